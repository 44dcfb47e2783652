"""FileStorage and FileReader: what was acknowledged comes back, what was torn does not, what is damaged is an error."""

import asyncio
import os
import resource
import struct
import subprocess
import sys

import pytest
from buffer_cases import make_group, through_a_file

from trinity_lightning.buffer.storage import frames
from trinity_lightning.buffer.storage.file import FileReader, FileStorage
from trinity_lightning.common.experience import ExperienceError
from trinity_lightning.errors import StorageError, StorageFormatError, StorageLockedError

HEADER = frames.FILE_HEADER.size


def written(path, sizes):
    """A closed file with a write of each size; the experiences, and the offset where each write begins and the end."""
    experiences, offsets = [], [HEADER]
    with FileStorage(path) as storage:
        for task, size in enumerate(sizes):
            group = make_group(task, size)
            storage.write(group)
            experiences.extend(group)
            offsets.append(path.stat().st_size)
    return experiences, offsets


def everything(path):
    with FileReader(path) as reader:
        return reader.read(1000)


def flip(path, offset, bits=1):
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.write_bytes(bytes(data))


def test_what_was_written_is_read_in_order(tmp_path):
    path = tmp_path / "deep" / "er" / "buffer"
    experiences, _ = written(path, [3, 1, 4])
    reader = FileReader(path)
    assert reader.read(2) == experiences[:2]
    assert reader.read() == experiences[2:3]  # what is left of the first write
    assert reader.read() == experiences[3:4]
    assert reader.read(100) == experiences[4:]
    assert reader.read(100) == reader.read() == []
    reader.rewind()
    assert reader.read(100) == experiences


def test_a_reader_sees_what_is_written_after_it_came(tmp_path):
    with FileStorage(tmp_path / "buffer") as storage:
        reader = FileReader(tmp_path / "buffer")
        assert reader.read() == []
        for task in range(3):
            group = make_group(task, 2)
            asyncio.run(storage.write_async(group))
            assert reader.read() == group


def test_a_second_session_appends(tmp_path):
    first, _ = written(tmp_path / "buffer", [2])
    second, _ = written(tmp_path / "buffer", [3])
    assert everything(tmp_path / "buffer") == first + second


def test_nothing_is_written_for_nothing_or_for_what_cannot_be(tmp_path):
    path = tmp_path / "buffer"
    with FileStorage(path) as storage:
        storage.write([])
        (bad,) = make_group(0, 1)
        bad.info["what"] = object()
        with pytest.raises(ExperienceError, match="info"):
            storage.write([*make_group(1, 2), bad])
        assert path.stat().st_size == HEADER
        storage.write(make_group(2, 1))
    assert [e.eid.task for e in everything(path)] == [2]


def test_a_reader_goes_on_from_its_state(tmp_path):
    experiences, _ = written(tmp_path / "buffer", [3, 2, 4])
    for done in range(len(experiences) + 1):
        reader = FileReader(tmp_path / "buffer")
        if done:
            reader.read(done)
        resumed = FileReader(tmp_path / "buffer")
        resumed.load_state_dict(through_a_file(reader.state_dict()))
        assert resumed.read(100) == experiences[done:]


def test_the_state_of_another_file_is_refused(tmp_path):
    written(tmp_path / "one", [1])
    written(tmp_path / "two", [1])
    state = FileReader(tmp_path / "one").state_dict()
    with pytest.raises(StorageError, match="another buffer"):
        FileReader(tmp_path / "two").load_state_dict(state)


def test_a_file_cut_before_the_cursor_is_an_error(tmp_path):
    path = tmp_path / "buffer"
    _, offsets = written(path, [1, 1])
    reader = FileReader(path)
    reader.read(2)
    os.truncate(path, offsets[1])
    with pytest.raises(StorageError, match=f"buffer, offset {offsets[2]}.*cut or replaced"):
        reader.read(1)


def test_cut_anywhere_the_whole_writes_remain_and_writing_goes_on(tmp_path):
    source, path = tmp_path / "source", tmp_path / "buffer"
    experiences, offsets = written(source, [2, 1])
    data = source.read_bytes()
    edges = {offset + by for offset in offsets for by in (-4, -1, 0, 1, 31, 32, 33)}
    for size in sorted({*range(HEADER, len(data), 29), *edges} & {*range(HEADER, len(data))}):
        path.write_bytes(data[:size])
        whole = experiences[: 2 if size >= offsets[1] else 0]
        reader = FileReader(path)
        assert reader.read(100) == whole
        more, _ = written(path, [1])
        assert reader.read(100) == more  # the reader that stood at the torn frame goes on
        assert everything(path) == whole + more


@pytest.mark.parametrize("keep", [0, 5, 40, -4])
def test_blocks_that_were_never_written_are_a_torn_write(tmp_path, keep):
    path = tmp_path / "buffer"
    experiences, offsets = written(path, [2, 1])
    size = path.stat().st_size
    os.truncate(path, offsets[1] + keep if keep >= 0 else size + keep)
    os.truncate(path, size)  # grown again, by zeros
    assert everything(path) == experiences[:2]
    more, _ = written(path, [3])
    assert everything(path) == experiences[:2] + more


@pytest.mark.parametrize("which", [0, 1])
def test_every_flipped_bit_is_found(tmp_path, which):
    """Also in a length, which would otherwise make a torn frame of everything behind it."""
    path = tmp_path / "buffer"
    experiences, offsets = written(path, [1, 1])
    whole = path.read_bytes()
    for offset in range(offsets[which], offsets[which + 1]):
        path.write_bytes(whole)
        flip(path, offset, 1 << (offset % 8))
        reader = FileReader(path)
        with pytest.raises(StorageFormatError, match=f"buffer, offset {offsets[which]}: .*truncate -s"):
            reader.read(2)
        reader.rewind()
        if which:
            assert reader.read() == experiences[:1]
    assert len(whole) == offsets[2]


def test_a_writer_does_not_build_on_damage(tmp_path):
    path = tmp_path / "buffer"
    _, offsets = written(path, [1, 1, 1])
    for offset, frame in ((offsets[1] + 9, 1), (offsets[3] - 2, 2), (offsets[2] + 60, 2)):
        whole = path.read_bytes()
        flip(path, offset)
        before = path.read_bytes()
        with pytest.raises(StorageFormatError, match=f"offset {offsets[frame]}"):
            FileStorage(path)
        assert path.read_bytes() == before
        path.write_bytes(whole)


def test_a_missing_file_is_an_error_for_a_reader(tmp_path):
    with pytest.raises(StorageError, match="nowhere: there is no such file"):
        FileReader(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("content", [b"", b"TRXB", b"step,loss\n1,2.0\n" * 9, b"TRXB\x09" + bytes(40)])
@pytest.mark.parametrize("kind", [FileReader, FileStorage])
def test_a_foreign_file_is_an_error_and_stays_as_it_is(tmp_path, content, kind):
    path = tmp_path / "notes.csv"
    path.write_bytes(content)
    with pytest.raises(StorageFormatError, match=r"notes\.csv, offset 0: .*no file of experiences"):
        kind(path)
    assert path.read_bytes() == content


def test_a_payload_that_cannot_be_read_is_an_error(tmp_path):
    path = tmp_path / "buffer"
    FileStorage(path).close()
    with path.open("ab") as file:
        file.write(b"".join(frames.pack_frame(b"not a payload", 1)))
    with pytest.raises(StorageFormatError, match=f"buffer, offset {HEADER}"):
        everything(path)


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "buffer"
    with FileStorage(path):
        with pytest.raises(StorageLockedError, match="another writer"):
            FileStorage(path)
        code = f"from trinity_lightning.buffer.storage.file import FileStorage; FileStorage({str(path)!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "StorageLockedError" in done.stderr
    FileStorage(path).close()


def test_a_closed_storage_takes_no_more(tmp_path):
    storage = FileStorage(tmp_path / "buffer")
    storage.close()
    with pytest.raises(StorageError, match="closed"):
        storage.write(make_group(0, 1))
    reader = FileReader(tmp_path / "buffer")
    reader.close()
    with pytest.raises(StorageError, match="closed"):
        reader.read(1)


def test_a_full_disk_leaves_whole_writes(tmp_path):
    path = tmp_path / "buffer"
    first = make_group(0, 2)
    storage = FileStorage(path)
    storage.write(first)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        with pytest.raises(StorageError, match="cannot be written"):
            storage.write(make_group(1, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert everything(path) == first
    more, _ = written(path, [1])
    assert everything(path) == first + more


def test_a_reader_that_mixed_an_old_head_with_new_bytes_looks_again(tmp_path, monkeypatch):
    """A tail cut off and written anew between the reads of one look is no damage."""
    path, other = tmp_path / "buffer", tmp_path / "other"
    experiences, _ = written(path, [2])
    written(other, [3])
    old = other.read_bytes()[HEADER : HEADER + 32]
    real, calls = os.pread, []

    def pread(descriptor, size, offset):
        calls.append(offset)
        return old if len(calls) == 2 else real(descriptor, size, offset)

    reader = FileReader(path)
    calls.append(0)
    os.truncate(path, path.stat().st_size + 2000)  # long enough for the old head's length
    monkeypatch.setattr(os, "pread", pread)
    assert reader.read(2) == experiences


def test_the_layout_is_the_one_described(tmp_path):
    path = tmp_path / "buffer"
    written(path, [3])
    data = path.read_bytes()
    assert data[:5] == b"TRXB\x01"
    magic, count, length = struct.unpack_from("<4sIQ", data, HEADER)
    assert (magic, count) == (b"FRAM", 3)
    assert data[HEADER + 32 : HEADER + 36] == b"TRXP"
    assert len(data) == HEADER + 32 + length + 4
    assert data.endswith(b"DONE")

"""Readers: whole groups, waiting, positions that go through a checkpoint, repetition, and what a section reads."""

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.buffer import make_group, through_a_file
from support.errors import refuses

from trinity_lightning.buffer.reader import MemoryReader, RepeatingReader, create_reader
from trinity_lightning.buffer.sql import ReplayReader, SqlStorage
from trinity_lightning.buffer.step_files import keep_step
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.config.buffer import BufferConfig


def groups_of(sizes):
    return [experience for task, size in enumerate(sizes) for experience in make_group(task, size)]


@settings(deadline=None, max_examples=80)
@given(sizes=st.lists(st.integers(1, 6), max_size=8), count=st.integers(1, 8))
def test_whole_groups_are_never_parted_and_fill_what_they_can(sizes, count):
    experiences = groups_of(sizes)
    reader = MemoryReader(experiences)
    reads = []
    while got := reader.read(count, whole_groups=True):
        reads.append(got)
    assert [e for read in reads for e in read] == experiences
    for index, read in enumerate(reads):
        tasks = {e.eid.task for e in read}
        assert len(read) == sum(sizes[task] for task in tasks)
        assert len(read) <= count or len(tasks) == 1
        if index + 1 < len(reads):
            assert len(read) + sizes[reads[index + 1][0].eid.task] > count


def test_experiences_of_no_task_are_no_group():
    experiences = [Experience(eid=EID(suffix=str(n)), tokens=[1, 2], prompt_length=1) for n in range(5)]
    assert MemoryReader(experiences).read(2, whole_groups=True) == experiences[:2]


def test_a_state_goes_through_a_checkpoint_and_back():
    experiences = groups_of([2, 3])
    reader = MemoryReader(experiences)
    reader.read(3, whole_groups=True)
    resumed = MemoryReader(experiences)
    resumed.load_state_dict(through_a_file(reader.state_dict()))
    assert resumed.read(9) == reader.read(9) == experiences[2:]
    reader.rewind()
    assert reader.read(1) == experiences[:1]


def test_a_reader_waits_for_what_is_missing_and_then_takes_what_there_is():
    experiences = groups_of([2])
    reader = MemoryReader(experiences)
    threading.Timer(0.2, lambda: experiences.extend(make_group(1, 2))).start()
    assert len(reader.read(4, wait=20)) == 4
    experiences.extend(make_group(2, 1))
    start = time.monotonic()
    assert len(reader.read(4, wait=0.2)) == 1
    assert time.monotonic() - start >= 0.2
    assert reader.read(4) == []


def test_a_count_below_one_is_refused():
    with pytest.raises(ValueError, match="count"):
        MemoryReader([]).read(0)


# -- the same data again and again ------------------------------------------------------------------------------------


def repeated(number):
    return RepeatingReader(MemoryReader([experience for task in range(number) for experience in make_group(task, 1)]))


def test_repeated_data_start_over():
    reader = repeated(3)
    assert [[e.eid.task for e in reader.read(2)] for _ in range(4)] == [[0, 1], [2], [0, 1], [2]]
    resumed = repeated(3)
    resumed.load_state_dict(through_a_file(reader.state_dict()))
    assert [e.eid.task for e in resumed.read(2)] == [0, 1]


def test_nothing_repeated_is_nothing():
    assert repeated(0).read(2) == []


# -- what a section reads ---------------------------------------------------------------------------------------------


def test_kept_steps_are_read_by_their_folder(tmp_path):
    group = make_group(0, 3)
    keep_step(tmp_path, 1, group)
    with create_reader(BufferConfig(storage="file", path=str(tmp_path), repeat=False)) as reader:
        assert reader.read(9) == group
        assert reader.read(9) == []
    with create_reader(BufferConfig(storage="file", path=str(tmp_path))) as reader:
        assert [reader.read(9) for _ in range(2)] == [group, group]


@pytest.mark.parametrize("order", ["fifo", "priority", "random"])
def test_a_database_is_read_by_its_path_or_url_in_three_orders(tmp_path, order):
    path = tmp_path / "buffer.db"
    with SqlStorage(path) as storage:
        storage.write(make_group(0, 3))
    again: dict[str, Any] = {} if order == "fifo" else {"reuse_limit": None}
    for place, url in ((str(path), None), (None, f"sqlite:///{path}")):
        section = BufferConfig(storage="sql", path=place, url=url, order=order, repeat=False, **again)
        with create_reader(section) as reader:
            assert {e.eid.run for e in reader.read(3)} == {0, 1, 2}


@pytest.mark.parametrize("order", ["priority", "random"])
def test_runs_that_read_one_database_are_readers_of_their_own(tmp_path, order):
    path = tmp_path / "buffer.db"
    with SqlStorage(path) as storage:
        storage.write([experience for task in range(8) for experience in make_group(task, 1)])
    section = BufferConfig(storage="sql", path=str(path), order=order)
    with create_reader(section, 1) as one, create_reader(section, 2) as two:
        state = through_a_file(one.state_dict())
        read = [one.read(2), two.read(2), one.read(2)]  # both at work at the same time
    assert len({e.eid.task for step in read for e in step}) == 6
    with create_reader(section, 1) as resumed:  # takes back its own reads, and not the other's
        resumed.load_state_dict(state)
        again = [resumed.read(2), resumed.read(9)]
    others = {e.eid.task for e in read[1]}
    assert sorted(e.eid.task for step in again for e in step) == sorted({*range(8)} - others)


def test_a_run_of_an_earlier_version_goes_on_under_its_name(tmp_path):
    """All of them were the reader `trainer`."""
    path = tmp_path / "buffer.db"
    with SqlStorage(path) as storage:
        storage.write(make_group(0, 1) + make_group(1, 1))
    with ReplayReader(path) as reader:
        state = reader.state_dict() | {"reader": "trainer"}
        reader.load_state_dict(state)
        first = reader.read(1)
    with create_reader(BufferConfig(storage="sql", path=str(path), order="priority")) as resumed:
        resumed.load_state_dict(state)
        assert resumed.read(1) == first
        assert resumed.state_dict() == state | {"reads": 1}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"storage": "fiel"}, "buffer.storage"),
        ({"storage": "file"}, "buffer.storage"),
        ({"storage": "file", "path": ".", "url": "b"}, "buffer.storage"),
        ({"storage": "sql"}, "buffer.storage"),
        ({"storage": "sql", "path": ".", "url": "b"}, "buffer.url"),
        ({"storage": "sql", "path": "nowhere"}, "buffer.path"),
        ({"storage": "sql", "path": ".", "order": "newest"}, "buffer.order"),
        ({"storage": "file", "path": ".", "order": "priority"}, "buffer.order"),
        ({"storage": "file", "path": ".", "reuse_limit": 3}, "buffer.reuse_limit"),
        ({"storage": "sql", "path": ".", "order": "random", "decay": 0.5}, "buffer.decay"),
        ({"storage": "sql", "url": "b"}, "buffer.url"),
        ({"keep": "sqll"}, "buffer.keep"),
        ({"keep": "yes"}, "buffer.keep"),
        ({"keep": 1}, "buffer.keep"),
        ({"keep": "sql", "url": "foo"}, "buffer.url"),
        ({"keep": "sql", "path": "a.db", "url": "sqlite:///b.db"}, "buffer.url"),
        ({"keep": True, "storage": "file", "path": "."}, "buffer.keep"),
    ],
)
def test_what_cannot_be_read_or_kept_is_refused_by_its_key(settings, key):
    with refuses(key):
        BufferConfig(**settings)


@pytest.mark.slow
def test_without_sqlalchemy_the_extra_is_named(tmp_path):
    code = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "from trinity_lightning.buffer.reader import create_reader\n"
        "from trinity_lightning.config.run import BufferConfig\n"
        f"create_reader(BufferConfig(storage='file', path={str(tmp_path)!r}))\n"
        "print('files are read')\n"
        f"create_reader(BufferConfig(storage='sql', path={str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "files are read" in done.stdout
    assert "ConfigError: experiences in a database need SQLAlchemy" in done.stderr
    assert "trinity-lightning[sql]" in done.stderr

"""Kept steps: written whole, read back by file, by folder and in order, and turned into a dataset."""

import asyncio
import shutil
from functools import partial

import pytest
from support.buffer import make_group, through_a_file
from support.experiences import pictured

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.buffer.step_files import StepReader, keep_step, read_experiences
from trinity_lightning.common.experience import from_hf_datasets, to_hf_datasets
from trinity_lightning.errors import StorageError, StorageFormatError


def keep(folder, sizes):
    """Keep a step of each size, from step 8 on: 10 comes after 9."""
    steps = [make_group(0, size, batch=step) for step, size in enumerate(sizes, 8)]
    for step, experiences in reversed(list(enumerate(steps, 8))):
        keep_step(folder, step, experiences)
    return [experience for step in steps for experience in step]


def test_a_folder_is_read_in_the_order_of_its_steps(tmp_path):
    experiences = keep(tmp_path / "experiences", [2, 1, 0, 3])
    (tmp_path / "experiences" / "notes.txt").write_text("mine")
    assert read_experiences(tmp_path / "experiences") == experiences
    assert read_experiences(tmp_path / "experiences" / "step_11.trxp") == experiences[3:]
    assert sorted(path.name for path in (tmp_path / "experiences").iterdir()) == [
        "folder.id",
        "notes.txt",
        "step_10.trxp",
        "step_11.trxp",
        "step_8.trxp",
        "step_9.trxp",
    ]


def test_a_step_kept_again_takes_the_place_of_the_first(tmp_path):
    keep_step(tmp_path, 1, make_group(0, 3))
    again = make_group(1, 2)
    keep_step(tmp_path, 1, again)
    assert read_experiences(tmp_path) == again


def test_a_write_cut_short_leaves_what_was_there(tmp_path, monkeypatch):
    before = make_group(0, 3)
    path = keep_step(tmp_path, 1, before)

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(StorageError, match=r"step_1\.trxp.*No space left.*keep=false"):
            keep_step(tmp_path, 1, make_group(1, 2))
    assert read_experiences(path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.id", "step_1.trxp"]


def test_a_file_that_is_no_step_is_refused_by_what_it_is(tmp_path):
    earlier = tmp_path / "buffer"
    earlier.write_bytes(b"TRXB\x01" + bytes(11))
    for read in (read_experiences, StepReader):
        with pytest.raises(StorageFormatError, match=r"buffer: .*`FileStorage` wrote it, up to commit"):
            read(earlier)
    examples = tmp_path / "examples.jsonl"
    examples.write_text('{"prompt": "a", "completion": "b"}')
    with pytest.raises(StorageFormatError, match=r"no kept rollouts: give .* by \+recipe=sft or \+recipe=dpo"):
        StepReader(examples)
    with pytest.raises(StorageFormatError, match=r"step_1\.trxp: the file of one step: give its folder"):
        StepReader(keep_step(tmp_path, 1, make_group(0, 1)))


def test_what_is_missing_or_damaged_is_an_error_that_names_it(tmp_path):
    with pytest.raises(StorageError, match="nowhere"):
        read_experiences(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="nowhere"):
        StepReader(tmp_path / "nowhere")
    with pytest.raises(StorageError, match=r"no step_<n>\.trxp"):
        read_experiences(tmp_path)
    path = keep_step(tmp_path, 3, make_group(0, 2))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageFormatError, match=r"step_3\.trxp"):
        read_experiences(tmp_path)
    with pytest.raises(StorageFormatError, match=r"step_3\.trxp"):
        StepReader(tmp_path).read(1)


def test_a_folder_reader_goes_on_from_its_state_and_sees_later_steps(tmp_path):
    experiences = keep(tmp_path, [2, 3, 0, 1])
    resumed = StepReader(tmp_path)
    for done in range(1, 7):
        reader = StepReader(tmp_path)
        reader.read(done)
        resumed.load_state_dict(through_a_file(reader.state_dict()))
        assert resumed.read(100) == experiences[done:]
    later = make_group(0, 2, batch=12)
    keep_step(tmp_path, 12, later)
    assert resumed.read(9) == later


def test_a_position_in_one_folder_is_refused_in_another(tmp_path):
    experiences = keep(tmp_path / "one", [2, 3])
    keep(tmp_path / "another", [2, 3])
    reader = StepReader(tmp_path / "one")
    reader.read(3)
    state = through_a_file(reader.state_dict())
    with pytest.raises(StorageError, match=r"another.*belongs to another buffer"):
        StepReader(tmp_path / "another").load_state_dict(state)
    shutil.move(tmp_path / "one", tmp_path / "moved")
    moved = StepReader(tmp_path / "moved")
    moved.load_state_dict(state)
    assert moved.read(100) == experiences[3:]


def test_a_folder_without_an_id_is_any_folder(tmp_path):
    """As it was before there were ids; and a folder gets none once there are steps in it."""
    experiences = keep(tmp_path / "old", [2, 3])
    (tmp_path / "old" / "folder.id").unlink()
    keep_step(tmp_path / "old", 10, experiences[:1])
    assert not (tmp_path / "old" / "folder.id").exists()
    reader = StepReader(tmp_path / "old")
    reader.read(3)
    keep(tmp_path / "new", [2, 3])
    resumed = StepReader(tmp_path / "new")
    resumed.load_state_dict(through_a_file(reader.state_dict()))
    assert len(resumed.read(100)) == 2
    state = resumed.state_dict()
    reader.load_state_dict(state)


def test_the_data_module_keeps_what_the_trainer_is_given(tmp_path):
    data = ExperienceDataModule("grpo", keep=partial(keep_step, tmp_path / "experiences"))
    for step in (1, 2):
        asyncio.run(data.fill(make_group(0, 4, batch=step), step))
        data.storage.advance(step)
    stored = read_experiences(tmp_path / "experiences")
    assert stored[4:] == data.storage.experiences
    assert all(experience.advantages is not None for experience in stored)
    assert from_hf_datasets(to_hf_datasets(stored)) == stored


def test_a_group_has_its_picture_once_in_a_file_and_in_memory(tmp_path):
    group = pictured(size=8, pixels=50_000)
    path = keep_step(tmp_path, 1, group)
    assert path.stat().st_size < 250_000
    assert read_experiences(path) == group
    keep_step(tmp_path, 2, group)
    with StepReader(tmp_path) as reader:
        again = reader.read(16)  # of both files
    assert again == [*group, *group]
    assert len({id(experience.multi_modal_inputs) for experience in again}) == 1
    of_rows = from_hf_datasets(to_hf_datasets(again))
    assert of_rows == again
    assert len({id(experience.multi_modal_inputs) for experience in of_rows}) == 1


def test_nothing_is_kept_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asyncio.run(ExperienceDataModule("grpo").fill(make_group(0, 4), 1))
    assert list(tmp_path.iterdir()) == []

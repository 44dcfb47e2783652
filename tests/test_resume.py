"""Checkpoints that a run refuses to go on from, before anything is loaded."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from support.buffer import make_group
from support.errors import refuses

from trinity_lightning.buffer.offline import OfflineExperienceDataModule
from trinity_lightning.buffer.reader import create_reader
from trinity_lightning.buffer.sql import SqlStorage
from trinity_lightning.config import hydra as compose
from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.config.buffer import BufferConfig
from trinity_lightning.config.model import ModelConfig
from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.errors import StorageError
from trinity_lightning.explorer.staleness import StalenessController
from trinity_lightning.resume import OFFLINE, ONLINE, check_model, check_resumed_data, checkpoint_to_resume, log_changes


def written(folder: Path, position: int = 0, **parts: Any) -> str:
    """A checkpoint of the first step, as far as it is looked into, of a run that deals its steps into 2 x 2 items."""
    loop = {
        "epoch_progress": {"current": {"processed": 1}},
        "state_dict": {"combined_loader": [{"explore_step": 1, "position": position}]},
    }
    settings = {"model": "tiny", "optimizer": {}, "algorithm": {"optimizer_steps": 2, "inner_epochs": 2}}
    file = folder / "it.ckpt"
    torch.save({"state_dict": {}, "loops": {"fit_loop": loop}, "hyper_parameters": settings} | parts, file)
    return str(file)


def resume(checkpoint: str, items: tuple[int, int] = (2, 2), name: str = "tiny", **settings: Any) -> str:
    algorithm = AlgorithmConfig(optimizer_steps=items[0], inner_epochs=items[1])
    config = TrainConfig(ckpt_path=checkpoint, steps=2, model=ModelConfig(name=name), algorithm=algorithm, **settings)
    return checkpoint_to_resume(config, Path(checkpoint).parent)


def test_a_checkpoint_of_another_model_is_refused_without_the_record_of_its_run(tmp_path: Path) -> None:
    checkpoint = written(tmp_path)
    assert resume(checkpoint) == checkpoint
    with refuses("model.name"):
        resume(checkpoint, name="smollm2")


def test_a_model_that_has_been_moved_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "trinity_lightning.resume.resolve_model", lambda name: resolve_model(name.replace("tiny", "/no"))
    )
    with refuses("model.name"):
        resume(written(tmp_path), name="smollm2")


def test_a_model_that_has_been_moved_is_evaluated_from_the_folder_that_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with refuses("model.name"):
        check_model("tiny", "/no/model", may_have_moved=True)
    assert not caplog.text
    (tmp_path / "config.json").touch()
    check_model(str(tmp_path), "/no/model", may_have_moved=True)
    assert f"/no/model is not here to compare: {tmp_path} is taken for it" in caplog.text


def test_another_seed_in_a_folder_of_its_own_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = written(tmp_path, callbacks={"ExplorerCallback": {"explorer": {"seed": 3}}})
    resume(checkpoint, seed=3)
    assert not caplog.text
    resume(checkpoint, seed=4)
    assert f"resuming with seed = 4; it was 3 in '{checkpoint}'" in caplog.text


def test_a_run_that_has_finished_is_said_to_have_nothing_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = {"fit_loop": {"epoch_progress": {"current": {"processed": 2}}}}
    resume(written(tmp_path, loops=done))
    assert "nothing is left to do: all 2 steps are done" in caplog.text


@pytest.mark.parametrize(("part", "storage"), [(ONLINE, "file"), (OFFLINE, "memory")])
def test_a_checkpoint_of_the_other_kind_of_run_is_refused(part: str, storage: str, tmp_path: Path) -> None:
    buffer = BufferConfig(storage=storage, path=None if storage == "memory" else str(tmp_path))
    with refuses("ckpt_path"):
        resume(written(tmp_path, 0, **{part: {}}), buffer=buffer)


@pytest.mark.parametrize("items", [(4, 1), (8, 1), (1, 1)])
def test_a_step_is_finished_by_the_items_that_it_was_begun_with(items: tuple[int, int], tmp_path: Path) -> None:
    with refuses("algorithm.optimizer_steps") as refused:
        resume(written(tmp_path, position=3), items)
    assert "algorithm.optimizer_steps=2 and algorithm.inner_epochs=2" in str(refused.value.fix)
    resume(written(tmp_path, position=4), items)  # the next step is a new one
    resume(written(tmp_path, position=3))


def test_settings_that_groups_under_way_do_not_go_with_are_refused_with_those_that_do(tmp_path: Path) -> None:
    controller = StalenessController(batch_size=2, max_staleness=3, run_ahead=1)
    controller.begin()
    controller.sync()
    groups = {"controller": controller.state_dict(), "batch_size": 2, "max_staleness": 3}
    checkpoint = written(tmp_path, callbacks={"ExplorerCallback": {"explorer": {"seed": 42, "groups": groups}}})
    compose.register()

    def resumed(batch_size: int, max_staleness: int) -> str:
        settings = (f"explorer.batch_size={batch_size}", f"explorer.max_staleness={max_staleness}", "steps=2")
        items = ("algorithm.optimizer_steps=2", "algorithm.inner_epochs=2", f"ckpt_path={checkpoint}")
        config = compose.compose_run(["+recipe=grpo", "model=tiny", *items, *settings], str(tmp_path))
        return checkpoint_to_resume(config, tmp_path)

    assert resumed(2, 3) == resumed(2, 1) == checkpoint
    for wrong, key in (((4, 3), "explorer.batch_size"), ((2, 0), "explorer.max_staleness")):
        with refuses(key) as refused:
            resumed(*wrong)
        assert str({"explorer.batch_size": 2, "explorer.max_staleness": 3}[key]) in str(refused.value.fix)


# -- the data ----------------------------------------------------------------------------------------------------------


def database(folder: Path) -> Path:
    with SqlStorage(folder / "it.db") as storage:
        storage.write(make_group(0, 4))
    return folder / "it.db"


def check(reader: Any, saved: Any, buffer: BufferConfig, folder: Path) -> None:
    """Check a run that reads with `reader`, resumed from one that read with `saved`."""
    file = str(folder / "it.ckpt")
    torch.save({OFFLINE: {"reader": saved.state_dict()}} if saved else {}, file)
    data = OfflineExperienceDataModule(reader, batch_size=2, steps_per_epoch=1)
    check_resumed_data(data, file, buffer, folder)


def test_a_database_that_cannot_be_read_is_not_called_another_one(tmp_path: Path) -> None:
    place = database(tmp_path)
    section = BufferConfig(storage="sql", path=str(place), order="priority")
    with create_reader(section) as reader:
        check(reader, reader, section, tmp_path)
        with sqlite3.connect(place) as connection:
            connection.execute("DROP TABLE experiences_reads")
        connection.close()
        with pytest.raises(StorageError, match="no such table"):
            check(reader, reader, section, tmp_path)


def test_another_order_of_reading_is_refused_by_its_key(tmp_path: Path) -> None:
    place = str(database(tmp_path))
    kinds: list[dict[str, Any]] = [{"order": "random"}, {}, {"repeat": False}]
    sections = [BufferConfig(storage="sql", path=place, **settings) for settings in kinds]
    readers = [create_reader(section) for section in sections]
    for reader in readers:
        for section, saved in zip(sections, readers, strict=True):
            if saved is reader:
                check(reader, saved, section, tmp_path)
                continue
            with refuses("buffer.order"):
                check(reader, saved, section, tmp_path)
    with refuses("ckpt_path"):
        check(readers[0], None, sections[0], tmp_path)
    for reader in readers:
        reader.close()


def test_changed_arguments_of_the_processor_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Others are told in the same way; a dataset's examples, whose tokens they change, are refused besides."""
    before, after = (
        OmegaConf.create({"model": {"name": "tiny_vision", "processor_args": args}})
        for args in ({"size": {"longest_edge": 64}}, {"size": {"longest_edge": 32}, "do_image_splitting": True})
    )
    OmegaConf.save(before, tmp_path / "config.yaml")
    log_changes(after, tmp_path / "config.yaml")
    assert [message for message in caplog.messages if "processor_args" in message] == [
        "resuming with model.processor_args.do_image_splitting = True; it was None",
        "resuming with model.processor_args.size.longest_edge = 32; it was 64",
    ]

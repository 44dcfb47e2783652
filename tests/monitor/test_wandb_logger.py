"""The history of a run of W&B, read back from its file, and the id by which a resumed run goes on in it.

W&B records in a process of its own.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import wandb
from lightning.pytorch.loggers import WandbLogger
from PIL import Image
from support.pictures import experience, prompt_of, random_picture
from support.wandb_reader import WandbRun, read_wandb_run

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.pictures.thumbnail_files import FOLDER
from trinity_lightning.common.pictures.thumbnails import notes_of, taken_from, write_thumbnails
from trinity_lightning.monitor.run_monitor import define_metrics, log_completions, show_pictures, write_completions
from trinity_lightning.monitor.wandb_logger import RunLogger, record_id, run_id


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLogger:
    monkeypatch.setenv("WANDB_SILENT", "true")
    return RunLogger(tmp_path, project="p", name="a name", tags=["grpo", "tiny"], offline=True, log_model=False)


def recorded(logger: RunLogger, folder: Path) -> WandbRun:
    logger.finalize("success")
    wandb.finish()
    return read_wandb_run(folder)


@pytest.mark.slow
def test_what_belongs_together_is_one_row(offline: RunLogger, tmp_path: Path) -> None:
    define_metrics(offline.experiment)
    for step in (1, 2, 3):
        offline.log_metrics({"reward/mean": step / 4, "explore_step": float(step)}, step=step)
        log_completions(offline, [{"completion": "a"}], explore_step=step)
        offline.log_metrics({"actor/lr": 0.1}, step=step)
        offline.log_metrics({"perf/peak_memory_gb": 1.0, "explore_step": float(step)}, step=step)
    run = recorded(offline, tmp_path)
    assert (run.id, run.name, sorted(run.tags)) == (offline.id, "a name", ["grpo", "tiny"])
    assert [row["explore_step"] for row in run.history] == [1, 2, 3]
    assert [row["trainer/global_step"] for row in run.history] == [1, 2, 3]
    every = {"reward/mean", "completions", "actor/lr", "perf/peak_memory_gb"}
    assert all(every <= row.keys() for row in run.history)


@pytest.mark.slow
def test_each_optimizer_step_of_an_explore_step_has_a_row(offline: RunLogger, tmp_path: Path) -> None:
    for step in (0, 1):
        offline.log_metrics({"actor/pg_loss": float(step), "explore_step": 1.0}, step=step)
    offline.flush(before=1)  # of an earlier explore step there is none
    offline.log_metrics({"eval/loss": 0.5, "explore_step": 1.0}, step=1)
    run = recorded(offline, tmp_path)
    assert [row.get("actor/pg_loss") for row in run.history] == [0, 1]
    assert [row.get("eval/loss") for row in run.history] == [None, 0.5]


def test_a_run_has_an_id_before_it_begins_or_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert RunLogger(tmp_path).id != RunLogger(tmp_path).id
    assert RunLogger(tmp_path, id="mine").id == "mine"
    monkeypatch.setenv("WANDB_RUN_ID", "of-a-sweep")
    assert RunLogger(tmp_path).id == "of-a-sweep"


def checkpoint(folder: Path, id: str) -> str:
    path = folder / "checkpoints" / "final.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"callbacks": {"RunMonitor": {"wandb_run_id": id}, "Other": {}}}, path)
    return str(path)


def test_a_resumed_run_goes_on_in_the_run_of_its_folder_or_else_of_its_checkpoint(tmp_path: Path) -> None:
    moved = checkpoint(tmp_path / "moved", "theirs")
    new = tmp_path / "new"
    assert run_id(new, None) is None
    assert run_id(new, moved) == "theirs"
    record_id(new, "mine")
    assert run_id(new, moved) == "mine"
    assert run_id(new, None) == "mine"  # begun again


def test_a_run_that_branches_off_another_ones_folder_has_a_run_of_its_own(tmp_path: Path) -> None:
    theirs = checkpoint(tmp_path / "theirs", "theirs")
    record_id(tmp_path / "theirs", "theirs")
    assert run_id(tmp_path / "new", theirs) is None
    assert run_id(tmp_path / "theirs", theirs) == "theirs"


def test_a_checkpoint_is_looked_for_where_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"callbacks": {"RunMonitor": {"wandb_run_id": "theirs"}}}, tmp_path / "it.ckpt")
    monkeypatch.chdir(tmp_path)
    assert run_id(tmp_path / "new", "it.ckpt") == "theirs"


def test_an_id_that_the_settings_choose_is_the_one_of_a_resumed_run_too(tmp_path: Path) -> None:
    chosen, other = RunLogger(tmp_path, id="mine"), RunLogger(tmp_path)
    for logger in (chosen, other):
        logger.adopt("of the folder")
    assert (chosen.id, other.id) == ("mine", "of the folder")


# -- Lightning's own logger, whose axes and tables are the same --------------------------------------------------------


def rollouts_with_pictures(folder: Path) -> list[Experience]:
    """Two of a prompt with two pictures, and one of a text."""
    prompt = prompt_of("<image><image>?", [random_picture(1, (20, 40)), random_picture(2, (30, 10))])
    made = [experience(prompt, [5], run=run, info=notes_of(prompt)) for run in range(2)]
    write_thumbnails(folder / FOLDER, taken_from(made))
    return [*made, experience([1, 2], [5])]


LONG_TEXT = "a completion " * 4000  # longer than a block of the file


@pytest.fixture(scope="module")
def lightning_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WandbRun]:
    """An offline run as a training makes it, read back from its file."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        logger = WandbLogger(save_dir=folder, offline=True, log_model=False, project="p", group="sweep", name="seed=1")
        define_metrics(logger.experiment)
        logger.log_hyperparams({"seed": 1, "model": {"name": "tiny"}, "notes": LONG_TEXT})
        for step in range(3):
            logger.log_metrics({"reward/mean": step / 4, "explore_step": step + 1.0}, step=step)
            # Unknown to the table of names, and logged without their step: drawn over it all the same.
            logger.log_metrics({"mine": 1.0, "actor/lr": 0.1}, step=step)
        rows = [{"step": 3, "completion": "②", "advantage": None}, {"step": 3, "completion": "b", "advantage": 0.5}]
        log_completions(logger.experiment, rows, explore_step=3)
        with_pictures = write_completions(folder, 4, rollouts_with_pictures(folder), "held")
        show_pictures(with_pictures, folder / FOLDER)
        log_completions(logger.experiment, with_pictures, explore_step=4, name="completions_held")
        log_completions(logger.experiment, [], explore_step=4)
        wandb.finish()
        yield read_wandb_run(folder)


@pytest.mark.slow
def test_the_run_is_read_back(lightning_run: WandbRun) -> None:
    assert lightning_run.finished
    assert (lightning_run.group, lightning_run.name) == ("sweep", "seed=1")
    assert lightning_run.config["model"] == {"name": "tiny"}
    assert lightning_run.config["notes"] == LONG_TEXT
    assert lightning_run.summary["reward/mean"] == 0.5


@pytest.mark.slow
def test_every_metric_is_drawn_over_the_explore_step(lightning_run: WandbRun) -> None:
    assert lightning_run.axes["rollout/*"] == lightning_run.axes["actor/*"] == lightning_run.axes["*"] == "explore_step"
    assert [row["explore_step"] for row in lightning_run.history if "reward/mean" in row] == [1, 2, 3]
    assert [row["explore_step"] for row in lightning_run.history if "mine" in row] == [1, 2, 3]


@pytest.mark.slow
def test_pictures_are_images_of_the_table(lightning_run: WandbRun) -> None:
    (table,) = lightning_run.tables["completions_held"]
    assert table.columns[-1] == "pictures"
    assert [row[-1] is None for row in table.data] == [False, False, True]
    (files,) = lightning_run.images["completions_held"]  # the rollouts of a prompt have one
    with Image.open(files[0]) as image:
        assert image.size == (20 + 30, 40)
    assert len(files) == 1


@pytest.mark.slow
def test_completions_are_one_table(lightning_run: WandbRun) -> None:
    (table,) = lightning_run.tables["completions"]
    assert table.columns == ["step", "completion", "advantage"]
    assert table.data == [[3, "②", None], [3, "b", 0.5]]
    assert [row["explore_step"] for row in lightning_run.history if "completions" in row] == [3]

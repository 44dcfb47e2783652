from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from lightning.pytorch.loggers import WandbLogger
from support.wandb_reader import WandbRun, read_wandb_run

from trinity_lightning.monitor.run_monitor import define_metrics, log_completions

pytestmark = pytest.mark.slow  # W&B records in a process of its own

LONG_TEXT = "a completion " * 4000  # longer than a block of the file


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WandbRun]:
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
        log_completions(logger.experiment, [], explore_step=4)
        wandb.finish()
        yield read_wandb_run(folder)


def test_the_run_is_read_back(recorded: WandbRun) -> None:
    assert recorded.finished
    assert (recorded.group, recorded.name) == ("sweep", "seed=1")
    assert recorded.config["model"] == {"name": "tiny"}
    assert recorded.config["notes"] == LONG_TEXT
    assert recorded.summary["reward/mean"] == 0.5


def test_every_metric_is_drawn_over_the_explore_step(recorded: WandbRun) -> None:
    assert recorded.axes["rollout/*"] == recorded.axes["actor/*"] == recorded.axes["*"] == "explore_step"
    assert [row["explore_step"] for row in recorded.history if "reward/mean" in row] == [1, 2, 3]
    assert [row["explore_step"] for row in recorded.history if "mine" in row] == [1, 2, 3]


def test_completions_are_one_table(recorded: WandbRun) -> None:
    (table,) = recorded.tables["completions"]
    assert table.columns == ["step", "completion", "advantage"]
    assert table.data == [[3, "②", None], [3, "b", 0.5]]
    assert [row["explore_step"] for row in recorded.history if "completions" in row] == [3]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0 \.wandb files"):
        read_wandb_run(tmp_path)

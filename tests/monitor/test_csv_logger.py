"""Metrics that belong together are one row of `metrics.csv`, and nothing logged is lost."""

import csv
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from trinity_lightning.errors import StorageFormatError
from trinity_lightning.monitor.csv_logger import MetricsCSVLogger


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The rows of the file, without empty cells."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def test_calls_of_one_step_make_one_row(tmp_path: Path) -> None:
    logger = MetricsCSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.5}, step=0)
    logger.log_metrics({"reward": 0.25}, step=0)
    logger.log_metrics({"loss": 1.0}, step=1)
    assert rows_of(tmp_path) == [{"step": "0", "loss": "1.5", "reward": "0.25"}, {"step": "1", "loss": "1.0"}]


def test_an_explore_step_is_one_row_whatever_the_trainer_step(tmp_path: Path) -> None:
    logger = MetricsCSVLogger(tmp_path)
    logger.log_metrics({"rollout/tasks": 8, "explore_step": 1.0}, step=0)
    logger.log_metrics({"eval/acc": 0.5, "explore_step": 1}, step=1)
    logger.log_metrics({"rollout/tasks": 8, "explore_step": 2.0}, step=1)
    assert rows_of(tmp_path) == [
        {"step": "0", "rollout/tasks": "8", "explore_step": "1", "eval/acc": "0.5"},
        {"step": "1", "rollout/tasks": "8", "explore_step": "2"},
    ]


def test_a_later_optimizer_step_never_overwrites(tmp_path: Path) -> None:
    logger = MetricsCSVLogger(tmp_path)
    logger.log_metrics({"reward": 1.0, "explore_step": 1}, step=0)
    for step, loss in enumerate((0.3, 0.3, 0.1)):
        logger.log_metrics({"loss": loss, "explore_step": 1, "epoch": 0}, step=step)
    rows = rows_of(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows] == [("0", "0.3"), ("1", "0.3"), ("2", "0.1")]
    assert [row.get("reward") for row in rows] == ["1.0", None, None]


def test_metrics_without_an_explore_step_join_the_row_of_their_trainer_step(tmp_path: Path) -> None:
    logger = MetricsCSVLogger(tmp_path)
    logger.log_metrics({"lr": 0.1}, step=4)
    logger.log_metrics({"loss": 1.0, "explore_step": 5}, step=4)
    logger.log_metrics({"lr": 0.2}, step=5)
    assert [row.get("lr") for row in rows_of(tmp_path)] == ["0.1", "0.2"]
    assert rows_of(tmp_path)[0]["explore_step"] == "5"


def test_a_further_logger_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    MetricsCSVLogger(tmp_path).log_metrics({"loss": 1.0}, step=0)
    second = MetricsCSVLogger(tmp_path)
    second.log_metrics({"reward": 0.5}, step=0)
    second.log_metrics({"loss": 0.5}, step=1)
    assert rows_of(tmp_path) == [{"step": "0", "loss": "1.0", "reward": "0.5"}, {"step": "1", "loss": "0.5"}]


def test_a_value_that_gets_shorter_leaves_no_rest(tmp_path: Path) -> None:
    logger = MetricsCSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.23456789}, step=0)
    logger.log_metrics({"loss": 2.0}, step=0)
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n0,2.0\n"


def test_resume_drops_later_explore_steps(tmp_path: Path) -> None:
    logger = MetricsCSVLogger(tmp_path)
    for step in range(4):
        logger.log_metrics({"loss": float(step), "explore_step": step + 1}, step=step)
    resumed = MetricsCSVLogger(tmp_path)
    resumed.resume_at(2)
    assert [row["explore_step"] for row in rows_of(tmp_path)] == ["1", "2"]
    resumed.log_metrics({"loss": 9.0, "explore_step": 3}, step=2)
    assert [row["loss"] for row in rows_of(tmp_path)] == ["0.0", "1.0", "9.0"]


def test_resume_within_an_explore_step_drops_later_trainer_steps(tmp_path: Path) -> None:
    logger = MetricsCSVLogger(tmp_path)
    for step in range(6):
        logger.log_metrics({"loss": float(step), "explore_step": 1 + step // 3}, step=step)
    MetricsCSVLogger(tmp_path).resume_at(2, step=4)
    assert [row["step"] for row in rows_of(tmp_path)] == ["0", "1", "2", "3"]


def test_resume_before_anything_was_logged_does_nothing(tmp_path: Path) -> None:
    MetricsCSVLogger(tmp_path).resume_at(0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"step,explore_step\n1,\xff\n", b"step,explore_step\n1,one\n"])
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(StorageFormatError, match=re.escape(str(tmp_path / "metrics.csv"))):
        MetricsCSVLogger(tmp_path).resume_at(1)


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    MetricsCSVLogger(tmp_path).log_metrics({"loss": 1.0}, step=0)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("1,0.7")
    MetricsCSVLogger(tmp_path).log_metrics({"loss": 0.5}, step=1)
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n0,1.0\n1,0.5\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # the child only writes, and dies
def test_what_was_logged_survives_a_kill(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            logger = MetricsCSVLogger(tmp_path)
            for step in range(5):
                logger.log_metrics({"loss": float(step), f"part{step % 2}": 1.0}, step=step)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [row["loss"] for row in rows_of(tmp_path)] == ["0.0", "1.0", "2.0", "3.0", "4.0"]


@pytest.mark.slow
@settings(deadline=None)  # it writes files
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.dictionaries(st.sampled_from(["a", "b", "c,d", 'e"f']), st.floats(), min_size=1)
        ),
        max_size=12,
    )
)
def test_nothing_logged_is_ever_lost(tmp_path_factory: pytest.TempPathFactory, calls: list) -> None:
    folder = tmp_path_factory.mktemp("run")
    logger = MetricsCSVLogger(folder)
    expected: dict[int, dict[str, str]] = {}
    step = 0
    for advance, metrics in calls:
        step += advance
        logger.log_metrics(metrics, step=step)
        expected.setdefault(step, {}).update({name: str(value) for name, value in metrics.items()})
    rows = rows_of(folder) if calls else []
    assert rows == [{"step": str(step)} | row for step, row in expected.items()]


class LoggingModel(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"loss": float(batch_idx), "explore_step": float(self.current_epoch + 1)}, on_step=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_mean", 1.0)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*isinstance.treespec.*")
def test_lightning_logs_through_it(tmp_path: Path) -> None:
    trainer = Trainer(
        max_epochs=2,
        limit_train_batches=2,
        limit_val_batches=0,
        logger=MetricsCSVLogger(tmp_path),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(LoggingModel())
    rows = rows_of(tmp_path)
    assert [(row["step"], row["explore_step"]) for row in rows] == [("0", "1"), ("1", "1"), ("2", "2"), ("3", "2")]
    assert [row.get("epoch_mean") for row in rows] == [None, "1.0", None, "1.0"]

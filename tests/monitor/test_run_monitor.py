"""A run is shown while it goes on: lines, rows of a resumed run, completions."""

import csv
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.runs import UNTRAINED
from trinity_lightning.monitor import progress, run_monitor
from trinity_lightning.monitor.csv_logger import MetricsCSVLogger
from trinity_lightning.monitor.progress import Progress, read_progress
from trinity_lightning.monitor.run_monitor import RunMonitor, held_out_score, write_completions

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning",  # no worker processes
    "ignore:.*LeafSpec.*",
    "ignore:Checkpoint directory .* exists and is not empty",  # a resumed run goes on in its folder
    "ignore:Using ModelCheckpoint with manual optimization",  # checkpoints after the step are what is wanted
)

ITEMS, SKIPPED = 4, 1  # items an explore step; the one that takes no optimizer step, so that global_step lags behind


class SkippingModel(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"item": float(batch_idx), "explore_step": float(self.current_epoch + 1)}, on_step=True)
        if batch_idx != SKIPPED:
            optimizer = self.optimizers()
            self.manual_backward(self.step(batch))
            optimizer.step()  # pyright: ignore[reportAttributeAccessIssue]


def test_an_evaluation_is_printed_and_in_the_log(tmp_path: Path, capsys: Any, caplog: Any) -> None:
    metrics = {"eval/sums/mean@1": 0.5, "eval/sums/pass@1": 0.25, "eval/sums/seconds": 2.0}
    with caplog.at_level("INFO", logger="trinity_lightning.printed"):
        RunMonitor(tmp_path, total_steps=9).show_evaluation(metrics, 3, {"sums": "right at 1"})
    line = "evaluated at step 3/9  sums mean@1 0.5  pass@1 0.25 (right at 1)  2s"
    assert capsys.readouterr().out == f"{line}\n"
    assert [record.message for record in caplog.records] == [line]


def fit(
    folder: Path,
    checkpoint: Path | None = None,
    model: BoringModel | None = None,
    monitor: RunMonitor | None = None,
) -> list[tuple[str, str, str]]:
    """Train two explore steps into a folder; its rows as (step, explore_step, item)."""
    trainer = Trainer(
        max_epochs=2,
        limit_train_batches=ITEMS,
        limit_val_batches=0,
        logger=MetricsCSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[
            monitor or RunMonitor(folder, total_steps=2),
            ModelCheckpoint(folder / "checkpoints", filename="{step}", save_top_k=-1, every_n_train_steps=1),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(model or SkippingModel(), ckpt_path=checkpoint, weights_only=True)
    with (folder / "metrics.csv").open(newline="") as file:
        return [(row["step"], row["explore_step"], row.get("item", "")) for row in csv.DictReader(file)]


@pytest.mark.parametrize("optimizer_steps", [2, 3, 4])  # within an explore step, at its end, within the next
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(tmp_path: Path, optimizer_steps: int) -> None:
    rows = fit(tmp_path)
    assert rows == [(str(i), str(1 + i // ITEMS), str(float(i % ITEMS))) for i in range(2 * ITEMS)]
    assert fit(tmp_path, tmp_path / "checkpoints" / f"step={optimizer_steps}.ckpt") == rows


def test_a_line_is_printed_for_each_explore_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("step ")] == ["step 1/2", "step 2/2"]


def test_the_lines_are_logged_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = RunMonitor(tmp_path, total_steps=2)
    monitor.keep_metrics({"experience_pipeline/trained": 0.0})
    with caplog.at_level("INFO"):
        fit(tmp_path, monitor=monitor)
    lines = [record.message for record in caplog.records if record.name == "trinity_lightning.printed"]
    assert [line.partition("  left")[0] for line in lines] == [f"step {n}/2  no rollout trained" for n in (1, 2)]


class Idle(SkippingModel):
    """Trains in the first explore step only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 0:
            self.log("actor/grad_norm", 1.5, on_step=True)
            super().training_step(batch, batch_idx)


def test_a_step_that_trained_nothing_does_not_show_the_last_ones_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, model=Idle())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert lines == ["step 1/2  grad norm 1.50", "step 2/2"]


class FarOff(SkippingModel):
    """A model whose engine gives other log-probabilities than it samples by."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("actor/logprob_diff/mean", 3.6, on_step=True)
        super().training_step(batch, batch_idx)


def test_an_engine_whose_log_probabilities_are_far_off_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, model=FarOff())
    [warned] = [record.message for record in caplog.records if "nats" in record.message]
    assert warned.startswith("explore step 1: the log-probabilities that the engine gave its responses are 3.6 nats")


def test_a_resumed_run_does_not_repeat_its_alerts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, model=FarOff())
    fit(tmp_path, tmp_path / "checkpoints" / f"step={ITEMS + 1}.ckpt", FarOff())  # within the second step
    assert len([record for record in caplog.records if "nats" in record.message]) == 1


class Explored(SkippingModel):
    """A model of a run in which some responses of the first step have equal rewards, and those of the second are good.

    Args:
        monitor: the run's monitor, which is given the metrics as the explorer gives them.
    """

    def __init__(self, monitor: RunMonitor) -> None:
        super().__init__()
        self._monitor = monitor

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        counts = {"experience_pipeline/untrained/equal_rewards": 3.0} if self.current_epoch == 0 else {}
        self._monitor.keep_metrics(counts | {"experience_pipeline/trained": 8.0})
        if batch_idx == 0:
            self.log_dict(counts, on_step=True)
        return super().training_step(batch, batch_idx)


def test_a_reason_that_leaves_out_no_response_any_more_is_logged_as_0(tmp_path: Path) -> None:
    def counts(checkpoint: Path | None) -> dict[str, float]:
        monitor = RunMonitor(tmp_path, total_steps=2)
        fit(tmp_path, checkpoint, Explored(monitor), monitor)
        with (tmp_path / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        name = "experience_pipeline/untrained/equal_rewards"
        return {row["explore_step"]: float(row[name]) for row in rows if row[name]}

    assert counts(None) == {"1": 3.0, "2": 0.0}
    assert counts(tmp_path / "checkpoints" / f"step={ITEMS}.ckpt") == {"1": 3.0, "2": 0.0}  # resumed in the second step


def test_a_checkpoint_of_an_earlier_version_lacks_the_reasons(tmp_path: Path) -> None:
    monitor = RunMonitor(tmp_path, total_steps=2)
    state = monitor.state_dict()
    del state[run_monitor.REASONS]
    monitor.load_state_dict(state)
    assert monitor.state_dict()[run_monitor.REASONS] == []


def test_the_score_of_an_evaluation_is_that_of_its_first_taskset() -> None:
    metrics = {"eval/a/acc/mean@4": 0.1, "eval/a/mean@4": 0.2, "eval/a/seconds": 1.0}
    assert held_out_score(metrics | {"eval/b/mean@4": 0.3, "eval/b/seconds": 1.0}) == 0.2
    assert held_out_score({"reward/mean": 1.0}) is None


def test_a_step_that_trained_on_little_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = RunMonitor(tmp_path, total_steps=2)
    monitor.keep_metrics({"rollout/experiences": 16.0, "experience_pipeline/trained": 3.0})
    fit(tmp_path, monitor=monitor)
    assert "step 1/2  trained 3 of 16" in capsys.readouterr().out


def test_the_time_left_is_that_of_the_whole_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The explorer measures the whole step: its parts may overlap, or leave gaps."""
    monitor = RunMonitor(tmp_path, total_steps=2000)
    monitor.keep_metrics({"time/rollout": 7200.0, "time/step": 3600.0})
    fit(tmp_path, monitor=monitor)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert lines[0].endswith("left 83d 7h")


class Watched(SkippingModel):
    """Waits, in its first item, for the file of the run's progress."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.seen: Progress | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for _ in range(500 if self.seen is None else 0):
            read = read_progress(self._folder)
            if read is not None and read[0].part == "training":
                self.seen = read[0]
                break
            time.sleep(0.01)
        super().training_step(batch, batch_idx)


def test_other_processes_are_told_what_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "WRITE_SECONDS", 0.01)
    model = Watched(tmp_path)
    fit(tmp_path, model=model)
    assert model.seen is not None
    assert (model.seen.part, model.seen.step) == ("training", 1)
    assert read_progress(tmp_path) is None  # the run has ended


# -- completions -------------------------------------------------------------------------------------------------------


def experience(run: int = 0, **changes: Any) -> Experience:
    fields: dict[str, Any] = {
        "eid": EID(batch=3, task=7, run=run),
        "tokens": [1, 2, 3, 4, 5],
        "prompt_length": 2,
        "logprobs": [-0.1, -0.2, -0.3],
        "reward": 0.5,
        "advantages": [1.25, 1.25, 1.25],
        "metrics": {"reward/math": 0.5, "accuracy": 1.0},
        "prompt_text": "1 + 1 = ?",
        "response_text": "zwei: ② \n",
    }
    return Experience(**fields | changes)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_completion_is_one_object(tmp_path: Path) -> None:
    write_completions(tmp_path / "completions", 3, [experience(), experience(run=1)])
    first, second = lines_of(tmp_path / "completions" / "step_3.jsonl")
    assert first == {
        "step": 3,
        "task": 7,
        "run": 0,
        "prompt": "1 + 1 = ?",
        "completion": "zwei: ② \n",
        "reward": 0.5,
        "reward/math": 0.5,
        "advantage": 1.25,
        "length": 3,
        "truncated": False,
        "trained": True,
        "reason": None,
    }
    assert second["run"] == 1


def test_what_is_not_trained_on_says_why(tmp_path: Path) -> None:
    (row,) = write_completions(tmp_path, 3, [experience(info={UNTRAINED: "equal rewards"})])
    assert (row["trained"], row["reason"]) == (False, "equal rewards")
    (row,) = write_completions(tmp_path, 3, [experience()], taskset="held")
    assert not {"trained", "reason"} & row.keys()  # nobody trains on it


def test_table_rows_share_their_columns_and_are_at_most_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_monitor, "TABLE_ROWS", 2)
    experiences = [
        experience(metrics={"reward/a": 1.0}),
        experience(metrics={"reward/b": 2.0}),
        experience(),
        experience(),
    ]
    rows = write_completions(tmp_path, 3, experiences)
    columns = ["step", "prompt", "completion", "reward", "reward/a", "reward/b", "advantage", "length", "truncated"]
    assert [list(row) for row in rows] == [[*columns, "trained", "reason"]] * 2
    assert [row["reward/a"] for row in rows] == [1.0, None]
    assert len(lines_of(tmp_path / "step_3.jsonl")) == 4


def test_what_is_missing_is_null(tmp_path: Path) -> None:
    bare = experience(
        reward=math.nan, advantages=None, metrics=None, response_text=None, truncate_status="response_truncated"
    )
    (row,) = write_completions(tmp_path, 3, [bare])
    assert (row["reward"], row["advantage"], row["completion"], row["truncated"]) == (None, None, None, True)
    assert "NaN" not in (tmp_path / "step_3.jsonl").read_text()


def test_evaluations_have_files_of_their_own(tmp_path: Path) -> None:
    write_completions(tmp_path, 3, [experience()], taskset="heldout")
    write_completions(tmp_path, 3, [experience()], taskset="org/set")
    write_completions(tmp_path, 3, [experience(), experience()], taskset="heldout")  # again: replaced as a whole
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "eval_heldout_step_3.jsonl",
        "eval_org_set_step_3.jsonl",
    ]
    assert len(lines_of(tmp_path / "eval_heldout_step_3.jsonl")) == 2

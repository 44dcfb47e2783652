"""Whole runs that log to W&B: offline, their files are read back."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from support.runs import SMALL, Commands, only, rows, wait_for
from support.wandb_reader import WandbRun, read_wandb_run

from trinity_lightning.monitor.dashboard import SECTIONS

STEPS = 8
RUN = ("+recipe=grpo", "optimizer.lr=1e-4", f"steps={STEPS}", *SMALL[:-1], "engine=transformers", "ckpt_path=auto")
RUN += ("output_dir=run", "callbacks.checkpoint.every_n_epochs=1")


@pytest.fixture(scope="module")
def resumed(run_train: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was terminated, and then resumed by the same command."""
    folder = tmp_path_factory.mktemp("resumed")
    process = run_train.start(folder, *RUN)
    wait_for((folder / "run" / "completions" / "step_2.jsonl").is_file, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    done = run_train(folder, *RUN)
    assert done.returncode == 0, done.stdout[-4000:]
    return folder / "run"


@pytest.fixture(scope="module")
def parts(resumed: Path) -> list[WandbRun]:
    """The contents of W&B's two files, the second of which is the resumed run's."""
    first, second = sorted(resumed.glob("wandb/offline-run-*"), key=lambda path: path.stat().st_mtime)
    return [read_wandb_run(first), read_wandb_run(second)]


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(resumed: Path, parts: list[WandbRun]) -> None:
    assert parts[0].id == parts[1].id == (resumed / "wandb_run_id.txt").read_text().strip()
    assert [part.exit_code for part in parts] == [0, 0]


def test_each_explore_step_of_a_part_is_one_row_as_in_the_table(resumed: Path, parts: list[WandbRun]) -> None:
    before, after = ([row["explore_step"] for row in part.history] for part in parts)
    assert before == list(range(1, len(before) + 1))
    assert after == list(range(int(after[0]), STEPS + 1))
    assert after[0] <= len(before) + 2  # no step is missing but one that was under way
    table = {row["explore_step"]: row for row in rows(resumed)}
    for row in parts[1].history:
        assert row["reward/mean"] == float(table[str(int(row["explore_step"]))]["reward/mean"])
        assert {"actor/lr", "perf/peak_memory_gb", "completions", "time/rollout"} <= row.keys()


def test_a_run_is_named_by_what_the_command_set(parts: list[WandbRun]) -> None:
    for part in parts:
        assert part.name.startswith(f"grpo tiny transformers lr=1e-4 steps={STEPS} reward=contains_digits ")
        assert sorted(part.tags) == ["addition", "contains_digits", "grpo", "tiny"]


# -- a run with settings and an evaluation, which goes wrong in three ways ---------------------------------------------

WORN_OUT = """
calls = 0


def reward(response, task):
    global calls
    calls += 1
    varied = 1 + sum(map(ord, response)) % 97 / 1000
    return varied if calls <= 5 * 16 * 2 + 4 else 0.0  # of five steps, and of the first evaluation
"""
SET = {"entity": "team", "project": "sums", "name": "mine", "group": "g", "notes": "a note", "id": "abc123"}
FAILING = ("+recipe=grpo", *SMALL[:-1], "reward=worn_out.reward", "engine=transformers", "output_dir=run", "steps=10")
FAILING += ("explorer.batch_size=16", "explorer.repeat_times=2", "sampling.max_tokens=4", "optimizer.lr=1e-4")
FAILING += ("optimizer.lr_scheduler={name: torch.optim.lr_scheduler.StepLR, args: {step_size: 2, gamma: 0.0}}",)
FAILING += ("explorer.eval_interval=4", "+eval_tasksets.addition_heldout.args.heldout=4")
FAILING += ("explorer.eval_on_startup=false", "eval_sampling.max_tokens=4", "logger.wandb.tags=[a,b]")


@pytest.fixture(scope="module")
def failing(run_train: Commands, tmp_path_factory: pytest.TempPathFactory) -> tuple[WandbRun, str]:
    """The run, and what it printed: its reward function breaks in step 6, and its learning rate is 0 from step 3 on."""
    folder = tmp_path_factory.mktemp("failing")
    (folder / "worn_out.py").write_text(WORN_OUT)
    done = run_train(folder, *FAILING, *(f"logger.wandb.{key}={value}" for key, value in SET.items()))
    assert done.returncode == 0, done.stdout[-4000:]
    return read_wandb_run(folder), done.stdout


def test_the_run_of_wandb_is_the_one_of_the_settings(failing: tuple[WandbRun, str]) -> None:
    run, _ = failing
    assert {key: getattr(run, key) for key in SET} == SET
    assert sorted(run.tags) == ["a", "b"]


def test_each_alert_is_told_once_to_wandb_and_in_the_terminal(failing: tuple[WandbRun, str]) -> None:
    run, printed = failing
    titles = [title for title, _ in run.alerts]
    assert titles == ["the learning rate is 0", "the reward collapsed", "groups have no signal"]
    steps = [int(text.split()[2].rstrip(":")) for _, text in run.alerts]
    assert steps == [4, 7, 10]
    assert [printed.count(text) for _, text in run.alerts] == [1, 1, 1]


def test_every_panel_of_the_dashboard_finds_its_metrics(failing: tuple[WandbRun, str]) -> None:
    names = {name for row in failing[0].history for name in row}
    panels = [panel for section in SECTIONS for panel in section.panels]
    missing = {panel.title: panel for panel in panels if not panel.matching(names)}
    assert [title for title, panel in missing.items() if not panel.only] == []
    parts = {name for panel in panels if not panel.only for name in panel.metrics}
    assert parts - names == {"time/wait_for_rollout", "time/operators"}  # of rollouts ahead, and of operators
    # Of the others this run has these; test_dashboard.py compares all of them with the table of metrics.
    here = {panel.title for panel in panels if panel.only} - missing.keys()
    assert here >= {"Held-out reward", "Groups without signal", "Not trained, by reason", "Importance weights"}


def test_the_table_of_runs_has_the_best_values_beside_the_last(failing: tuple[WandbRun, str]) -> None:
    run, _ = failing

    def values(name: str) -> list[float]:
        return [row[name] for row in run.history if name in row]

    held_out = values("eval/addition_heldout/mean@1")
    assert len(held_out) == 3
    assert run.summary["eval/addition_heldout/mean@1"] == {"max": max(held_out), "last": held_out[-1]}
    assert (run.summary["held_out/best"], run.summary["held_out/last"]) == (max(held_out), held_out[-1])
    for name in ("reward/mean", "actor/logprob_diff/mean", "actor/grad_norm"):
        assert run.summary[name] == {"max": max(values(name)), "last": values(name)[-1]}, name
    assert run.summary["time/step"]["mean"] == pytest.approx(sum(values("time/step")) / 10)
    assert run.axes["reward/mean"] == "explore_step"


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a W&B service that works in another folder than the runs."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    wandb.teardown()  # another test's
    wandb.setup(wandb.Settings(mode="offline")).ensure_service()
    yield os.environ["WANDB_SERVICE"]
    wandb.teardown()


def test_a_run_that_is_started_by_a_program_with_a_service_writes_into_its_own_folder(
    service: str, run_train: Commands, tmp_path: Path
) -> None:
    process = run_train.start(tmp_path, *RUN, "steps=1", WANDB_SERVICE=service)
    assert process.wait(120) == 0, (tmp_path / "stdout").read_text()[-4000:]
    assert len(read_wandb_run(only(tmp_path, "run/wandb/offline-run-*")).history) == 1


def test_wandb_says_nothing_at_the_start_of_an_offline_run(run_train: Commands, tmp_path: Path) -> None:
    process = run_train.start(tmp_path, *RUN, "steps=1", WANDB_SILENT="false")
    assert process.wait(120) == 0
    assert "wandb:" not in (tmp_path / "stdout").read_text()


@pytest.mark.parametrize(
    ("logger", "variables", "sentence"),
    [
        ("wandb", {}, "logger.wandb uploads to W&B, and this machine has no login: run `wandb login`"),
        ("wandb", {"WANDB_API_KEY": "short"}, "logger.wandb uploads to W&B, and WANDB_API_KEY invalid"),
        ("tensorboard", {}, "logger.tensorboard needs the package tensorboard"),
    ],
)
def test_a_logger_that_cannot_log_is_refused_before_anything_is_loaded(
    logger: str, variables: dict[str, str], sentence: str, run_train: Commands, tmp_path: Path
) -> None:
    nobody = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_MODE": "online"}
    arguments = ("+recipe=grpo", "model=tiny", f"logger={logger}")
    process = run_train.start(tmp_path, *arguments, **nobody, **variables)
    assert process.wait(60) == 2
    printed = (tmp_path / "stdout").read_text()
    assert printed.count("\n") == 1
    assert printed.startswith(f"trinity-lightning: {sentence}")
    assert not list(tmp_path.glob("outputs/*/*"))
    assert only(tmp_path, "stdout").is_file()

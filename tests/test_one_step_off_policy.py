"""Rollouts by a server while the trainer trains: what overlaps, how old the weights are, and exact resume."""

import signal
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.runs import TRAIN, Commands, RunTrain, only, rows, same_metrics, steps_done, wait_for

SMALL = (
    "model=tiny",
    "reward=contains_digits",
    "explorer.batch_size=4",
    "explorer.repeat_times=4",
    "sampling.max_tokens=12",
    "logger=csv",
)
STEPS = 12  # many quick ones: a run is to be interrupted in the middle, on a fast machine too
SMALL += ("explorer.eval_on_startup=false", "callbacks.checkpoint.every_n_epochs=1", f"steps={STEPS}")
AHEAD = ("+recipe=one_step_off_policy", *SMALL, f"explorer.eval_interval={STEPS}")
AHEAD += ("taskset=support.task_streams.sums", "taskset.order=sequential")  # whose place a checkpoint must hold
AHEAD += ("+eval_tasksets={addition_heldout: {source: addition, split: heldout, args: {heldout: 16}}}",)
# Engines with older weights than the trainer has, without a server: what a checkpoint must hold is the same.
RARELY = ("+recipe=grpo", *SMALL, "explorer.eval_interval=0", "name=rarely", "explorer.sync_interval=3")


@pytest.fixture(scope="module")
def ahead(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    done = run_train(folder, *AHEAD)
    assert done.returncode == 0, done.stdout[-4000:]
    return only(folder, "outputs/one_step_off_policy/*")


def by_step(folder: Path, metric: str) -> list[float]:
    return [float(row[metric]) for row in rows(folder) if row.get(metric)]


def test_each_step_is_sampled_from_the_weights_before_the_last(ahead: Path) -> None:
    assert by_step(ahead, "sample/lag/mean") == [0] + [1] * (STEPS - 1)
    assert by_step(ahead, "sample/model_version/mean") == [0, *range(STEPS - 1)]
    trained = by_step(ahead, "actor/trained_rows")
    assert len(trained) == STEPS
    assert all(count > 0 for count in trained)
    # Float32 on both sides: on-policy it is rounding, then the policy has moved by a step.
    first, *later = by_step(ahead, "actor/logprob_diff/mean")
    assert first < 1e-4 < max(later)


def test_the_ratio_is_against_the_policy_that_sampled(ahead: Path) -> None:
    first, *later = map(abs, by_step(ahead, "actor/ppo_kl"))
    assert first < 1e-5 < max(later)


def test_rollouts_and_training_go_on_at_once(ahead: Path) -> None:
    overlaps = by_step(ahead, "rollout/overlap")
    assert len(overlaps) == STEPS - 1  # the first step is rolled out before there is anything to train on
    assert all(0 <= overlap <= 1 for overlap in overlaps)
    # Most: a step is trained in 30 ms, and on a busy machine that may be over before the thread of the rollouts wakes.
    assert sum(overlap > 0 for overlap in overlaps) > STEPS // 2


def test_the_trained_policy_is_what_is_evaluated(ahead: Path) -> None:
    [row] = [row for row in rows(ahead) if row["eval/addition_heldout/mean@1"]]
    assert row["explore_step"] == str(STEPS)
    assert (ahead / "completions" / f"eval_addition_heldout_step_{STEPS}.jsonl").is_file()


def interrupted_and_resumed(
    run_train: Commands,
    folder: Path,
    name: str,
    arguments: tuple[str, ...],
    how: signal.Signals = signal.SIGKILL,
    program: str = TRAIN,
) -> Path:
    """Interrupted in the middle of a step, every process of it gone, and run to its end."""
    process = run_train.start(folder, *arguments, program=program)
    checkpoints = f"outputs/{name}/*/checkpoints/*.ckpt"
    wait_for(lambda: steps_done(folder, name) >= 3 and any(folder.glob(checkpoints)), process)
    family = [*psutil.Process(process.pid).children(recursive=True), *run_train.at_work()]
    process.send_signal(how)
    process.wait(timeout=120)
    assert not psutil.wait_procs(family, timeout=30)[1], "a server outlived its run"
    assert steps_done(folder, name) < STEPS
    done = run_train(folder, *arguments, "ckpt_path=last", program=program)
    assert done.returncode == 0, done.stdout[-4000:]
    return only(folder, f"outputs/{name}/*")


def assert_equal_runs(a: Path, b: Path) -> None:
    left, right = (load_file(path / "model" / "model.safetensors") for path in (a, b))
    assert all(torch.equal(left[name], right[name]) for name in left)
    same_metrics(a, b)
    for step in range(1, STEPS + 1):
        name = f"completions/step_{step}.jsonl"
        assert (a / name).read_text() == (b / name).read_text()


@pytest.mark.parametrize(
    ("how", "others", "program"),
    # The reference has runners of its own process, and sends its weights as a folder: neither may matter.
    [
        (signal.SIGINT, (), TRAIN),
        (signal.SIGKILL, ("synchronizer=nccl",), "support.nccl_stand_in"),
        (signal.SIGINT, ("explorer.runner=ray", "explorer.runner_per_model=1"), TRAIN),
    ],
    ids=["ctrl-c", "kill-nccl", "ctrl-c-ray"],
)
def test_an_interrupted_run_with_rollouts_in_flight_equals_an_uninterrupted_one(
    how: signal.Signals, others: tuple[str, ...], program: str, ahead: Path, run_train: Commands, tmp_path: Path
) -> None:
    arguments = (*AHEAD, *others)
    resumed = interrupted_and_resumed(run_train, tmp_path, "one_step_off_policy", arguments, how, program)
    assert_equal_runs(ahead, resumed)


def test_a_killed_run_whose_engine_has_old_weights_equals_an_uninterrupted_one(
    run_train: Commands, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole, cut = (tmp_path_factory.mktemp(name) for name in ("whole", "cut"))
    done = run_train(whole, *RARELY)
    assert done.returncode == 0, done.stdout[-4000:]
    expected = only(whole, "outputs/rarely/*")
    assert by_step(expected, "sample/lag/mean") == [0, 1, 2] * (STEPS // 3)
    assert_equal_runs(expected, interrupted_and_resumed(run_train, cut, "rarely", RARELY))

"""Whole runs on two processes: they train as one does, go on after whatever ends them, and refuse what cannot be."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.forked import Forked
from support.runs import SMALL, RunTrain, only, rows, same_metrics, steps_done, wait_for

STEPS = 8  # many quick ones: a run is to be ended in the middle
# The groups of a step that teach nothing are replaced, in rounds of further rollouts. With one runner this engine's
# batches, on which the last bits depend, are the same each time.
RUN = ("+recipe=grpo", *SMALL, f"steps={STEPS}", "engine=transformers", "add_strategy=[dapo,grpo]", "optimizer.lr=1e-3")
RUN += ("explorer.repeat_times=2", "explorer.runner_per_model=1", "algorithm.optimizer_steps=2")
RUN += ("buffer.keep=true", "callbacks.checkpoint.every_n_epochs=1", "name=run")
VLLM = ("+recipe=grpo", *SMALL, "steps=2", "algorithm.optimizer_steps=2", "algorithm.kl.coef=0.01", "save_model=false")
AHEAD = ("+recipe=one_step_off_policy", *SMALL, "steps=4", "explorer.batch_size=4", "name=run")
ON_TWO = ("trainer.accelerator=cpu", "trainer.devices=2")
TWO = ("trainer=ddp", *ON_TWO)
SAME = ("reward/mean", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/trained_rows")


def finished(run_train: RunTrain, folder: Path, *arguments: str) -> Path:
    """The folder of a run that came to its end."""
    done = run_train(folder, *arguments)
    assert done.returncode == 0, done.stdout[-4000:]
    return only(folder, "outputs/*/*")


def alike(folder: Path, expected: Path) -> None:
    """The same but for the order of float32 sums."""
    assert len(rows(folder)) == len(rows(expected))
    for row, other in zip(rows(folder), rows(expected), strict=True):
        named, wanted = ({name for name, value in each.items() if value} for each in (row, other))
        assert named >= wanted - {"perf/other_cores"}  # there if other programs were at work
        for name in SAME:
            if other.get(name):
                assert float(row[name]) == pytest.approx(float(other[name]), rel=1e-4, abs=1e-6), name
    assert any(float(row["actor/trained_rows"] or 0) > 0 for row in rows(folder))


def equal(folder: Path, expected: Path) -> None:
    """The same bits."""
    mine, others = (load_file(path / "model" / "model.safetensors") for path in (folder, expected))
    assert all(torch.equal(mine[name], others[name]) for name in others)
    same_metrics(folder, expected)


@pytest.fixture(scope="module")
def one(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(run_train, tmp_path_factory.mktemp("one"), *RUN)


@pytest.fixture(scope="module")
def two(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(run_train, tmp_path_factory.mktemp("two"), *RUN, *TWO)


@pytest.fixture(scope="module")
def with_vllm(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(run_train, tmp_path_factory.mktemp("vllm"), *VLLM)


@pytest.mark.parametrize("trainer", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(with_vllm: Path, trainer: str, run_train: RunTrain, tmp_path: Path) -> None:
    done = run_train(tmp_path, *VLLM, f"trainer={trainer}", *ON_TWO)
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("step 2/2") == 1
    alike(only(tmp_path, "outputs/*/*"), with_vllm)


def test_groups_that_are_replaced_are_those_of_one_process(one: Path, two: Path) -> None:
    alike(two, one)
    assert any(float(row["rollout/refill_tasks"] or 0) > 0 for row in rows(two))


def test_stored_experiences_are_trained_on_as_by_one(two: Path, run_train: RunTrain, tmp_path: Path) -> None:
    offline = ("+recipe=offline", "model=tiny", "logger=csv", "buffer.batch_size=4", f"buffer.path={two}/experiences")
    folders = [tmp_path / name for name in ("one", "two")]
    for folder, devices in zip(folders, ((), TWO), strict=True):
        folder.mkdir()
        finished(run_train, folder, *offline, "steps=4", *devices)
    alike(*(only(folder, "outputs/*/*") for folder in reversed(folders)))


def of_torchrun(rank: int) -> dict[str, str]:
    """What torchrun gives the only process of a machine."""
    own = {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0"}
    return {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", **own}


def of_srun(rank: int) -> dict[str, str]:
    """What srun gives the only task of a machine."""
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2"}
    return {**job, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"}


@pytest.mark.parametrize("launcher", [of_torchrun, of_srun])
def test_two_machines_train_as_one(
    launcher: Callable[[int], dict[str, str]],
    one: Path,
    run_train: RunTrain,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As far as one machine can show it: a process for each, with the environment that a launcher gives it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    nodes = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1", "+trainer.num_nodes=2")
    runs = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        with monkeypatch.context() as patch:
            for name, value in (meeting | launcher(rank)).items():
                patch.setenv(name, value)
            folder = f"hydra.run.dir={tmp_path}/outputs/first"
            runs.append(run_train.start(tmp_path / str(rank), *RUN, *nodes, folder))  # type: ignore[attr-defined]
    for rank, run in enumerate(runs):
        assert run.wait(120) == 0, (tmp_path / str(rank) / "stdout").read_text()[-4000:]
    alike(tmp_path / "outputs/first", one)


# -- what ends a run ---------------------------------------------------------------------------------------------------


def followers(run_train: RunTrain, run: Forked) -> list[psutil.Process]:
    """The processes of other ranks; between them and the warm process is one that waits for their end."""
    at_work = run_train.at_work()  # type: ignore[attr-defined]
    [waiting] = {each.pid for each in at_work if each.pid == psutil.Process(run.pid).ppid()}
    warm = psutil.Process(waiting).ppid()
    return [each for each in at_work if each.ppid() not in (warm, run.pid) and each.pid != run.pid]


def ended(
    run_train: RunTrain, folder: Path, steps: int, strike: Callable[[Forked, int], None], *arguments: str
) -> tuple[int, str]:
    """A run that is struck, (rank 0, process of rank 1), after so many steps: its exit code and what it printed."""
    run = run_train.start(folder, *arguments)  # type: ignore[attr-defined]
    wait_for(lambda: steps_done(folder, "run") >= steps, run)
    family = followers(run_train, run)
    assert len(family) == 1
    strike(run, family[0].pid)
    code = run.wait(60)
    assert not psutil.wait_procs(family, 60)[1], "a rank outlived the run"
    assert steps_done(folder, "run") < STEPS
    return code, (folder / "stdout").read_text()


def terminate(run: Forked, follower: int) -> None:
    run.send_signal(signal.SIGTERM)  # rank 0 passes it on


def terminate_a_follower(run: Forked, follower: int) -> None:
    os.kill(follower, signal.SIGTERM)


def kill_a_follower(run: Forked, follower: int) -> None:
    os.kill(follower, signal.SIGKILL)


def kill(run: Forked, follower: int) -> None:
    run.send_signal(signal.SIGKILL)


def interrupt(run: Forked, follower: int) -> None:
    """As a terminal does."""
    for process in (run.pid, follower):
        os.kill(process, signal.SIGINT)


def test_a_run_goes_on_with_the_same_bits_after_whatever_ended_it(
    two: Path, run_train: RunTrain, tmp_path: Path
) -> None:
    strikes = {
        1: (terminate, 143, "stopped in step"),
        2: (kill_a_follower, 1, "the process of rank 1 was ended by signal 9"),
        4: (terminate_a_follower, 143, "rank 1: SIGTERM"),
        5: (kill, -signal.SIGKILL, ""),
    }
    resume: tuple[str, ...] = ()
    for steps, (strike, expected, message) in strikes.items():
        code, printed = ended(run_train, tmp_path, steps, strike, *RUN, *TWO, *resume)
        assert code == expected, printed[-4000:]
        assert message in printed, printed[-4000:]
        assert ("Resume with" in printed) == (strike is not kill)
        resume = ("ckpt_path=last",)
    equal(finished(run_train, tmp_path, *RUN, *TWO, *resume), two)


def test_a_run_on_two_processes_goes_on_with_one(one: Path, run_train: RunTrain, tmp_path: Path) -> None:
    code, printed = ended(run_train, tmp_path, 2, interrupt, *RUN, *TWO)
    assert (code, "Resume with" in printed) == (1, True), printed[-4000:]
    alike(finished(run_train, tmp_path, *RUN, "ckpt_path=last"), one)


def test_a_run_on_one_process_goes_on_with_two(one: Path, run_train: RunTrain, tmp_path: Path) -> None:
    finished(run_train, tmp_path, *RUN, "steps=3")
    alike(finished(run_train, tmp_path, *RUN, *TWO, "ckpt_path=last"), one)


def test_a_server_beside_two_processes_that_is_killed_is_started_again(run_train: RunTrain, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    expected = finished(run_train, folders[0], *AHEAD)
    run = run_train.start(folders[1], *AHEAD, *TWO)  # type: ignore[attr-defined]
    wait_for(lambda: steps_done(folders[1], "run") >= 1, run)
    servers = [each for each in followers(run_train, run) if os.getsid(each.pid) == each.pid]
    assert servers
    os.killpg(servers[0].pid, signal.SIGKILL)
    assert run.wait(120) == 0, (folders[1] / "stdout").read_text()[-4000:]
    assert "died and is started again" in (folders[1] / "stdout").read_text()
    alike(only(folders[1], "outputs/*/*"), expected)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("--multirun", "optimizer.lr=1e-5,1e-4"), {}, "without --multirun"),
        ((), {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "need one folder for the run"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    message: str,
    run_train: RunTrain,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = run_train(tmp_path, *arguments, *VLLM, *TWO)
    assert done.returncode == 2, done.stdout[-2000:]
    assert message in done.stdout
    assert "Traceback" not in done.stdout

"""Whole runs on two processes: they train as one does, go on after whatever ends them, and refuse what cannot be."""

import json
import os
import re
import shlex
import signal
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from support.process import Forked
from support.runs import (
    ROOT,
    SHARDS,
    SMALL,
    TRAIN,
    TRAINERS,
    TWO,
    WITHIN_A_PASS,
    Commands,
    alike,
    environment,
    equal,
    finished,
    imitation,
    only,
    rows,
    steps_done,
    wait_for,
    with_a_server_killed,
)
from support.slurm import installed

from trinity_lightning.config.models import resolve_model
from trinity_lightning.trainer.checkpoint import AtomicCheckpointIO

STEPS = 8  # many quick ones: a run is to be ended in the middle
# The groups of a step that teach nothing are replaced, in rounds of further rollouts. With one runner this engine's
# batches, on which the last bits depend, are the same each time.
RUN = ("+recipe=grpo", *SMALL, f"steps={STEPS}", "engine=transformers", "add_strategy=[dapo,grpo]", "optimizer.lr=1e-3")
RUN += ("explorer.repeat_times=2", "explorer.runner_per_model=1", "algorithm.optimizer_steps=2")
RUN += ("buffer.keep=true", "callbacks.checkpoint.every_n_epochs=1", "name=run")
VLLM = ("+recipe=grpo", *SMALL, f"steps={STEPS}", "add_strategy=[dapo,grpo]", "explorer.repeat_times=2", "name=run")
VLLM += ("algorithm.optimizer_steps=2", "algorithm.kl.coef=0.01", "callbacks.checkpoint.every_n_epochs=1")
VLLM += ("optimizer.lr=1e-3",)
QUICK = (*VLLM, "steps=4")  # of what is not ended in the middle
PER_RANK = "engine.per_rank=true"
AHEAD = ("+recipe=one_step_off_policy", *SMALL, "steps=4", "explorer.batch_size=4", "name=run")
AHEAD += ("taskset=support.task_streams.sums", "taskset.order=sequential")  # rank 0 alone makes the tasks


@pytest.fixture(scope="module")
def one(run_train: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(run_train, tmp_path_factory.mktemp("one"), *RUN)


@pytest.fixture(scope="module")
def two(run_train: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(run_train, tmp_path_factory.mktemp("two"), *RUN, *TWO)


@pytest.fixture(scope="module")
def with_vllm(run_train: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(run_train, tmp_path_factory.mktemp("vllm"), *VLLM)


@pytest.fixture(scope="module")
def quick(run_train: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(run_train, tmp_path_factory.mktemp("quick"), *QUICK)


@pytest.fixture(scope="module")
def ahead(run_train: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(run_train, tmp_path_factory.mktemp("ahead"), *AHEAD)


@pytest.fixture(scope="module")
def together(run_train: Commands, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The same by two processes, of a trainer."""

    def run(trainer: str) -> Path:
        folder = tmp_path_factory.mktemp(trainer)
        done = run_train(folder, *QUICK, *TRAINERS[trainer])
        assert done.returncode == 0, done.stdout[-4000:]
        assert done.stdout.count("step 2/4") == 1
        return only(folder, "outputs/*/*")

    return cache(run)


def evaluated(run_train: Commands, run: Path) -> list[str]:
    """The answers of a run's last checkpoint to held-out tasks."""
    overrides = ("+recipe=grpo", *SMALL, "engine=transformers", f"ckpt_path={run}", "hydra.run.dir=evaluation")
    tasks = ("eval_sampling.max_tokens=16", "+eval_tasksets.addition_heldout.args.heldout=16")
    done = run_train(run, *overrides, *tasks, program="trinity_lightning.evaluate")
    assert done.returncode == 0, done.stdout[-4000:]
    lines = only(run, "evaluation/completions/*_step_4.jsonl").read_text().splitlines()
    return [json.loads(line)["completion"] for line in lines]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_two_processes_train_as_one(
    quick: Path, together: Callable[[str], Path], trainer: str, run_train: Commands
) -> None:
    alike(together(trainer), quick)
    assert any(float(row["rollout/refill_tasks"] or 0) > 0 for row in rows(together(trainer)))
    assert evaluated(run_train, together(trainer)) == evaluated(run_train, quick)


def test_groups_that_are_replaced_are_those_of_one_process(one: Path, two: Path) -> None:
    alike(two, one)
    assert any(float(row["rollout/refill_tasks"] or 0) > 0 for row in rows(two))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_engine_in_each_process_rolls_out_as_one(
    quick: Path, trainer: str, run_train: Commands, tmp_path: Path
) -> None:
    alike(finished(run_train, tmp_path, *QUICK, *TRAINERS[trainer], PER_RANK), quick)


def test_engines_of_the_processes_have_adapters_older_weights_and_evaluations_as_one(
    run_train: Commands, tmp_path: Path
) -> None:
    adapted = ("+recipe=lora", *SMALL, "steps=4", "name=run", "model.lora.r=4", "optimizer.lr=0.03")
    adapted += ("explorer.sync_interval=2", "explorer.eval_interval=1")
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    one = finished(run_train, folders[0], *adapted)
    assert sum(any(value and name.startswith("eval/") for name, value in row.items()) for row in rows(one)) == 4
    alike(finished(run_train, folders[1], *adapted, *TWO, PER_RANK), one)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


TORCHRUN = "torch.distributed.run"
FIRST = ("hydra.run.dir=../outputs/first",)


def torchrun(port: str, processes: str = "1", nodes: str = "1", node: str = "0") -> tuple[str, ...]:
    """The words of its command before those of the run."""
    where = ("--nnodes", nodes, "--node-rank", node, "--nproc-per-node", processes)
    return (*where, "--master-addr", "127.0.0.1", "--master-port", port, "-m", TRAIN)


def test_stored_experiences_are_trained_on_as_by_one(two: Path, run_train: Commands, tmp_path: Path) -> None:
    """Also by two processes that torchrun starts on one machine."""
    offline = ("+recipe=offline", "model=tiny", "logger=csv", "buffer.batch_size=4", f"buffer.path={two}/experiences")
    offline += ("steps=4", "hydra.run.dir=outputs/run/first")
    for name in ("one", *TRAINERS):
        (tmp_path / name).mkdir()
    one = finished(run_train, tmp_path / "one", *offline)
    alike(finished(run_train, tmp_path / "fsdp2", *offline, *SHARDS), one)
    words = torchrun(free_port(), processes="2")
    alike(finished(run_train, tmp_path / "ddp", *words, *offline, *TWO, program=TORCHRUN), one)


Launcher = Callable[[str, str], tuple[tuple[str, ...], dict[str, str]]]


def by_torchrun(rank: str, port: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command of each machine: words before those of the run, and how `Commands.start` starts it."""
    return torchrun(port, nodes="2", node=rank), {"program": TORCHRUN}


def by_srun(rank: str, port: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The same, with what srun gives the only task of a machine."""
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2"}
    job |= {"SLURM_PROCID": rank, "SLURM_NODEID": rank, "SLURM_LOCALID": "0"}
    return (), job | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


Machines = Callable[..., list[tuple[int, str]]]


@pytest.fixture
def machines(run_train: Commands, tmp_path: Path) -> Machines:
    """Exit code and output of what a launcher starts on each of two machines."""

    def start(launcher: Launcher, *arguments: str) -> list[tuple[int, str]]:
        port = free_port()
        nodes = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1", "+trainer.num_nodes=2")
        folders = [tmp_path / str(rank) for rank in range(2)]
        runs = []
        for rank, folder in enumerate(folders):
            folder.mkdir()
            words, settings = launcher(str(rank), port)
            runs.append(run_train.start(folder, *words, *arguments, *nodes, **settings))
        return [(run.wait(120), (folder / "stdout").read_text()) for run, folder in zip(runs, folders, strict=True)]

    return start


def test_two_machines_train_as_one(machines: Machines, one: Path, tmp_path: Path) -> None:
    """As far as one machine can show it."""
    for code, printed in machines(by_torchrun, *RUN, *FIRST):
        assert code == 0, printed[-4000:]
    alike(tmp_path / "outputs/first", one)


def test_two_machines_train_the_jobs_of_a_sweep_that_srun_starts(machines: Machines, one: Path, tmp_path: Path) -> None:
    """The second as by itself."""
    sweep = ("hydra.sweep.dir=../outputs", f"steps=1,{STEPS}")
    for code, printed in machines(by_srun, "--multirun", *RUN, *sweep):
        assert code == 0, printed[-4000:]
    assert (tmp_path / "outputs/0/model").is_dir()
    alike(tmp_path / "outputs/1", one)


def test_two_processes_train_the_jobs_of_a_sweep_that_submitit_submits(
    one: Path, run_train: Commands, tmp_path: Path
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="extra `sweep`")
    launcher = ("hydra/launcher=submitit_slurm", "hydra.launcher.nodes=1", "hydra.launcher.tasks_per_node=2")
    sweep = (*launcher, "hydra.launcher.timeout_min=5", "hydra.sweep.dir=outputs", f"steps=1,{STEPS}")
    settings = {"PATH": installed(tmp_path / "slurm"), "WARM": run_train.address}
    run = run_train.start(tmp_path, "--multirun", *RUN, *TWO, *sweep, **settings)
    code, printed = run.wait(240), (tmp_path / "stdout").read_text()
    assert code == 0, printed[-4000:]
    assert (tmp_path / "outputs/0/model").is_dir()
    alike(tmp_path / "outputs/1", one)


def test_machines_with_a_folder_of_their_own_each_are_refused(machines: Machines, tmp_path: Path) -> None:
    for code, printed in machines(by_srun, *RUN):
        assert code == 2, printed[-4000:]
        assert f"another one, {tmp_path}/1/outputs/run/" in printed
        assert "give every process the same folder, which all machines share, such as hydra.run.dir=/shared" in printed


# -- what ends a run ---------------------------------------------------------------------------------------------------


def ended(
    run_train: Commands, folder: Path, steps: int, strike: Callable[..., None], *arguments: str
) -> tuple[int, str]:
    """A run that is struck, (rank 0, process of rank 1 if any), after so many steps: exit code and what it printed."""
    run = run_train.start(folder, *arguments)
    wait_for(lambda: steps_done(folder, "run") >= steps, run)
    family = run_train.followers(run)
    assert len(family) == ("trainer.devices=2" in arguments)
    strike(run, *(process.pid for process in family))
    code = run.wait(60)
    assert not psutil.wait_procs(family, 60)[1], "a rank outlived the run"
    assert steps_done(folder, "run") < STEPS
    return code, (folder / "stdout").read_text()


def terminate(run: Forked, *followers: int) -> None:
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


@pytest.mark.parametrize("engines", [(), (PER_RANK,)], ids=["an engine", "an engine a rank"])
def test_a_run_goes_on_with_the_same_bits_after_whatever_ended_it(
    engines: tuple[str, ...], two: Path, run_train: Commands, tmp_path: Path
) -> None:
    strikes = {
        1: (terminate, 143, "stopped in step"),
        2: (kill_a_follower, 1, "the process of rank 1 was ended by signal 9"),
        4: (terminate_a_follower, 143, "rank 1: SIGTERM"),
        5: (kill, -signal.SIGKILL, ""),
    }
    resume: tuple[str, ...] = ()
    for steps, (strike, expected, message) in strikes.items():
        code, printed = ended(run_train, tmp_path, steps, strike, *RUN, *TWO, *engines, *resume)
        assert code == expected, printed[-4000:]
        assert message in printed, printed[-4000:]
        assert ("Resume with" in printed) == (strike is not kill)
        resume = ("ckpt_path=last",)
    equal(finished(run_train, tmp_path, *RUN, *TWO, *engines, *resume), two)


def test_a_process_whose_rank_0_is_killed_before_they_meet_does_not_wait(run_train: Commands, tmp_path: Path) -> None:
    run = run_train.start(tmp_path, *RUN, *TWO)
    wait_for(lambda: bool(run_train.followers(run)), run)
    family = run_train.followers(run)
    run.kill()
    assert not psutil.wait_procs(family, 60)[1]
    log = only(tmp_path, "outputs/run/*/train_ddp_process_1.log").read_text()
    assert "the process that started this one has ended" in log


def test_a_run_goes_on_with_any_number_of_processes_and_either_trainer(
    with_vllm: Path, run_train: Commands, tmp_path: Path
) -> None:
    """From each of three to each of the others."""
    nothing_of_it = "nothing can be saved without the shares of all processes"
    strikes = {
        1: ((), terminate, 143, "stopped in step"),
        2: (TWO, interrupt, 130, "stopped in step"),
        3: (SHARDS, terminate, 143, "stopped in step"),
        4: ((), terminate, 143, "stopped in step"),
        5: (SHARDS, kill_a_follower, 1, nothing_of_it),
        7: (TWO, terminate_a_follower, 143, "rank 1: SIGTERM"),
    }
    for steps, (devices, strike, expected, message) in strikes.items():
        resume = ("ckpt_path=last",) if steps > 1 else ()
        code, printed = ended(run_train, tmp_path, steps, strike, *VLLM, *devices, *resume)
        assert code == expected, printed[-4000:]
        assert message in printed, printed[-4000:]
        assert "Resume with" in printed
    alike(finished(run_train, tmp_path, *VLLM, "ckpt_path=last"), with_vllm)


def stopped(run_train: Commands, folder: Path, place: str, *arguments: str) -> Forked:
    """A run of which a rank has stopped for good at a place of support/stops.py."""
    run = run_train.start(folder, *arguments, program="support.stops", STOPS=place)
    wait_for((folder / "stopped").exists, run)
    return run


def test_a_run_killed_while_shards_are_written_goes_on_from_the_checkpoint_before(
    together: Callable[[str], Path], run_train: Commands, tmp_path: Path
) -> None:
    """With the same bits; and what is evaluated of its last one is what is evaluated of one in a file."""
    sharded = (*QUICK, *SHARDS, "trainer.strategy.save_distributed_checkpoint=true")
    run = stopped(run_train, tmp_path, "0 finish 2", *sharded)
    for process in (run, *run_train.followers(run)):
        os.kill(process.pid, signal.SIGKILL)
    assert run.wait(60) == -signal.SIGKILL
    folder = only(tmp_path, "outputs/run/*/checkpoints")
    assert len(list(only(folder, ".*.tmp").glob("*.distcp"))) == 2
    saved = AtomicCheckpointIO().load_checkpoint(only(folder, "*.ckpt"), weights_only=True)
    assert saved["global_step"] == 2
    resumed = finished(run_train, tmp_path, *sharded, "ckpt_path=last")
    equal(resumed, together("fsdp2"))
    assert evaluated(run_train, resumed) == evaluated(run_train, together("fsdp2"))


HANGS = {"when a weight is gathered": ("1 share 30", r"model\.\S+"), "in the drill's noise": ("1 reshard 2", "a sum")}


@pytest.mark.parametrize(("place", "at"), HANGS.values(), ids=HANGS)
def test_a_rank_that_hangs_in_a_weight_sync_ends_the_run_by_its_time_limit(
    place: str, at: str, run_train: Commands, tmp_path: Path
) -> None:
    run = stopped(run_train, tmp_path, place, *VLLM, *SHARDS, "synchronizer.sync_timeout=3")
    family = run_train.followers(run)
    assert run.wait(60) == 1
    assert not psutil.wait_procs(family, 60)[1], "a rank outlived the run"
    printed = (tmp_path / "stdout").read_text()
    assert re.search(rf"did not answer in time, at {at} \(rank 1 hangs\)", printed), printed[-4000:]


@pytest.mark.parametrize(("how", "place", "message"), [(how, *case) for how, case in WITHIN_A_PASS.items()])
def test_a_rank_that_ends_or_hangs_within_a_pass_ends_the_run_which_names_it(
    how: str, place: str, message: str, run_train: Commands, tmp_path: Path
) -> None:
    """There are no rounds within a pass: the other rank waits for a layer."""
    timeout = "trainer.strategy.timeout=60"  # 4 s by support/stops.py
    run = stopped(run_train, tmp_path, place, *imitation(tmp_path), *SHARDS, timeout)
    family = run_train.followers(run)
    if how == "killed":
        family[0].kill()
    assert run.wait(60) == 1
    assert not psutil.wait_procs(family, 60)[1], "a rank outlived the run"
    assert message in (printed := (tmp_path / "stdout").read_text()), printed[-4000:]
    assert ("Resume with" in printed) == (how == "fails")  # without the shares of all ranks nothing is saved


@pytest.mark.parametrize(
    ("place", "arguments", "message"),
    [
        ("1 step 3", RUN, "(rank 1 hangs)"),  # its engine does not sleep: the next round misses it
        ("1 add 1", VLLM, "the engine of rank 1 did not sleep until sync within 4 s"),
    ],
    ids=["transformers", "vllm"],
)
def test_a_rank_whose_engine_hangs_ends_the_run_by_its_time_limits(
    place: str, arguments: tuple[str, ...], message: str, run_train: Commands, tmp_path: Path
) -> None:
    """In a request of rank 0, which it therefore has; no group is replaced, which would have its own time-out."""
    limits = ("explorer.max_timeout=10", "explorer.max_retry_times=0", "trainer.strategy.timeout=60")  # 4 s by stops.py
    run = stopped(run_train, tmp_path, place, *arguments, *TWO, PER_RANK, "add_strategy=grpo", *limits)
    family = run_train.followers(run)
    assert run.wait(60) == 1
    assert not psutil.wait_procs(family, 60)[1], "a rank outlived the run"
    assert message in (printed := (tmp_path / "stdout").read_text()), printed[-4000:]


def test_one_of_two_servers_beside_two_processes_that_is_killed_is_started_again(
    ahead: Path, run_train: Commands, tmp_path: Path
) -> None:
    alike(with_a_server_killed(run_train, tmp_path, *AHEAD, *SHARDS), ahead, "rollout/engine_restarts")


def test_runners_of_ray_roll_out_for_two_processes(ahead: Path, run_train: Commands, tmp_path: Path) -> None:
    runners = ("explorer.runner=ray", "explorer.runner_per_model=1")
    alike(finished(run_train, tmp_path, *AHEAD, *TWO, *runners), ahead)


def is_healthy(port: str) -> bool:
    try:
        return urlopen(f"http://127.0.0.1:{port}/health").status == 200
    except OSError:
        return False


def test_a_server_that_runs_already_rolls_out_for_two_processes(
    ahead: Path, run_train: Commands, tmp_path: Path
) -> None:
    """Started as the page of engines says; weights reach it as a folder."""
    page, port = (ROOT / "conf" / "engine" / "vllm_server.yaml").read_text(), free_port()
    here = {"MODEL": str(resolve_model("tiny")), "8000": port, "bfloat16": "float32", "1024": "512"}
    words = shlex.split(" ".join(re.findall(r"(--.*?)\\?$", page, re.MULTILINE)))
    command = ["vllm.entrypoints.openai.api_server", *(here.get(word, word) for word in words)]
    with (tmp_path / "server.log").open("w") as log:
        variables = environment() | {"VLLM_SERVER_DEV_MODE": "1"}
        server = Forked(run_train.address, command, tmp_path, variables, log, serves=True)
    try:
        wait_for(lambda: is_healthy(port), server)
        server_settings = (f"engine.urls=[http://127.0.0.1:{port}]", f"synchronizer.folder={tmp_path}/weights")
        alike(finished(run_train, tmp_path, *AHEAD, *TWO, *server_settings), ahead)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        server.stdin.close()


# -- what is refused ---------------------------------------------------------------------------------------------------


INTERACTIVE = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "interactive"}  # a shell, in which srun starts nothing


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("--multirun", "optimizer.lr=1e-5,1e-4"), {}, "without --multirun"),
        (("--multirun", "optimizer.lr=1e-5,1e-4"), INTERACTIVE, "without --multirun"),
        (
            ("--multirun", "hydra/sweeper=optuna", "optimizer.lr=choice(1e-5,1e-4)"),
            {"SLURM_NTASKS": "2"},
            "each task of srun would run one of its own",
        ),
        ((), {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "output_dir=outputs/"),
        ((), {"SLURM_NTASKS": "4", "SLURM_NNODES": "2"}, "srun has started 4 of the processes"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    message: str,
    run_train: Commands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = run_train(tmp_path, *arguments, *VLLM, *TWO)
    assert done.returncode == 2, done.stdout[-2000:]
    assert message in done.stdout
    assert "Traceback" not in done.stdout

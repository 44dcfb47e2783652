"""Two processes that train one policy: losses, gradients, weights and metrics are as in one process.

By both strategies: the whole policy in each, or a share of it.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.errors import refuses
from support.policy import Weights, assert_same_gradients, batch_of, fit, make_policy
from support.replicas import (
    ASKED,
    CASES,
    DTYPES,
    FULL,
    KINDS,
    LACKED,
    MORE,
    NOT_IN_SHARDS,
    PAIRS,
    PLACES,
    RANKS,
    SHAPES,
    SMOOTH,
    STRATEGIES,
    asked,
    assert_same,
    ragged,
    start,
    write,
    write_again,
    write_first,
)
from support.runs import Commands
from torch import nn

from trinity_lightning.common.ranks import Ranks
from trinity_lightning.config.algorithm import KLConfig
from trinity_lightning.errors import ConfigError, RankError
from trinity_lightning.evaluation import merged_weights
from trinity_lightning.sync.files import checkpoint_weights
from trinity_lightning.trainer import ddp
from trinity_lightning.trainer.checkpoint import AtomicCheckpointIO
from trinity_lightning.trainer.policy import PolicyModule

pytestmark = pytest.mark.slow

Found = list[dict[str, dict[str, dict[str, Any]]]]

Alone = Callable[[str], dict[str, Any]]

ENDED = "the process that started this one has ended."

STEP = ("actor/grad_norm", "actor/lr", "actor/bad_steps")  # by which each rank changes its weights


ALL = [(kind, case) for kind in STRATEGIES for case in CASES if kind != "fsdp2" or case not in NOT_IN_SHARDS]
ALL += [(kind, "SmolLM2") for kind in STRATEGIES]


@pytest.fixture(scope="module")
def alone() -> Alone:
    """Results of one process for a case."""
    return cache(lambda case: (CASES | SHAPES)[case]())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes write."""
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def results(folder: Path, run_train: Commands) -> Found:
    """Results of two processes; a checkpoint of one process is there for them to read."""
    write_first(folder, "one")
    return start(folder, run_train)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory, run_train: Commands) -> Callable[[int], Found]:
    """Results of more processes, by their number."""
    return cache(lambda ranks: start(tmp_path_factory.mktemp("more"), run_train, ranks))


@pytest.fixture(scope="module")
def checkpoints(results: Found, folder: Path) -> Callable[[str], dict[str, Any]]:
    """Checkpoints by name; one process has read the checkpoints of two, and written some again."""
    write_again(folder, "one")
    write(folder / "later.ckpt", "one", epochs=2)
    return lambda name: AtomicCheckpointIO().load_checkpoint(folder / f"{name}.ckpt", weights_only=True)


@pytest.mark.parametrize(("kind", "case"), [pair for pair in ALL if pair[1] != "bfloat16"])
def test_two_processes_train_as_one(results: Found, alone: Alone, case: str, kind: str) -> None:
    assert_same(results[0][kind][case], alone(case))


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks, cases in MORE.items() for case in cases])
def test_more_processes_train_as_one(
    more: Callable[[int], Found], alone: Alone, ranks: int, case: str, kind: str
) -> None:
    for result in more(ranks):
        assert_same(result[kind][case], alone(case))


@pytest.mark.parametrize(("kind", "case"), ALL)
def test_all_ranks_have_the_same_bits(results: Found, case: str, kind: str) -> None:
    first, *others = (result[kind][case] for result in results)
    for other in others:
        for part in ("weights", "losses"):
            torch.testing.assert_close(other[part], first[part], rtol=0, atol=0, equal_nan=True)
        for mine, expected in zip(other["metrics"], first["metrics"], strict=True):
            assert [mine.get(name) for name in STEP] == [expected.get(name) for name in STEP]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_masters_of_bfloat16_weights_follow_the_sum(results: Found, alone: Alone, kind: str) -> None:
    one, together = alone("bfloat16"), results[0][kind]["bfloat16"]
    for mine, expected in zip(together["gradients"], one["gradients"], strict=True):
        assert {value.dtype for value in mine.values()} == {torch.float32}
        assert_same_gradients(mine, expected, tolerance=0.05)


def test_masters_in_shards_follow_sums_in_float32(checkpoints: Callable[[str], dict[str, Any]]) -> None:
    """Both ways cut an item alike: as one process does it, bfloat16 rounds otherwise."""
    whole, shards = (checkpoints(f"{kind}-bf16")["optimizer_states"][0]["state"] for kind in STRATEGIES)
    torch.testing.assert_close(shards["masters"], whole["masters"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_dropout_draws_something_else_on_each_rank_and_the_same_if_a_run_is_resumed(results: Found, kind: str) -> None:
    (first, resumed), (other, other_resumed) = (
        (result[kind]["noise"]["drawn"], result[kind]["noise resumed"]["drawn"]) for result in results
    )
    assert (first, other) == (resumed, other_resumed)
    assert len({*first, *other}) == 2 * 2 * len(ragged())


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("policy", ASKED)
def test_what_rank_0_asks_for_alone_is_that_of_one_process(results: Found, policy: str, kind: str) -> None:
    one, together = asked(policy), results[0][kind][f"asked {policy}"]
    rounding = 1e-5 if policy in ("fp32", "mixture of experts") else 0.02
    for name in ("perturbed", "logprobs"):
        torch.testing.assert_close(together.pop(name), one.pop(name), rtol=rounding, atol=rounding)
    for name in ("sent", "saved"):
        torch.testing.assert_close(together.pop(name), one.pop(name), rtol=0, atol=0)
    assert together == one


@pytest.mark.parametrize("model", ["held", "reference"])
def test_each_of_two_processes_holds_half(results: Found, model: str) -> None:
    """Half of the policy, and half of the reference."""
    case = "reference and several steps"
    halves = [result["fsdp2"][case][model] for result in results]
    assert sum(halves) == results[0]["ddp"][case][model] > 0
    assert max(halves) < 0.51 * sum(halves)


@pytest.mark.parametrize("case", ["gathers", "gathers, recomputed"])
def test_a_layer_is_put_together_once_in_each_direction_recomputed_or_not(results: Found, case: str) -> None:
    """transformers recomputes a layer with the hooks of `fully_shard`, which then find it whole already."""
    for result in results:
        counted = result["fsdp2"][case]
        assert counted["gathers"] == 2 * counted["layers"] + 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_fails_ends_all_with_its_message_and_a_checkpoint(
    results: Found, folder: Path, rank: int, kind: str, place: str
) -> None:
    for other in range(RANKS):
        error = "TrinityError" if other == rank else f"RankError: rank {rank}: TrinityError"
        failed = results[other][kind][f"rank {rank} fails {place}"]
        assert failed["error"] == f"{error}: broken on purpose on {rank}"
        assert failed["held"] == results[other][kind]["padded"]["held"]
    saved = torch.load(folder / f"{kind}-{rank}-{place}" / "interrupted.ckpt", weights_only=True)
    seen = Weights()
    fit(make_policy(optimizer=SMOOTH), [batch_of(item) for item in ragged()], seen)
    torch.testing.assert_close(saved["state_dict"], seen.after_first, rtol=1e-5, atol=1e-5)
    assert saved["global_step"] == 1


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_fails_when_a_weight_is_gathered_ends_all_with_both_names_and_a_checkpoint(
    results: Found, folder: Path, rank: int
) -> None:
    reason = f"TrinityError: MemoryError when {LACKED} was gathered: no room"
    for other in range(RANKS):
        error = results[other]["fsdp2"][f"rank {rank} lacks room"]["error"]
        assert error == (reason if other == rank else f"RankError: rank {rank}: {reason}")
    saved = torch.load(folder / f"lacks-{rank}" / "interrupted.ckpt", weights_only=True)
    assert saved["global_step"] == 1


def test_a_rank_that_fails_leaves_a_checkpoint_in_shards(results: Found, folder: Path) -> None:
    assert results[0]["folder"]["rank 1 fails"]["error"] == "RankError: rank 1: TrinityError: broken on purpose on 1"
    saved = AtomicCheckpointIO().load_checkpoint(folder / "folder-fails" / "interrupted.ckpt", weights_only=True)
    in_one_file = torch.load(folder / f"fsdp2-1-{PLACES[0]}" / "interrupted.ckpt", weights_only=True)
    for part in ("state_dict", "optimizer_states", "global_step"):
        torch.testing.assert_close(saved[part], in_one_file[part], rtol=0, atol=0)


@pytest.mark.parametrize(("rank", "times"), FULL)
def test_a_full_disk_ends_all_with_its_message_and_the_checkpoints_that_there_was_room_for(
    results: Found, folder: Path, rank: int, times: int
) -> None:
    name = f"full-{rank}-{times}"
    errors = [result["folder"][name]["error"] for result in results]
    assert errors.pop(rank) == "OSError: disk full"
    assert errors == [f"RankError: rank {rank}: OSError: disk full"]
    steps = {"last.ckpt": 1} | ({"interrupted.ckpt": 2} if times == 1 else {})
    read = AtomicCheckpointIO().load_checkpoint
    there = {file.name: read(file, weights_only=True)["global_step"] for file in (folder / name).iterdir()}
    assert there == steps


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_evaluation_reads_weights_in_shards(
    checkpoints: Callable[[str], dict[str, Any]], folder: Path, dtype: str
) -> None:
    step, weights = checkpoint_weights(folder / f"one-{dtype}-folder.ckpt")
    expected = checkpoints(f"one-{dtype}")["state_dict"]
    assert step == checkpoint_weights(folder / f"one-{dtype}.ckpt")[0]
    torch.testing.assert_close({f"model.{name}": weight for name, weight in weights}, expected, rtol=0, atol=0)
    with pytest.raises(ConfigError, match=f"one-{dtype}-folder"):
        PolicyModule.load_from_checkpoint(folder / f"one-{dtype}-folder.ckpt")


def test_an_evaluation_merges_adapters_in_shards(checkpoints: Callable[[str], dict[str, Any]], folder: Path) -> None:
    saved = checkpoints("one-adapters-folder")
    assert saved["state_dict"].keys() == checkpoints("one-adapters")["state_dict"].keys()
    names = [f"one-adapters{way}.ckpt" for way in ("", "-folder")]
    in_file, in_shards = (dict(merged_weights(folder / name, "tiny")) for name in names)
    torch.testing.assert_close(in_shards, in_file, rtol=0, atol=0)


@pytest.mark.parametrize("policy", KINDS)
@pytest.mark.parametrize(("before", "way"), PAIRS)
def test_a_checkpoint_is_the_same_however_it_was_trained_and_read(
    checkpoints: Callable[[str], dict[str, Any]], before: str, way: str, policy: str
) -> None:
    written, again = checkpoints(f"{before}-{policy}"), checkpoints(f"{before}-{policy}-{way}")
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(again[part], written[part], rtol=0, atol=0)


@pytest.mark.parametrize(("before", "way"), PAIRS)
def test_any_way_of_training_goes_on_from_any(
    checkpoints: Callable[[str], dict[str, Any]], before: str, way: str
) -> None:
    expected, resumed = checkpoints("later"), checkpoints(f"{before}-later-{way}")
    torch.testing.assert_close(resumed["state_dict"], expected["state_dict"], rtol=1e-5, atol=1e-5)
    assert resumed["global_step"] == expected["global_step"]


SLURM = {
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0", "GROUP_RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "follows"),
    [
        ({}, False),
        ({"SLURM_PROCID": ""}, False),
        ({"LOCAL_RANK": "1"}, True),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, True),
        ({**TORCHRUN}, False),
        ({**TORCHRUN, "GROUP_RANK": "1"}, True),
        ({**SLURM, "SLURM_NODEID": "1"}, True),
        # A job of one's own within an allocation: SLURM says nothing of its processes.
        ({**SLURM, "SLURM_JOB_NAME": "interactive", "SLURM_LOCALID": "1"}, False),
        ({**SLURM, "SLURM_JOB_NAME": "bash", "LOCAL_RANK": "1"}, True),
    ],
)
def test_who_follows_is_what_lightning_finds(
    environment: dict[str, str], follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ddp.follows() is follows


def test_a_process_has_its_rank_on_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "LOCAL_RANK": "2", "GROUP_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert ddp.ranks_here() == (2, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("LOCAL_RANK", ""), ("SLURM_NTASKS", "2")],
)
def test_ranks_that_lightning_cannot_read_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with refuses(None) as refused:
        ddp.follows()
    assert name.split("_")[1].lower() in str(refused.value).lower()


def test_the_process_that_was_killed_is_named_before_those_that_followed() -> None:
    launcher = ddp._Launcher(ddp.LightningEnvironment(), num_processes=4, num_nodes=1)
    assert launcher.lost() is None
    ends = ("sys.exit(1)", "os.kill(os.getpid(), 9)", "sys.exit(0)")
    launcher.procs = [subprocess.Popen([sys.executable, "-c", f"import os, sys; {end}"]) for end in ends]
    for process in launcher.procs:
        process.wait()
    assert launcher.lost() == (
        "the process of rank 2 was ended by signal 9 (out of memory?); the process of rank 1 ended with exit code 1."
    )


def test_a_process_knows_whether_the_one_that_started_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    launcher, of_torchrun = (
        ddp._Launcher(where, num_processes=2, num_nodes=1)
        for where in (ddp.LightningEnvironment(), ddp.TorchElasticEnvironment())
    )
    monkeypatch.delenv(ddp.STARTED_BY, raising=False)
    assert launcher.lost() is None  # started by hand
    monkeypatch.setenv(ddp.STARTED_BY, str(os.getppid()))
    assert launcher.lost() is None
    monkeypatch.setattr("os.getppid", lambda: 0)  # no process has this id
    assert launcher.lost() == ENDED
    assert of_torchrun.lost() is None


def test_what_the_launching_process_starts_later_does_not_count_as_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    launcher = ddp._Launcher(ddp.LightningEnvironment(), num_processes=1, num_nodes=1)
    seen: list[str | None] = []
    monkeypatch.setattr(launcher, "_call_children_scripts", lambda: seen.append(os.environ.get(ddp.STARTED_BY)))
    launcher.launch(lambda: seen.append(os.environ.get(ddp.STARTED_BY)))
    assert seen == [str(os.getpid()), None]


def test_an_address_that_is_not_reached_is_named_with_the_cause() -> None:
    with socket.socket() as taken:
        taken.bind((ddp.LOOPBACK, 0))  # and does not listen
        address = taken.getsockname()
        message = rf"within 0:00:00 rank 0 was not reached at 127\.0\.0\.1:{address[1]} \(.*refused\)"
        with pytest.raises(RankError, match=message):
            ddp.join(address, Ranks(1, 2), torch.device("cpu"), timedelta())


@pytest.mark.parametrize("there", [True, False])
def test_a_rank_that_does_not_see_the_folder_of_rank_0_is_refused(tmp_path: Path, there: bool) -> None:
    folders = [tmp_path / str(rank) for rank in range(RANKS)]
    if there:
        folders[0].mkdir()
    name = ""

    class Of(Ranks):
        def broadcast(self, value: Any, source: int = 0) -> Any:
            nonlocal name
            name = value
            return value

        def exchange(self, value: Any, patient: bool = False, at: str = "") -> list[Any]:
            return [value, (str(folders[1]), (folders[1] / name).exists())]

    with refuses("output_dir") as refused:
        check_folder(folders[0], Of(0, RANKS))
    assert all(str(folder) in str(refused.value) for folder in folders)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refuses("output_dir"):
        check_folder(tmp_path / "file" / "run", Ranks(0, RANKS))


def test_all_ranks_begin_with_the_weights_and_the_reference_of_rank_0() -> None:
    """Though another machine's folder holds others."""
    policies = [make_policy(kl=KLConfig("k3", 0.1)) for _ in range(RANKS)]
    sent: list[list[torch.Tensor]] = []

    class Of(Ranks):
        def add_up(self, tensors: Sequence[torch.Tensor], at: str = "") -> None:
            if self.rank == 0:
                sent.append([tensor.clone() for tensor in tensors])
            else:
                for tensor, first in zip(tensors, sent.pop(0), strict=True):
                    tensor.add_(first)

    for rank, policy in enumerate(policies):
        policy.configure_model()
        torch.manual_seed(rank)
        for parameter in (*policy.policy.parameters(), *policy.reference.parameters()):
            nn.init.normal_(parameter)
    assert not torch.equal(policies[0].reference.lm_head.weight, policies[0].policy.lm_head.weight)
    for rank, policy in enumerate(policies):
        strategy: Any = ddp.ReplicaStrategy(cluster_environment=SimpleNamespace(global_rank=lambda rank=rank: rank))
        strategy._lightning_module, strategy.ranks = policy, Of(rank, RANKS)
        strategy.configure_ddp()
    for name in ("policy", "reference"):
        first, other = (getattr(policy, name).state_dict() for policy in policies)
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def check_folder(folder: Path, ranks: Ranks) -> None:
    """Check the folder as rank 0 does when it meets the others."""
    strategy: Any = ddp.ReplicaStrategy()
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(default_root_dir=folder))
    strategy.ranks = ranks
    strategy._check_folder()

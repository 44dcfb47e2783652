"""A policy in shards, as far as one process shows it; test_ddp.py runs several."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
from support.errors import refuses
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup, ReduceOp  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from trinity_lightning.common.ranks import Ranks
from trinity_lightning.errors import RankError, WeightSyncError
from trinity_lightning.trainer.fsdp import Mesh, Scatter, Shards, ShardStrategy, is_large


class Sends(Ranks):
    """The first of two ranks, which notes what it would send."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=2, group=ProcessGroup(HashStore(), 0, 2))
        self.sent: list[tuple[Any, ...]] = []
        self.collected: list[tuple[Any, ...]] = []

    def send(self, collective: Any, received: Tensor, sent: Tensor, options: Any, at: str) -> None:
        self.sent.append((collective.__name__, received, sent, options, at))

    def collect(self, collective: str, tensors: Sequence[Any], options: Any, at: str, device: torch.device) -> None:
        self.collected.append((collective, tensors, options, at, device))


def test_a_checkpoint_is_mapped_where_each_process_needs_a_share_of_it(tmp_path: Path) -> None:
    torch.save({"moment": torch.ones(3)}, tmp_path / "it.ckpt")
    strategy = ShardStrategy()
    strategy.ranks = Ranks(rank=1, size=2)
    loaded = strategy.load_checkpoint(tmp_path / "it.ckpt", weights_only=True)
    assert str(tmp_path / "it.ckpt") in Path("/proc/self/maps").read_text()
    assert torch.equal(loaded["moment"], torch.ones(3))


def test_large_checkpoints_are_in_shards() -> None:
    assert not is_large(1_200_000_000, torch.bfloat16)
    assert is_large(1_300_000_000, torch.bfloat16)
    assert not is_large(1_300_000_000, torch.float32)
    assert is_large(1_500_000_000, torch.float32)


def test_nothing_is_saved_without_the_share_of_a_process_that_died() -> None:
    class Dead(Ranks):
        def call(self, name: str, *arguments: Any, saving: bool = False) -> NoReturn:
            raise RankError("the process of rank 1 was ended by signal 9.")

    shards = object.__new__(Shards)
    shards.ranks, shards.module = Dead(rank=0, size=2), SimpleNamespace(trainer=SimpleNamespace(interrupted=True))
    with pytest.raises(RankError, match="rank 1"):
        shards.on_all_ranks("gather")


def test_a_thread_that_still_sends_weights_when_the_run_has_failed_is_refused() -> None:
    shards = object.__new__(Shards)
    shards._asking, shards._thread = threading.RLock(), -1  # another's
    shards.module = SimpleNamespace(trainer=SimpleNamespace(interrupted=True))
    with pytest.raises(WeightSyncError):
        shards.gather("model.norm.weight")


def test_moments_on_the_host_are_gathered_where_the_policy_is() -> None:
    """The other ranks send theirs from there. `meta`, from which gloo sends nothing, is the policy's device here."""
    shards, (policy, moment) = object.__new__(Shards), (torch.ones(2, 3, device=place) for place in ("meta", "cpu"))
    shards.ranks = ranks = Sends()
    mesh = Mesh(ranks, torch.device("cpu"))
    shards._parameters = {"weight": SimpleNamespace(to_local=lambda: policy)}
    held = DTensor.from_local(moment, mesh, [Shard(0)], run_check=False, shape=torch.Size((3, 3)), stride=(3, 1))
    assert shards.gathered(held, at="it").shape == (3, 3)
    [(collective, received, sent, _, at)] = ranks.sent
    assert (collective, at) == ("_allgather_base", "it")
    assert (received.shape, received.device.type, sent.shape, sent.device.type) == ((4, 3), "meta", (2, 3), "meta")


@pytest.mark.parametrize("failed", [False, True])
def test_once_a_pass_has_failed_weights_are_gathered_on_the_hosts(failed: bool) -> None:
    """A pass that fails on GPUs ends what they send by. Rank 0 decides for all ranks; `meta` stands for a GPU."""
    shards: Any = object.__new__(Shards)
    shards.ranks = ranks = Sends()
    ranks.pass_group, ranks._in_pass = ranks.group, failed
    shards.module, shards._asking = SimpleNamespace(trainer=SimpleNamespace(interrupted=failed)), threading.RLock()
    shards._thread = threading.get_ident()
    shards.on_all_ranks = asked = Mock()
    mesh, rows = Mesh(ranks, torch.device("cpu")), torch.ones(2, 3)
    share = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=torch.Size((3, 3)), stride=(3, 1))
    shards._share = lambda name, moment: share
    shards._parameters = {"weight": SimpleNamespace(to_local=lambda: rows.to("meta"))}
    shards.gather("weight")
    place = "cpu" if failed else "meta"
    assert [tensor.device.type for _, *tensors, _, _ in ranks.sent for tensor in tensors] == [place] * 2
    asked.assert_called_once_with("gather", "weight", None, None, failed)
    shards.gather("weight", None, None, True)  # as another rank is asked
    assert ranks.sent[-1][1].device.type == "cpu"


def test_gradients_are_sums_of_which_each_process_is_sent_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks have the same weights and rows; sums go by NCCL, where `meta` stands for a GPU, and by gloo."""

    class Alike(Sends):
        def collect(self, collective: str, tensors: Sequence[Any], options: Any, at: str, device: torch.device) -> None:
            super().collect(collective, tensors, options, at, device)
            if collective == "allreduce":
                tensors[0][0].mul_(self.size)

    class OnBoth(Scatter):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *arguments: Any, **named: Any) -> None:
            super().__call__(output_tensor.to("meta"), input_tensor.to("meta"), *arguments, **named)
            super().__call__(output_tensor, input_tensor, *arguments, **named)
            asked.append(named["op"])

    rows, factors, ranks = torch.arange(15.0).view(5, 3), torch.arange(1.0, 5.0), Alike()
    asked: list[Any] = []
    monkeypatch.setattr("trinity_lightning.trainer.fsdp.Scatter", OnBoth)
    layer: Any = torch.nn.Linear(3, 4, bias=False)
    layer.token_logprobs = layer.forward
    layer.config = SimpleNamespace(model_type="llama")
    shards: Any = object.__new__(Shards)
    shards.ranks, shards.dtype, shards._mesh = ranks, torch.float32, Mesh(ranks, torch.device("cpu"))
    shards._shard(layer, trained=False)
    (layer(rows) * factors).sum().backward()
    assert not ranks.sent  # no round within the pass
    weights, *_, (collective, (received, sent), options, at, device), (summed, _, sums, *same) = ranks.collected
    assert weights[0] == "_allgather_base"
    assert (collective, summed, device.type) == ("_reduce_scatter_base", "allreduce", "meta")
    assert (at, same) == ("a layer's gradient", ["a layer's gradient", torch.device("cpu")])
    assert (received.device.type, received.shape, sent.shape) == ("meta", (6,), (12,))  # two of four rows, of all four
    assert [options.reduceOp, sums.reduceOp, *asked] == [ReduceOp.SUM] * 3  # not the mean, nor any other factor
    torch.testing.assert_close(layer.weight.grad.to_local(), 2 * len(rows) * factors[:2, None] * rows.mean(0))


def test_a_torch_that_lacks_what_shards_need_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with refuses("trainer"):
        ShardStrategy()


def test_only_passes_with_gradients_of_the_policy_are_counted() -> None:
    policy, reference = (SimpleNamespace(token_logprobs=lambda function: ()) for _ in range(2))
    shards: Any = object.__new__(Shards)
    shards.module, shards._passes_left = SimpleNamespace(policy=policy), 1
    shards.ranks = Mock()
    shards._used = SimpleNamespace(add=lambda model: None)
    shards.logprobs(None, reference)
    with torch.no_grad():
        shards.logprobs(None, policy)
    assert shards._passes_left == 1
    shards.logprobs(None, policy)
    assert shards._passes_left == 0


@pytest.mark.parametrize("name", ["perturb", "restore"])
def test_a_drill_waits_for_a_thread_that_still_sends(name: str) -> None:
    """And takes its noise back although another rank has failed: the weights may be saved."""
    original, held = torch.ones(3), torch.zeros(3)
    shards: Any = object.__new__(Shards)
    shards._asking, shards._used, asked = threading.RLock(), set(), threading.Event()
    shards._saved, shards._parameters = [original], {"weight": Mock(to_local=lambda: held)}

    def on_all_ranks(name: str, *arguments: Any) -> NoReturn:
        asked.set()
        raise RankError("rank 1: broken")

    shards.on_all_ranks = on_all_ranks
    with ThreadPoolExecutor(1) as pool:
        with shards._asking:
            drill = pool.submit(getattr(shards, name), *([0.1] if name == "perturb" else []))
            assert not asked.wait(0.2)
        with pytest.raises(RankError, match="broken"):
            drill.result()
    assert torch.equal(held, original) is (name == "restore")

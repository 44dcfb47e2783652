"""adamw_offload: masters and moments on the host give the bits of adamw, and no copy is read before it is there."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.optimizers import adamw, make_parameters, set_gradients
from support.policy import batch_of, fit, make_experiences, make_policy, optimizer_of
from support.runs import RunTrain, equal, only, rows
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.trainer.host import PORTABLE, HostBlock, HostMasters, HostMemory, states_of
from trinity_lightning.trainer.masters import MasterWeights
from trinity_lightning.trainer.optim import make_optimizer, optimizer_factory

LR = 1e-2
ROUNDED, EXACT, MIXED = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
)


def made(name: str, dtypes: Sequence[torch.dtype]) -> tuple[list[nn.Parameter], Any]:
    """A transposed matrix, a vector and an idle vector without gradients, in two groups as policy and critic have."""
    generator = torch.Generator().manual_seed(0)
    shapes, dtypes = ((33, 17), (1001,), (5,)), (*dtypes, dtypes[0])
    matrix, vector, idle = (torch.randn(*s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=True))
    parameters = [nn.Parameter(tensor) for tensor in (matrix.t(), vector, idle)]
    groups = [{"params": [parameters[0], parameters[2]]}, {"params": parameters[1:2], "lr": LR / 3, "weight_decay": 0}]
    factory = optimizer_factory(OptimizerConfig(name=name, lr=LR, weight_decay=0.1, betas=[0.8, 0.95]))
    return parameters, make_optimizer(groups, factory, name)


def train(parameters: list[nn.Parameter], optimizer: Optimizer, schedule: Any, steps: range) -> None:
    """Steps along clipped gradients, which are gone after each."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters[:2]:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter, dtype=torch.float32).copy_(gradient)
        assert float(torch.nn.utils.clip_grad_norm_(parameters[:2], 1.0)) > 10
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def scheduled(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def same(one: Any, other: Any) -> None:
    """Assert the same structure with the same bits."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtypes", [ROUNDED, EXACT, MIXED])
def test_steps_and_state_are_those_of_adamw(dtypes: Sequence[torch.dtype]) -> None:
    (plain, adamw), (offloaded, offload) = (made(name, dtypes) for name in ("adamw", "adamw_offload"))
    assert isinstance(offload, HostMasters)
    for parameters, optimizer in ((plain, adamw), (offloaded, offload)):
        train(parameters, optimizer, scheduled(optimizer), range(20))
    same(offloaded, plain)
    same(offload.state_dict(), adamw.state_dict())
    assert {tensor.device.type for tensor in tree_leaves(offload.state_dict()) if isinstance(tensor, Tensor)} == {"cpu"}
    assert all(master.grad is None for master in offload.masters)


@pytest.mark.parametrize("dtypes", [ROUNDED, EXACT, MIXED])
@pytest.mark.parametrize("names", [("adamw", "adamw_offload"), ("adamw_offload", "adamw"), ("adamw_offload",) * 2])
def test_a_state_goes_on_by_either(names: tuple[str, str], dtypes: Sequence[torch.dtype]) -> None:
    whole, uninterrupted = made("adamw", dtypes)
    train(whole, uninterrupted, scheduled(uninterrupted), range(6))
    (first, before), (second, after) = (made(name, dtypes) for name in names)
    train(first, before, schedule := scheduled(before), range(3))
    with torch.no_grad():
        for weight, saved in zip(second, first, strict=True):
            weight.copy_(saved)
    resumed = scheduled(after)
    after.load_state_dict(before.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    train(second, after, resumed, range(3, 6))
    same(second, whole)
    same(after.state_dict(), uninterrupted.state_dict())


class Stream(TorchDispatchMode):
    """A GPU's stream: copies that are not waited for are made, in their order, only when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Callable[[], Any]] = []
        self.waits: list[int] = []
        self.waiting = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[2:] == (True,) and not self.waiting:
            self.pending.append(lambda: func(*args))
            return args[0]
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def wait(self, _: Any = None) -> None:
        self.waits.append(len(self.pending))
        self.waiting = True
        while self.pending:
            self.pending.pop(0)()
        self.waiting = False


@pytest.mark.parametrize("dtypes", [ROUNDED, EXACT, MIXED])
def test_nothing_is_read_before_it_has_arrived_nor_overwritten_before_it_has_left(
    dtypes: Sequence[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain, adamw), (offloaded, offload) = (made(name, dtypes) for name in ("adamw", "adamw_offload"))
    train(plain, adamw, scheduled(adamw), range(5))
    stream = Stream()
    monkeypatch.setattr(HostMasters, "_wait", stream.wait)
    with stream:
        train(offloaded, offload, scheduled(offload), range(5))
    assert stream.waits == [2, *4 * [3 + 2]]  # once a step: for weights of the last one, and for gradients
    stream.wait()
    same(offloaded, plain)


# -- memory of the host: as large as what lies in it -------------------------------------------------------------------


class Driver:
    """Stands in for CUDA's: what is page-locked, by address."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.registered = code, dict[int, int]()
        self.waits = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == PORTABLE
        assert not self.registered.keys() & range(address, address + size)
        if not self.code:
            self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert self.waits  # for copies that go on
        del self.registered[address]
        return 0

    def wait(self, *_: Any) -> None:
        self.waits += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    stand_in = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", stand_in.wait)
    return stand_in


def test_pinned_memory_is_as_large_as_what_lies_in_it_and_is_given_back(driver: Driver) -> None:
    size = 4 * (2**20 + 3)  # torch's own would be 8 MiB
    block = HostBlock(size, pinned=True)
    assert driver.registered == {block.bytes.data_ptr(): size}
    view = block.bytes[:4].view(torch.float32).fill_(7.0)
    other = HostBlock(12, pinned=True)
    assert sorted(driver.registered.values()) == [12, size]
    del block, other
    assert driver.registered == {}
    assert view.item() == 7.0  # the memory is there as long as a tensor in it


def test_nothing_is_pinned_without_a_gpu(driver: Driver) -> None:
    parameters, optimizer = made("adamw_offload", ROUNDED)
    memory = HostMemory(MasterWeights(make_parameters(), adamw))
    memory.leave()
    assert (len(parameters), driver.registered) == (3, {})
    assert sum(tensor.numel() for tensor in optimizer._slots) == sum(tensor.numel() for tensor in parameters)


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_said(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.code = 2
    assert len(HostBlock(100, pinned=True).bytes) == 100
    assert "100 bytes of the host could not be pinned (CUDA error 2)" in caplog.text


def test_what_leaves_lies_in_one_block_and_comes_back_bit_for_bit() -> None:
    weights = [nn.Parameter(torch.randn(7, 3).t()), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(()))]
    optimizer = MasterWeights(weights, adamw)
    set_gradients(weights, 0)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    memory = HostMemory(optimizer)
    for _ in range(2):
        memory.leave()
        states = states_of(optimizer)
        assert {state.untyped_storage().data_ptr() for state in states} == {memory._block.bytes.data_ptr()}
        assert len(memory._block.bytes) == sum(-(-4 * state.numel() // 64) * 64 for state in states)
        same(optimizer.state_dict(), before)
        memory.come_back()
        same(optimizer.state_dict(), before)


# -- a policy, and a run -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("names", [("adamw", "adamw_offload"), ("adamw_offload", "adamw"), ("adamw_offload",) * 2])
def test_a_policy_goes_on_from_a_checkpoint_of_either_to_the_bit(
    names: tuple[str, str], dtype: str, tmp_path: Path
) -> None:
    batches = [batch_of(make_experiences(seed=seed)) for seed in range(2)]

    def policy(name: str) -> Any:
        config = OptimizerConfig(name=name, lr=LR, lr_scheduler="linear", total_steps=8, weight_decay=0.1)
        return make_policy(config, dtype, max_grad_norm=0.1)

    fit(whole := policy("adamw"), batches, max_epochs=2)
    fit(policy(names[0]), batches).save_checkpoint(tmp_path / "it.ckpt")
    fit(resumed := policy(names[1]), batches, ckpt_path=tmp_path / "it.ckpt", max_epochs=2)
    same(list(resumed.policy.parameters()), list(whole.policy.parameters()))
    same(optimizer_of(resumed).state_dict(), optimizer_of(whole).state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_is_that_of_adamw(dtype: str, run_train: RunTrain, tmp_path: Path) -> None:
    arguments = ("+recipe=grpo", "model=tiny", f"model.dtype={dtype}", "reward=contains_digits", "steps=3")
    arguments += ("explorer.batch_size=4", "explorer.repeat_times=4", "sampling.max_tokens=12", "logger=csv")
    arguments += ("algorithm.max_grad_norm=0.01",)
    for name in ("adamw", "adamw_offload"):
        done = run_train(tmp_path, *arguments, f"optimizer.name={name}", f"name={name}")
        assert done.returncode == 0, done.stdout[-4000:]
    plain, offloaded = (only(tmp_path, f"outputs/{name}/*") for name in ("adamw", "adamw_offload"))
    equal(offloaded, plain)
    assert any(float(row["actor/grad_norm"] or 0) > 0.01 for row in rows(plain))


# -- masters and moments that leave between steps: training goes on as if they stayed ----------------------------------


def with_masters(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return MasterWeights(parameters, adamw)


def take_step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, step: int) -> None:
    set_gradients(parameters, step)
    optimizer.step()


@pytest.mark.parametrize("make", [with_masters, adamw])
def test_training_goes_on_as_if_nothing_had_left(make: Callable[..., torch.optim.Optimizer]) -> None:
    stay, leave = make_parameters(), make_parameters()
    staying, leaving = make(stay), make(leave)
    memory = HostMemory(leaving)
    for step in range(4):
        memory.leave()
        memory.leave()
        memory.come_back()
        memory.come_back()
        take_step(stay, staying, step)
        take_step(leave, leaving, step)
    assert all(torch.equal(one, other) for one, other in zip(stay, leave, strict=True))


def test_what_left_is_not_where_it_was_and_a_checkpoint_of_it_is_the_same() -> None:
    weights = make_parameters()
    optimizer = MasterWeights(weights, adamw)
    take_step(weights, optimizer, 0)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    stayed = [tensor.data for tensor in states_of(optimizer)]  # kept alive: nothing else can come to lie there
    memory = HostMemory(optimizer)
    memory.leave()
    assert not {state.data_ptr() for state in stayed} & {tensor.data_ptr() for tensor in states_of(optimizer)}
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)


def test_a_checkpoint_loaded_meanwhile_comes_back_too() -> None:
    weights, resumed = make_parameters(), make_parameters()
    optimizer, other = MasterWeights(weights, adamw), MasterWeights(resumed, adamw)
    take_step(weights, optimizer, 0)
    memory = HostMemory(other)
    memory.leave()  # the masters alone: there are no moments yet
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    left = [tensor.data for tensor in states_of(other)]  # kept alive: nothing else can come to lie there
    memory.come_back()
    assert not {state.data_ptr() for state in left} & {tensor.data_ptr() for tensor in states_of(other)}
    take_step(weights, optimizer, 1)
    take_step(resumed, other, 1)
    assert all(torch.equal(one, other) for one, other in zip(weights, resumed, strict=True))


@pytest.mark.parametrize("make", [with_masters, adamw])
@pytest.mark.parametrize("fused", [True, False])
def test_counts_of_steps_loaded_meanwhile_go_where_the_optimizer_needs_them(
    make: Callable[..., torch.optim.Optimizer], fused: bool
) -> None:
    weights = make_parameters()
    optimizer = make(weights)
    take_step(weights, optimizer, 0)
    plain = optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer
    for group in plain.param_groups:
        group["fused"] = fused
    memory = HostMemory(optimizer)
    memory.leave()
    counts = [state["step"] for state in plain.state.values()]
    places = [count.detach() for count in counts]  # kept, so that none of them is free for a new one
    memory.come_back()
    moved = [count.data_ptr() != place.data_ptr() for count, place in zip(counts, places, strict=True)]
    assert moved == [fused, fused]  # a fused optimizer's are beside its moments, others' on the host

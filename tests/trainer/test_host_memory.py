"""An optimizer whose masters and moments leave for the host between steps trains as one whose stay."""

import copy
from collections.abc import Callable

import pytest
import torch
from support.optimizers import adamw, make_parameters, set_gradients
from torch import nn

from trinity_lightning.trainer.host_memory import HostMemory, kept_of
from trinity_lightning.trainer.optim import MasterWeights


def with_masters(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return MasterWeights(parameters, adamw)


def train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, step: int) -> None:
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
        train(stay, staying, step)
        train(leave, leaving, step)
    assert all(torch.equal(one, other) for one, other in zip(stay, leave, strict=True))


def test_what_left_is_not_where_it_was_and_a_checkpoint_of_it_is_the_same() -> None:
    weights = make_parameters()
    optimizer = MasterWeights(weights, adamw)
    train(weights, optimizer, 0)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    places = [tensor.data_ptr() for tensor in kept_of(optimizer)]
    memory = HostMemory(optimizer)
    memory.leave()
    assert not set(places) & {tensor.data_ptr() for tensor in kept_of(optimizer)}
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)


def test_a_checkpoint_loaded_meanwhile_comes_back_too() -> None:
    weights, resumed = make_parameters(), make_parameters()
    optimizer, other = MasterWeights(weights, adamw), MasterWeights(resumed, adamw)
    train(weights, optimizer, 0)
    memory = HostMemory(other)
    memory.leave()  # the masters alone: there are no moments yet
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    places = [tensor.data_ptr() for tensor in kept_of(other)]
    memory.come_back()
    assert not set(places) & {tensor.data_ptr() for tensor in kept_of(other)}
    train(weights, optimizer, 1)
    train(resumed, other, 1)
    assert all(torch.equal(one, other) for one, other in zip(weights, resumed, strict=True))


@pytest.mark.parametrize("make", [with_masters, adamw])
@pytest.mark.parametrize("fused", [True, False])
def test_counts_of_steps_loaded_meanwhile_go_where_the_optimizer_needs_them(
    make: Callable[..., torch.optim.Optimizer], fused: bool
) -> None:
    weights = make_parameters()
    optimizer = make(weights)
    train(weights, optimizer, 0)
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

"""Float32 masters behind bfloat16 weights: nothing is lost to rounding, in weights, gradients or a checkpoint."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import adamw, make_parameters, set_gradients
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from trinity_lightning.trainer.masters import PIECE, MasterWeights, master_of


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_updates_that_bfloat16_would_lose_survive():
    lost, mastered = nn.Parameter(torch.ones(1).bfloat16()), nn.Parameter(torch.ones(1).bfloat16())
    plain = torch.optim.SGD([lost], lr=1.0)
    optimizer = MasterWeights([mastered], lambda groups: torch.optim.SGD(groups, lr=1.0))
    for _ in range(100):
        lost.grad, mastered.grad = torch.full((1,), 1e-3).bfloat16(), torch.full((1,), 1e-3)
        plain.step()
        optimizer.step()
    assert lost.item() == 1.0
    assert mastered.item() == pytest.approx(0.9, abs=2**-7)  # a master of 1 begins up to 2**-8 away from it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(bits=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1))
def test_masters_begin_within_what_rounds_to_the_weight(dtype: torch.dtype, bits: list[int]):
    weight = torch.tensor(bits, dtype=torch.int16).view(dtype)
    weight = torch.where(weight.isfinite(), weight, 1.0)
    assert torch.equal(master_of(weight).to(dtype).view(torch.int16), weight.view(torch.int16))
    assert torch.equal(master_of(weight), master_of(weight))


@pytest.mark.parametrize(("dtype", "update"), [(torch.bfloat16, 1e-6), (torch.bfloat16, 1e-4), (torch.float16, 1e-5)])
def test_the_first_update_reaches_the_weights_in_the_mean(dtype: torch.dtype, update: float):
    """Masters that began with the weights would move none of these: half a rounding step of 0.1 is 2.4e-4, or 3e-5."""
    weight = nn.Parameter(
        torch.empty(PIECE + 100_000).uniform_(0.07, 0.12, generator=torch.Generator().manual_seed(0)).to(dtype)
    )
    before = weight.detach().double()
    optimizer = MasterWeights([weight], lambda groups: torch.optim.SGD(groups, lr=update))
    assert torch.equal(weight.double(), before)
    weight.grad = -torch.ones(weight.shape)
    optimizer.step()
    assert (weight.double() - before).mean().item() == pytest.approx(update, rel=0.1)
    assert torch.equal((weight.detach().float() + update).to(dtype), weight)


def test_a_transposed_weight_has_masters_in_the_same_order_in_memory():
    weight = torch.randn(33, 17, generator=torch.Generator().manual_seed(0)).bfloat16().t()
    master = master_of(weight)
    assert master.stride() == weight.stride()
    assert torch.equal(master.bfloat16(), weight)
    assert not torch.equal(master, weight.float())


def test_float32_weights_have_copies():
    weight = torch.randn(7)
    assert torch.equal(master_of(weight), weight)
    assert master_of(weight).data_ptr() != weight.data_ptr()


def test_equals_float32_adamw_rounded_at_the_end_of_each_step():
    parameters = make_parameters()
    optimizer = MasterWeights(parameters, adamw)
    masters = [nn.Parameter(master_of(p.detach())) for p in parameters]
    reference = adamw(masters)
    for step in range(5):
        set_gradients(parameters, step)
        set_gradients(masters, step)
        optimizer.step()
        reference.step()
        for parameter, master in zip(parameters, masters, strict=True):
            assert torch.equal(parameter, master.bfloat16())
    assert all(
        torch.equal(saved, m) for saved, m in zip(optimizer.state_dict()["state"]["masters"], masters, strict=True)
    )


def test_gradients_add_up_in_float32():
    parameter = nn.Parameter(torch.ones(1).bfloat16())
    MasterWeights([parameter], adamw)
    for gradient in [1.0] + [2.0**-9] * 8:  # each of the eight would vanish in bfloat16
        (parameter * gradient).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.float32
    assert parameter.grad.item() == 1.0 + 8 * 2.0**-9


def test_a_schedule_reaches_the_inner_optimizer():
    parameter = nn.Parameter(torch.zeros(1).bfloat16())
    optimizer = MasterWeights([parameter], lambda groups: torch.optim.SGD(groups, lr=1.0))
    schedule = LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.25)
    moves = []
    for _ in range(2):
        before = parameter.item()
        parameter.grad = torch.ones(1)
        optimizer.step()
        schedule.step()
        moves.append(before - parameter.item())
    assert moves == [1.0, 0.25]
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_parameter_groups_keep_their_own_settings():
    first, second = make_parameters()
    optimizer = MasterWeights(
        [{"params": [first], "lr": 0.5}, {"params": [second]}], lambda g: torch.optim.SGD(g, lr=0.1)
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    before = [master_of(p.detach()) for p in (first, second)]
    for parameter in (first, second):
        parameter.grad = torch.ones(parameter.shape)
    optimizer.step()
    assert torch.equal(first, (before[0] - 0.5).bfloat16())
    assert torch.equal(second, (before[1] - 0.1).bfloat16())


def test_a_parameter_without_gradient_stays():
    parameters = make_parameters()
    optimizer = MasterWeights(parameters, adamw)
    before = parameters[1].detach().clone()
    parameters[0].grad = torch.ones(4, 3)
    optimizer.step()
    assert torch.equal(parameters[1], before)


def test_state_goes_through_a_file_bit_for_bit():
    parameters = make_parameters()
    optimizer = MasterWeights(parameters, adamw)
    schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for step in range(3):
        set_gradients(parameters, step)
        optimizer.step()
        schedule.step()
    saved = through_a_file(optimizer.state_dict())

    others = make_parameters(seed=1)
    resumed = MasterWeights(others, adamw)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for step in range(3, 6):
        for parameter, other in zip(parameters, others, strict=True):
            assert torch.equal(parameter, other)
        set_gradients(parameters, step)
        set_gradients(others, step)
        optimizer.step()
        resumed.step()
    final = zip(optimizer.state_dict()["state"]["masters"], resumed.state_dict()["state"]["masters"], strict=True)
    assert all(torch.equal(a, b) for a, b in final)


def test_a_closure_is_called_with_gradients_enabled():
    parameter = nn.Parameter(torch.ones(1).bfloat16())
    optimizer = MasterWeights([parameter], lambda groups: torch.optim.SGD(groups, lr=0.5))

    def closure():
        loss = (2 * parameter).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert parameter.item() == pytest.approx(0.0, abs=2**-8)

"""The optimizer: AdamW and its schedule, and float32 masters."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from support.optimizers import adamw, make_parameters, set_gradients
from support.policy import Gradients, batch_of, fit, make_experiences, make_policy
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    get_scheduler,
)

from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.config.registry import PARTS
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.optim import MasterWeights, learning_rate_schedule, parameter_groups

# -- schedules ---------------------------------------------------------------------------------------------------------


def halving(optimizer: torch.optim.Optimizer, num_warmup_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5 ** max(step - num_warmup_steps, 0))


def rates(schedule: Any, steps: int = 8) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return found


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.parametrize("name", PARTS["schedule"])
def test_a_schedule_is_that_of_transformers(name: str) -> None:
    config = OptimizerConfig(lr_scheduler=name, warmup_steps=0 if name == "constant" else 2, total_steps=8)
    expected = get_scheduler(name, sgd(), config.warmup_steps, config.total_steps)
    assert rates(learning_rate_schedule(sgd(), config)) == rates(expected)


def test_a_schedule_of_ones_own() -> None:
    config = OptimizerConfig(lr_scheduler=f"{__name__}.halving", warmup_steps=2)
    assert rates(learning_rate_schedule(sgd(), config), 5) == [1.0, 1.0, 1.0, 0.5, 0.25]


def test_a_schedule_that_ends_needs_to_know_when() -> None:
    with pytest.raises(ValueError, match=r"optimizer.lr_scheduler=linear needs optimizer.total_steps"):
        learning_rate_schedule(sgd(), OptimizerConfig(lr_scheduler="linear"))


# -- what weight decay is for: matrices, and nothing else; through the masters of bfloat16 weights too -----------------


LR, DECAY = 0.01, 0.5


def is_matrix(name: str) -> bool:
    return not any(part in name for part in ("embed", "norm", "bias"))


def untied() -> Any:
    """A model with biases, and a head of its own."""
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1)
    config.attention_bias, config.tie_word_embeddings = True, False
    return AutoModelForCausalLM.from_config(config)


def test_the_groups_are_all_trained_parameters_once() -> None:
    model = untied()
    names = {id(p): name for name, p in model.named_parameters()}
    model.model.norm.weight.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight._no_weight_decay = True
    matrices, others = ([names.pop(id(p)) for p in group["params"]] for group in parameter_groups(model))
    assert list(names.values()) == ["model.norm.weight"]
    assert len(matrices) == 7
    assert "lm_head.weight" in matrices
    assert all(map(is_matrix, matrices))
    assert "model.layers.0.mlp.up_proj.weight" in others
    assert not any(is_matrix(name) for name in others if "up_proj" not in name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_only_matrices_decay(dtype: str) -> None:
    """A step with decay is the step without it, and decay of the matrices beside it."""
    stepped: list[dict[str, torch.Tensor]] = []
    start: dict[str, torch.Tensor] = {}
    for decay in (0.0, DECAY):
        policy = make_policy(OptimizerConfig(lr=LR, weight_decay=decay), dtype=dtype)
        policy.configure_model()
        start = {name: p.detach().float().clone() for name, p in policy.policy.named_parameters()}
        fit(policy, [batch_of(make_experiences())], Gradients())
        stepped.append({name: p.detach().float() for name, p in policy.policy.named_parameters()})
    without, decayed = stepped
    tolerance = 1e-6 if dtype == "fp32" else 1e-2
    for name, parameter in start.items():
        expected = without[name] - (LR * DECAY * parameter if is_matrix(name) else 0.0)
        torch.testing.assert_close(decayed[name], expected, rtol=tolerance, atol=tolerance / 10)
        if not is_matrix(name):
            assert torch.equal(decayed[name], without[name]), name
    assert not any(torch.equal(decayed[name], without[name]) for name in start if is_matrix(name))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_of_one_group_is_refused(dtype: str, tmp_path: Path) -> None:
    trainer = fit(make_policy(dtype=dtype), [batch_of(make_experiences())])
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    checkpoint = torch.load(tmp_path / "it.ckpt", weights_only=True)
    del checkpoint["optimizer_states"][0]["param_groups"][1]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    with pytest.raises(ConfigError, match="as one parameter group"):
        fit(make_policy(dtype=dtype), [batch_of(make_experiences())], ckpt_path=tmp_path / "old.ckpt", max_epochs=2)


def test_an_optimizer_of_ones_own_is_given_the_groups() -> None:
    policy = make_policy()
    policy._optimizer_factory = lambda groups: torch.optim.SGD(groups, lr=LR, weight_decay=DECAY)
    policy.configure_model()
    optimizer = policy.configure_optimizers()["optimizer"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY, 0.0]
    assert all(isinstance(p, nn.Parameter) for group in optimizer.param_groups for p in group["params"])


@pytest.mark.filterwarnings("ignore:.*fast path.*")
def test_state_matrices_and_rows_of_biases_do_not_decay() -> None:
    """Two-dimensional parameters that are no matrices of a linear map, in models of transformers."""
    mamba = MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=8, state_size=4, num_hidden_layers=1))
    config = GptOssConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_local_experts=2)
    config.num_attention_heads = config.num_key_value_heads = 2
    config.head_dim = 4
    for model, exempt in ((mamba, {"A_log"}), (GptOssForCausalLM(config), {"gate_up_proj_bias", "down_proj_bias"})):
        names = {id(p): name.rsplit(".", 1)[-1] for name, p in model.named_parameters()}
        matrices, others = ([(names[id(p)], p.ndim) for p in group["params"]] for group in parameter_groups(model))
        assert exempt <= {name for name, dimensions in others if dimensions == 2}
        assert {name for name, _ in matrices} <= {"weight", "gate_up_proj", "down_proj"}


def test_a_norm_does_not_decay_whatever_its_shape() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm([2, 4]))
    matrices, others = ([p.shape for p in group["params"]] for group in parameter_groups(model))
    assert matrices == [(4, 4)]
    assert sorted(others) == [(2, 4), (2, 4), (4,)]


# -- float32 masters behind bfloat16 weights: nothing is lost to rounding, in weights, gradients or a checkpoint -------


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_updates_that_bfloat16_would_lose_survive():
    lost, kept = nn.Parameter(torch.ones(1).bfloat16()), nn.Parameter(torch.ones(1).bfloat16())
    plain = torch.optim.SGD([lost], lr=1.0)
    optimizer = MasterWeights([kept], lambda groups: torch.optim.SGD(groups, lr=1.0))
    for _ in range(100):
        lost.grad, kept.grad = torch.full((1,), 1e-3).bfloat16(), torch.full((1,), 1e-3)
        plain.step()
        optimizer.step()
    assert lost.item() == 1.0
    assert kept.item() == pytest.approx(0.9, abs=2**-9)


def test_equals_float32_adamw_rounded_at_the_end_of_each_step():
    parameters = make_parameters()
    optimizer = MasterWeights(parameters, adamw)
    masters = [nn.Parameter(p.detach().float().clone()) for p in parameters]
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
    before = [p.detach().float().clone() for p in (first, second)]
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
    assert parameter.item() == 0.0

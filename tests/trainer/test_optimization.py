"""What weight decay is for: matrices, and nothing else; through the masters of bfloat16 weights too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import Gradients, batch_of, fit, make_experiences, make_policy
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
)

from trinity_lightning.config.training import OptimizerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.optim import parameter_groups

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

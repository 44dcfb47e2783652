"""Dropout is off unless it is asked for: a policy that moves by chance has no ratio of 1."""

from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import Prepare, batch_of, fit, make_experiences
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from trinity_lightning.config.training import AlgorithmConfig, Dropout, OptimizerConfig
from trinity_lightning.trainer.model import switch_off_dropout
from trinity_lightning.trainer.policy import PolicyModule

SIZES: dict[str, Any] = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random GPT-2, whose configuration has three kinds of dropout of 0.1."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=64)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("dropout", "moves"), [(Dropout.off, False), ("keep", True)])
def test_the_first_ratio_of_several_steps_is_one_without_dropout(gpt2: Path, dropout: str, moves: bool) -> None:
    batches = [batch_of(make_experiences())]
    algorithm = AlgorithmConfig(optimizer_steps=2, max_tokens_per_micro_batch=64)
    policy = PolicyModule(str(gpt2), algorithm, OptimizerConfig(lr=1e-3), dtype="fp32", dropout=dropout)
    trainer = fit(policy, batches, Prepare(batches))
    assert policy.policy.training
    assert (float(trainer.logged_metrics["actor/ppo_kl"]) != 0.0) is moves


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPTNeoXForCausalLM(
            GPTNeoXConfig(**SIZES, intermediate_size=32, hidden_dropout=0.3, attention_dropout=0.3)
        ),
        lambda: MixtralForCausalLM(
            MixtralConfig(
                **SIZES, intermediate_size=32, num_key_value_heads=2, num_local_experts=2, router_jitter_noise=0.3
            )
        ),
    ],
)
def test_nothing_random_is_left_of_a_model_in_training_mode(make) -> None:
    model: nn.Module = make().train()
    tokens = torch.arange(8)[None]

    def changes() -> bool:
        with torch.no_grad():
            return not torch.equal(model(tokens).logits, model(tokens).logits)

    assert changes()
    switch_off_dropout(model)
    assert not changes()


def test_random_shares_are_known_by_their_names() -> None:
    module: Any = nn.Module()
    shares = {
        "attn_drop": 0.1,
        "drop": 0.1,
        "fusion_droppath": 0.1,
        "dropout": 1,
        "drop_mlp_rate": 0.1,
        "layer_drop": 0.1,
    }
    shares |= {
        "drop_path_rate": 0.1,
        "drop_prob": 0.1,
        "embd_pdrop": 0.1,
        "drop_connect_rate": 0.1,
        "moe_jitter_eps": 0.1,
    }
    others = {"xdrope_section": 0.5, "backdrop": 0.5, "drop_last": 1, "token_dropout": True, "dropout_layers": 2}
    for name, value in (shares | others).items():
        setattr(module, name, value)
    switch_off_dropout(module)
    assert {name: getattr(module, name) for name in shares} == dict.fromkeys(shares, 0.0)
    assert {name: getattr(module, name) for name in others} == others

"""TRL's DPOTrainer and SFTTrainer are oracles: the same dataset has the same loss and gradient of every weight."""

import warnings
from typing import Any

import pytest
import torch
from datasets import Dataset
from support.dataset import GENERATION, assistant, user
from support.policy import Gradients, assert_same_gradients, batch_of, fit, load_plain, moved_policy, naive_gradients

from trinity_lightning.buffer.dataset import Example
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.trainer.policy import PolicyModule

WORDS = ("one", "twenty two", "3", "fo ur", "5 and 6", "7")


def settings(folder: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 6,
        "disable_tqdm": True,
        "max_length": None,
    }


def of_trl(trainer: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole dataset as one batch."""
    model = trainer.model.train()
    loss = trainer.compute_loss(model, next(iter(trainer.get_train_dataloader())))
    return float(loss), naive_gradients(model, loss)


def of_ours(policy: PolicyModule, examples: list[Any]) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    seen = Gradients()
    trainer = fit(policy, [batch_of(examples)], seen)
    return seen.losses[0], seen.steps[0], {name: float(value) for name, value in trainer.logged_metrics.items()}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's imports and set-up warn of matters that are not ours
        yield


def pairs(kind: str) -> list[dict[str, Any]]:
    texts = [{"prompt": f"say {i}:", "chosen": word, "rejected": word[::-1] + "?"} for i, word in enumerate(WORDS)]
    chats = [
        {
            "prompt": [user(each["prompt"])],
            "chosen": [assistant(each["chosen"])],
            "rejected": [assistant(each["rejected"])],
        }
        for each in texts
    ]
    implicit = [{name: [*each["prompt"], *each[name]] for name in ("chosen", "rejected")} for each in chats]
    return {"text": texts, "chat": chats, "implicit": implicit}[kind]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("text", {"loss_type": "sigmoid", "beta": 0.1}),
        ("chat", {"loss_type": "ipo", "beta": 0.2}),
        ("implicit", {"loss_type": "hinge", "beta": 0.5}),
    ],
)
def test_dpo_equals_trl(kind, arguments, tmp_path):
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    entries, tokenizer = pairs(kind), load_tokenizer("tiny")
    policy = moved_policy(policy_loss={"name": "dpo", "args": arguments})
    model = load_plain()
    model.load_state_dict(policy.policy.state_dict())
    theirs = {"loss_type": [arguments["loss_type"]], "beta": arguments["beta"]}
    trainer = DPOTrainer(
        model=model,
        ref_model=load_plain(),
        args=DPOConfig(**settings(tmp_path), **theirs),
        train_dataset=Dataset.from_list(entries),
        processing_class=tokenizer,
    )
    loss, gradients = of_trl(trainer)
    own, own_gradients, metrics = of_ours(policy, [Example(tokenizer, entry).pair() for entry in entries])
    assert own == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(own_gradients, gradients)
    measured = {name: values[0] for name, values in trainer._metrics["train"].items() if "rewards/" in name}
    assert len(measured) == 4
    assert {name: metrics[f"actor/{name}"] for name in measured} == pytest.approx(measured, rel=1e-4, abs=1e-5)


def responses(kind: str) -> list[dict[str, Any]]:
    texts = [{"prompt": f"say {i}:", "completion": word} for i, word in enumerate(WORDS)]
    chats = [{"prompt": [user(e["prompt"])], "completion": [assistant(e["completion"])]} for e in texts]
    turns = [{"messages": [*e["prompt"], *e["completion"]] * (1 + i % 3)} for i, e in enumerate(chats)]
    return {"text": texts, "chat": chats, "turns": turns, "whole": [{"text": word} for word in WORDS]}[kind]


@pytest.mark.parametrize("kind", ["text", "chat", "turns", "whole"])
def test_sft_equals_trl(kind, tmp_path):
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    entries, tokenizer, marking = responses(kind), load_tokenizer("tiny"), load_tokenizer("tiny")
    marking.chat_template = GENERATION
    policy = moved_policy(policy_loss="sft")
    model = load_plain()
    model.load_state_dict(policy.policy.state_dict())
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**settings(tmp_path), assistant_only_loss=kind == "turns"),
        train_dataset=Dataset.from_list(entries),
        processing_class=marking,
    )
    loss, gradients = of_trl(trainer)
    own, own_gradients, _ = of_ours(policy, [Example(tokenizer, entry).response() for entry in entries])
    assert own == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(own_gradients, gradients)

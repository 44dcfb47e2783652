"""Trials of a product and of generations, told as soon as they are known."""

from typing import Any

import pytest
import torch

from trinity_lightning.plan import trial
from trinity_lightning.plan.trial import tell_product


def test_a_product_is_timed_and_must_be_right(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tell, read = told
    tell_product(tell)
    finding = read()["trials", "product"]
    assert finding["level"] == "good"
    assert "bfloat16" in finding["text"]
    monkeypatch.setattr(torch, "ones", torch.zeros)
    tell_product(tell)
    assert read()["trials", "product"]["level"] == "bad"


def test_transformers_generates(told: Any) -> None:
    tell, read = told
    trial.tell_transformers(tell)
    finding = read()["trials", "transformers"]
    assert finding["level"] == "good", finding
    assert "tokens" in finding["text"]


@pytest.mark.usefixtures("needs_vllm")
def test_vllm_generates(told: Any) -> None:
    tell, read = told
    trial.tell_vllm(tell)
    finding = read()["trials", "vllm"]
    assert finding["level"] == "good", finding


def test_an_engine_that_fails_is_told(told: Any) -> None:
    tell, read = told
    trial.tell_generation(tell, "transformers", trial.TransformersEngine("tiny"))  # without a model
    finding = read()["trials", "transformers"]
    assert finding["level"] == "bad"
    assert finding["text"].startswith("ConfigError: the transformers engine generates with the training model")

"""The tiny model as the trainer has it: what an engine that holds its weights has to compute."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trinity_lightning.config.models import resolve_model


def tiny_model(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def logprobs(model: Any, tokens: list[int], temperature: float = 1.0) -> list[float]:
    ids = torch.tensor([tokens])
    with torch.no_grad():
        scores = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    return scores[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()


def train_a_little(model: Any, scale: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))

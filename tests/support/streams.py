"""Data of experiences for objectives of several terms: a teacher's likeliest tokens, and weights of one's own."""

from collections.abc import Sequence
from typing import Any

import torch

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import is_expert, predicted_mask

ALL_STREAMS: dict[str, Any] = {
    "rl": {"loss": "ppo"},
    "expert": {"loss": "sft", "tokens": "expert", "weight": 0.5},
    "teacher": {"loss": "teacher_kl", "weight": 0.3},
    "tools": {"loss": "sft", "tokens": "observations", "weight": 0.2},
    "praised": {"loss": "sft", "tokens": "weights", "weight": 0.1},
}
STREAMS: dict[str, Any] = {"policy_loss": {"name": "streams", "args": {"streams": ALL_STREAMS}}}


def read(experiences: Sequence[Experience], k: int = 3, vocabulary: int = 90) -> None:
    """Let a teacher of random opinions read the rollouts, once, and give some tokens of all experiences a weight."""
    unread = [experience for experience in experiences if "token_weights" not in experience.info]
    for number, experience in enumerate(unread):
        generator = torch.Generator().manual_seed(number)
        opinions = 2 * torch.randn(experience.response_length, vocabulary, generator=generator)
        likeliest = opinions.log_softmax(-1).topk(k)
        praise = torch.rand(experience.response_length, generator=generator)
        info: dict[str, Any] = {"token_weights": {"praised": praise * (praise > 0.6) * predicted_mask(experience)}}
        if not is_expert(experience):
            info["teacher_top_k"] = {"ids": likeliest.indices.int(), "logprobs": likeliest.values}
        experience.info = experience.info | info

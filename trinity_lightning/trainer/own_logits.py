"""Log-probabilities of models whose logits are not a head's of their base model's states."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from trinity_lightning.errors import ModelLoadError
from trinity_lightning.trainer.attention import NAME
from trinity_lightning.trainer.model import Head, LogprobFn, name_of, token_logprobs

logger = logging.getLogger(__name__)


def by_own_forward_pass(model: Any, agrees: Callable[[LogprobFn], bool]) -> LogprobFn:
    """`logprobs_by_forward`, if that agrees with the model's own logits.

    Raises:
        ModelLoadError: it does not, or the model's forward pass computes all logits or none.
    """
    if "logits_to_keep" in inspect.signature(model.forward).parameters and agrees(logprobs_by_forward):
        logger.info("%s: logits by its own forward pass, which takes more memory than a head.", name_of(model))
        return logprobs_by_forward
    raise ModelLoadError(
        f"{name_of(model)} cannot be trained: its logits are not those of its base model and output embeddings, and "
        "its forward pass has no logits_to_keep. Use one whose class follows transformers' causal language models."
    )


def logprobs_by_forward(
    model: Any, inputs: dict[str, Any], positions: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """From the model's own logits, at every place of the sequence where any row has a target: all in memory at once."""
    length = inputs["input_ids"].shape[1]
    rows, places = positions // length, positions % length
    kept, columns = places.unique(return_inverse=True)
    logits = model(**inputs, use_cache=False, logits_to_keep=kept).logits
    return token_logprobs(Head(nn.Identity()), logits[rows, columns], targets, temperature)


def why_unshared(model: Any, kinds: set[str]) -> str:
    """Why rows of a model cannot share prefixes: by its layers (of these kinds), attention, device or dropout."""
    if kinds != {"full_attention"}:
        others = ", ".join(sorted(kinds - {"full_attention"}))
        return f"has layers of {others}, and only full attention can share prefixes"
    if model.config.get_text_config()._attn_implementation != NAME:
        return "shares prefixes only with model.attn_implementation=sdpa"
    if model.device.type not in ("cpu", "cuda"):
        return f"shares prefixes on a CPU or an NVIDIA GPU, not on {model.device.type}"
    return (
        "has dropout (model.dropout=keep), or its adapters have (model.lora.dropout), which would drop a shared "
        "prefix for all of its rows alike"
    )

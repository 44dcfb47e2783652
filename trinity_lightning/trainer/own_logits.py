"""Log-probabilities of models whose logits are not a head's of their base model's states."""

from typing import Any

from torch import Tensor, nn

from trinity_lightning.trainer.logprobs import Head, token_logprobs


def logprobs_by_forward(
    model: Any, inputs: dict[str, Any], positions: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """From the model's own logits, at every place of the sequence where any row has a target: all in memory at once."""
    length = inputs["input_ids"].shape[1]
    rows, places = positions // length, positions % length
    kept, columns = places.unique(return_inverse=True)
    logits = model(**inputs, use_cache=False, logits_to_keep=kept).logits
    return token_logprobs(Head(nn.Identity()), logits[rows, columns], targets, temperature)

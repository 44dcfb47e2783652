"""How a model's log-probabilities are computed: by its base model and a head of ours, or by its own forward pass.

The head runs on trained positions only and in chunks, which saves most of the memory. Not every architecture's logits
are what its configuration's common names say, so both ways are held against the model's own logits before one is used.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trinity_lightning.common.errors import ModelLoadError
from trinity_lightning.trainer.logprobs import Head, token_logprobs

logger = logging.getLogger(__name__)

# (model, tokens [B, S], positions [n], targets [n], temperature [n]) -> log-probabilities and entropies, float32 [n].
# A position is the place in the flattened tokens of the state that predicts the target.
LogprobFn = Callable[[Any, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

CHECKED_TOKENS = 16
# Mean differences that are rounding, as a share of the largest logit.
FULL_LIMIT, HALF_LIMIT = 1e-4, 5e-3


def logprobs_by_head(
    model: Any, tokens: Tensor, positions: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """From hidden states of the base model, by `Head.of`: of the logits one chunk at a time."""
    states = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return token_logprobs(Head.of(model), states.flatten(0, 1)[positions], targets, temperature)


def logprobs_by_forward(
    model: Any, tokens: Tensor, positions: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """From the model's own logits, at every place of the sequence where any row has a target: all in memory at once."""
    rows, places = positions // tokens.shape[1], positions % tokens.shape[1]
    kept, columns = places.unique(return_inverse=True)
    logits = model(input_ids=tokens, use_cache=False, logits_to_keep=kept).logits
    return token_logprobs(Head(nn.Identity()), logits[rows, columns], targets, temperature)


@torch.no_grad()
def logprob_function(model: Any) -> LogprobFn:
    """The first of the two whose results are those of the model's own logits, tried on a few random tokens.

    Raises:
        ModelLoadError: neither is, or a token depends on later ones: the model cannot be trained here.
    """
    was_training = model.training
    model.eval()
    try:
        tokens = _random_tokens(model)
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        limit = (FULL_LIMIT if model.dtype == torch.float32 else HALF_LIMIT) * max(1.0, float(logits.abs().max()))
        if float((logits[0, :-1] - logits[1, :-1]).abs().mean()) > limit:  # the rows differ in their last token
            raise ModelLoadError(f"{_name(model)} is no causal model: what it predicts depends on later tokens.")
        if _agrees(logprobs_by_head, model, tokens, logits, limit):
            return logprobs_by_head
        can_choose = "logits_to_keep" in inspect.signature(model.forward).parameters
        if can_choose and _agrees(logprobs_by_forward, model, tokens, logits, limit):
            logger.info("%s: logits by its own forward pass, which takes more memory than a plain head.", _name(model))
            return logprobs_by_forward
    finally:
        model.train(was_training)
    raise ModelLoadError(
        f"{_name(model)} cannot be trained: its logits are not those of its base model and output embeddings, and its "
        "forward pass has no logits_to_keep. Use a model whose class follows transformers' causal language models."
    )


def _random_tokens(model: Any) -> Tensor:
    """Two rows [2, S] of the same token ids but for the last."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    rows = torch.randint(vocabulary, (1, CHECKED_TOKENS), generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    rows[1, -1] = (rows[0, -1] + 1) % vocabulary
    return rows.to(model.device)


def _agrees(function: LogprobFn, model: Any, tokens: Tensor, logits: Tensor, limit: float) -> bool:
    """Whether it runs, and yields the log-probabilities and entropies that follow from the logits [2, S, V]."""
    positions = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)[:, :-1].flatten()
    targets, temperature = tokens[:, 1:].flatten(), torch.ones(len(positions), device=tokens.device)
    try:
        found = function(model, tokens, positions, targets, temperature)
    except torch.OutOfMemoryError:  # a RuntimeError, which says nothing of the architecture
        raise
    except (AttributeError, TypeError, RuntimeError) as error:  # no such output, argument or shape
        logger.info("%s has no %s: %s", _name(model), function.__name__, error)
        return False
    expected = token_logprobs(Head(nn.Identity()), logits.flatten(0, 1)[positions], targets, temperature)
    return all(float((mine - own).abs().mean()) <= limit for mine, own in zip(found, expected, strict=True))


def _name(model: Any) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"

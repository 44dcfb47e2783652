"""The request for the rest of a sample whose first tokens are known, after the process that drew them has ended."""

from collections.abc import Mapping, Sequence
from typing import Any

from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.common.random_state import rest_seed


def rest_of(
    prompt: Sequence[int], token_ids: Sequence[int], sampling: Mapping[str, Any]
) -> tuple[Sequence[int], dict[str, Any]]:
    """Prompt and settings of the request: its limits are lower by the known tokens, and its noise is new.

    Stop strings and penalties begin again: they see the rest alone. Without known tokens the request is the sample's.

    Args:
        prompt: the sample's prompt.
        token_ids: its known tokens, fewer than `max_tokens`.
        sampling: its settings, `max_tokens` among them.
    """
    known, rest = len(token_ids), dict(sampling)
    if known == 0:
        return prompt, rest
    rest["max_tokens"] -= known
    if "min_tokens" in rest:
        rest["min_tokens"] = max(rest["min_tokens"] - known, 0)
    if "seed" in rest:
        rest["seed"] = rest_seed(rest["seed"], known)
    if isinstance(prompt, PicturePrompt):
        return PicturePrompt.joined(prompt, token_ids), rest
    return [*prompt, *token_ids], rest

"""A loss of one's own whose annotations are postponed, as many modules have them."""

from __future__ import annotations

from typing import Any, Optional

from trinity_lightning.algorithm.policy_loss import reinforce


def postponed(
    logprobs: Any,
    old_logprobs: Any,
    action_mask: Any,
    advantages: Any,
    *,
    width: float = 1.0,
    cap: Optional[float] = None,  # noqa: UP045 - what users write
    **totals: Any,
) -> Any:
    """REINFORCE with two arguments."""
    return reinforce(logprobs, old_logprobs, action_mask, advantages * width, **totals)


def unresolved(
    logprobs: Tensor,  # type: ignore[name-defined] # noqa: F821 - imported for type checkers only
    old_logprobs: Any,
    action_mask: Any,
    advantages: Any,
    *,
    width: float = 1.0,
    **totals: Any,
) -> Any:
    """The same, with an annotation that nothing can resolve."""
    return reinforce(logprobs, old_logprobs, action_mask, advantages * width, **totals)

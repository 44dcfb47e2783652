"""Why experiences of an explore step are not trained on, and what helps."""

import logging
from collections import Counter

logger = logging.getLogger(__name__)

# Each reason, what it means, and what helps.
REASONS = {
    "equal rewards": (
        "All runs of the task got the same reward, and their advantages are 0.",
        "If all rewards are 0, one that the model can get: `completions/` shows what it writes, and whether "
        "`sampling.max_tokens` cuts it off. Else tasks neither too easy nor too hard (`taskset.order=by_difficulty`), "
        "more `explorer.repeat_times`, a reward with steps between wrong and right, or new tasks in their place: "
        "`add_strategy=[dapo,grpo] explorer.max_refills=3`.",
    ),
    "zero advantage": (
        "The reward is just the baseline; the task's other runs are trained on.",
        "Nothing is wrong.",
    ),
    "filtered by NAME": (
        "The operator or add strategy NAME left it out.",
        "Its arguments, say its threshold: fewer should be left out. With `dapo` what helps against `equal rewards`.",
    ),
    "truncated": (
        "The response was cut off, and `mask_response_truncated` masks it.",
        "A larger `sampling.max_tokens`.",
    ),
    "no trained tokens": (
        "The action mask is zero throughout.",
        "The workflow, or the operator that masks.",
    ),
    "invalid reward": (
        "A reward of the task (`invalid METRIC`: what a filter judges by) is missing, NaN or infinite: its group is "
        "left out.",
        "The reward function; `operators=invalid_reward_filter` drops the run alone.",
    ),
    "surplus": ("The step was full before this group of a refill.", "Nothing is wrong."),
}


def what_helps(reason: str) -> str:
    """What helps against one of the `REASONS`, whatever name or metric it ends with."""
    return next(helps for known, (_, helps) in REASONS.items() if known.split()[0] == reason.split()[0])


def warn_of_idle_step(step: int, received: int, reasons: Counter[str], explained: set[str]) -> None:
    """Log why no response of a step is trained on, and what helps against the most frequent reason.

    Args:
        step: the explore step.
        received: how many responses it had.
        reasons: of how many of them each is the reason.
        explained: the reasons for which it was logged what helps; the most frequent one joins them.
    """
    causes = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    logger.warning("explore step %d: none of its %d responses is trained on: %s.", step, received, causes)
    [(reason, _)] = reasons.most_common(1)
    if reason not in explained:
        explained.add(reason)
        logger.warning("what helps against '%s': %s", reason, what_helps(reason))

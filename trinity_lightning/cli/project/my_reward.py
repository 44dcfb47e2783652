"""The reward: what a response is worth. Change it, then look at it: trinity-lightning check."""

from typing import Any

MOST_WORDS = 8


def plural(response: str, task: Any) -> dict[str, float]:
    """Two parts, whose sum is the reward: is the answer right, and has it the form that was asked for?

    Args:
        response: the text that the model wrote, whole or cut off.
        task: `task.raw_task` is the line of tasks/train.jsonl, with all of its fields.
    """
    words = response.lower().split()
    last = words[-1].strip(".!?\"'*") if words else ""
    return {
        "correct": float(last == task.raw_task["answer"]),
        "form": 0.2 * (0 < len(words) <= MOST_WORDS),
    }

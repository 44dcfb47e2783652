"""reasoning-gym's own verifiers as a reward."""

import functools
import json
from collections.abc import Callable
from typing import Any

from trinity_lightning.explorer.rewards.text import find_last_answer
from trinity_lightning.explorer.tasks.task import Task


def reasoning_gym(response: str, task: Task) -> float:
    """What the verifier of the entry's reasoning-gym dataset gives, from 0 to 1.

    Judged is what stands in the last `<answer>...</answer>` of the response, or else the whole of it.

    Raises:
        ValueError: the task does not come from a reasoning-gym taskset.
    """
    source = task.raw_task.get("reasoning_gym")
    if not source:
        raise ValueError("the task is no reasoning-gym entry: this reward needs a taskset with source 'reasoning_gym'")
    answer = find_last_answer(response) or response.strip()
    config = json.dumps(source.get("config", {}), sort_keys=True)
    return float(_verifier(source["name"], config)(answer, source["entry"]))


@functools.cache
def _verifier(name: str, config: str) -> Callable[[str, dict[str, Any]], float]:
    """The verifier of a dataset as it was configured: some judge by the configuration (a number of decimal places)."""
    import reasoning_gym  # for a second: only where it is needed

    verifier: Callable[..., float] = reasoning_gym.create_dataset(name, **json.loads(config)).score_answer
    return verifier

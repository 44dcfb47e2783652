"""Task sources of one's own, for whole runs: `taskset=support.task_streams.sums`."""

import random
from collections.abc import Iterator


def sums(seed: int) -> Iterator[dict[str, str]]:
    """Additions without end. Who goes back to one of them makes the generator again."""
    draw = random.Random(seed)
    while True:
        first, second = draw.randrange(100), draw.randrange(100)
        yield {"prompt": f"{first} + {second} =", "answer": str(first + second)}

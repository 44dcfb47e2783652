"""What happens to the experiences of an explore step before the trainer sees them."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_lightning.algorithm.add_strategy import create_add_strategy
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.writer import BufferWriter

StrategySpec = str | Sequence[tuple[str, Mapping[str, Any]]]


class ExperiencePipeline:
    """Weighs a whole explore step (groups must be complete) and writes it to the buffer.

    Args:
        add_strategy: a registered name or dotted path, or several with arguments: [("grpo", {"epsilon": 1e-6})].
        writer: where the result goes.
    """

    def __init__(self, add_strategy: StrategySpec, writer: BufferWriter) -> None:
        specs = [(add_strategy, {})] if isinstance(add_strategy, str) else [(n, dict(a)) for n, a in add_strategy]
        self._strategy = create_add_strategy(specs, writer)

    async def process(self, experiences: list[Experience], step: int) -> dict[str, float]:
        """Weigh and write an explore step; the metrics of every stage."""
        start = time.perf_counter()
        count, metrics = await self._strategy.add(experiences, step)
        return {
            **metrics,
            "experience_pipeline/written": float(count),
            "time/add_strategy": time.perf_counter() - start,
        }

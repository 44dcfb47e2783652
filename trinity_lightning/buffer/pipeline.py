"""What happens to the experiences of an explore step before the trainer sees them."""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_lightning.algorithm.add_strategy import ComposedAddStrategy
from trinity_lightning.buffer.operator_chain import OperatorChain
from trinity_lightning.buffer.operators import AuxiliaryModels, ExperienceOperatorV1, OperatorConfig
from trinity_lightning.buffer.refill import merged, refill
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.more_rollouts import MoreRollouts
from trinity_lightning.common.runs import forget_raw_reward
from trinity_lightning.common.untrained import Untrained, forget_reason
from trinity_lightning.common.writer import BufferWriter

logger = logging.getLogger(__name__)

StrategySpec = str | Sequence[tuple[str, Mapping[str, Any]]]


class ExperiencePipeline:
    """Runs operators on a whole explore step (groups must be complete), weighs what is left, writes it to the buffer.

    Args:
        add_strategy: a registered name or dotted path, or several with arguments: [("grpo", {"epsilon": 1e-6})].
        writer: where the result goes.
        operators: run before the add strategy, in order.
        auxiliary_models: clients of other models, for operators that ask them.
        folder: where `rejected/step_<n>.trxp` is written when an operator fails; None: nowhere.

    Raises:
        ValueError, TypeError: an unknown operator or strategy, or arguments it does not have.
        ConfigError: an argument's value is out of range.
    """

    def __init__(
        self,
        add_strategy: StrategySpec,
        writer: BufferWriter,
        operators: Sequence[OperatorConfig] = (),
        *,
        auxiliary_models: AuxiliaryModels | None = None,
        folder: str | Path | None = None,
    ) -> None:
        specs = [(add_strategy, {})] if isinstance(add_strategy, str) else add_strategy
        self._strategy = ComposedAddStrategy(specs, writer)
        self._chain = OperatorChain(operators, auxiliary_models, folder)

    @property
    def operators(self) -> list[ExperienceOperatorV1]:
        """The operators, in order."""
        return self._chain.operators

    @property
    def prepared(self) -> bool:
        """Whether there are operators that are prepared, and have to be closed."""
        return self._chain.prepared

    @property
    def selector_metric(self) -> dict[Any, Any]:
        """What the last step's operators tell a task selector: {taskset_id: {"indices": [...], "values": [...]}}.

        For selectors of your own: tasksets of this library are updated by the explorer, by rewards as they came.
        """
        return self._chain.selector_metric

    async def prepare(self) -> None:
        """Prepare the operators; `process` does it too, where it has not been done. Twice is allowed.

        Raises:
            OperatorError: one of them failed.
        """
        await self._chain.prepare()

    async def close(self) -> None:
        """Close the operators; twice is allowed.

        Raises:
            OperatorError: one of them failed; the others are closed.
        """
        await self._chain.close()

    async def process(
        self, experiences: list[Experience], step: int, more: MoreRollouts | None = None, *, all_rows: bool = False
    ) -> dict[str, float]:
        """Tidy, weigh and write an explore step; the metrics of every stage.

        Experiences that are not trained on get the reason in their info (`UNTRAINED`); a step of which none is trained
        on is logged with the reasons.

        Args:
            experiences: of the step.
            step: its number.
            more: asked for further tasks where a strategy that wants the step full (`dapo`) leaves it short.
            all_rows: whether experiences without an advantage are trained on too (`Objective.needs_all_rows`).

        Raises:
            OperatorError: an operator failed, and is not to be skipped; the step's experiences, as they came, are saved
                (those of its refills so far, too).
            ExperienceError: an experience that the add strategy cannot weigh.
        """
        all_of_them: list[Experience] = []
        tidy_ones: list[Experience] = []
        copies: list[Experience] = []
        untrained = Untrained(all_rows)

        async def tidy(some: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
            all_of_them.extend(some)
            for experience in some:
                forget_raw_reward(experience)
                forget_reason(experience)
            metrics: dict[str, float] = {}
            if len(self._chain):
                start = time.perf_counter()
                some, metrics = await self._chain.process(some, step, copies, untrained)
                metrics["time/operators"] = time.perf_counter() - start
            tidy_ones.extend(some)
            return some, metrics

        await self._chain.prepare()
        experiences, metrics = await tidy(experiences)
        if more is not None and self._strategy.refills:
            filled = await refill(experiences, step, more, tidy, self._strategy.survivors)
            experiences, metrics = filled.experiences, merged([metrics, *filled.metrics])
            metrics["experience_pipeline/surplus_groups"] = float(filled.surplus)
            metrics["experience_pipeline/missing_groups"] = float(filled.missing)
            untrained.leave_out(tidy_ones, experiences, "surplus")
        start = time.perf_counter()
        count, added = await self._strategy.add(experiences, step)
        metrics |= {**added, "experience_pipeline/written": float(count)}
        metrics["time/add_strategy"] = time.perf_counter() - start
        return metrics | self._note_untrained(untrained, all_of_them, experiences, step)

    def _note_untrained(
        self, untrained: Untrained, came: list[Experience], weighed: list[Experience], step: int
    ) -> dict[str, float]:
        """Mark which of the experiences that came are not trained on; how many there are, by reason."""
        for name, written in self._strategy.stages.items():
            untrained.leave_out(weighed, written, f"filtered by {name}")
            weighed = written
        trained = untrained.weigh(weighed)
        reasons = untrained.note(came)
        if came and not trained:
            causes = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
            logger.warning("explore step %d: none of its %d responses is trained on: %s.", step, len(came), causes)
        counts = {f"experience_pipeline/untrained/{r.replace(' ', '_')}": float(n) for r, n in reasons.items()}
        return {"experience_pipeline/trained": float(trained), **counts}

"""What happens to the experiences of an explore step before the trainer sees them."""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trinity_lightning.algorithm.add_strategy import ComposedAddStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import ListWriter
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.runs import Untrained, forget_notes

if TYPE_CHECKING:
    from trinity_lightning.buffer.operators import AuxiliaryModels
    from trinity_lightning.buffer.operators.experience_operator import OperatorChain
    from trinity_lightning.common.runs import Criterion
    from trinity_lightning.config.buffer import OperatorConfig

StrategySpec = str | Sequence[tuple[str, Mapping[str, Any]]]


class ExperiencePipeline:
    """Runs operators on a whole explore step (groups must be complete), and weighs what is left.

    Args:
        add_strategy: how rewards become advantages: a registered name or dotted path, or several that follow each
            other, with arguments: [("grpo", {"epsilon": 1e-6})].
        operators: run before the add strategy, in order.
        auxiliary_models: clients of other models, for operators that ask them.
        folder: the run's folder: where a failing operator leaves its step, `rejected/step_<n>.trxp`; None: nowhere.

    Attributes:
        chain: the operators, if there are any.

    Raises:
        ValueError, TypeError: an unknown operator or strategy, or arguments it does not have.
        ConfigError: an argument's value is out of range.
    """

    def __init__(
        self,
        add_strategy: StrategySpec,
        operators: "Sequence[OperatorConfig]" = (),
        *,
        auxiliary_models: "AuxiliaryModels | None" = None,
        folder: str | Path | None = None,
    ) -> None:
        specs = [(add_strategy, {})] if isinstance(add_strategy, str) else add_strategy
        self._written = ListWriter()
        self._strategy = ComposedAddStrategy(specs, self._written)
        self.chain: OperatorChain | None = None
        if operators:
            from trinity_lightning.buffer.operators import experience_operator  # an option

            self.chain = experience_operator.OperatorChain(operators, auxiliary_models, folder)
        self._explained: set[str] = set()  # reasons for untrained steps for which it was logged what helps

    @property
    def criteria(self) -> "list[Criterion]":
        """What its filters judge by."""
        from trinity_lightning.common.runs import Criterion

        parts = [*self._strategy.strategies, *(self.chain.operators if self.chain is not None else ())]
        return [found for part in parts if isinstance(found := getattr(part, "criterion", None), Criterion)]

    async def prepare(self) -> None:
        if self.chain is not None:
            await self.chain.prepare()

    async def process(
        self, experiences: list[Experience], step: int, more: "MoreRollouts | None" = None, *, all_rows: bool = False
    ) -> tuple[list[Experience], dict[str, float]]:
        """Tidy and weigh an explore step: what the trainer is to be given, and the metrics of every stage.

        Experiences that are not trained on get the reason in their info (`UNTRAINED`); a step of which none is trained
        on is logged with the reasons, and once with what helps against the most frequent.

        Args:
            experiences, step: of the step, and its number.
            more: asked for further tasks if a strategy that wants the step full (`dapo`) leaves it short.
            all_rows: whether experiences without an advantage are trained on too (`Objective.needs_all_rows`).

        Raises:
            OperatorError: an operator failed, and is not to be skipped; what the step received so far is saved.
            ExperienceError: an experience that the add strategy cannot weigh.
        """
        all_of_them: list[Experience] = []
        tidy_ones: list[Experience] = []
        copies: list[Experience] = []
        untrained = Untrained(all_rows)

        async def tidy(some: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
            all_of_them.extend(some)
            for experience in some:
                forget_notes(experience)
            metrics: dict[str, float] = {}
            if self.chain is not None:
                some, metrics = await self.chain.process(some, step, copies, untrained)
            tidy_ones.extend(some)
            return some, metrics

        await self.prepare()
        experiences, metrics = await tidy(experiences)
        if more is not None and self._strategy.refills:
            experiences, metrics = await refill(experiences, metrics, step, more, tidy, self._strategy.survivors)
            untrained.leave_out(tidy_ones, experiences, "surplus")
        start = time.perf_counter()
        self._written.calls = []
        count, added = await self._strategy.add(experiences, step)
        metrics |= {**added, "experience_pipeline/written": float(count)}
        metrics["time/add_strategy"] = time.perf_counter() - start
        metrics |= self._note_untrained(untrained, all_of_them, experiences, step)
        return self._written.experiences, metrics

    def _note_untrained(
        self, untrained: Untrained, received: list[Experience], weighed: list[Experience], step: int
    ) -> dict[str, float]:
        """Mark which of the received experiences are not trained on; how many there are, by reason."""
        for name, written in self._strategy.stages.items():
            untrained.leave_out(weighed, written, f"filtered by {name}")
            weighed = written
        trained = untrained.weigh(weighed)
        reasons = untrained.note(received)
        if received and not trained:
            from trinity_lightning.common.runs import warn_of_idle_step

            warn_of_idle_step(step, len(received), reasons, self._explained)
        counts = {f"experience_pipeline/untrained/{r.replace(' ', '_')}": float(n) for r, n in reasons.items()}
        return {"experience_pipeline/trained": float(trained), **counts}


logger = logging.getLogger(__name__)


class MoreRollouts(Protocol):
    """Rolls out further tasks for the step under way."""

    @property
    def tasks(self) -> int:
        """How many a step is meant to have."""
        ...

    async def __call__(self, tasks: int) -> list[Experience]:
        """The experiences of that many new tasks; nothing once no more are to be had.

        Tasks that all failed are replaced in turn, as long as the limit of such requests allows.
        """
        ...


# Tidies the experiences of some tasks, as it does those of a whole step: what is left, and metrics.
Tidy = Callable[[list[Experience]], Awaitable[tuple[list[Experience], dict[str, float]]]]

# Those of some experiences' groups that would be trained on, by task.
Survivors = Callable[[list[Experience]], dict[str, list[Experience]]]

# Assume that at least this share of new tasks survives, however few did so far, so that one request stays bounded.
_MIN_RATE = 0.25


async def refill(
    experiences: list[Experience],
    metrics: dict[str, float],
    step: int,
    more: MoreRollouts,
    tidy: Tidy,
    survivors: Survivors,
) -> tuple[list[Experience], dict[str, float]]:
    """Ask for more tasks until as many groups survive as the step is meant to have, or no more are to be had.

    Only `tidy` and the filter see the new groups apart; what weighs a whole step sees it once it is full. Groups
    beyond that number are dropped and counted: the earliest are kept.

    The `experiences` and `metrics` are those of the tidied step. Returned are all experiences, filtered ones too,
    without surplus groups, and the metrics of all rounds.
    """
    kept, asked = survivors(experiences), more.tasks
    filled, rounds, dropped = list(experiences), [metrics], 0
    while (missing := more.tasks - len(kept)) > 0:
        rate = max(len(kept) / asked, _MIN_RATE)
        tasks = min(math.ceil(missing / rate), more.tasks)
        if not (added := await more(tasks)):
            break
        added, metrics = await tidy(added)
        rounds.append(metrics)
        asked += tasks
        new = survivors(added)
        surplus = set(list(new)[missing:])
        dropped += len(surplus)
        filled += [e for e in added if e.eid.tid not in surplus]
        kept |= {task: group for task, group in new.items() if task not in surplus}
    if missing > 0:
        logger.warning(
            "step %d: %d of its %d tasks are missing after filters left out the others and %d more tasks were tried: "
            "raise explorer.max_refills, or take tasks that are neither too easy nor too hard.",
            step,
            missing,
            more.tasks,
            asked - more.tasks,
        )
    counts = {"surplus_groups": float(dropped), "missing_groups": float(max(missing, 0))}
    return filled, merged(rounds) | {f"experience_pipeline/{name}": count for name, count in counts.items()}


def merged(parts: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of several rounds as those of one step: counts and times add up, anything else is averaged."""
    names = dict.fromkeys(name for part in parts for name in part)
    values = {name: [part[name] for part in parts if name in part] for name in names}
    adds_up = {name: "count" in name or "dropped" in name or name.startswith("time/") for name in names}
    return {name: sum(each) if adds_up[name] else sum(each) / len(each) for name, each in values.items()}

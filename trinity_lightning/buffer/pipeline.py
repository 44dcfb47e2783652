"""Takes an explore step's experiences to the trainer: by operators, a refill, and add strategies."""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trinity_lightning.algorithm.add_strategy import ComposedAddStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import ListWriter
from trinity_lightning.buffer.operators.experience_operator import AuxiliaryModels, OperatorChain, Operators
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.runs import Criterion, Untrained, forget_notes, warn_of_idle_step
from trinity_lightning.common.tidied import TidiedGroup
from trinity_lightning.config.sections import PartConfig, strategies

logger = logging.getLogger(__name__)

StrategySpec = str | Sequence[tuple[str, Mapping[str, Any]]] | Mapping[str, PartConfig]


class ExperiencePipeline:
    """Runs operators on a whole explore step (groups must be complete), and weighs what is left.

    Args:
        add_strategy: makes advantages of rewards: a registered name or dotted path, or several that follow each other,
            with arguments: [("grpo", {"epsilon": 1e-6})], or as the section `add_strategy` of a configuration.
        operators: run before the add strategy, in order; a list, or the section `operators` of a configuration.
        auxiliary_models: clients of other models, for operators that ask them.
        folder: the run's folder, to which a failing operator's step is written (`rejected/step_<n>.trxp`); None: such
            steps are not written.

    Attributes:
        chain: the operators, if there are any.

    Raises:
        ValueError, TypeError: an unknown operator or strategy, or arguments it does not have.
        ConfigError: an argument's value is out of range.
    """

    def __init__(
        self,
        add_strategy: StrategySpec,
        operators: Operators = (),
        *,
        auxiliary_models: AuxiliaryModels | None = None,
        folder: str | Path | None = None,
    ) -> None:
        labels: list[str] | None = None
        if isinstance(add_strategy, str):
            specs: Sequence[tuple[str, Mapping[str, Any]]] = [(add_strategy, {})]
        elif isinstance(add_strategy, Mapping):
            labels = list(add_strategy)
            specs = [(part.name, part.args) for part in strategies(add_strategy).values()]
        else:
            specs = add_strategy
        self._written = ListWriter()
        self._strategy = ComposedAddStrategy(specs, self._written, labels)
        self.chain = OperatorChain(operators, auxiliary_models, folder) if operators else None
        self._explained: set[str] = set()  # reasons for untrained steps whose remedy was logged already

    @property
    def criteria(self) -> list[Criterion]:
        """The criteria of its filters."""
        parts = [*self._strategy.strategies, *(self.chain.operators if self.chain is not None else ())]
        criteria = [getattr(part, "criterion", None) for part in parts]
        return [criterion for criterion in criteria if isinstance(criterion, Criterion)]

    async def prepare(self) -> None:
        if self.chain is not None:
            await self.chain.prepare()

    async def process(
        self, experiences: list[Experience], step: int, more: "MoreRollouts | None" = None, *, all_rows: bool = False
    ) -> tuple[list[Experience], dict[str, float]]:
        """Tidy and weigh an explore step.

        Experiences that are not trained on get the reason in their info (`UNTRAINED`). If none is trained on, the step
        is logged with the reasons, and once with a remedy for the most frequent one.

        Args:
            experiences, step: of the explore step, and its number.
            more: asked for further tasks if a strategy that wants the step full (`dapo`) leaves it short.
            all_rows: train on experiences without an advantage, too (`Objective.needs_all_rows`).

        Returns:
            The experiences for the trainer, and the metrics of every stage.

        Raises:
            OperatorError: an operator failed, and is not to be skipped; the experiences so far are saved.
            ExperienceError: the add strategy cannot weigh an experience.
        """
        received: list[Experience] = []
        tidied: list[Experience] = []
        copies: list[Experience] = []
        untrained = Untrained(all_rows)

        async def tidy(arrived: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
            received.extend(arrived)
            remaining, metrics = await self._tidy(arrived, step, copies, untrained)
            tidied.extend(remaining)
            return remaining, metrics

        await self.prepare()
        experiences, metrics = await tidy(experiences)
        if more is not None and self._strategy.refills:
            experiences, metrics = await refill(experiences, metrics, step, more, tidy, self._strategy.survivors)
            untrained.leave_out(tidied, experiences, "surplus")
        return await self._weigh(experiences, step, received, untrained, metrics)

    async def tidy_group(self, experiences: list[Experience], step: int, *, all_rows: bool = False) -> TidiedGroup:
        """Run the operators on one group, and the filter whose tasks are replaced; for rollouts that do not wait.

        Several groups may be tidied at once.

        Args:
            experiences: of all runs of the group.
            step: number of the batch that the group belongs to, for messages.
            all_rows: as in `process`.

        Raises:
            OperatorError: as `process`.
        """
        await self.prepare()
        untrained = Untrained(all_rows)
        tidied, metrics = await self._tidy(experiences, step, [], untrained)
        kept = tidied
        if self._strategy.refills:
            kept = [experience for group in self._strategy.survivors(tidied).values() for experience in group]
            untrained.leave_out(tidied, kept, f"filtered by {self._strategy.first}")
        untrained.note(experiences)
        uids = {experience.eid.uid for experience in kept}
        return TidiedGroup(kept, [exp for exp in experiences if exp.eid.uid not in uids], metrics)

    async def weigh_groups(
        self, groups: Sequence[TidiedGroup], filtered: Sequence[TidiedGroup], step: int, *, all_rows: bool = False
    ) -> tuple[list[Experience], dict[str, float]]:
        """Weigh an explore step of groups that were tidied one by one; returns as `process` does.

        Args:
            groups: the groups of the step.
            filtered: groups that were left out since the step before, for the metrics.
            step, all_rows: as in `process`.

        Raises:
            ExperienceError: as `process`.
        """
        received = [experience for group in (*groups, *filtered) for experience in group.experiences]
        untrained = Untrained(all_rows)
        untrained.recall(received)
        metrics = merged([group.metrics for group in (*groups, *filtered)])
        kept = [experience for group in groups for experience in group.kept]
        return await self._weigh(kept, step, received, untrained, metrics)

    async def _tidy(
        self, arrived: list[Experience], step: int, copies: list[Experience], untrained: Untrained
    ) -> tuple[list[Experience], dict[str, float]]:
        """Run the operators; returns the experiences that are left, and metrics."""
        for experience in arrived:
            forget_notes(experience)
        if self.chain is None:
            return arrived, {}
        return await self.chain.process(arrived, step, copies, untrained)

    async def _weigh(
        self,
        experiences: list[Experience],
        step: int,
        received: list[Experience],
        untrained: Untrained,
        metrics: dict[str, float],
    ) -> tuple[list[Experience], dict[str, float]]:
        """Run the add strategies; returns the experiences for the trainer, and the metrics with those of this stage."""
        start = time.perf_counter()
        self._written.calls = []
        count, added = await self._strategy.add(experiences, step)
        metrics |= {**added, "experience_pipeline/written": float(count)}
        metrics["time/add_strategy"] = time.perf_counter() - start
        metrics |= self._note_untrained(untrained, received, experiences, step)
        return self._written.experiences, metrics

    def _note_untrained(
        self, untrained: Untrained, received: list[Experience], weighed: list[Experience], step: int
    ) -> dict[str, float]:
        """Note in the received experiences why they are not trained on; returns counts by reason, as metrics."""
        for name, written in self._strategy.stages.items():
            untrained.leave_out(weighed, written, f"filtered by {name}")
            weighed = written
        trained = untrained.weigh(weighed)
        reasons = untrained.note(received)
        if received and not trained:
            warn_of_idle_step(step, len(received), reasons, self._explained)
        counts = {f"experience_pipeline/untrained/{r.replace(' ', '_')}": float(n) for r, n in reasons.items()}
        return {"experience_pipeline/trained": float(trained), **counts}


# -- a refill: further tasks for a step that filters have left short ---------------------------------------------------


class MoreRollouts(Protocol):
    """Rolls out further tasks for the step under way."""

    @property
    def tasks(self) -> int:
        """Number of tasks that a step is meant to have."""
        ...

    async def __call__(self, tasks: int) -> list[Experience]:
        """The experiences of that number of new tasks; none once there are no more tasks.

        If all of the tasks failed, others take their place, as long as the limit of such requests allows.
        """
        ...


# Runs the operators on the experiences of some tasks; returns the experiences that are left, and metrics.
Tidy = Callable[[list[Experience]], Awaitable[tuple[list[Experience], dict[str, float]]]]

# Returns the groups, among some experiences, that would be trained on, by task.
Survivors = Callable[[list[Experience]], dict[str, list[Experience]]]

# At least this share of new tasks is assumed to survive, however few did so far, so that one request stays bounded.
_MIN_RATE = 0.25


async def refill(
    experiences: list[Experience],
    metrics: dict[str, float],
    step: int,
    more: MoreRollouts,
    tidy: Tidy,
    survivors: Survivors,
) -> tuple[list[Experience], dict[str, float]]:
    """Ask for more tasks until as many groups survive as the step is meant to have, or there are no more tasks.

    Only `tidy` and the filter see the new groups alone; strategies that weigh a whole step see it once it is full.
    Groups beyond that number are dropped and counted: the earliest stay.

    Args:
        experiences, metrics: of the tidied step.
        step: its number.
        more: rolls out further tasks.
        tidy: runs the operators on them.
        survivors: groups the experiences that would be trained on.

    Returns:
        All experiences, filtered ones too, without surplus groups; and the metrics of all rounds.
    """
    surviving, asked = survivors(experiences), more.tasks
    filled, rounds, dropped = list(experiences), [metrics], 0
    while (missing := more.tasks - len(surviving)) > 0:
        rate = max(len(surviving) / asked, _MIN_RATE)
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
        surviving |= {task: group for task, group in new.items() if task not in surplus}
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
    """Metrics of several rounds as one step's: counts and times add up, others are averaged."""
    names = dict.fromkeys(name for part in parts for name in part)
    values = {name: [part[name] for part in parts if name in part] for name in names}
    adds_up = {name: "count" in name or "dropped" in name or name.startswith("time/") for name in names}
    return {name: sum(of_name) if adds_up[name] else sum(of_name) / len(of_name) for name, of_name in values.items()}

"""What happens to the experiences of an explore step before the trainer sees them."""

import copy
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from trinity_lightning.algorithm.add_strategy import ComposedAddStrategy
from trinity_lightning.buffer.operators import (
    AuxiliaryModels,
    ExperienceOperatorV1,
    OnError,
    OperatorConfig,
    create_operators,
)
from trinity_lightning.buffer.operators.experience_operator import SELECTOR_METRIC, class_name
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.experience.experience import check_assigned
from trinity_lightning.common.files import write_atomically
from trinity_lightning.common.runs import forget_raw_reward, keep_raw_reward
from trinity_lightning.common.untrained import Untrained, forget_reason, what_helps
from trinity_lightning.common.writer import BufferWriter
from trinity_lightning.errors import OperatorError

logger = logging.getLogger(__name__)

StrategySpec = str | Sequence[tuple[str, Mapping[str, Any]]]

# -- refilling: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) -----------------------------------------------


class MoreRollouts(Protocol):
    """Rolls out further tasks for the step under way.

    Attributes:
        tasks: how many a step is meant to have.
    """

    tasks: int

    async def __call__(self, tasks: int) -> list[Experience]:
        """The experiences of that many new tasks; nothing once no more are to be had.

        Tasks that all failed are replaced in turn, as long as the limit of such requests allows.
        """
        ...


# Tidies the experiences of some tasks, as it does those of a whole step: what is left, and metrics.
Tidy = Callable[[list[Experience]], Awaitable[tuple[list[Experience], dict[str, float]]]]
# Those of some experiences' groups that would be trained on, by task.
Survivors = Callable[[list[Experience]], dict[str, list[Experience]]]

# However few tasks survived so far, this share of the next ones is taken to: what is asked for at once stays bounded.
_MIN_RATE = 0.25


@dataclass
class Refilled:
    """A step with what was added to it: all experiences, filtered ones too, without surplus groups."""

    experiences: list[Experience]
    metrics: list[dict[str, float]] = field(default_factory=list)
    surplus: int = 0
    missing: int = 0


async def refill(
    experiences: list[Experience], step: int, more: MoreRollouts, tidy: Tidy, survivors: Survivors
) -> Refilled:
    """Ask for more tasks until as many groups survive as the step is meant to have, or no more are to be had.

    Only `tidy` and the filter see the new groups apart; what weighs a whole step sees it once it is full. Groups
    beyond that number are dropped and counted: the earliest are kept.
    """
    kept = survivors(experiences)
    asked, result = more.tasks, Refilled(list(experiences))
    while (missing := more.tasks - len(kept)) > 0:
        rate = max(len(kept) / asked, _MIN_RATE)
        tasks = min(math.ceil(missing / rate), more.tasks)
        if not (added := await more(tasks)):
            break
        added, metrics = await tidy(added)
        result.metrics.append(metrics)
        asked += tasks
        new = survivors(added)
        surplus = set(list(new)[missing:])
        result.surplus += len(surplus)
        result.experiences += [e for e in added if e.eid.tid not in surplus]
        kept |= {task: group for task, group in new.items() if task not in surplus}
    result.missing = missing if missing > 0 else 0
    if result.missing:
        logger.warning(
            "step %d: %d of its %d tasks are missing after filters left out the others and %d more tasks were tried: "
            "raise explorer.max_refills, or take tasks that are neither too easy nor too hard.",
            step,
            result.missing,
            more.tasks,
            asked - more.tasks,
        )
    return result


def merged(parts: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of several rounds as those of one step: counts and times add up, anything else is averaged."""
    names = dict.fromkeys(name for part in parts for name in part)
    values = {name: [part[name] for part in parts if name in part] for name in names}
    adds_up = {name: "count" in name or "dropped" in name or name.startswith("time/") for name in names}
    return {name: sum(each) if adds_up[name] else sum(each) / len(each) for name, each in values.items()}


# -- operators, one after the other ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stage:
    """One operator: how it is called in metrics, and the key of its time."""

    operator: ExperienceOperatorV1
    label: str
    time_key: str
    on_error: OnError

    @property
    def title(self) -> str:
        return f"operator '{self.label}' ({class_name(self.operator)})"


class OperatorChain:
    """Runs operators in order on the experiences of an explore step.

    Args:
        configs: the operators.
        auxiliary_models: clients of other models, for operators that ask them.
        folder: where `rejected/step_<n>.trxp` is written when an operator fails; None: nowhere.

    Attributes:
        selector_metric: what the last step's operators tell the task selector, {} if nothing.

    Raises:
        ValueError, TypeError, ConfigError: as `create_operators`.
    """

    def __init__(
        self,
        configs: Sequence[OperatorConfig],
        auxiliary_models: AuxiliaryModels | None = None,
        folder: str | Path | None = None,
    ) -> None:
        operators = create_operators(configs, auxiliary_models)
        names = [config.name for config in configs]
        repeats = [names[: i + 1].count(name) for i, name in enumerate(names)]
        self._stages = [
            _Stage(
                operator,
                config.name if repeat == 1 else f"{config.name}_{repeat}",
                f"time/operator/{index}_{class_name(operator)}",
                config.on_error,
            )
            for index, (operator, config, repeat) in enumerate(zip(operators, configs, repeats, strict=True))
        ]
        self._folder = None if folder is None else Path(folder)
        self._prepared: list[_Stage] = []
        self._warned: set[str] = set()
        self.selector_metric: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def operators(self) -> list[ExperienceOperatorV1]:
        """The operators, in order."""
        return [stage.operator for stage in self._stages]

    @property
    def prepared(self) -> bool:
        """Whether any operator is prepared and not closed."""
        return bool(self._prepared)

    async def prepare(self) -> None:
        """Prepare the operators that are not; if one fails, those that were are closed again. Twice is allowed.

        Raises:
            OperatorError: the one that failed.
        """
        for stage in self._stages[len(self._prepared) :]:
            try:
                await stage.operator.prepare()
            except Exception as error:
                try:
                    await self.close()
                except OperatorError as another:
                    logger.warning("%s", another)  # the first failure is the one to act on
                raise OperatorError(f"{stage.title} could not be prepared: {_described(error)}") from error
            self._prepared.append(stage)

    async def close(self) -> None:
        """Close all operators, in reverse order, also when one of them fails. Twice is allowed.

        Raises:
            OperatorError: naming those that failed.
        """
        failures = []
        while self._prepared:
            stage = self._prepared.pop()
            try:
                await stage.operator.close()
            except Exception as error:
                failures.append((stage, error))
        if failures:
            causes = "; ".join(f"{stage.title} could not be closed: {_described(error)}" for stage, error in failures)
            raise OperatorError(causes) from failures[0][1]

    async def process(
        self, experiences: list[Experience], step: int, came: list[Experience], untrained: Untrained
    ) -> tuple[list[Experience], dict[str, float]]:
        """What the operators make of explore step `step`, and their metrics.

        Args:
            experiences: of the step, or of a refill of it.
            step: its number.
            came: copies of what the step's earlier parts came with; those of these experiences are added.
            untrained: takes note of what each operator leaves out.

        Raises:
            OperatorError: an operator failed whose on_error is `stop`. The step's experiences so far, as they came, are
                saved.
        """
        self.selector_metric = {}
        metrics: dict[str, float] = {}
        if self._folder is not None and self._stages:
            came += snapshot(experiences)
        for stage in self._stages:
            for experience in experiences:
                keep_raw_reward(experience)
            given = experiences
            before = snapshot(experiences) if stage.on_error is OnError.skip else None
            start = time.perf_counter()
            try:
                # A list of its own: the caller's keeps what it has.
                experiences, values = _checked(await stage.operator.process(list(experiences)))
            except Exception as error:
                if before is None:
                    raise self._failure(stage, error, step, came) from error
                logger.warning("%s failed at explore step %d and is skipped.", stage.title, step, exc_info=error)
                _put_back(given, before)  # in place: observers hold these experiences too
                experiences, values = given, {}
            finally:
                metrics[stage.time_key] = time.perf_counter() - start
            untrained.leave_out(given, experiences, f"filtered by {stage.label}")
            metrics |= self._numbers(stage, values)
            if before is not None:
                metrics[f"experience_pipeline/{stage.label}/failed"] = float(experiences is given)
        return experiences, metrics

    def _numbers(self, stage: _Stage, values: Mapping[str, Any]) -> dict[str, float]:
        """The real numbers among an operator's metrics, under their full names."""
        metrics = {}
        for key, value in values.items():
            name = f"experience_pipeline/{stage.label}/{key}"
            number = as_number(value)
            if key == SELECTOR_METRIC:
                self.selector_metric |= value
            elif number is not None:
                metrics[name] = number
            elif name not in self._warned:
                self._warned.add(name)
                logger.warning("metric '%s' is no number, but %.80r: it is not logged.", name, value)
        return metrics

    def _failure(self, stage: _Stage, error: Exception, step: int, came: list[Experience]) -> OperatorError:
        """The error that ends the run; the experiences are written to `rejected/` first, whole or not at all."""
        where = "The step's experiences are lost: no folder was given to save them in."
        if self._folder is not None:
            path = self._folder / "rejected" / f"step_{step}.trxp"
            try:
                data = Experience.serialize_many(came)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, data)
                where = f"The step's experiences are in {path} (Experience.deserialize_many reads them)."
            except (OSError, ExperienceError) as failure:
                where = f"The step's experiences could not be saved: {_described(failure)}."
        return OperatorError(
            f"{stage.title} failed at explore step {step}: {_described(error)}\n{where} "
            "Set its on_error to skip to go on without it."
        )


def snapshot(experiences: Sequence[Experience]) -> list[Experience]:
    """Copies that nothing done to the originals in place reaches; what originals share, the copies share too.

    Raises:
        ExperienceError: a field holds what cannot be copied, such as a lock in info.
    """
    memo: dict[int, Any] = {}
    return [_copy_experience(experience, memo) for experience in experiences]


def _put_back(experiences: Sequence[Experience], before: Sequence[Experience]) -> None:
    """Give the experiences the fields of their copies."""
    for experience, copied in zip(experiences, before, strict=True):
        vars(experience).clear()
        vars(experience).update(vars(copied))


def _copy_experience(experience: Experience, memo: dict[int, Any]) -> Experience:
    copied = copy.copy(experience)
    for name, value in vars(experience).items():
        if isinstance(value, Tensor):
            if id(value) not in memo:
                memo[id(value)] = value.detach().clone()
            setattr(copied, name, memo[id(value)])
        elif isinstance(value, dict | list) and value:
            try:
                setattr(copied, name, copy.deepcopy(value, memo))
            except Exception as error:  # whatever a user's object raises
                raise ExperienceError(f"experience {experience.eid}: {name} cannot be copied: {error}") from error
        elif isinstance(value, dict | list):
            setattr(copied, name, type(value)())
    copied.eid = copy.copy(experience.eid)
    return copied


def as_number(value: Any) -> float | None:
    """A real number of any kind (numpy's and torch's scalars too) as float; None for anything else."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().item() if value.numel() == 1 else None
    elif isinstance(value, np.generic | np.ndarray):
        value = value.item() if value.size == 1 else None
    return float(value) if isinstance(value, Real) else None


def _checked(result: Any) -> tuple[list[Experience], Mapping[str, Any]]:
    """What an operator returned, if it is what one has to return.

    Raises:
        TypeError: it is not.
        ExperienceError: the operator set a field of an experience to what it cannot hold.
    """
    if isinstance(result, tuple) and len(result) == 2:
        experiences, metrics = result
        of_experiences = isinstance(experiences, Sequence) and all(isinstance(e, Experience) for e in experiences)
        if of_experiences and isinstance(metrics, Mapping | None):
            for experience in experiences:
                check_assigned(experience)
            return list(experiences), metrics or {}
    raise TypeError(f"process must return (list of experiences, dict of metrics), not {result!r:.80}")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# -- the whole --------------------------------------------------------------------------------------------------------


class ExperiencePipeline:
    """Runs operators on a whole explore step (groups must be complete), weighs what is left, writes it to the buffer.

    Args:
        add_strategy: a registered name or dotted path, or several with arguments: [("grpo", {"epsilon": 1e-6})].
        writer: where the result goes.
        operators: run before the add strategy, in order.
        auxiliary_models: clients of other models, for operators that ask them.
        folder: where `rejected/step_<n>.trxp` is written when an operator fails; None: nowhere.

    Attributes:
        chain: the operators; who made the pipeline closes them.

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
        self.chain = OperatorChain(operators, auxiliary_models, folder)
        self._explained: set[str] = set()  # reasons for untrained steps for which it was logged what helps

    @property
    def selector_metric(self) -> dict[Any, Any]:
        """What the last step's operators tell a task selector: {taskset_id: {"indices": [...], "values": [...]}}.

        For selectors of your own: tasksets of this library are updated by the explorer, by rewards as they came.
        """
        return self.chain.selector_metric

    async def process(
        self, experiences: list[Experience], step: int, more: MoreRollouts | None = None, *, all_rows: bool = False
    ) -> dict[str, float]:
        """Tidy, weigh and write an explore step; the metrics of every stage.

        Experiences that are not trained on get the reason in their info (`UNTRAINED`); a step of which none is trained
        on is logged with the reasons, and once with what helps against the most frequent.

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
            if len(self.chain):
                start = time.perf_counter()
                some, metrics = await self.chain.process(some, step, copies, untrained)
                metrics["time/operators"] = time.perf_counter() - start
            tidy_ones.extend(some)
            return some, metrics

        await self.chain.prepare()
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
            [(reason, _)] = reasons.most_common(1)
            if reason not in self._explained:
                self._explained.add(reason)
                logger.warning("what helps where responses are left out as '%s': %s", reason, what_helps(reason))
        counts = {f"experience_pipeline/untrained/{r.replace(' ', '_')}": float(n) for r, n in reasons.items()}
        return {"experience_pipeline/trained": float(trained), **counts}

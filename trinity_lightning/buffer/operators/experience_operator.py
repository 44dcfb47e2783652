"""Experience operators: their base classes, how they are made from configurations, and the chain that runs them."""

import asyncio
import contextlib
import copy
import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.experience.experience import check_assigned
from trinity_lightning.common.files import write_atomically
from trinity_lightning.common.runs import RAW_REWARD, Untrained, is_valid_reward
from trinity_lightning.config.buffer import OnError, OperatorConfig, on_error_of
from trinity_lightning.config.own_code import described
from trinity_lightning.config.registry import Registry
from trinity_lightning.config.signatures import made_at_start
from trinity_lightning.config.values import as_float, numbered
from trinity_lightning.errors import ArgumentError, ConfigError, OperatorError, configured_at

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

# Clients of other models (judges, say), several for one model to share its load.
AuxiliaryModels = Mapping[str | int, "list[AsyncOpenAI]"]

# Key of an operator's metrics for a task selector, {taskset_id: {"indices": [...], "values": [...]}}: not logged.
SELECTOR_METRIC = "selector_metric"

# Seconds to wait until operators are closed on a loop that another thread runs; after an error, which may have stopped
# that loop, CLOSE_SECONDS.
WAIT_SECONDS, CLOSE_SECONDS = 60.0, 5.0


class ExperienceOperator(ABC):
    """An operator of the older, synchronous kind."""

    @abstractmethod
    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """The experiences of an explore step after the operator, perhaps none, and metrics."""

    def close(self) -> None:  # noqa: B027  # most operators hold nothing
        """Free what the operator holds."""


class ExperienceOperatorV1(ABC):
    """Changes, filters or measures all experiences of an explore step, before they are weighed.

    Attributes:
        auxiliary_models: clients by the name or number of their model; empty before `set_auxiliary_model`.
        advice: sentence of the error message that says how to go on after the operator has failed.
    """

    advice = "Set its on_error to skip to go on without it."
    # Read-only, since it is shared: operators need not call this class's constructor.
    auxiliary_models: AuxiliaryModels = MappingProxyType({})

    async def prepare(self) -> None:  # noqa: B027  # most operators have nothing to prepare
        """Load what the operator needs; awaited once, before the first `process`, on the same event loop."""

    @abstractmethod
    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """The experiences of an explore step after the operator, perhaps none, and metrics.

        The list is the operator's own; the experiences may be changed in place. Every real number among the metrics is
        logged as `experience_pipeline/<operator>/<metric>`.
        """

    async def close(self) -> None:  # noqa: B027  # most operators hold nothing
        """Free what the operator holds."""

    def set_auxiliary_model(self, auxiliary_models: AuxiliaryModels | None) -> None:
        """Give the operator other models to ask."""
        self.auxiliary_models = {} if auxiliary_models is None else auxiliary_models


# Operators in order. The keys of a mapping are their names in the configuration: errors have the key `operators.NAME`.
Operators = Sequence[OperatorConfig] | Mapping[str, OperatorConfig]
OperatorClass = type[ExperienceOperator] | type[ExperienceOperatorV1]
EXPERIENCE_OPERATORS: Registry[OperatorClass] = Registry("experience operator")


class LegacyOperator(ExperienceOperatorV1):
    """Adapts an operator of the older kind to the newer.

    Args:
        operator: gets the auxiliary models if it has `set_auxiliary_model`.
    """

    def __init__(self, operator: ExperienceOperator) -> None:
        self.operator = operator

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        return self.operator.process(exps)

    async def close(self) -> None:
        self.operator.close()

    def set_auxiliary_model(self, auxiliary_models: AuxiliaryModels | None) -> None:
        super().set_auxiliary_model(auxiliary_models)
        if (take := getattr(self.operator, "set_auxiliary_model", None)) is not None:
            take(auxiliary_models)


def create_operators(
    operator_configs: Operators, auxiliary_models: AuxiliaryModels | None = None
) -> list[ExperienceOperatorV1]:
    """The operators that the configurations describe, in order.

    Args:
        operator_configs: name (registered, or the dotted path of a class) and arguments of each. The keys of errors
            begin with `operators.NAME`, by the names in a mapping, or else by the operators' own.
        auxiliary_models: clients of other models, given to every operator that takes them.

    Raises:
        ValueError: an unknown name (the message lists the known ones), or nothing to import at that path.
        TypeError: a path that is no operator class.
        ArgumentError: an argument that the operator does not have, or lacks; the message names operator and argument.
        ConfigError: an argument's value is out of range.
    """
    operators = []
    is_section = isinstance(operator_configs, Mapping)
    named = operator_configs.items() if is_section else ((config.name, config) for config in operator_configs)
    for label, config in named:
        with configured_at(f"operators.{label}", names=("args",)):
            built = _create(operator_class(config.name), config)
        operator = LegacyOperator(built) if isinstance(built, ExperienceOperator) else built
        operator.set_auxiliary_model(auxiliary_models)
        operators.append(operator)
    return operators


def operator_class(name: str) -> OperatorClass:
    """The operator class of that name, or at that dotted path; errors as `create_operators`."""
    operator = EXPERIENCE_OPERATORS.resolve(name)
    if not (isinstance(operator, type) and issubclass(operator, ExperienceOperator | ExperienceOperatorV1)):
        raise TypeError(
            f"'{name}' is no experience operator, but {operator!r}: give a class derived from ExperienceOperatorV1."
        )
    for method in ("prepare", "process", "close") if issubclass(operator, ExperienceOperatorV1) else ():
        function = getattr(operator, method)
        if not any(map(inspect.iscoroutinefunction, (function, inspect.unwrap(function)))):  # a method may be decorated
            returns = ", which returns (list of experiences, dict of metrics)" if method == "process" else ""
            raise TypeError(
                f"operator '{name}': write `async def {method}`{returns}, as an ExperienceOperatorV1 has it."
            )
    return operator


def _create(cls: OperatorClass, config: OperatorConfig) -> ExperienceOperator | ExperienceOperatorV1:
    try:
        return made_at_start(f"operator '{config.name}'", cls, config.args)
    except ArgumentError:
        raise
    except ConfigError as error:
        raise ConfigError(f"operator '{config.name}': {error}", key=error.key) from error


# -- the chain ---------------------------------------------------------------------------------------------------------


class _Stage(NamedTuple):
    operator: ExperienceOperatorV1
    label: str  # in metrics
    title: str  # in messages
    time_key: str
    on_error: OnError


class OperatorChain:
    """Runs operators in order on the experiences of an explore step.

    Args:
        configs, auxiliary_models: see `create_operators`, also for the errors.
        folder: `rejected/step_<n>.trxp` is written here when an operator fails; None: it is not written.
    """

    def __init__(self, configs: Operators, auxiliary_models: AuxiliaryModels | None, folder: str | Path | None) -> None:
        self._stages: list[_Stage] = []
        operators = create_operators(configs, auxiliary_models)
        configs = list(configs.values()) if isinstance(configs, Mapping) else configs
        labels = numbered([config.name for config in configs])
        for operator, config, label in zip(operators, configs, labels, strict=True):
            kind = type(operator.operator if isinstance(operator, LegacyOperator) else operator).__name__
            title, time_key = f"operator '{label}' ({kind})", f"time/operator/{len(self._stages)}_{kind}"
            self._stages.append(_Stage(operator, label, title, time_key, on_error_of(label, config.on_error)))
        self._folder = None if folder is None else Path(folder)
        self._prepared: list[_Stage] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # where they were prepared
        self._warned: set[str] = set()

    @property
    def operators(self) -> list[ExperienceOperatorV1]:
        return [stage.operator for stage in self._stages]

    async def prepare(self) -> None:
        """Prepare the operators that are not prepared yet; if one fails, the others are closed again.

        Raises:
            OperatorError: an operator failed; the message names it.
        """
        self._loop = asyncio.get_running_loop()
        for stage in self._stages[len(self._prepared) :]:
            try:
                await stage.operator.prepare()
            except Exception as error:
                try:
                    await self.close()
                except OperatorError as another:
                    logger.warning("%s", another)  # the first failure is raised
                raise OperatorError(f"{stage.title} could not be prepared: {described(error)}") from error
            self._prepared.append(stage)

    async def close(self) -> None:
        """Close all prepared operators, in reverse order, also when one of them fails.

        Raises:
            OperatorError: some failed; the message names them.
        """
        failures = []
        while self._prepared:
            stage = self._prepared.pop()
            try:
                await stage.operator.close()
            except Exception as error:
                failures.append((stage, error))
        if failures:
            causes = "; ".join(f"{stage.title} could not be closed: {described(error)}" for stage, error in failures)
            raise OperatorError(causes) from failures[0][1]

    def end(self, after_error: bool = False) -> None:
        """Close the operators, from any thread, on the loop that they were prepared on, as long as it runs.

        Args:
            after_error: True if another error will reach the user: one of closing is only logged then.
        """
        try:
            if self._prepared:
                self._close_within(CLOSE_SECONDS if after_error else WAIT_SECONDS)
        except OperatorError as error:
            if not after_error:
                raise
            logger.warning("%s", error)

    def _close_within(self, seconds: float) -> None:
        """Close the operators on their loop if it runs in another thread, else on a new loop."""
        running = None
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread
            running = asyncio.get_running_loop()
        if self._loop is None or not self._loop.is_running() or self._loop is running:
            with ThreadPoolExecutor(max_workers=1) as pool:  # this thread may have a running loop, as in a notebook
                return pool.submit(lambda: asyncio.run(self.close())).result()
        closing = asyncio.run_coroutine_threadsafe(self.close(), self._loop)
        try:
            return closing.result(seconds)
        except TimeoutError as error:
            closing.cancel()  # nobody waits for it any more
            raise OperatorError(f"the operators were not closed within {seconds:g} s.") from error

    async def process(
        self, experiences: list[Experience], step: int, received: list[Experience], untrained: Untrained
    ) -> tuple[list[Experience], dict[str, float]]:
        """Run the operators on the experiences of explore step `step`.

        Args:
            experiences: of the step, or of a refill of it.
            step: its number.
            received: copies of the step's experiences so far, before any operator; copies of these are added.
            untrained: notes which experiences each operator leaves out.

        Returns:
            The experiences that are left, and the operators' metrics.

        Raises:
            OperatorError: an operator failed whose on_error is `stop`; the received experiences are saved.
        """
        began, metrics = time.perf_counter(), dict[str, float]()
        if self._folder is not None:
            received += snapshot(experiences)
        for stage in self._stages:
            for experience in experiences:
                if RAW_REWARD not in experience.metrics and is_valid_reward(experience.reward):
                    # A new dict, since experiences may share one.
                    experience.metrics = experience.metrics | {RAW_REWARD: experience.reward}
            entered = experiences
            before = snapshot(experiences) if stage.on_error is OnError.skip else None
            start = time.perf_counter()
            try:
                # The operator gets a list of its own: the caller's list does not change.
                experiences, values = _checked(await stage.operator.process(list(experiences)))
            except Exception as error:
                if before is None:
                    raise self._failure(stage, error, step, received) from error
                logger.warning("%s failed at explore step %d and is skipped.", stage.title, step, exc_info=error)
                for experience, copied in zip(entered, before, strict=True):  # in place: others hold the objects too
                    experience.__dict__ = vars(copied)
                experiences, values = entered, {}
            finally:
                metrics[stage.time_key] = time.perf_counter() - start
            untrained.leave_out(entered, experiences, f"filtered by {stage.label}")
            metrics |= self._numbers(stage, values)
            if before is not None:
                metrics[f"experience_pipeline/{stage.label}/failed"] = float(experiences is entered)
        return experiences, metrics | {"time/operators": time.perf_counter() - began}

    def _numbers(self, stage: _Stage, values: Mapping[str, Any]) -> dict[str, float]:
        """The real numbers among an operator's metrics, under their full names."""
        metrics = {}
        for key, value in values.items():
            name = f"experience_pipeline/{stage.label}/{key}"
            number = as_float(value)
            if number is not None:
                metrics[name] = number
            elif key != SELECTOR_METRIC and name not in self._warned:
                self._warned.add(name)
                logger.warning("metric '%s' is no number, but %.80r: it is not logged.", name, value)
        return metrics

    def _failure(self, stage: _Stage, error: Exception, step: int, received: list[Experience]) -> OperatorError:
        """The error that ends the run; the experiences are first written to `rejected/`, all or none of them."""
        fate = "The step's experiences are lost: no folder was given to save them in."
        if self._folder is not None:
            path = self._folder / "rejected" / f"step_{step}.trxp"
            try:
                data = Experience.serialize_many(received)
                write_atomically(path, data)
                fate = f"The step's experiences are in {path} (Experience.deserialize_many reads them)."
            except (OSError, ExperienceError) as failure:
                fate = f"The step's experiences could not be saved: {described(failure)}."
        return OperatorError(
            f"{stage.title} failed at explore step {step}: {described(error)}\n{fate} {stage.operator.advice}"
        )


def snapshot(experiences: Sequence[Experience]) -> list[Experience]:
    """Copies that share nothing with the originals; a tensor that two originals share, their copies share too.

    Raises:
        ExperienceError: a field cannot be copied, such as a lock in info.
    """
    memo: dict[int, Any] = {}
    return [_copy_experience(experience, memo) for experience in experiences]


def _copy_experience(experience: Experience, memo: dict[int, Any]) -> Experience:
    copied = copy.copy(experience)
    for name, value in vars(experience).items():
        if isinstance(value, Tensor):
            if id(value) not in memo:
                memo[id(value)] = value.detach().clone()
            setattr(copied, name, memo[id(value)])
        elif isinstance(value, dict | list):
            try:
                setattr(copied, name, copy.deepcopy(value, memo) if value else type(value)())
            except Exception as error:  # a user's object may raise anything
                raise ExperienceError(f"experience {experience.eid}: {name} cannot be copied: {error}") from error
    copied.eid = copy.copy(experience.eid)
    return copied


def _checked(result: Any) -> tuple[list[Experience], Mapping[str, Any]]:
    """The experiences and metrics that an operator returned. TypeError, ExperienceError: it returned something else."""
    if isinstance(result, tuple) and len(result) == 2:
        experiences, metrics = result
        of_experiences = isinstance(experiences, Sequence) and all(isinstance(e, Experience) for e in experiences)
        if of_experiences and isinstance(metrics, Mapping | None):
            for experience in experiences:
                check_assigned(experience)
            return list(experiences), metrics or {}
    raise TypeError(f"process must return (list of experiences, dict of metrics), not {_types_in(result)}")


def _types_in(result: Any) -> str:
    """The types in an operator's result, which itself may be long."""
    if isinstance(result, tuple):
        return f"({', '.join(map(_types_in, result))})"
    others = [item for item in result if not isinstance(item, Experience)] if isinstance(result, list) else []
    return f"list with {type(others[0]).__name__}" if others else type(result).__name__

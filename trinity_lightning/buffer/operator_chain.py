"""The operators of a pipeline, one after the other: timed, named in metrics, and with an answer to one that fails."""

import copy
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from trinity_lightning.buffer.operators import (
    SELECTOR_METRIC,
    AuxiliaryModels,
    ExperienceOperatorV1,
    OnError,
    OperatorConfig,
    create_operators,
)
from trinity_lightning.buffer.operators.experience_operator import class_name
from trinity_lightning.buffer.storage.atomic import write_atomically
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.experience.experience import check_assigned
from trinity_lightning.common.runs import keep_raw_reward
from trinity_lightning.common.untrained import Untrained
from trinity_lightning.errors import OperatorError

logger = logging.getLogger(__name__)


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
        """Prepare the operators that are not; where one fails, those that were are closed again.

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
                raise OperatorError(f"{stage.title} could not be prepared: {_told(error)}") from error
            self._prepared.append(stage)

    async def close(self) -> None:
        """Close all operators, in reverse order, also when one of them fails.

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
            told = "; ".join(f"{stage.title} could not be closed: {_told(error)}" for stage, error in failures)
            raise OperatorError(told) from failures[0][1]

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
                experiences, told = _checked(await stage.operator.process(list(experiences)))
            except Exception as error:
                if before is None:
                    raise self._failure(stage, error, step, came) from error
                logger.warning("%s failed at explore step %d and is skipped.", stage.title, step, exc_info=error)
                _put_back(given, before)  # in place: observers hold these experiences too
                experiences, told = given, {}
            finally:
                metrics[stage.time_key] = time.perf_counter() - start
            untrained.leave_out(given, experiences, f"filtered by {stage.label}")
            metrics |= self._numbers(stage, told)
            if before is not None:
                metrics[f"experience_pipeline/{stage.label}/failed"] = float(experiences is given)
        return experiences, metrics

    def _numbers(self, stage: _Stage, told: Mapping[str, Any]) -> dict[str, float]:
        """The real numbers among an operator's metrics, under their full names."""
        metrics = {}
        for key, value in told.items():
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
        where = "The step's experiences are lost: no folder was given to save them in."
        if self._folder is not None:
            try:
                path = save_rejected(self._folder, step, came)
                where = f"The step's experiences are in {path} (Experience.deserialize_many reads them)."
            except (OSError, ExperienceError) as failure:
                where = f"The step's experiences could not be saved: {_told(failure)}."
        return OperatorError(
            f"{stage.title} failed at explore step {step}: {_told(error)}\n{where} "
            "Set its on_error to skip to go on without it."
        )


def save_rejected(folder: Path, step: int, experiences: Sequence[Experience]) -> Path:
    """Write `<folder>/rejected/step_<step>.trxp`, whole or not at all: its path.

    Raises:
        OSError: it cannot be written.
        ExperienceError: a field cannot be encoded.
    """
    path = folder / "rejected" / f"step_{step}.trxp"
    data = Experience.serialize_many(experiences)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return path


def snapshot(experiences: Sequence[Experience]) -> list[Experience]:
    """Copies that nothing done to the originals in place reaches; what originals share, the copies share too.

    Raises:
        ExperienceError: a field holds what cannot be copied, such as a lock in info.
    """
    memo: dict[int, Any] = {}
    return [_copy_experience(experience, memo) for experience in experiences]


def _put_back(experiences: Sequence[Experience], before: Sequence[Experience]) -> None:
    """Give the experiences the fields of their copies."""
    for experience, twin in zip(experiences, before, strict=True):
        vars(experience).clear()
        vars(experience).update(vars(twin))


def _copy_experience(experience: Experience, memo: dict[int, Any]) -> Experience:
    twin = copy.copy(experience)
    for name, value in vars(experience).items():
        if isinstance(value, Tensor):
            if id(value) not in memo:
                memo[id(value)] = value.detach().clone()
            setattr(twin, name, memo[id(value)])
        elif isinstance(value, dict | list) and value:
            try:
                setattr(twin, name, copy.deepcopy(value, memo))
            except Exception as error:  # whatever a user's object raises
                raise ExperienceError(f"experience {experience.eid}: {name} cannot be copied: {error}") from error
        elif isinstance(value, dict | list):
            setattr(twin, name, type(value)())
    twin.eid = copy.copy(experience.eid)
    return twin


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


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

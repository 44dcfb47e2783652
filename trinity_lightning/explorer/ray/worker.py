"""The far side of a Ray runner: a WorkflowRunner in a process of its own, with its own copy of the models."""

import logging
import os
import pickle
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.config.schema import ExplorerConfig
from trinity_lightning.errors import ConfigError, RolloutError
from trinity_lightning.explorer.runner import Attempt, WorkflowRunner

PACKAGE = __name__.partition(".")[0]
# A worker whose workflows log without end keeps the last of it.
MAX_LOG_RECORDS = 1000


@dataclass
class Answer:
    """An Attempt on its way back.

    Attributes:
        experiences: a payload of `Experience.serialize_many`.
        errors: by run; each survives pickling.
        seconds: the attempt took.
        log: (logger, level, text) of what was logged since the last answer.
    """

    experiences: bytes
    errors: dict[int, BaseException]
    seconds: float
    log: list[tuple[str, int, str]]


class RayWorker:
    """The actor.

    Args:
        setup: a pickle of (config, rollout model, auxiliary models); within bytes, so that Ray does not explain at
            length what cannot be pickled.
        import_path: where the program that started it looks for modules; looked at last.
        runner_id: for messages.
        log_level: from which level on this library's log is sent back; of others', warnings are.
    """

    def __init__(self, setup: bytes, import_path: list[str], runner_id: int | None, log_level: int) -> None:
        sys.path += [folder for folder in import_path if folder not in sys.path]
        config, model, auxiliary_models = pickle.loads(setup)  # noqa: S301 - from the program that started this one
        self._config: ExplorerConfig = config
        self._model: InferenceModel = model
        self._auxiliary_models: list[InferenceModel] = auxiliary_models
        self._runner_id = runner_id
        self._log = _Records()
        logging.getLogger().addHandler(self._log)
        logging.getLogger(PACKAGE).setLevel(log_level)

    async def ready(self) -> int:
        """The process id, once everything is imported."""
        return os.getpid()

    async def attempt(self, task: bytes, runs: Sequence[int], limit: float | None, version: int) -> Answer:
        """See `WorkflowRunner.attempt`.

        Args:
            task: a pickle of the Task.
            runs: the runs to try.
            limit: seconds after which they are cancelled.
            version: of the model's present weights.
        """
        try:
            loaded = pickle.loads(task)  # noqa: S301 - from the program that started this one
        except Exception as error:
            reason = f"the task cannot be read in a Ray worker: {type(error).__name__}: {error}"
            return self._answer(Attempt([], dict.fromkeys(runs, ConfigError(reason)), 0.0), runs)
        model = cast("InferenceModel", _AtVersion(self._model, version))
        runner = WorkflowRunner(self._config, model, self._auxiliary_models, self._runner_id)
        return self._answer(await runner.attempt(loaded, runs, limit), runs)

    def _answer(self, attempt: Attempt, runs: Sequence[int]) -> Answer:
        errors = {run: portable(error) for run, error in attempt.errors.items()}
        try:
            payload = Experience.serialize_many(attempt.experiences)
        except ExperienceError as error:
            payload, errors = Experience.serialize_many([]), errors | dict.fromkeys(runs, error)
        return Answer(payload, errors, attempt.seconds, self._log.take())


class _AtVersion:
    """A model that is given its version: weights are synced from the program that trains, and this is a copy."""

    def __init__(self, model: InferenceModel, version: int) -> None:
        self._model = model
        self.model_version = version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Records(logging.Handler):
    """Keeps what is logged until it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self._records: deque[tuple[str, int, str]] = deque(maxlen=MAX_LOG_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.name, record.levelno, self.format(record)))

    def take(self) -> list[tuple[str, int, str]]:
        """What was logged since the last call."""
        taken = list(self._records)
        self._records.clear()
        return taken


def portable(error: BaseException) -> BaseException:
    """The error itself if a pickle of it is the same again; otherwise a RolloutError with its type and text."""
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
    except Exception:
        copy = None
    same = type(copy) is type(error) and str(copy) == str(error)
    return error if same else RolloutError(f"{type(error).__name__}: {error}")

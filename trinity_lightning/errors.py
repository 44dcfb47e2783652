"""The errors of this library. A message names the thing and the fix."""

import errno
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError


class TrinityError(Exception):
    """Base of the errors that this library raises on purpose: the message alone is enough to act on."""


class ConfigError(TrinityError, ValueError):
    """A key, type or value of the configuration is wrong. Raised before a model is loaded.

    Args:
        message: the problem; a whole sentence if there is no `fix`.
        key: the dotted key to change; None where no single key is at fault. Code that does not know its section gives a
            key that begins with a dot (".answer_field"), or none: see `configured_at`.
        fix: the change that helps, which ends the message.
    """

    def __init__(self, message: str, *, key: str | None = None, fix: str | None = None) -> None:
        super().__init__(message if fix is None else f"{message}: {fix}.")
        self.key = key
        self.fix = fix


@contextmanager
def configured_at(key: str | None, *, section: str | None = None, names: Collection[str] = ()) -> Iterator[None]:
    """Complete the key of a ConfigError that is raised within this context; a whole key stays as it is.

    Use it where a part's place in the configuration is known, so that the part's own code need not know it.

    Example:
        with configured_at("tasksets.sums.path", section="tasksets.sums"):
            raise ConfigError("there is no field 'answer'", key=".answer_field")  # tasksets.sums.answer_field

    Args:
        key: the whole dotted key for an error that has none; None: it gets none.
        section: the dotted key in front of a relative one, which begins with a dot or with one of `names`; None: `key`.
        names: names of the section's own keys, such as the arguments of a part.
    """
    try:
        yield
    except ConfigError as error:
        section = key if section is None else section
        if error.key is None:
            error.key = key
        elif section is not None and error.key.startswith("."):
            error.key = section + error.key
        elif section is not None and re.split(r"[.\[]", error.key)[0] in names:
            error.key = f"{section}.{error.key}"
        raise


class TakenFolderError(ConfigError):
    """The folder belongs to another run. Nothing is written there, not even to its log."""


class UnfinishedClassError(ConfigError, TypeError):
    """A user's class does not define methods that its base class requires."""


class ArgumentError(ConfigError, TypeError):
    """A part has no such argument, or one that it needs is missing; the message has the key and its arguments."""


class PartError(TrinityError):
    """The user's code (a loss, a strategy, an engine, a callback) raised; the message names its file and line."""


class ModelLoadError(TrinityError):
    """A model, its tokenizer or an engine could not be loaded."""


class DeviceMemoryError(TrinityError):
    """A GPU ran out of memory while it trained; the message has the memory plan's figures and the keys that help."""


class RolloutError(TrinityError):
    """An explore step gave no experience at all, or an engine failed for good."""


class RewardError(RolloutError):
    """A reward function raised, took too long, or returned anything but a finite number; the message names it."""

    may_pass = False  # True if another attempt may work: a server or a disk did not answer, for example


class WorkflowBlockedError(RolloutError):
    """A workflow blocked the event loop, and with it every other rollout."""


class WorkerDiedError(RolloutError):
    """The process that tried a task died."""


class ReadOnlyError(TrinityError, FrozenInstanceError):
    """A field was written that cannot change; the message says what to do instead."""


class DiskFullError(TrinityError, OSError):
    """The file `filename` could not be written: the disk is full, or a limit on file sizes was reached."""

    def __str__(self) -> str:
        fix = "raise the limit of a file's size (ulimit -f)" if self.errno == errno.EFBIG else "make room there"
        return f"'{self.filename}' could not be written ({self.strerror}): {fix}, or write to another disk."


class ModelNotSavedError(TrinityError):
    """Training has ended, and the model or the last checkpoint could not be written.

    The message says which weights are saved, and how to write the model from them.
    """


class OperatorError(TrinityError):
    """An experience operator failed; the message says which one, why, and where the step's experiences are."""


class WeightSyncError(TrinityError):
    """The engine's weights differ from the trainer's: in names, in shapes, or by the probe."""


class LossScaleError(TrinityError):
    """The gradients of a policy in float16 overflow at every scale of its loss."""


class RankError(TrinityError):
    """Another process of a run on several devices failed or ended; the message says which one, and why."""


class RankTerminatedError(RankError):
    """Another process of a run on several devices received SIGTERM, which ends all of them."""


class PromptTooLongError(TrinityError, ValueError):
    """The prompt leaves no room for a response in the engine's context."""

    def __str__(self) -> str:
        return f"prompt_truncated: {super().__str__()}"


# -- buffers outside this process: the message names the place and the fix ---------------------------------------------


class StorageError(TrinityError):
    """A buffer cannot be opened, read or written."""


class ForeignPositionError(StorageError):
    """A saved position belongs to another buffer or reader: this one cannot go on from it."""


class StorageFormatError(StorageError, ValueError):
    """A buffer was not written by this library, or is damaged."""


class StorageLockedError(StorageError):
    """Another writer holds the buffer, for good or for too long."""


# -- causes of an error ------------------------------------------------------------------------------------------------


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, then its cause or the error that was being handled when it was raised, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__

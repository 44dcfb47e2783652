"""Optimizer batches straight out of a reader, where no explorer makes experiences: sized, lazy, stateful."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from trinity_lightning.buffer.reader import BufferReader
from trinity_lightning.buffer.storage.errors import StorageError
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.values import number, whole_number


class OfflineLoader:
    """Yields `steps_per_epoch` optimizer batches an epoch, each one read.

    Its state is the position in the epoch; that of the reader is the data module's.

    Args:
        reader: where experiences come from.
        batch_size: experiences a batch: at most, or with whole groups, unless one group alone is larger.
        steps_per_epoch: batches an epoch.
        whole_groups: never part the experiences of a task.
        wait: seconds to wait for a batch that another process is still to write.
        max_response_length: longest response that the data allow, in tokens; None: unknown, see `OptimizerBatch`.

    Attributes:
        pause: as the reader's `read` has it, for a run that may end while it waits.

    Raises:
        ConfigError: a number below 1, or a wait below 0.
    """

    def __init__(
        self,
        reader: BufferReader,
        batch_size: int,
        steps_per_epoch: int,
        *,
        whole_groups: bool = True,
        wait: float = 0.0,
        max_response_length: int | None = None,
    ) -> None:
        whole_number("batch_size", batch_size, least=1)
        whole_number("steps_per_epoch", steps_per_epoch, least=1)
        number("wait", wait, least=0)
        self._reader = reader
        self._batch_size, self._steps_per_epoch = batch_size, steps_per_epoch
        self._whole_groups, self._wait = whole_groups, wait
        self._max_response_length = max_response_length
        self.pause: Callable[[float], None] = time.sleep
        self._epoch, self._position = 1, 0
        self._before: dict[str, Any] = {}  # where the reader stood before the last batch

    def __len__(self) -> int:
        """Optimizer batches an epoch: constant."""
        return self._steps_per_epoch

    def __iter__(self) -> Iterator[OptimizerBatch]:
        if self._position >= len(self):
            self._epoch, self._position = self._epoch + 1, 0
        for index in range(self._position, len(self)):
            self._before = self._reader.state_dict()
            experiences = self._reader.read(
                self._batch_size, whole_groups=self._whole_groups, wait=self._wait, pause=self.pause
            )
            if not experiences:
                raise StorageError(
                    f"nothing left to read for step {index + 1} of {len(self)} in epoch {self._epoch} (waited "
                    f"{self._wait:g} s). Give more data, fewer steps, or repeat them (RepeatingReader)."
                )
            # Counted before it is handed out: a checkpoint after its training step then resumes with the next one.
            self._position = index + 1
            yield OptimizerBatch.of(experiences, self._epoch, self._max_response_length)

    def rewind(self, position: int) -> None:
        """What was handed out last, behind the first `position` batches, was not trained on: it is read again."""
        if self._position > position:
            self._reader.load_state_dict(self._before)
            self._position = position

    def state_dict(self) -> dict[str, Any]:
        """Which batch of which epoch comes next."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._epoch, self._position = state["epoch"], state["position"]

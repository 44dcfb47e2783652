"""The LightningDataModule: holds the buffer, lets experiences in through the pipeline, hands out optimizer batches."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from torch import Tensor

from trinity_lightning.buffer.loader import ExperienceLoader, OfflineLoader
from trinity_lightning.buffer.memory import MemoryStorage
from trinity_lightning.buffer.operators import AuxiliaryModels, OperatorConfig
from trinity_lightning.buffer.pipeline import ExperiencePipeline, MoreRollouts, StrategySpec
from trinity_lightning.buffer.reader import BufferReader
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.optimizer_batch import marked
from trinity_lightning.config.values import whole_number
from trinity_lightning.errors import OperatorError, StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Writes the experiences of an explore step somewhere, in place of those of an earlier attempt at it.
StepKeeper = Callable[[int, list[Experience]], object]

WAIT_SECONDS = 60.0  # for the loop that operators live on, if it runs in another thread
CLOSE_SECONDS = 5.0  # after an error, which may be that nothing else can run there


class ExpertData:
    """So many expert experiences for every explore step, out of a reader that does not end.

    What was read counts as read when `commit` says that the explore step has taken it: a step cut short reads the same
    again, so that the state always is that of the last whole step.

    Args:
        reader: where they come from, in its order; for data that end a `RepeatingReader`.
        per_step: expert experiences an explore step.

    Raises:
        ConfigError: a number below 1.
    """

    def __init__(self, reader: BufferReader, per_step: int) -> None:
        whole_number("per_step", per_step, least=1)
        self._reader, self._per_step = reader, per_step
        self._taken = reader.state_dict()
        self._ahead = False  # whether the reader stands behind what no step has taken

    def read(self, step: int) -> list[Experience]:
        """Those of explore step `step`: marked as an expert's, without advantage, identities within the step.

        Raises:
            StorageError: the reader has nothing more to give.
        """
        if self._ahead:
            self._reader.load_state_dict(self._taken)
        self._ahead = True
        experiences: list[Experience] = []
        while (missing := self._per_step - len(experiences)) > 0:
            more = self._reader.read(missing)
            if not more:
                raise StorageError("the expert data have ended, or there are none: give more, or let them repeat.")
            experiences += more
        return [_joining(experience, step, number) for number, experience in enumerate(experiences)]

    def commit(self) -> None:
        """The explore step has taken what was read last."""
        self._taken, self._ahead = self._reader.state_dict(), False

    def state_dict(self) -> dict[str, Any]:
        """Where the reader stood after the last step that has taken its share."""
        return self._taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; errors as the reader's."""
        self._reader.load_state_dict(state)
        self._taken, self._ahead = state, False


def _joining(experience: Experience, step: int, number: int) -> Experience:
    """A copy fit to stand among rollouts.

    Its log-probabilities, where it has some, are of another policy: they say nothing of this run's engine, and would
    raise the alarm that watches it.
    """
    joining = marked(experience, expert=True)
    joining.eid = EID(batch=step, task=f"expert-{number}", suffix=experience.eid.suffix)
    joining.logprobs = None
    joining.advantages = torch.zeros(experience.response_length)
    joining.returns = None
    return joining


class _Unmoved(L.LightningDataModule):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Nothing is moved here: micro-batches are padded on the device when they are cut."""
        return batch


class ExperienceDataModule(_Unmoved):
    """Experiences between explorer and trainer.

    Args:
        add_strategy: how rewards become advantages: a name, or several (name, arguments) that follow each other.
        optimizer_steps: optimizer steps an explore step.
        inner_epochs: passes over an explore step's experiences.
        seed: seed of the dealing of groups into optimizer steps.
        operators: what tidies a step's experiences before they are weighed, in order.
        auxiliary_models: clients of other models, for operators that ask them.
        folder: the run's folder: where a failing operator leaves its step, `rejected/step_<n>.trxp`; None: nowhere.
        keep: keeps the experiences of every step, as the trainer is given them; None: nothing does.
        experts: expert data that join every step behind the strategies; None: none.
        max_response_length: longest response that the run allows, in tokens; None: unknown, see `OptimizerBatch`.

    Raises:
        ValueError, TypeError: an unknown strategy or operator, or arguments it does not have.
    """

    def __init__(
        self,
        add_strategy: StrategySpec = "grpo",
        *,
        optimizer_steps: int = 1,
        inner_epochs: int = 1,
        seed: int = 0,
        operators: Sequence[OperatorConfig] = (),
        auxiliary_models: AuxiliaryModels | None = None,
        folder: str | Path | None = None,
        keep: StepKeeper | None = None,
        experts: ExpertData | None = None,
        max_response_length: int | None = None,
    ) -> None:
        super().__init__()
        self.storage = MemoryStorage()
        self.pipeline = ExperiencePipeline(
            add_strategy, self.storage, operators, auxiliary_models=auxiliary_models, folder=folder
        )
        self.optimizer_steps = optimizer_steps
        self.inner_epochs = inner_epochs
        self._seed = seed
        self._keep = keep
        self._experts = experts
        self._max_response_length = max_response_length
        self._loop: asyncio.AbstractEventLoop | None = None  # where the operators live

    @property
    def batch(self) -> int:
        """The explore step that is trained on; 0 before the first."""
        return self.storage.batch

    def advance(self, step: int, columns: dict[str, list[Tensor]] | None = None) -> None:
        """Hand the trainer explore step `step`, which has been filled in, with the columns computed for it."""
        self.storage.advance(step, columns)

    @property
    def experiences(self) -> list[Experience]:
        """What the trainer will be given."""
        return self.storage.experiences

    async def fill(
        self, experiences: list[Experience], step: int, more: MoreRollouts | None = None, *, all_rows: bool = False
    ) -> dict[str, float]:
        """Take an explore step's experiences into the buffer, weighed; the pipeline's metrics.

        They wait there for `advance`, while another step may be trained on. A step of which the strategies leave
        nothing is an empty one: its items train nothing and are counted. `more` is asked for further tasks where a
        strategy wants the step full; `all_rows` as `ExperiencePipeline.process`.

        Raises:
            OperatorError: an operator failed; the buffer holds what it held before.
            StorageError: the expert data cannot be read, or have ended.
        """
        await self.prepare()
        self.storage.begin()
        metrics = await self.pipeline.process(experiences, step, more, all_rows=all_rows)
        if self._experts is not None:
            joining = self._experts.read(step)
            self.storage.write(joining)
            metrics["experience_pipeline/expert"] = float(len(joining))
        if self._keep is not None:
            await asyncio.to_thread(self._keep, step, self.storage.written)
        self.storage.commit(step)  # last: an interruption while something is awaited must find the step not taken
        if self._experts is not None:
            self._experts.commit()
        return metrics

    async def prepare(self) -> None:
        """Prepare the operators, on the loop that `fill` runs on; `fill` does it too. Twice is allowed.

        Raises:
            OperatorError: one of them failed.
        """
        self._loop = asyncio.get_running_loop()
        await self.pipeline.chain.prepare()

    async def close(self) -> None:
        """Close the operators; twice is allowed. Lightning's `teardown` does it too.

        Raises:
            OperatorError: one of them failed; the others are closed.
        """
        await self.pipeline.chain.close()

    def teardown(self, stage: str) -> None:
        """Close the operators, on the loop they were prepared on as long as it runs."""
        if self.pipeline.chain.prepared:
            _on_loop(self.close, self._loop)

    def on_exception(self, exception: BaseException) -> None:
        """The same after an error: it is on its way to the user, and one of closing is only logged."""
        try:
            if self.pipeline.chain.prepared:
                _on_loop(self.close, self._loop, CLOSE_SECONDS)
        except (OperatorError, TimeoutError) as error:
            logger.warning("%s", error)

    def train_dataloader(self) -> ExperienceLoader:
        """One sized, lazy, stateful loader for the whole run."""
        return ExperienceLoader(
            self.storage, self.optimizer_steps, self.inner_epochs, self._seed, self._max_response_length
        )

    def state_dict(self) -> dict[str, Any]:
        """The buffer, and where the expert data stand."""
        state = self.storage.state_dict()
        return state if self._experts is None else state | {"experts": self._experts.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the buffer, and go on with the expert data; new ones begin at their beginning."""
        self.storage.load_state_dict(state_dict)
        if self._experts is not None and "experts" in state_dict:
            self._experts.load_state_dict(state_dict["experts"])


class OfflineExperienceDataModule(_Unmoved):
    """Experiences out of a reader, where no explorer makes them: SFT, DPO, offline RL.

    An epoch is `steps_per_epoch` reads, each of which becomes one optimizer batch. The reader's position is in the
    checkpoint, that in the epoch too (the loader's).

    Args:
        reader: where experiences come from.
        batch_size, steps_per_epoch, whole_groups, wait, max_response_length: as `OfflineLoader`.

    Attributes:
        older_weights: they were sampled by other weights than the present ones, which PolicyModule looks at.

    Raises:
        ConfigError: a number below 1.
    """

    older_weights = True

    def __init__(
        self,
        reader: BufferReader,
        *,
        batch_size: int,
        steps_per_epoch: int,
        whole_groups: bool = True,
        wait: float = 0.0,
        max_response_length: int | None = None,
    ) -> None:
        super().__init__()
        self.reader = reader
        self._loader = OfflineLoader(
            reader,
            batch_size,
            steps_per_epoch,
            whole_groups=whole_groups,
            wait=wait,
            max_response_length=max_response_length,
        )

    def train_dataloader(self) -> OfflineLoader:
        """One sized, lazy, stateful loader for the whole run."""
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """Where the reader stands."""
        return {"reader": self.reader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on reading where the checkpoint was taken.

        Raises:
            StorageError: the checkpoint is of another buffer.
        """
        self.reader.load_state_dict(state_dict["reader"])


def _on_loop(
    function: Callable[[], Coroutine[Any, Any, T]], loop: asyncio.AbstractEventLoop | None, wait: float = WAIT_SECONDS
) -> T:
    """What the coroutine function returns: run on `loop` if that runs in another thread, else on a loop of its own.

    Raises:
        TimeoutError: it took longer than `wait` seconds on a loop in another thread.
    """
    try:
        own = asyncio.get_running_loop()
    except RuntimeError:
        own = None
    if loop is not None and loop.is_running() and loop is not own:
        return asyncio.run_coroutine_threadsafe(function(), loop).result(wait)
    # In a thread, as the present one may have a running loop: a notebook's has.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(lambda: asyncio.run(function())).result()

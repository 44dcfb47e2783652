"""The LightningDataModule: holds the buffer, lets experiences in through the pipeline, hands out optimizer batches."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from torch import Tensor

from trinity_lightning.buffer.loader import ExperienceLoader, MemoryStorage
from trinity_lightning.buffer.pipeline import ExperiencePipeline, StrategySpec
from trinity_lightning.common.experience import Experience

if TYPE_CHECKING:
    from trinity_lightning.buffer.offline import ExpertData
    from trinity_lightning.buffer.operators import AuxiliaryModels
    from trinity_lightning.buffer.refill import MoreRollouts
    from trinity_lightning.config.parts import OperatorConfig

# Writes the experiences of an explore step somewhere, in place of those of an earlier attempt at it.
StepKeeper = Callable[[int, list[Experience]], object]


class UnmovedDataModule(L.LightningDataModule):
    def everywhere(self, obtain: Callable[[], list[Experience]]) -> list[Experience]:
        """What `obtain` returns on rank 0, on every rank that trains; the others do not call it."""
        trainer = self.trainer
        if trainer is None or trainer.world_size == 1:
            return obtain()
        experiences = obtain() if trainer.is_global_zero else []
        payload = trainer.strategy.broadcast(Experience.serialize_many(experiences))
        return experiences if trainer.is_global_zero else Experience.deserialize_many(payload)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Nothing is moved here: micro-batches are padded on the device when they are cut."""
        return batch


class ExperienceDataModule(UnmovedDataModule):
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
        operators: "Sequence[OperatorConfig]" = (),
        auxiliary_models: "AuxiliaryModels | None" = None,
        folder: str | Path | None = None,
        keep: StepKeeper | None = None,
        experts: "ExpertData | None" = None,
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

    @property
    def batch(self) -> int:
        """The explore step that is trained on; 0 before the first."""
        return self.storage.batch

    def advance(self, step: int, columns: dict[str, list[Tensor]] | None = None) -> None:
        """Hand the trainer explore step `step`, which has been filled in, with the columns computed for it."""
        self.storage.advance(step, columns)

    def share(self, step: int) -> list[Experience]:
        """The experiences of explore step `step`, which is ready on rank 0, and then on every rank."""
        experiences = self.everywhere(lambda: self.storage.ready(step))
        if not self.storage.is_ready(step):
            self.storage.begin()
            self.storage.write(experiences)
            self.storage.commit(step)
        return experiences

    @property
    def experiences(self) -> list[Experience]:
        """What the trainer will be given."""
        return self.storage.experiences

    async def fill(
        self, experiences: list[Experience], step: int, more: "MoreRollouts | None" = None, *, all_rows: bool = False
    ) -> dict[str, float]:
        """Take an explore step's experiences into the buffer, weighed; the pipeline's metrics.

        They wait there for `advance`, while another step may be trained on. A step of which the strategies leave
        nothing is an empty one: its items train nothing and are counted. `more` is asked for further tasks if a
        strategy wants the step full; `all_rows` as `ExperiencePipeline.process`.

        Raises:
            OperatorError: an operator failed; the buffer holds what it held before.
            StorageError: the expert data cannot be read, or have ended.
        """
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
        await self.pipeline.prepare()

    async def close(self) -> None:
        """Close the operators; twice is allowed. Lightning's `teardown` does it too.

        Raises:
            OperatorError: one of them failed; the others are closed.
        """
        await self.pipeline.close()

    def teardown(self, stage: str) -> None:
        """Close the operators, on the loop they were prepared on as long as it runs."""
        if self.pipeline.chain is not None:
            self.pipeline.chain.end()

    def on_exception(self, exception: BaseException) -> None:
        """The same after an error: it is on its way to the user, and one of closing is only logged."""
        if self.pipeline.chain is not None:
            self.pipeline.chain.end_after_error()

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

"""The LightningDataModule: experiences in through the pipeline, held in memory, and dealt into optimizer batches."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from trinity_lightning.buffer.pipeline import ExperiencePipeline, StrategySpec
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.values import whole_number
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.buffer.offline import ExpertData
    from trinity_lightning.buffer.operators import AuxiliaryModels
    from trinity_lightning.buffer.pipeline import MoreRollouts
    from trinity_lightning.config.buffer import OperatorConfig

# Writes the experiences of an explore step somewhere, in place of those of an earlier attempt at it.
StepKeeper = Callable[[int, list[Experience]], object]


# -- the buffer, in memory ---------------------------------------------------------------------------------------------


class MemoryStorage:
    """Holds the explore step that is trained on, with the columns computed for it, and those that are ready after it.

    A step that is ready takes the place of the step before at `advance`: it can come while another is trained on.

    Attributes:
        batch, experiences: the explore step that is trained on (EID.batch; 0 before the first), and what it has.
        columns: float32 tensors [response] by name, one an experience.
        ready: what each of the steps after it has.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.batch = 0
        self.experiences: list[Experience] = []
        self.columns: dict[str, list[Tensor]] = {}
        self.ready: dict[int, list[Experience]] = {}

    def is_ready(self, batch: int) -> bool:
        return batch in self.ready

    def advance(self, batch: int, columns: dict[str, list[Tensor]] | None = None) -> None:
        """Explore step `batch` takes the place of the one that was trained on; earlier ones are forgotten."""
        self.batch, self.experiences, self.columns = batch, self.ready[batch], columns or {}
        self.ready = {step: waiting for step, waiting in self.ready.items() if step > batch}

    def state_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "payload": Experience.serialize_many(self.experiences),
            "columns": self.columns,
            "ready": {step: Experience.serialize_many(waiting) for step, waiting in self.ready.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. ExperienceFormatError: a payload is damaged; the storage is as it was."""
        experiences = Experience.deserialize_many(state["payload"])
        ready = {step: Experience.deserialize_many(payload) for step, payload in state["ready"].items()}
        self.batch, self.experiences, self.columns, self.ready = state["batch"], experiences, state["columns"], ready


# -- optimizer batches, dealt out of it --------------------------------------------------------------------------------


@dataclass(eq=False)
class ExperienceLoader:
    """Yields the optimizer batches of the explore step that the storage holds.

    Sized, so that Lightning neither pre-fetches nor counts by exhausting it; lazy, so that the buffer is read only
    after the explorer has filled it; stateful, so that a run stopped in the middle of a step goes on with the next
    item.

    Attributes:
        storage: the buffer.
        optimizer_steps: batches that the step's experiences are dealt into, by whole groups.
        inner_epochs: passes over them, each dealt again.
        seed: seed of the dealing; with the explore step and the pass it decides the order.
        max_response_length: longest response that the run allows, in tokens; None: unknown, see `OptimizerBatch`.

    Raises:
        ConfigError: a number of steps or passes below 1; or, as it is read, nothing has filled the storage.
    """

    storage: MemoryStorage
    optimizer_steps: int = 1
    inner_epochs: int = 1
    seed: int = 0
    max_response_length: int | None = None
    _explore_step: int = field(default=0, init=False)
    _position: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        whole_number("optimizer_steps", self.optimizer_steps, least=1)
        whole_number("inner_epochs", self.inner_epochs, least=1)

    def __len__(self) -> int:
        """Optimizer batches an epoch: constant."""
        return self.optimizer_steps * self.inner_epochs

    def __iter__(self) -> Iterator[OptimizerBatch]:
        if self.storage.batch == 0 and not self.storage.experiences:
            raise ConfigError("there are no rollouts to train on", fix="give the Trainer an ExplorerCallback")
        if self._explore_step != self.storage.batch or self._position >= len(self):
            self._explore_step, self._position = self.storage.batch, 0
        for index in range(self._position, len(self)):
            # Counted before it is handed out: a checkpoint after its training step then resumes with the next one.
            self._position = index + 1
            yield self._batch(index)

    def _batch(self, index: int) -> OptimizerBatch:
        inner_epoch, part = divmod(index, self.optimizer_steps)
        rows = self._deal(inner_epoch)[part]
        experiences = [self.storage.experiences[row] for row in rows]
        batch = OptimizerBatch.of(experiences, self.storage.batch, self.max_response_length)
        batch.columns = {name: [column[row] for row in rows] for name, column in self.storage.columns.items()}
        batch.step = self.storage.experiences if self.optimizer_steps > 1 else None
        return batch

    def _deal(self, inner_epoch: int) -> list[list[int]]:
        """Row numbers of each batch of one pass: whole groups, in a seeded order, evened out by size."""
        groups: dict[str, list[int]] = {}
        for row, experience in enumerate(self.storage.experiences):
            groups.setdefault(experience.eid.tid, []).append(row)
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.storage.batch + inner_epoch)
        members = list(groups.values())
        parts: list[list[int]] = [[] for _ in range(self.optimizer_steps)]
        for index in torch.randperm(len(groups), generator=generator).tolist():
            min(parts, key=len).extend(members[index])
        return parts

    def rewind(self, position: int) -> None:
        """Go back to item `position`: later items were handed out but not trained on."""
        self._position = min(self._position, position)

    def state_dict(self) -> dict[str, Any]:
        return {"explore_step": self._explore_step, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._explore_step, self._position = state["explore_step"], state["position"]


# -- what Lightning is given -------------------------------------------------------------------------------------------


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
        add_strategy, operators, auxiliary_models, folder: as `ExperiencePipeline`.
        optimizer_steps, inner_epochs, seed, max_response_length: as `ExperienceLoader`.
        keep: keeps the experiences of every step, as the trainer is given them; None: nothing does.
        experts: expert data that join every step behind the strategies; None: none.

    Attributes:
        storage: the buffer: what is ready, and what is trained on.

    Raises:
        ConfigError: a number below 1.
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
        self.pipeline = ExperiencePipeline(add_strategy, operators, auxiliary_models=auxiliary_models, folder=folder)
        self._loader = partial(ExperienceLoader, self.storage, optimizer_steps, inner_epochs, seed, max_response_length)
        self._loader()  # wrong numbers are refused here, not once engines are loaded
        self._keep = keep
        self._experts = experts

    def share(self, step: int) -> list[Experience]:
        """The experiences of explore step `step`, which is ready on rank 0, and then on every rank."""
        self.storage.ready[step] = self.everywhere(lambda: self.storage.ready[step])
        return self.storage.ready[step]

    async def fill(
        self, experiences: list[Experience], step: int, more: "MoreRollouts | None" = None, *, all_rows: bool = False
    ) -> dict[str, float]:
        """Take an explore step's experiences into the buffer, weighed; the pipeline's metrics.

        They wait there for `storage.advance`, while another step may be trained on. A step of which the strategies
        leave nothing is an empty one: its items train nothing and are counted. `more` is asked for further tasks if a
        strategy wants the step full; `all_rows` as `ExperiencePipeline.process`.

        Raises:
            OperatorError: an operator failed; the buffer holds what it held before.
            StorageError: the expert data cannot be read, or have ended.
        """
        weighed, metrics = await self.pipeline.process(experiences, step, more, all_rows=all_rows)
        if self._experts is not None:
            joining = self._experts.read(step)
            weighed += joining
            metrics["experience_pipeline/expert"] = float(len(joining))
        if self._keep is not None:
            await asyncio.to_thread(self._keep, step, weighed)
        self.storage.ready[step] = weighed  # last: an interruption while something is awaited must find it not taken
        if self._experts is not None:
            self._experts.commit()
        return metrics

    async def prepare(self) -> None:
        """Prepare the operators, on the loop that `fill` runs on, which does it too. OperatorError: one failed."""
        await self.pipeline.prepare()

    def teardown(self, stage: str) -> None:
        """Close the operators, on the loop they were prepared on as long as it runs."""
        if self.pipeline.chain is not None:
            self.pipeline.chain.end()

    def on_exception(self, exception: BaseException) -> None:
        """The same after an error: it is on its way to the user, and one of closing is only logged."""
        if self.pipeline.chain is not None:
            self.pipeline.chain.end(after_error=True)

    def train_dataloader(self) -> ExperienceLoader:
        """One sized, lazy, stateful loader for the whole run."""
        return self._loader()

    def state_dict(self) -> dict[str, Any]:
        state = self.storage.state_dict()
        state["judged_by"] = [each.metric for each in self.pipeline.criteria if each.seen]
        return state if self._experts is None else state | {"experts": self._experts.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the buffer, and go on with the expert data; new ones begin at their beginning."""
        self.storage.load_state_dict(state_dict)
        for each in self.pipeline.criteria:
            each.seen = each.metric in state_dict.get("judged_by", ())  # which older checkpoints lack
        if self._experts is not None and "experts" in state_dict:
            self._experts.load_state_dict(state_dict["experts"])

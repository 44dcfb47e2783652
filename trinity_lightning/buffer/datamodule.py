"""The LightningDataModule: it takes experiences in by the pipeline, holds them, and deals optimizer batches."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from trinity_lightning.buffer.operators.experience_operator import AuxiliaryModels, Operators
from trinity_lightning.buffer.pipeline import ExperiencePipeline, MoreRollouts, StrategySpec
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.experience.inputs import share_inputs
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.common.tidied import TidiedGroup
from trinity_lightning.config.buffer import BufferConfig
from trinity_lightning.config.registry import Registry
from trinity_lightning.config.values import whole_number
from trinity_lightning.errors import ConfigError, configured_at

if TYPE_CHECKING:
    from trinity_lightning.buffer.offline import ExpertData

# Writes the experiences of an explore step somewhere, in place of those of an earlier attempt at it.
StepKeeper = Callable[[int, list[Experience]], object]
KEEPERS: Registry[Callable[[BufferConfig, Path], StepKeeper]] = Registry("experience keeper")


def step_keeper(buffer: BufferConfig, folder: Path) -> StepKeeper:
    """The keeper that `buffer.keep` names, for the run in that folder.

    Raises:
        ConfigError: the database's URL is none, or a package for it is missing.
        StorageError: there is no such database, or it is of something else.
    """
    with configured_at("buffer.keep", section="buffer"):
        return KEEPERS.get("sql" if buffer.keep == "sql" else "file")(buffer, folder)


# -- the buffer, in memory ---------------------------------------------------------------------------------------------


class MemoryStorage:
    """Holds the explore step that is trained on, with its computed columns, and the steps that are ready after it.

    A step may come in while another is trained on. `advance` then puts it in the place of the step before.

    Attributes:
        batch, experiences: number (EID.batch; 0 before the first) and experiences of the step that is trained on.
        columns: by name, one float32 tensor [response] an experience.
        ready: by number, the experiences of the steps after it.
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
        """Put explore step `batch` in the place of the one that was trained on; earlier ones are forgotten."""
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

    It is sized, so that Lightning neither pre-fetches nor counts by exhausting it. It is lazy: the buffer is read only
    after the explorer has filled it. It is stateful: a run that was stopped in the middle of a step goes on with the
    next item.

    Attributes:
        storage: the buffer.
        optimizer_steps: number of batches that the step's experiences are dealt into, by whole groups.
        inner_epochs: number of passes over them, each dealt anew.
        seed: of the dealing. The order depends on it, on the explore step, and on the pass.
        max_response_length: longest response that the run allows, in tokens; None: unknown, see `OptimizerBatch`.

    Raises:
        ConfigError: a number of steps or passes is below 1; or the loader is read, and nothing has filled the
            storage.
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
            # Counted before the yield: a checkpoint after its training step then resumes with the next one.
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
        """Row numbers of each batch of one pass: whole groups in a seeded order, batches of similar sizes."""
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


# -- Lightning's data modules ------------------------------------------------------------------------------------------


class UnmovedDataModule(L.LightningDataModule):
    """Base of the data modules, whose batches stay where they are."""

    def everywhere(self, obtain: Callable[[], list[Experience]]) -> list[Experience]:
        """The experiences that `obtain` returns on rank 0, on every rank; the other ranks do not call it."""
        trainer = self.trainer
        if trainer is None or trainer.world_size == 1:
            return obtain()
        experiences = obtain() if trainer.is_global_zero else []
        payload = trainer.strategy.broadcast(Experience.serialize_many(experiences))
        return experiences if trainer.is_global_zero else Experience.deserialize_many(payload)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Move nothing: the trainer moves each micro-batch once it is collated."""
        return batch


class ExperienceDataModule(UnmovedDataModule):
    """Experiences between explorer and trainer.

    Args:
        add_strategy, operators, auxiliary_models, folder: see `ExperiencePipeline`.
        optimizer_steps, inner_epochs, seed, max_response_length: see `ExperienceLoader`.
        keep: writes the experiences of every step, as the trainer gets them; None: they are not kept.
        experts: expert data that join every step after the strategies; None: there are none.

    Attributes:
        storage: the buffer, with the step that is trained on and those that are ready.

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
        operators: Operators = (),
        auxiliary_models: AuxiliaryModels | None = None,
        folder: str | Path | None = None,
        keep: StepKeeper | None = None,
        experts: "ExpertData | None" = None,
        max_response_length: int | None = None,
    ) -> None:
        super().__init__()
        self.storage = MemoryStorage()
        self.pipeline = ExperiencePipeline(add_strategy, operators, auxiliary_models=auxiliary_models, folder=folder)
        self._loader = partial(ExperienceLoader, self.storage, optimizer_steps, inner_epochs, seed, max_response_length)
        self._loader()  # refuses wrong numbers now, before engines are loaded
        self._keep = keep
        self._experts = experts

    def share(self, step: int) -> list[Experience]:
        """The experiences of explore step `step`, which is ready on rank 0. Afterwards it is ready on every rank."""
        self.storage.ready[step] = self.everywhere(lambda: self.storage.ready[step])
        return self.storage.ready[step]

    async def fill(
        self, experiences: list[Experience], step: int, more: MoreRollouts | None = None, *, all_rows: bool = False
    ) -> dict[str, float]:
        """Weigh an explore step's experiences and take them into the buffer; returns the pipeline's metrics.

        They wait there for `storage.advance`, while another step may be trained on. If the strategies leave nothing of
        a step, it is empty: its items train nothing, and are counted.

        Args:
            experiences, step: of the explore step, and its number.
            more: asked for further tasks if a strategy wants the step full.
            all_rows: see `ExperiencePipeline.process`.

        Raises:
            OperatorError: an operator failed; the buffer holds what it held before.
            StorageError: the expert data cannot be read, or have ended.
        """
        weighed, metrics = await self.pipeline.process(experiences, step, more, all_rows=all_rows)
        return await self._take_in(weighed, metrics, step)

    async def fill_groups(
        self, groups: Sequence[TidiedGroup], filtered: Sequence[TidiedGroup], step: int, *, all_rows: bool = False
    ) -> dict[str, float]:
        """Do as `fill` for a step of groups that were tidied one by one; see `ExperiencePipeline.weigh_groups`.

        Raises:
            StorageError: as `fill`.
        """
        weighed, metrics = await self.pipeline.weigh_groups(groups, filtered, step, all_rows=all_rows)
        return await self._take_in(weighed, metrics, step)

    async def _take_in(self, weighed: list[Experience], metrics: dict[str, float], step: int) -> dict[str, float]:
        """Make a weighed step ready, with expert data if there are any; returns the metrics."""
        if self._experts is not None:
            joining = self._experts.read(step)
            weighed += joining
            metrics["experience_pipeline/expert"] = float(len(joining))
        await asyncio.to_thread(share_inputs, weighed)  # a group's rollouts may be of several workers
        if self._keep is not None:
            await asyncio.to_thread(self._keep, step, weighed)
        self.storage.ready[step] = weighed  # at the end: an interruption during an await must find the step not taken
        if self._experts is not None:
            self._experts.commit()
        return metrics

    async def prepare(self) -> None:
        """Prepare the operators, on the loop that `fill` runs on. `fill` does it, too. OperatorError: one failed."""
        await self.pipeline.prepare()

    def teardown(self, stage: str) -> None:
        """Close the operators, on the loop that they were prepared on, as long as it runs."""
        if self.pipeline.chain is not None:
            self.pipeline.chain.end()

    def on_exception(self, exception: BaseException) -> None:
        """Close the operators after an error. This error reaches the user; one of closing is only logged."""
        if self.pipeline.chain is not None:
            self.pipeline.chain.end(after_error=True)

    def train_dataloader(self) -> ExperienceLoader:
        """A sized, lazy, stateful loader for the whole run."""
        return self._loader()

    def state_dict(self) -> dict[str, Any]:
        state = self.storage.state_dict()
        state["judged_by"] = [criterion.metric for criterion in self.pipeline.criteria if criterion.seen]
        return state if self._experts is None else state | {"experts": self._experts.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the buffer and the position in the expert data, which begin anew if the state has none."""
        self.storage.load_state_dict(state_dict)
        for criterion in self.pipeline.criteria:
            criterion.seen = criterion.metric in state_dict.get("judged_by", ())  # which older checkpoints lack
        if self._experts is not None and "experts" in state_dict:
            self._experts.load_state_dict(state_dict["experts"])

"""The LightningDataModule: holds the buffer, lets experiences in through the pipeline, hands out optimizer batches."""

from typing import Any

import lightning as L

from trinity_lightning.buffer.loader import ExperienceLoader
from trinity_lightning.buffer.pipeline import ExperiencePipeline, StrategySpec
from trinity_lightning.buffer.storage.memory import MemoryStorage
from trinity_lightning.common.experience import Experience


class ExperienceDataModule(L.LightningDataModule):
    """Experiences between explorer and trainer.

    Args:
        add_strategy: how rewards become advantages: a name, or several (name, arguments) that follow each other.
        optimizer_steps: optimizer steps an explore step.
        inner_epochs: passes over an explore step's experiences.
        seed: seed of the dealing of groups into optimizer steps.

    Raises:
        ValueError, TypeError: an unknown strategy, or arguments it does not have.
    """

    def __init__(
        self,
        add_strategy: StrategySpec = "grpo",
        *,
        optimizer_steps: int = 1,
        inner_epochs: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.storage = MemoryStorage()
        self.pipeline = ExperiencePipeline(add_strategy, self.storage)
        self.optimizer_steps = optimizer_steps
        self.inner_epochs = inner_epochs
        self._seed = seed

    @property
    def batch(self) -> int:
        """The explore step whose experiences the buffer holds; 0 before the first."""
        return self.storage.batch

    @property
    def experiences(self) -> list[Experience]:
        """What the trainer will be given."""
        return self.storage.experiences

    async def fill(self, experiences: list[Experience], step: int) -> dict[str, float]:
        """Replace the buffer's contents by an explore step's experiences, weighed; the pipeline's metrics.

        A step of which the strategies leave nothing is an empty one: its items train nothing and are counted.
        """
        self.storage.begin()
        metrics = await self.pipeline.process(experiences, step)
        self.storage.commit(step)
        return metrics

    def train_dataloader(self) -> ExperienceLoader:
        """One sized, lazy, stateful loader for the whole run."""
        return ExperienceLoader(self.storage, self.optimizer_steps, self.inner_epochs, self._seed)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Nothing is moved here: micro-batches are padded on the device when they are cut."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The buffer."""
        return self.storage.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the buffer."""
        self.storage.load_state_dict(state_dict)

"""What a policy asks of its critic, if it has one; without one, advantages come with the experiences."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from trinity_lightning.common.alone import ALONE, Alone
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.training import Layout
from trinity_lightning.trainer.micro_batch import MicroBatch
from trinity_lightning.trainer.passes import Passes
from trinity_lightning.trainer.placement import WHOLE, Whole

Columns = dict[str, list[Tensor]]


class CriticHooks:
    """Where a critic takes part in the training of a policy; these do nothing, those of `critic.Critic` do."""

    @property
    def trained(self) -> Mapping[str, nn.Module]:
        """What is trained in addition to the policy, by its name in metrics."""
        return {}

    @property
    def models(self) -> list[Any]:
        """The value model, if there is one."""
        return []

    def groups(self) -> list[dict[str, Any]]:
        """Further parameters for the policy's optimizer, at their own learning rate."""
        return []

    def usable_layout(self, layout: Layout) -> Layout:
        """The layout, or what the value model can do of it."""
        return layout

    def check(self, passes: Passes, policy: Any) -> None:
        """Refuse models that no values can be computed of."""

    def begin(self, batch: OptimizerBatch, step: int) -> None:
        """An optimizer batch is going to be trained on, as optimizer step `step`, counted from 0."""

    def with_values(self, passes: Passes) -> Passes:
        """The passes of the policy, which yield values behind log-probabilities and entropies."""
        return passes

    def joined(
        self, policy_loss: Tensor, values: list[Tensor], micro: MicroBatch, batch: OptimizerBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, of policy and critic, and the critic's metrics."""
        return policy_loss, {}

    def metrics(self, batch: OptimizerBatch) -> dict[str, float]:
        """What values and returns of an optimizer batch were before the step's first update."""
        return {}

    def columns(
        self, passes: Passes, policy: Any, batch: OptimizerBatch, placement: Whole = WHOLE, ranks: Alone = ALONE
    ) -> Columns:
        """The columns old_logprobs and values."""
        return {}

    def weigh(self, batch: OptimizerBatch, columns: Columns) -> Columns:
        """Advantages and returns of an explore step."""
        return {}

    def adapt(self, batch: OptimizerBatch, columns: Columns) -> None:
        """Let an adaptive weight of the KL follow what an explore step's columns say."""

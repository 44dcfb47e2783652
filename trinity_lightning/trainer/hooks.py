"""Where several processes, and a critic, take part in training a policy; what is here does it with neither."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trinity_lightning.common.alone import ALONE, Alone
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.training import Layout
from trinity_lightning.trainer.layout import MicroBatch, Part, Passes

Columns = dict[str, list[Tensor]]


class Whole:
    """One process has all weights; several do some of this otherwise (`ddp.Replicas`, `shards.Shards`)."""

    def seed_noise(self) -> None:
        """Set the random state that dropout draws from, before each optimizer batch of a model with dropout."""

    def passes(self, shares: Sequence[Sequence[Part]]) -> list[Part | None]:
        """The passes of this rank, out of the micro-batches of all; None: one of nothing, for the others' sake."""
        return list(shares[0])

    def logprobs(self, function: Any, model: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """What the `LogprobFn` yields of the policy or the reference."""
        return function(model, *arguments)

    def add_up_gradients(self, model: Any) -> None:
        """Make the model's gradients those of all ranks' micro-batches."""

    def from_all_ranks(self, losses: list[Any], metrics: list[Any]) -> tuple[list[Any], list[Any]]:
        """Losses and metrics of the micro-batches of all ranks, in the order of ranks, from those of this one."""
        return losses, metrics

    def clip(self, parameters: Iterable[nn.Parameter], limit: float | None) -> float:
        """Norm of the gradient, before it is clipped; one that is not finite stays as it is.

        Clips by torch itself: Lightning's `clip_gradients` computes the norm once more, and refuses fused optimizers
        under mixed precision, though only a gradient scaler (float16) could not do with them.
        """
        parameters = [p for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if limit is not None and norm.isfinite():
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return float(norm)

    def faulty_gradients(self, model: nn.Module) -> list[str]:
        """Names of the parameters whose gradients are not finite."""
        return [name for name, gradient in self.gradients(model).items() if not gradient.isfinite().all()]

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """What this process has of them, by the names of the parameters."""
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def end_step(self) -> None:
        """The optimizer has taken its step."""

    def on_all_ranks(self, name: str, *arguments: Any) -> None:
        """Rank 0 is about to do something alone: all others do it too, if it takes them."""

    def state_dict(self, model: Any) -> dict[str, Tensor]:
        """The policy's weights, on rank 0, which asks alone."""
        return model.state_dict()


WHOLE = Whole()


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

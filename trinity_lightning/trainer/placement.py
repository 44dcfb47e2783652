"""How the weights of a policy lie in the processes that train it: here, all of them in one process."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trinity_lightning.common.ranks import ALONE, Alone
from trinity_lightning.trainer.layout import Part


class Whole:
    """One process has all weights; several do some of this otherwise (`ddp.Replicas`, `shards.Shards`).

    Attributes:
        ranks: the processes.
    """

    ranks: Alone = ALONE

    def seed_noise(self) -> None:
        """Set the random state that dropout draws from, before each optimizer batch of a model with dropout."""

    def passes(self, shares: Sequence[Sequence[Part]]) -> list[Part | None]:
        """The passes of this rank, out of the micro-batches of all; None: one of nothing, for the others' sake."""
        return list(shares[self.ranks.rank])

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
        """Rank 0 calls it before it does something that only it was asked for: others join in, if it takes them."""

    def state_dict(self, model: Any) -> dict[str, Tensor]:
        """The policy's weights, on rank 0, which asks alone."""
        return model.state_dict()


WHOLE = Whole()

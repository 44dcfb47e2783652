"""Placement of a policy's weights in the processes that train it: here, all weights in one process."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trinity_lightning.common.ranks import ALONE, Alone
from trinity_lightning.trainer.layout import Part


class Whole:
    """One process with all weights; several processes override some of this (`ddp.Replicas`, `fsdp.Shards`).

    Attributes:
        ranks: the processes.
    """

    ranks: Alone = ALONE

    def seed_noise(self) -> None:
        """Set the random state that dropout draws from; called before each optimizer batch of a model with dropout."""

    def passes(self, shares: Sequence[Sequence[Part]]) -> list[Part | None]:
        """The passes of this rank, from the micro-batches of all ranks.

        None is an empty pass, made because the other ranks make one.
        """
        return list(shares[self.ranks.rank])

    def logprobs(self, function: Any, model: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """The results of a `LogprobFn` for the policy or the reference."""
        return function(model, *arguments)

    def add_up_gradients(self, model: Any) -> None:
        """Add up the model's gradients over the micro-batches of all ranks."""

    def from_all_ranks(self, losses: list[Any], metrics: list[Any]) -> tuple[list[Any], list[Any]]:
        """Exchange this rank's losses and metrics for those of all ranks' micro-batches, in the order of ranks."""
        return losses, metrics

    def clip(self, parameters: Iterable[nn.Parameter], limit: float | None) -> float:
        """Clip the gradient, unless its norm is not finite; returns the norm from before.

        torch itself clips: Lightning's `clip_gradients` computes the norm once more, and refuses fused optimizers under
        mixed precision, though they only conflict with a gradient scaler (float16).
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
        """This process's gradients by the names of the parameters."""
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def end_step(self) -> None:
        """Do what has to follow a step of the optimizer: with one process, nothing."""

    def on_all_ranks(self, name: str, *arguments: Any) -> None:
        """Let the other ranks make a call that only rank 0 got, if it needs them; rank 0 calls this first."""

    def state_dict(self, model: Any) -> dict[str, Tensor]:
        """The policy's weights; rank 0 alone asks for them."""
        return model.state_dict()


WHOLE = Whole()

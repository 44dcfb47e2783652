"""Loss scaling: in float16 most gradients of activations would be too small a number without it."""

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.errors import LossScaleError

logger = logging.getLogger(__name__)

START, LEAST = 2.0**16, 1.0
INTERVAL = 2000


@dataclass
class LossScale:
    """The factor of a float16 policy's loss in its backward pass, by the rule of torch.amp.GradScaler.

    float16 ends at 65,504, and rounds to zero below 3e-8. Gradients of weights add up in float32 (`Tensor.grad_dtype`)
    and are divided by the factor there; only the backward pass through the layers is scaled. A gradient that is not
    finite, of a loss that is, has overflowed: the step is left out, and the factor is halved. After `interval` steps
    without an overflow it is doubled. It stays a power of two, by which nothing is rounded. All ranks have the same
    sum of gradients, and so the same factor.

    Attributes:
        scale: the present factor.
        interval: steps without an overflow after which it is doubled.
        clean_steps: steps since it last changed.
        skipped_steps: steps so far that were left out because of an overflow.
    """

    scale: float = START
    interval: int = INTERVAL
    clean_steps: int = 0
    skipped_steps: int = 0

    def divide(self, gradients: Iterable[Tensor]) -> None:
        """Divide float32 gradients of the scaled loss by the factor."""
        torch._foreach_mul_(list(gradients), 1 / self.scale)  # pyright: ignore[reportPrivateImportUsage]

    def stepped(self) -> None:
        """Count an optimizer step that was taken, and double the factor if it is time."""
        self.clean_steps += 1
        if self.clean_steps >= self.interval:
            self.scale, self.clean_steps = 2 * self.scale, 0

    def overflowed(self, explore_step: int) -> None:
        """Count a step that is left out, and halve the factor.

        Raises:
            LossScaleError: the factor is the least one, and a smaller one would not help.
        """
        if self.scale <= LEAST:
            self.scale, self.clean_steps = START, 0  # of a resumed run, which begins with this item
            raise LossScaleError(
                f"the gradient of explore step {explore_step} overflows float16 even at the least loss scale, "
                f"{LEAST:g}, after {self.skipped_steps} steps that were left out: model.dtype=fp16 is not for this "
                "policy, or the learning rate is too high. In a new run set model.dtype=bf16, or fp32 on a GPU without "
                "bfloat16; the weights are those of the last good step."
            )
        overflow = self.scale
        self.scale, self.clean_steps, self.skipped_steps = overflow / 2, 0, self.skipped_steps + 1
        logger.warning(
            "the gradient of explore step %d overflowed float16 at loss scale %g: no optimizer step was taken, %d so "
            "far; the scale is now %g.",
            *(explore_step, overflow, self.skipped_steps, self.scale),
        )

    def metrics(self) -> dict[str, float]:
        """Metrics of an optimizer batch."""
        return {"actor/loss_scale": self.scale, "actor/skipped_steps": self.skipped_steps}

    def state_dict(self) -> dict[str, Any]:
        """The factor and its counts, for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the factor and counts of a checkpoint; the interval stays."""
        self.scale, self.clean_steps, self.skipped_steps = (
            state[name] for name in ("scale", "clean_steps", "skipped_steps")
        )

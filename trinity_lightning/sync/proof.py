"""The proof that the policy's weights arrived in its engines.

Checksums cannot prove it, because a CPU engine packs its weights into forms of its own. Log-probabilities can: a
*probe* compares engine and trainer on a fixed text. While the weights are still equal, a sync that does nothing would
pass a probe; hence the *drill*: once, before the first step, both sides are given perturbed weights.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.pictures.processor import PictureProcessor
from trinity_lightning.common.pictures.prompt import Expansion
from trinity_lightning.errors import WeightSyncError
from trinity_lightning.sync.stream import in_parts

# About 96 tokens of ordinary text, digits and punctuation. Random tokens would be unlikely ones, for which bfloat16 is
# coarsest.
PROBE_TEXT = (
    "The sum of two numbers is found by adding them. For example, 12 + 7 = 19, and 3 + 4 = 7. "
    "If a train leaves at 9:15 and arrives at 11:45, the journey takes two hours and thirty minutes. "
    "Water boils at 100 degrees and freezes at 0 degrees Celsius."
)
PROBE_EDGE = 64  # pixels of the probe's picture
DRILL_SEED = 0
# Scales of the noise, in root mean squares of each tensor. The drill uses the first scale that moves log-probabilities
# by DRILL_CONTRAST nats on average, 2.5 times the largest mean difference that any run allows as rounding. A trained
# model needs little noise, a new one much. At the last scale, 2.5 times the difference that this run allows is enough:
# adapters do not change the head, whose size limits how far they can move the log-probabilities.
DRILL_SCALES = tuple(0.02 * 1.5**i for i in range(15))  # up to 5.8
DRILL_CONTRAST = 0.3
DRILL_FLOOR = 0.01  # least root mean square by which noise is scaled, so that a bias of zeros moves too


def probe_picture(processor: PictureProcessor) -> Expansion:
    """A picture that the probe puts before its text: noise, always the same."""
    pixels = np.random.default_rng(0).integers(0, 256, (PROBE_EDGE, PROBE_EDGE, 3), dtype=np.uint8)
    return processor.expand(processor.token, [Picture(Image.fromarray(pixels))])


@dataclass(frozen=True)
class Tolerance:
    """Allowed absolute differences between log-probabilities of engine and trainer, in nats.

    Attributes:
        mean: allowed mean difference.
        max: allowed difference of each token.
        relative_mean: additional mean difference, as a share of the mean log-probability.
        relative_max: additional difference of each token, as a share of its log-probability. Rounding is largest for
            unlikely tokens, and grows as a policy becomes surer: the largest difference of a sound run went from 0.18
            at its start to 0.73 after 20 steps.
    """

    mean: float
    max: float
    relative_mean: float = 0.0
    relative_max: float = 0.0

    @classmethod
    def of(cls, *dtypes: torch.dtype, quantized: bool = False, on_gpu: bool = False) -> "Tolerance":
        """The tolerance for engine and trainer of these dtypes; `quantized` engines may differ twice as much.

        With float32 on both sides they agree to 1e-3; with 16 bits on one side each layer is rounded, in float16 to an
        eighth of what bfloat16 loses. SmolLM2 with weights and activations rounded to eight bits (float8_e4m3) differs
        by 0.15 nats on average from the same model unrounded, and by 0.17 with one scale a tensor. With four bits the
        difference is larger, and refused. The allowed mean stays below the drill's effect (`DRILL_CONTRAST`).

        `on_gpu`: the engine is a vLLM on a GPU, which in float32 takes the Triton attention, whose products have the
        ten bits of TF32.
        """
        if quantized:
            return cls(0.12, 1.0, relative_mean=0.04, relative_max=0.2)
        if all(dtype == torch.float32 for dtype in dtypes):
            return cls(1e-3, 1e-2 if on_gpu else 1e-3)
        if set(dtypes) <= {torch.float16, torch.float32}:
            return cls(0.01, 0.1, relative_mean=0.004, relative_max=0.02)
        return cls(0.06, 0.5, relative_mean=0.02, relative_max=0.1)

    def limits(self, logprobs: Tensor) -> tuple[float, Tensor]:
        """The allowed mean difference, and the allowed difference of each token [tokens], for the trainer's values."""
        # At most twice the mean, because every token is unlikely for a policy that knows nothing yet.
        mean = min(self.mean + self.relative_mean * float(logprobs.abs().mean()), 2 * self.mean)
        return mean, self.max + self.relative_max * logprobs.abs()


def compare(trainer: Sequence[float], engine: Sequence[float], tolerance: Tolerance, check: str) -> tuple[float, float]:
    """Mean and maximum absolute difference of two lists of log-probabilities; `check` names the comparison.

    Raises:
        WeightSyncError: a difference is beyond the tolerance, or not a number; the message has both values.
    """
    if len(trainer) != len(engine) or not trainer:
        raise different_texts(trainer, engine, check)
    logprobs = torch.tensor(trainer, dtype=torch.float64)
    difference = (logprobs - torch.tensor(engine, dtype=torch.float64)).abs()
    mean, maximum = float(difference.mean()), float(difference.max())
    allowed, limits = tolerance.limits(logprobs)
    if not (mean <= allowed and (difference <= limits).all()):
        worst = max(zip(difference.tolist(), limits.tolist(), strict=True), key=lambda pair: pair[0] - pair[1])
        raise different_logprobs(trainer, engine, (mean, allowed), worst, check)
    return mean, maximum


def perturbed(model: nn.Module) -> AbstractContextManager[Callable[[float], None]]:
    """A context with a function that perturbs all parameters of a model; the context's end restores them bit for bit.

    The function takes a scale, and gives each parameter its original value plus seeded noise of `scale` times its root
    mean square. The noise is made on the parameters' device, and the originals are copied to the host. With a model in
    shards (`trainer.fsdp.Shards`), every rank perturbs its shards.
    """
    parts = in_parts(model)
    return perturbed_tensors(model.parameters()) if parts is None else parts.perturbed()


@contextmanager
def perturbed_tensors(parameters: Iterable[Tensor]) -> Iterator[Callable[[float], None]]:
    """A context as that of `perturbed`, for these parameters."""
    parameters = [parameter.detach() for parameter in parameters]
    saved = [parameter.to("cpu", copy=True) for parameter in parameters]

    def perturb(scale: float) -> None:
        generator = torch.Generator(parameters[0].device).manual_seed(DRILL_SEED)
        for parameter, original in zip(parameters, saved, strict=True):
            parameter.copy_(original)
            size = torch.linalg.vector_norm(parameter, dtype=torch.float32) / math.sqrt(parameter.numel())
            parameter.add_(noise(parameter.shape, generator, scale, size).to(parameter.dtype))

    try:
        yield perturb
    finally:
        for parameter, original in zip(parameters, saved, strict=True):
            parameter.copy_(original)


def noise(shape: torch.Size, generator: torch.Generator, scale: float, size: Tensor) -> Tensor:
    """Normal noise of `scale` times `size`, the root mean square of the tensor that it is added to."""
    drawn = torch.randn(shape, generator=generator, device=generator.device)
    return drawn.mul_(scale * size.clamp_min(DRILL_FLOOR))


@dataclass(eq=False)
class Synchronizer:
    """Sends a policy's weights to its engines, and checks that they arrived.

    Attributes:
        perturbed: makes the context in which the drill perturbs the policy; see the function `perturbed`.
        send: hands the weights to every engine.
        trainer_logprobs: returns the trainer's log-probabilities of the probe's text.
        engine_logprobs: returns each engine's log-probabilities of it.
        tolerance: allowed differences between them.
        check_interval: number of syncs from one probe to the next; the first sync is always probed.
        with_drill: True if the drill precedes the first sync.
        drill_scale: the scale of the drill's noise that was enough, perhaps before the run was resumed; None: no drill
            was made.
        has_pictures: True if the probe's text has pictures. The engines score it before its first comparison, too:
            states of pictures that they keep from older weights would show.
        probes_next: True to probe the next sync in any case.
    """

    perturbed: Callable[[], AbstractContextManager[Callable[[float], None]]]
    send: Callable[[], None]
    trainer_logprobs: Callable[[], list[float]]
    engine_logprobs: Callable[[], list[list[float]]]
    tolerance: Tolerance
    check_interval: int
    with_drill: bool
    drill_scale: float | None = None
    has_pictures: bool = False
    probes_next: bool = False
    _syncs: int = field(default=0, init=False)

    def sync(self) -> dict[str, float]:
        """Make the drill before the first sync, send the present weights, probe them if a probe is due; metrics.

        Raises:
            WeightSyncError: an engine did not take the weights.
        """
        if self._syncs == 0 and self.has_pictures:
            self.engine_logprobs()
        if self._syncs == 0 and self.with_drill:
            self._drill()
        start = time.perf_counter()
        self.send()
        metrics = {"time/sync_weight": time.perf_counter() - start}
        if self.probes_next or self._syncs % self.check_interval == 0:
            self.probes_next = False
            mean, maximum = self._compare(self.trainer_logprobs(), f"probe of weight sync {self._syncs + 1}")
            metrics |= {"sync/probe_diff/mean": mean, "sync/probe_diff/max": maximum}
        self._syncs += 1
        return metrics

    def _drill(self) -> None:
        before = torch.tensor(self.trainer_logprobs())
        least = self.drill_scale or 0.0
        with self.perturbed() as perturb:
            for scale in (scale for scale in DRILL_SCALES if scale >= least):
                perturb(scale)
                after = self.trainer_logprobs()
                enough = DRILL_CONTRAST if scale < DRILL_SCALES[-1] else min(DRILL_CONTRAST, 5 * self.tolerance.mean)
                if float((torch.tensor(after) - before).abs().mean()) > enough:
                    self.send()
                    self._compare(after, "drill with perturbed weights")
                    self.drill_scale = scale
                    return
        raise unmoved()

    def _compare(self, trainer: list[float], check: str) -> tuple[float, float]:
        """The largest mean and maximum difference of any engine."""
        differences = [compare(trainer, engine, self.tolerance, check) for engine in self.engine_logprobs()]
        return max(mean for mean, _ in differences), max(maximum for _, maximum in differences)


# -- errors; `check` names the probe or drill --------------------------------------------------------------------------


def different_texts(trainer: Sequence[float], engine: Sequence[float], check: str) -> WeightSyncError:
    """The error for lists of log-probabilities of different lengths."""
    return WeightSyncError(
        f"{check}: {len(trainer)} log-probabilities of the trainer, {len(engine)} of the engine: they read the text "
        "with different tokenizers."
    )


def different_logprobs(
    trainer: Sequence[float], engine: Sequence[float], mean: tuple[float, float], worst: tuple[float, float], check: str
) -> WeightSyncError:
    """The error for log-probabilities that differ by more than rounding.

    `mean` is the mean difference, and `worst` the worst token's, each together with the allowed one.
    """
    return WeightSyncError(
        f"{check}: the engine's log-probabilities are not the trainer's. Mean |difference| {mean[0]:.3g} (allowed "
        f"{mean[1]:.3g}), of the worst token {worst[0]:.3g} (allowed {worst[1]:.3g}); mean log-probability of the "
        f"trainer {sum(trainer) / len(trainer):.4f}, of the engine {sum(engine) / len(engine):.4f}. "
        "The engine does not have the trainer's weights, computes in another dtype (engine.dtype; --dtype of a "
        "server of engine.urls), or another model. One of yours must compute `_logprobs` with what `_take` was given."
    )


def unmoved() -> WeightSyncError:
    """The error for a policy whose log-probabilities no noise of the drill moves."""
    return WeightSyncError(
        "the drill could not perturb the policy enough to tell whether weights arrive: its log-probabilities "
        "hardly depend on its weights. Is the checkpoint whole? synchronizer.drill=false skips the drill."
    )


def not_in_time(seconds: float) -> WeightSyncError:
    """The error for a weight sync that took longer than so many seconds."""
    return WeightSyncError(
        f"a weight sync did not end within {seconds:g} s (synchronizer.sync_timeout): does every engine live? "
        "Restart the servers of engine.urls: they may hold half of the weights."
    )

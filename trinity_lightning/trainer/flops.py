"""What a training step costs: floating-point operations, by the shape of the model and of what it computes.

Operations of matrix products, forward and backward, as in appendix B of PaLM (arXiv 2204.02311): a product of a token
with a weight takes 2 forward and 4 backward. Computing activations again is no part of what a step needs.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trinity_lightning.common.hardware import SHAPE, product_flops
from trinity_lightning.common.model_config import layer_configs, query_width
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.trainer.layout import Part, computed_tokens, trained_tokens

logger = logging.getLogger(__name__)

# -- what a device can compute: `perf/mfu` is a share of it ------------------------------------------------------------


MAX_ROWS, MAX_WIDTH = 512, 2048  # of a product that is timed: larger ones are no faster
KINDS = 4  # of a model's products, the largest ones


@dataclass
class Peak:
    """Operations a second of matrix products that the devices of a run can compute: `perf/mfu` is a share of it.

    On a CPU it is measured, with products of the model's own shapes among others; on a GPU known for bfloat16 by its
    name. A step that is faster shows that the value was too low, and its own speed takes its place.
    """

    flops: float
    _is_measured_anew: bool = False

    @classmethod
    def of(cls, model: Any, device: torch.device, dtype: torch.dtype, tokens: int, devices: int) -> "Peak | None":
        """The peak of as many devices as train, all alike; None if it is not known.

        Args:
            model: the model that is trained.
            device: one of the devices.
            dtype: what the model's products are computed in.
            tokens: most tokens of a micro-batch.
            devices: how many train.
        """
        flops = peak_flops(device, dtype, product_shapes(model, tokens) if device.type == "cpu" else ())
        return None if flops is None else cls(flops * devices)

    def share(self, flops: float) -> float:
        """Share of the peak, at most 1, that so many operations a second are."""
        if flops > self.flops:
            if not self._is_measured_anew:
                logger.warning(
                    "perf/mfu: a step computed %.3g operations a second, and the best product at the start no more "
                    "than %.3g, as when others use the machine. From now on it is a share of the fastest step.",
                    flops,
                    self.flops,
                )
            self.flops, self._is_measured_anew = flops, True
        return flops / self.flops


def peak_flops(device: torch.device, dtype: torch.dtype, shapes: tuple[tuple[int, int, int], ...] = ()) -> float | None:
    """Operations a second of matrix products in this dtype on one device; None where that is not known.

    On a CPU the best of products of fixed shapes and of `shapes`, measured within a second.
    """
    if device.type == "cpu":
        threads = torch.get_num_threads()
        fixed = product_flops(dtype, threads)
        return max(fixed, product_flops(dtype, threads, shapes)) if shapes else fixed
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    from trinity_lightning.common.hardware import known_gpu

    gpu = known_gpu(torch.cuda.get_device_name(device))
    return gpu and gpu.flops


def product_shapes(model: Any, tokens: int) -> tuple[tuple[int, int, int], ...]:
    """Rows, inner and columns of the largest kinds of products of a model, cut to what is timed quickly.

    Products that are smaller than the fixed ones are left out: those are faster.
    """
    rows = min(tokens, MAX_ROWS)
    weights = {
        tuple(min(size, MAX_WIDTH) for size in weight.shape) for weight in model.parameters() if weight.ndim == 2
    }
    large = {(rows, inner, columns) for columns, inner in weights if 2 * rows * inner * columns >= math.prod(SHAPE)}
    return tuple(sorted(large, key=lambda shape: (-math.prod(shape), shape))[:KINDS])


# -- what a step needs -------------------------------------------------------------------------------------------------

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # of a layer, as configurations call them


@dataclass(frozen=True)
class Work:
    """What a step sends through the model: tokens through the layers, padding included; positions through the head.

    `pairs` are those of a token and one that it attends to (itself, or one before), in one layer.
    """

    tokens: int
    predicted: int
    pairs: int

    @classmethod
    def of(cls, lengths: Sequence[int], parts: Sequence[Part], predicted: int) -> "Work":
        return cls(computed_tokens(parts), predicted, sum(_pairs(lengths, part) for part in parts))


def _pairs(lengths: Sequence[int], part: Part) -> int:
    if not part.groups:  # rows padded to the longest
        return len(part.rows) * attended(part.tokens // len(part.rows))
    return sum(
        attended(group.prefix) + sum(attended(lengths[row] - group.prefix, group.prefix) for row in group.rows)
        for group in part.groups
    )


def attended(tokens: int, before: int = 0) -> int:
    """Pairs of so many tokens under a causal mask, each of which also attends to all tokens before them."""
    return tokens * before + tokens * (tokens + 1) // 2


@dataclass(frozen=True)
class ModelSize:
    """Weights that a token is multiplied by.

    Attributes:
        body: those of the layers; of a mixture's experts the share that a token is sent to.
        head: those of the output embeddings, tied or not. Input embeddings are looked up, and multiply nothing.
        attention: width of all queries of a token, over all layers that attend.
        frozen: whether only adapters are trained: a frozen weight has no gradient.
    """

    body: int
    head: int
    attention: int
    frozen: bool = False

    @classmethod
    def of(cls, model: Any) -> "ModelSize":
        config = model.config.get_text_config()
        head = model.get_output_embeddings().weight
        tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)} | {id(head)}
        experts = next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), None)
        share = config.num_experts_per_tok / experts if experts else 1.0
        body = sum(
            parameter.numel() * (share if ".experts." in name else 1.0)
            for name, parameter in model.named_parameters()
            if id(parameter) not in tables
        )
        layers = layer_configs(config)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
        attend = "full_attention", "sliding_attention"  # not linear_attention
        width = sum(query_width(layer) for layer, kind in zip(layers, kinds, strict=False) if kind in attend)
        return cls(round(body), head.numel(), width, frozen=not head.requires_grad)

    def training_flops(self, work: Work) -> int:
        """Operations of forward and backward: 6 a token and weight; 4 + 8 a pair and unit of the queries' width.

        4 a frozen weight: adapters are so small that they count as one.
        """
        weights = self.body * work.tokens + self.head * work.predicted
        return (4 if self.frozen else 6) * weights + 12 * self.attention * work.pairs


def products_dtype(model: Any, device: torch.device, precision: Any) -> torch.dtype:
    """What products are computed in, under Lightning's precision plugin of the fit."""
    with precision.forward_context():  # autocast, if precision=bf16-mixed
        mixed = torch.is_autocast_enabled(device.type)
        return torch.get_autocast_dtype(device.type) if mixed else model.dtype


def step_costs(
    batch: OptimizerBatch, parts: Sequence[Part], seconds: float, size: ModelSize, peak: Peak | None
) -> dict[str, float]:
    """Metrics of what the micro-batches of an optimizer step computed, and how fast.

    Without `peak`, which is not known then, there is no `perf/mfu`.
    """
    lengths = [len(e.tokens) for e in batch.experiences]
    computed, trained = computed_tokens(parts), trained_tokens(batch, parts)
    real = sum(lengths[row] for part in parts for row in part.rows)
    costs = {
        "perf/padding_ratio": computed / real,
        "perf/computed_tokens": computed,
        "perf/shared_prefix": any(part.groups for part in parts),
        "perf/tokens_per_second": real / seconds,
        "perf/trained_tokens_per_second": trained / seconds,
        "time/train": seconds,
    }
    if peak is not None:
        costs["perf/mfu"] = peak.share(size.training_flops(Work.of(lengths, parts, trained)) / seconds)
    return costs

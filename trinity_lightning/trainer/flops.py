"""Floating-point operations of a training step, from the shape of the model and of its micro-batches.

Matrix products are counted, forward and backward, as in appendix B of PaLM (arXiv 2204.02311): a product of a token
with a weight takes 2 operations forward and 4 backward. Activations that are computed again do not count.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.hardware import SHAPE, TORCH_DTYPES, known_gpu, product_flops
from trinity_lightning.common.model_config import TowerSizes, layer_configs, query_width
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.common.pictures.kept import KeptStates, picture_parts
from trinity_lightning.common.pictures.tensors import PictureTensors
from trinity_lightning.common.ranks import Alone
from trinity_lightning.trainer.layout import Part, computed_tokens, trained_tokens

logger = logging.getLogger(__name__)

# -- the peak of a device: `perf/mfu` is a share of it -----------------------------------------------------------------

MAX_ROWS, MAX_WIDTH = 512, 2048  # bounds of a timed product: larger ones are no faster
KINDS = 4  # number of a model's kinds of products that are timed: the largest ones


@dataclass
class Peak:
    """Operations a second of matrix products that the devices of a run can compute: `perf/mfu` is a share of them.

    The peak of a CPU is measured, with products of the model's own shapes among others. The peak of a GPU is looked up
    by its name, for 16 bits. A faster step shows that the value was too low, and its speed becomes the peak.
    """

    flops: float
    _is_measured_anew: bool = False

    @classmethod
    def of(cls, model: Any, device: torch.device, dtype: torch.dtype, tokens: int, devices: int) -> "Peak | None":
        """The peak of all devices that train, which are alike; None if it is not known.

        Args:
            model: the model that is trained.
            device: one of the devices.
            dtype: dtype of the model's products.
            tokens: most tokens of a micro-batch.
            devices: how many devices train.
        """
        flops = peak_flops(device, dtype, product_shapes(model, tokens) if device.type == "cpu" else ())
        return None if flops is None else cls(flops * devices)

    def share(self, flops: float) -> float:
        """Share of the peak that `flops` operations a second are, at most 1."""
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
    """Operations a second of matrix products in this dtype on one device; None where they are not known.

    On a CPU the best product of fixed shapes and of `shapes` counts; this is measured within a second.
    """
    if device.type == "cpu":
        threads = torch.get_num_threads()
        fixed = product_flops(dtype, threads)
        return max(fixed, product_flops(dtype, threads, shapes)) if shapes else fixed
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    gpu = known_gpu(torch.cuda.get_device_name(device))
    return gpu.flops if gpu and dtype in (torch.float16, TORCH_DTYPES[gpu.half]) else None


def product_shapes(model: Any, tokens: int) -> tuple[tuple[int, int, int], ...]:
    """Rows, inner size and columns of a model's largest kinds of products, cut so that they are timed quickly.

    Products smaller than the fixed ones are left out: the fixed ones are faster.
    """
    rows = min(tokens, MAX_ROWS)
    weights = {
        tuple(min(size, MAX_WIDTH) for size in weight.shape) for weight in model.parameters() if weight.ndim == 2
    }
    large = {(rows, inner, columns) for columns, inner in weights if 2 * rows * inner * columns >= math.prod(SHAPE)}
    return tuple(sorted(large, key=lambda shape: (-math.prod(shape), shape))[:KINDS])


# -- the operations of a step ------------------------------------------------------------------------------------------

# Names that configurations have for the number of experts in a layer.
_EXPERTS = "num_local_experts", "num_experts", "n_routed_experts"


@dataclass(frozen=True)
class Work:
    """The work of a step.

    Attributes:
        tokens: tokens through the layers, padding included.
        predicted: positions through the head.
        pairs: pairs of a token and a token that it attends to (itself, or one before), in one layer.
        pictures: tokens of each different picture of each micro-batch; tower and projector compute it once.
        patches: patches of each picture that a frozen tower computed, where its states are kept; None: the tower
            computed all of `pictures`.
    """

    tokens: int
    predicted: int
    pairs: int
    pictures: tuple[int, ...] = ()
    patches: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, lengths: Sequence[int], parts: Sequence[Part], predicted: int, pictures: tuple[int, ...] = ()
    ) -> "Work":
        """The work of micro-batches of rows with these lengths, and with these pictures."""
        return cls(computed_tokens(parts), predicted, sum(_pairs(lengths, part) for part in parts), pictures)


def _pairs(lengths: Sequence[int], part: Part) -> int:
    if not part.groups:  # rows padded to the longest
        return len(part.rows) * attended(part.tokens // len(part.rows))
    return sum(
        attended(group.prefix) + sum(attended(lengths[row] - group.prefix, group.prefix) for row in group.rows)
        for group in part.groups
    )


def picture_tokens(rows: Sequence[Experience], parts: Sequence[Part]) -> tuple[int, ...]:
    """Number of tokens of each different picture of each micro-batch."""
    counts: list[int] = []
    for part in parts:
        of_rows = [PictureTensors.of_experience(rows[row]) for row in part.rows]
        different = {
            hashed: len(places)
            for pictures in of_rows
            if pictures is not None
            for hashed, places in zip(pictures.hashes, pictures.places, strict=True)
        }
        counts += different.values()
    return tuple(counts)


def attended(tokens: int, before: int = 0) -> int:
    """Number of pairs among `tokens` tokens under a causal mask, if each also attends to `before` earlier tokens."""
    return tokens * before + tokens * (tokens + 1) // 2


@dataclass(frozen=True)
class TowerSize:
    """Weights that pictures are multiplied by.

    Attributes:
        body: weights of the vision tower, for each patch.
        projector: weights between tower and language layers, for each token of a picture.
        attention: width of all queries of a patch, over all layers.
        patches: patches of a picture behind each of its tokens.
        trained: the tower is trained.
        projects: the projector is trained.
    """

    body: int
    projector: int
    attention: int
    patches: int
    trained: bool
    projects: bool

    @classmethod
    def of(cls, model: Any) -> "TowerSize | None":
        """The size of a Hugging Face model's tower; None for a text model."""
        if (sizes := TowerSizes.of(model.config)) is None:
            return None
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        parts = [[p for p in part.values() if id(p) not in tables] for part in picture_parts(model)]
        body, projector = (sum(p.numel() for p in part) for part in parts)
        trained, projects = (any(p.requires_grad for p in part) for part in parts)
        return cls(body, projector, sizes.layers * sizes.hidden, sizes.patches, trained, projects)

    def training_flops(self, work: Work) -> int:
        """Operations forward and backward: a frozen tower is computed forward alone.

        A projector behind it is computed forward, and backward for its weights but not its inputs.
        """
        patches = [self.patches * tokens for tokens in work.pictures] if work.patches is None else work.patches
        weights, pairs = self.body * sum(patches), self.attention * sum(count**2 for count in patches)
        tower = 6 * weights + 12 * pairs if self.trained else 2 * weights + 4 * pairs
        return tower + 2 * (1 + self.projects + self.trained) * self.projector * sum(work.pictures)


@dataclass(frozen=True)
class ModelSize:
    """Weights that a token is multiplied by.

    Attributes:
        body: weights of the layers; experts of a mixture count by the share of them that a token is sent to.
        head: weights of the output embeddings, tied or not. Input embeddings are looked up, and multiply nothing.
        attention: width of all queries of a token, over all layers that attend.
        frozen_body, frozen_head: the weights among these that are not trained, and have no gradient.
        tower: what pictures are multiplied by; None: the model reads text alone.
    """

    body: int
    head: int
    attention: int
    frozen_body: int = 0
    frozen_head: int = 0
    tower: TowerSize | None = None

    @classmethod
    def of(cls, model: Any) -> "ModelSize":
        """The size of a Hugging Face model."""
        config = model.config.get_text_config()
        head = model.get_output_embeddings().weight
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} | {id(head)}
        experts = next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), None)
        share = config.num_experts_per_tok / experts if experts else 1.0
        tower = TowerSize.of(model)
        weights = [
            (parameter.requires_grad, parameter.numel() * (share if ".experts." in name else 1.0))
            for name, parameter in (model if tower is None else model.get_decoder()).named_parameters()
            if id(parameter) not in tables
        ]
        body, frozen_body = sum(size for _, size in weights), sum(size for trained, size in weights if not trained)
        layers = layer_configs(config)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
        attend = "full_attention", "sliding_attention"  # not linear_attention
        width = sum(query_width(layer) for layer, kind in zip(layers, kinds, strict=False) if kind in attend)
        frozen_head = 0 if head.requires_grad else head.numel()
        return cls(round(body), head.numel(), width, round(frozen_body), frozen_head, tower)

    def training_flops(self, work: Work) -> int:
        """Operations forward and backward: 6 for a token and weight, 4 + 8 for a pair and unit of the queries' width.

        A frozen weight takes 4 for a token, as if something before it were trained.
        """
        weights = 6 * (self.body * work.tokens + self.head * work.predicted)
        frozen = 2 * (self.frozen_body * work.tokens + self.frozen_head * work.predicted)
        pictures = 0 if self.tower is None else self.tower.training_flops(work)
        return weights - frozen + 12 * self.attention * work.pairs + pictures


def products_dtype(model: Any, device: torch.device, precision: Any) -> torch.dtype:
    """The dtype of products under the precision plugin of the fit."""
    with precision.forward_context():  # autocast, if precision=bf16-mixed
        mixed = torch.is_autocast_enabled(device.type)
        return torch.get_autocast_dtype(device.type) if mixed else model.dtype


def step_costs(
    batch: OptimizerBatch,
    parts: Sequence[Part],
    seconds: float,
    size: ModelSize,
    peak: Peak | None,
    kept: KeptStates,
    ranks: Alone,
) -> dict[str, float]:
    """Metrics of an optimizer step: tokens that its micro-batches computed, and how fast.

    `perf/mfu` is left out where the peak is not known (None). `kept` has the pictures that a frozen tower computed on
    this one of the ranks.
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
        work = Work.of(lengths, parts, trained, picture_tokens(batch.experiences, parts))
        if kept.is_read:
            computed = tuple(rows for of_rank in ranks.exchange(kept.count()) for rows in of_rank)
            work = replace(work, patches=computed) if kept.of_tower else replace(work, pictures=computed)
        costs["perf/mfu"] = peak.share(size.training_flops(work) / seconds)
    return costs

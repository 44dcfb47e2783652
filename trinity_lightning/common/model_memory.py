"""Estimates the device memory that training a causal language model takes, from the model's shape alone.

Numbers are bytes unless a name says otherwise. Activations are the tensors that autograd saves in a transformer's layer
with root-mean-square norms and a gated feed-forward part; tests compare them with real models.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trinity_lightning.common.hardware import free_memory
from trinity_lightning.common.model_config import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    GPU_BLOCK_BYTES,
    GPU_CHUNK_BYTES,
    TowerSizes,
    layer_configs,
    query_width,
)
from trinity_lightning.common.pictures.kept import picture_parts

FLOAT = 4  # bytes of a float32
_IN_LAYER = re.compile(r"\.\d+\.")  # in the name of a layer's parameter


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a causal language model that decide its memory."""

    parameters: int  # all of them; tied ones count once
    largest: int  # parameters of the largest single tensor, usually the embedding
    layers: int
    hidden: int
    intermediate: int  # width of the feed-forward part that one token passes through (in a mixture, all chosen experts)
    heads: int  # heads of the queries
    query_width: int  # heads of the queries times their width
    key_width: int  # heads of the keys times their width; the values' width is the same
    vocabulary: int
    outside: int  # parameters outside the layers: embeddings, head, last norm
    tower: TowerSizes | None = None  # of a model that reads pictures
    tower_layers: int = 0  # parameters in layers of the tower

    @classmethod
    def of(cls, model: Any) -> "ModelShape":
        """The shape of a Hugging Face model, which may be on the meta device; if layers differ, the widest counts."""
        config = model.config.get_text_config()
        layers = layer_configs(config)
        heads = _largest(layers, "num_attention_heads") or 1
        # Without attention, the part that mixes tokens in its place counts as wide as the hidden states.
        queries = max(map(query_width, layers)) or config.hidden_size
        feed_forward = _largest(layers, "intermediate_size") or 4 * config.hidden_size
        expert = _largest(layers, "moe_intermediate_size") or feed_forward
        chosen = _largest(layers, "num_experts_per_tok")
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        tower = TowerSizes.of(model.config)
        of_pictures = [] if tower is None else [name for part in picture_parts(model) for name in part]
        return cls(
            parameters=sum(sizes.values()),
            largest=max(sizes.values()),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=chosen * expert if chosen else feed_forward,
            heads=heads,
            query_width=queries,
            key_width=(_largest(layers, "num_key_value_heads") or heads) * (queries // heads),
            vocabulary=config.vocab_size,
            outside=sum(size for name, size in sizes.items() if not _IN_LAYER.search(name)),
            tower=tower,
            tower_layers=sum(sizes[name] for name in of_pictures if _IN_LAYER.search(name)),
        )


def _largest(layers: Sequence[Any], name: str) -> int | None:
    """The largest of the layers' numbers with this name; None without one. A layer may have a list (Gemma 3n)."""
    values = [getattr(layer, name, None) for layer in layers]
    numbers = [number for value in values for number in (value if isinstance(value, list) else [value]) if number]
    return max(numbers, default=None)


@dataclass(frozen=True)
class Training:
    """The settings of a run that decide the memory of training."""

    width: int  # bytes of a weight in computations: 2 (bfloat16) or 4
    # Tokens of the longest row (prompt and response), or of both rows of the longest pair: a micro-batch holds at least
    # one. 0: unknown, and taken to be no longer than a micro-batch.
    longest_row: int
    tokens: int | None = None  # computed tokens of a micro-batch; None: as many as are useful and fit
    reference: bool = False  # a frozen copy of the policy is kept
    checkpointing: bool = False  # activations are computed again in the backward pass
    eager: bool = False  # attention keeps its weights, whose number is the square of the length
    repeats_keys: bool = False  # attention keeps keys and values once for every head (sdpa on a GPU before Ampere)
    shards: int = 1  # devices that weights, moments and reference are split over (trainer=fsdp2)
    on_cpu: bool = False
    adapters: int = 0  # parameters of adapters (model.lora), which are trained in place of the weights
    adapter_width: int = 0  # numbers that adapters of all layers keep of each token for the backward pass
    frozen: int = 0  # parameters that are not trained (model.freeze), without adapters
    frozen_tower: bool = False  # the tower for pictures is not trained; with adapters it never is
    kept_states: int = 0  # bytes of pictures' states that are kept during a step (`common.pictures.kept`)
    moments: int = 2 * FLOAT  # bytes that the optimizer keeps for each parameter, besides a float32 master
    value_model: ModelShape | None = None  # the critic, if it is a model of its own
    # Number of processes on a machine that keep masters and moments in the machine's memory
    # (optimizer.name=adamw_offload); 0: they are on the devices.
    on_host: int = 0
    # Number of those processes if adamw_offload were chosen; 0: it would replace an optimizer of the user's own.
    offloadable: int = 1


# -- activations -------------------------------------------------------------------------------------------------------


def layer_bytes(shape: ModelShape, training: Training) -> int:
    """Bytes for each token that autograd saves in one layer.

    Each of the two norms saves a float32 copy of its input, and its normalised and its scaled output. Attention saves
    queries, keys, values and its result; if keys and values are repeated, only the repeated ones. The feed-forward part
    saves the gate, its activation, the other branch and the product. In bfloat16 on a CPU (`trainer.layers`) a norm
    saves its input in place of the float32 copy and the normalised output, and activation and product are computed
    again (with adapters, the activation alone).

    Eager attention also saves keys and values once for every head, and in each head one weight for every token of the
    row: in float32, and again in the weights' dtype if that is another. Adapters save `adapter_width` numbers more.
    """
    width = training.width
    lean = training.on_cpu and width < FLOAT
    norms = 2 * (2 * width + (0 if lean else FLOAT)) * shape.hidden
    keys = shape.query_width if training.repeats_keys else shape.key_width
    attention = 2 * width * (shape.query_width + keys)
    if training.eager:
        weight = FLOAT + (width if width < FLOAT else 0)
        attention += shape.heads * training.longest_row * weight + 2 * width * shape.query_width
    feed_forward = (4 - lean * (1 if training.adapters else 2)) * width * shape.intermediate
    return norms + attention + feed_forward + width * -(-training.adapter_width // shape.layers)


def tower_bytes(tower: TowerSizes, training: Training) -> int:
    """Most bytes for each computed token that its pictures take: as if every token were one of another picture.

    Rows that share a prefix have it once. The pixels are there in float32 and in the weights' dtype, with a mask of a
    byte a pixel. A layer saves the input and the output of its two norms, queries, keys, values and the result of
    attention, and the feed-forward part before and after its activation. A frozen tower saves nothing, nor does one
    with adapters, which are of the language layers.
    """
    width = training.width
    layer = width * (8 * tower.hidden + 2 * tower.intermediate)
    saved = tower.layers * width * tower.hidden + layer if training.checkpointing else tower.layers * layer
    pixels = tower.edge**2 * (3 * (FLOAT + width) + 1)
    return tower.patches * (pixels + (layer if training.adapters or training.frozen_tower else saved))


def activations(shape: ModelShape, training: Training, tokens: int) -> int:
    """Bytes that a forward and backward pass over `tokens` computed tokens takes at its peak, without gradients.

    The peak is in the backward pass: in the head, which has all that the layers saved, two chunks of logits (one kept,
    one computed again) and its own gradient; or in a layer. If embeddings and head are one tensor, the head's gradient
    waits for that of the embeddings meanwhile.
    """
    width, layer = training.width, layer_bytes(shape, training)
    saved = shape.layers * (width * shape.hidden if training.checkpointing else layer)
    norm = (3 * FLOAT + 2 * width) * shape.hidden  # what the last one saves, and the gradients of hidden states
    chunk, block = (CHUNK_BYTES, BLOCK_BYTES) if training.on_cpu else (GPU_CHUNK_BYTES, GPU_BLOCK_BYTES)
    logits, gradient = min(width * tokens * shape.vocabulary, 2 * chunk), gradient_bytes(shape, training, tokens)
    present = 3 * width * shape.intermediate + (layer if training.checkpointing else 0)
    in_head = tokens * (saved + norm) + logits + 3 * block + gradient
    if training.on_cpu:  # the heap keeps what the forward pass of a layer has freed
        in_head += tokens * present
    tied = shape.outside < 2 * shape.largest
    in_layer = tokens * (saved + norm + present) + (FLOAT * shape.largest if gradient and tied else 0)
    values = 0
    if training.value_model is not None:  # it predicts no tokens
        values = activations(replace(training.value_model, vocabulary=0), replace(training, value_model=None), tokens)
    pictures = 0 if shape.tower is None else tower_bytes(shape.tower, training)
    return max(in_head, in_layer) + tokens * pictures + values


def gradient_bytes(shape: ModelShape, training: Training, tokens: int) -> int:
    """Bytes for the gradient of the largest tensor, the head's or the embeddings', besides the sum of micro-batches.

    Autograd makes it anew and casts it to float32. If there are several chunks of logits, each has a gradient, and
    autograd adds these up in float32 first; in shards, `plan.memory.GATHERED` counts that sum. On a CPU they are added
    up in place; frozen weights have none.
    """
    if training.on_cpu or training.adapters:
        return 0
    width = training.width
    in_chunks = training.shards == 1 and width < FLOAT and width * tokens * shape.vocabulary > GPU_CHUNK_BYTES
    return (width + FLOAT + (FLOAT if in_chunks else 0)) * shape.largest


# -- algorithm.max_tokens_per_micro_batch=auto without a memory plan ---------------------------------------------------

# Budgets on a CPU. Each is half of the one before, so that the free memory may differ a little from start to start, and
# the tokens stay the same. With SmolLM2 on two cores with AMX, `short` of benchmarks/vs_trl.py takes 2.4, 2.1 and 1.7 s
# in micro-batches of 512, 1,024 and 2,048 tokens, and `ragged` 19.6 and 16.2 s in micro-batches of 2,048 and 4,096
# (49 and 44 s without AMX's products).
CPU_TOKENS = (4096, 2048, 1024, 512, 256)
# The budget on a CPU for rows that are no longer, whatever memory is free (`plan.gpu.tokens_on_a_cpu`): short rows gain
# less from more tokens, of which 1,024 of SmolLM2 take 0.5 GB.
SHORT_ROWS = 512
# Budgets on a GPU: more tokens gain nothing, and fewer cost further passes over the gradient. Halves, as on a CPU.
GPU_TOKENS = (16384, 8192, 4096)
# The share of the free memory that activations may take: temporaries, fragments and other programs need the rest.
SHARE_OF_FREE = 0.5


def useful_tokens(model: Any, device: torch.device, trainers: int = 1, value_model: Any = None) -> int:
    """Tokens for a micro-batch: as many as help on the device and fit into the memory that is free there now.

    Args:
        model: a loaded Hugging Face model, before its first optimizer step.
        device: the device that it trains on.
        trainers: number of processes that train on this machine, and share its free memory.
        value_model: the critic's model, if there is one: it is trained, too.
    """
    values, on_cpu = None if value_model is None else ModelShape.of(value_model), device.type == "cpu"
    free = free_memory() // trainers if on_cpu else _free_on(device)
    return tokens_that_fit(ModelShape.of(model), model.dtype.itemsize, free, values, on_cpu=on_cpu)


def _free_on(device: torch.device) -> int:
    """Free bytes of a GPU; 0 for a device that is not known here."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def tokens_that_fit(
    shape: ModelShape, width: int, free: int, value_model: ModelShape | None = None, on_cpu: bool = True
) -> int:
    """The most of `CPU_TOKENS` or `GPU_TOKENS` whose activations fit beside gradients and moments; else the fewest.

    Args:
        shape: the policy's shape.
        width: bytes of one weight; weights and masters are loaded already.
        free: bytes that are left.
        value_model: the critic's shape, if there is one.
        on_cpu: False for a GPU.
    """
    trained = shape.parameters + (0 if value_model is None else value_model.parameters)
    room = SHARE_OF_FREE * (free - 3 * FLOAT * trained)  # what float32 gradients and two moments leave
    training, budgets = Training(width, 0, on_cpu=on_cpu, value_model=value_model), CPU_TOKENS if on_cpu else GPU_TOKENS
    return next((tokens for tokens in budgets if activations(shape, training, tokens) <= room), budgets[-1])

"""What training a causal language model takes of a device's memory, from its shape alone.

Bytes unless a name says otherwise. Activations are counted from what autograd saves in a layer of a transformer with
root-mean-square norms and a gated feed-forward part; tests hold them against real models.
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
    layer_configs,
    query_width,
)

FLOAT = 4  # bytes of a float32


@dataclass(frozen=True)
class ModelShape:
    """What a causal language model's memory follows from."""

    parameters: int  # all of them; tied ones count once
    largest: int  # those of the largest single tensor, usually the embedding
    layers: int
    hidden: int
    intermediate: int  # width of the feed-forward part that one token passes through (of a mixture, all chosen experts)
    heads: int  # of the queries
    query_width: int  # heads times their width
    key_width: int  # the same of the keys; the values have as many
    vocabulary: int
    outside: int  # parameters of no layer: embeddings, head, last norm

    @classmethod
    def of(cls, model: Any) -> "ModelShape":
        """The shape of a Hugging Face model, which may be on the meta device; of its widest layer if they differ."""
        config = model.config.get_text_config()
        layers = layer_configs(config)
        heads = _largest(layers, "num_attention_heads") or 1
        queries = max(map(query_width, layers)) or config.hidden_size  # without attention, what else mixes the tokens
        feed_forward = _largest(layers, "intermediate_size") or 4 * config.hidden_size
        expert = _largest(layers, "moe_intermediate_size") or feed_forward
        chosen = _largest(layers, "num_experts_per_tok")
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
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
            outside=sum(size for name, size in sizes.items() if not re.search(r"\.\d+\.", name)),
        )


def _largest(layers: Sequence[Any], name: str) -> int | None:
    """The largest number of that name, each of which may be a list (Gemma 3n); None: no layer has one."""
    values = [getattr(layer, name, None) for layer in layers]
    numbers = [each for value in values for each in (value if isinstance(value, list) else [value]) if each]
    return max(numbers, default=None)


@dataclass(frozen=True)
class Training:
    """How the policy is trained."""

    width: int  # bytes of a weight that is computed with: 2 (bfloat16) or 4
    # Tokens of the longest prompt and response together, of a pair those of both: a micro-batch holds at least one.
    # 0: unknown, and taken to be no longer than a micro-batch.
    longest_row: int
    tokens: int | None = None  # computed tokens of a micro-batch; None: as many as are useful and fit
    reference: bool = False  # a frozen copy of the policy is kept
    checkpointing: bool = False  # activations are computed again in the backward pass
    eager: bool = False  # attention keeps its weights, which takes the square of the length
    shards: int = 1  # devices that weights, moments and reference are split over (trainer=fsdp2)
    on_cpu: bool = False
    adapters: int = 0  # parameters of adapters (model.lora), which are trained in place of the weights
    adapter_width: int = 0  # numbers of each token that adapters keep for the backward pass, all layers together
    moments: int = 2 * FLOAT  # bytes that the optimizer keeps of a parameter, besides a float32 master
    value_model: ModelShape | None = None  # of a critic that is a model of its own
    # Processes of a machine that keep masters and moments in its memory (optimizer.name=adamw_offload); 0: they are on
    # the devices.
    on_host: int = 0
    # How many these would be with adamw_offload; 0: it would replace an optimizer of the user's own.
    offloadable: int = 1


def layer_bytes(shape: ModelShape, training: Training) -> int:
    """Bytes a token that autograd saves in one layer.

    Two norms (each a float32 copy of its input, the normalised and the scaled one), queries, keys, values and their
    result, and of the feed-forward part gate, its activation, the other branch and their product. In bfloat16 on a CPU
    (`trainer.layers`) a norm saves its input instead of the two copies, and activation and product are computed
    again (with adapters, the activation alone). Eager attention also saves keys and values once for every head, and of
    each head a weight of every token of the row: in float32, and rounded if they are. Adapters save `adapter_width`
    numbers besides.
    """
    width = training.width
    lean = training.on_cpu and width < FLOAT
    norms = 2 * (2 * width + (0 if lean else FLOAT)) * shape.hidden
    attention = 2 * width * (shape.query_width + shape.key_width)
    if training.eager:
        weight = FLOAT + (width if width < FLOAT else 0)
        attention += shape.heads * training.longest_row * weight + 2 * width * shape.query_width
    feed_forward = (4 - lean * (1 if training.adapters else 2)) * width * shape.intermediate
    return norms + attention + feed_forward + width * -(-training.adapter_width // shape.layers)


def activations(shape: ModelShape, training: Training, tokens: int) -> int:
    """Bytes that a forward and backward pass over so many computed tokens takes at its peak, gradients aside.

    One chunk of logits is kept, and one computed again. On a CPU the gradients of embeddings and head are added up
    where they lie; elsewhere autograd makes that of the largest tensor, which is then cast to float32, unless only
    adapters are trained.
    """
    width, layer = training.width, layer_bytes(shape, training)
    saved = shape.layers * width * shape.hidden + layer if training.checkpointing else shape.layers * layer
    # The last norm, and in the backward pass the layer that is under way.
    rest = (FLOAT + 2 * width) * shape.hidden + 3 * width * shape.intermediate + 2 * FLOAT * shape.hidden
    sizes = (CHUNK_BYTES, BLOCK_BYTES, 0) if training.on_cpu else (GPU_CHUNK_BYTES, GPU_BLOCK_BYTES, width + FLOAT)
    chunk, block, gradient = sizes
    head = min(width * tokens * shape.vocabulary, 2 * chunk) + 3 * block
    values = 0
    if training.value_model is not None:  # it predicts no tokens
        values = activations(replace(training.value_model, vocabulary=0), replace(training, value_model=None), tokens)
    return tokens * (saved + rest) + head + (0 if training.adapters else gradient * shape.largest) + values


# -- what algorithm.max_tokens_per_micro_batch=auto stands for, if no memory plan says it ------------------------------

# Of a CPU: halves, so that what is free may differ a little from start to start and the tokens are the same. SmolLM2 on
# two cores with AMX: `short` of benchmarks/vs_trl.py takes 2.4, 2.1 and 1.7 s in micro-batches of 512, 1,024 and 2,048
# tokens, `ragged` 19.6 and 16.2 s in those of 2,048 and 4,096, 49 and 44 s without AMX's products.
CPU_TOKENS = (4096, 2048, 1024, 512, 256)
GPU_TOKENS = 4096
# Of the memory that is free, for activations: temporaries, fragments and whatever else runs here need the rest.
SHARE_OF_FREE = 0.5


def useful_tokens(model: Any, device: torch.device, trainers: int = 1, value_model: Any = None) -> int:
    """As many tokens as are of use on the device and, on a CPU, fit into the memory that is free now.

    Args:
        model: a Hugging Face model that is loaded, before its first optimizer step.
        device: where it trains.
        trainers: how many processes train on this machine, and share what is free.
        value_model: that of a critic, which is trained, too.
    """
    if device.type != "cpu":
        return GPU_TOKENS
    values = None if value_model is None else ModelShape.of(value_model)
    return tokens_that_fit(ModelShape.of(model), model.dtype.itemsize, free_memory() // trainers, values)


def tokens_that_fit(shape: ModelShape, width: int, free: int, value_model: ModelShape | None = None) -> int:
    """The largest budget of a CPU whose activations fit, together with gradients and moments; else the smallest.

    Weights, of `width` bytes each, and masters are loaded; `free` bytes are left.
    """
    trained = shape.parameters + (0 if value_model is None else value_model.parameters)
    room = SHARE_OF_FREE * (free - 3 * FLOAT * trained)  # what float32 gradients and two moments leave
    training = Training(width, longest_row=0, on_cpu=True, value_model=value_model)
    return next((each for each in CPU_TOKENS if activations(shape, training, each) <= room), CPU_TOKENS[-1])

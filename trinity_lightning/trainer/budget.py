"""What algorithm.max_tokens_per_micro_batch=auto stands for, where no memory plan says it."""

from typing import Any

import torch

from trinity_lightning.common.devices import free_memory
from trinity_lightning.common.model_memory import FLOAT, ModelShape, Training, activations

# Of a CPU: halves, so that what is free may differ a little from start to start and the tokens are the same. More bring
# little: four layers of SmolLM2's shape took one core 1.26, 1.10, 1.07 and 1.02 s for 2,048 tokens in micro-batches of
# 256, 512, 1,024 and 2,048.
CPU_TOKENS = (1024, 512, 256)
GPU_TOKENS = 4096
# Of the memory that is free, for activations: temporaries, fragments and whatever else runs here need the rest.
SHARE = 0.5


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
    room = SHARE * (free - 3 * FLOAT * trained)  # what float32 gradients and two moments leave
    training = Training(width, longest_row=0, on_cpu=True, value_model=value_model)
    return next((each for each in CPU_TOKENS if activations(shape, training, each) <= room), CPU_TOKENS[-1])

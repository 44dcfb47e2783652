"""The error of a GPU without memory to train on: its use beside the memory plan, and the keys that help."""

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.optim import AdamW, Optimizer

from trinity_lightning.common.hardware import GIB
from trinity_lightning.errors import DeviceMemoryError, causes
from trinity_lightning.trainer.layout import Part
from trinity_lightning.trainer.masters import parameters_of

BUDGET_KEY = "algorithm.max_tokens_per_micro_batch"


@dataclass(frozen=True)
class Expected:
    """The memory plan of the phase in which the policy is trained.

    Attributes:
        parts: bytes on the device by name of the part; empty if there is no plan.
        may_sleep: True if vLLM keeps memory on the device that engine.sleep=always would free.
    """

    parts: Mapping[str, int] = field(default_factory=dict)
    may_sleep: bool = False


def out_of_memory(
    error: torch.OutOfMemoryError,
    device: torch.device,
    parts: Sequence[Part],
    max_tokens: int,
    expected: Expected,
    *,
    rows_of_a_unit: int = 1,
    checkpointing: bool = False,
) -> DeviceMemoryError:
    """The error to raise in place of torch's. What the failed functions still held on the device is freed.

    Args:
        error: torch's error; the functions that raised it have ended.
        device: the device that ran out of memory.
        parts: micro-batches of this process, or none if it did not train yet.
        max_tokens: most computed tokens of a micro-batch.
        expected: the memory plan.
        rows_of_a_unit: rows that a micro-batch holds at least: 2 for preference pairs.
        checkpointing: True if activations are computed again in the backward pass (model.gradient_checkpointing).
    """
    use, optimizer = use_of(device), _stepping(error)
    for cause in causes(error):
        traceback.clear_frames(cause.__traceback__)  # they hold activations, and a checkpoint may need the room
    if device.type == "cuda":
        torch.cuda.empty_cache()
    sleep = ["engine.sleep=always"] if expected.may_sleep else []
    if optimizer is None:
        where, knobs = _in_a_pass(parts, max_tokens, rows_of_a_unit, checkpointing)
        knobs += sleep
    else:
        where, knobs = "in the optimizer's step", [*sleep, *_without_moments(optimizer)]
    planned = sum(expected.parts.values())
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in expected.parts.items())
    plan = f"; the memory plan expected {planned / GIB:.1f} GiB while training ({listed})" if planned else ""
    return DeviceMemoryError(
        f"out of memory on {device} {where}: {_wanted(error)}{use}{plan}. Go on from the "
        f"{'last ' if optimizer else ''}checkpoint with {' or '.join(knobs) or 'a GPU that has more'}."
    )


def _stepping(error: BaseException) -> Optimizer | None:
    """The optimizer that was in its step, of which nothing is saved; None: none was."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "step"]
    owners = [frame.f_locals.get("self") for frame in frames]
    return next((owner for owner in reversed(owners) if isinstance(owner, Optimizer)), None)


def _without_moments(optimizer: Optimizer) -> list[str]:
    """The setting that keeps moments in the host's memory, if a run with this optimizer can go on with it."""
    in_shards = any(hasattr(parameter, "to_local") for parameter in parameters_of(optimizer))
    return ["optimizer.name=adamw_offload"] if type(optimizer) is AdamW and not in_shards else []


def _in_a_pass(
    parts: Sequence[Part], max_tokens: int, rows_of_a_unit: int, checkpointing: bool
) -> tuple[str, list[str]]:
    """The place of an error in a forward or backward pass, and the settings of such passes that help, in words."""
    largest = max(parts, key=lambda part: part.tokens, default=None)
    where = (
        f"in a micro-batch (the largest of {len(parts)} has {largest.tokens:,} computed tokens)"
        if largest is not None
        else f"before the step's first update, in micro-batches of at most {max_tokens:,} tokens"
    )
    can_be_cut = largest is None or len(largest.rows) > rows_of_a_unit
    tokens = largest.tokens if largest is not None else max_tokens
    return where, [
        *([f"{BUDGET_KEY}={max(min(tokens, max_tokens) // 2, 1)}"] if can_be_cut else []),
        *([] if checkpointing else ["model.gradient_checkpointing=true"]),
        *([] if can_be_cut else ["a lower engine.max_model_len: one row is as long as the micro-batch"]),
    ]


def use_of(device: torch.device) -> str:
    """The use of a GPU's memory, in words."""
    if device.type != "cuda":
        return "its memory is full"
    free, total = torch.cuda.mem_get_info(device)
    held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return (
        f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free, this process's tensors take {held / GIB:.1f} GiB, and "
        f"{(reserved - held) / GIB:.1f} GiB lie free between them"
    )


def _wanted(error: Exception) -> str:
    """The size that torch could not allocate, in words; "" if its message does not say it."""
    size = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    return f"{size[1]} more were needed, " if size else ""

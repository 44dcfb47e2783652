"""Per-token values of unpadded experiences to padded tensors. R is the response width, B the batch size.

What rows must have in common is checked in bulk: a loop over thousands of them takes as long as the copying.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from trinity_lightning.common.experience.experience import Experience, ExperienceError, no_column

Device = torch.device | str | int | None


def first_of(experiences: Sequence[Experience]) -> Experience:
    """The first experience of a list that must not be empty."""
    if not experiences:
        raise ExperienceError("expected at least one experience to gather, got an empty list.")
    return experiences[0]


def column_of(experiences: Sequence[Experience], name: str) -> list[Tensor]:
    """One field of every experience; all must have it, and in the dtype of the first."""
    dtype = getattr(getattr(first_of(experiences), name, None), "dtype", None)
    try:
        rows: list[Any] = list(map(attrgetter(name), experiences))
        if set(map(attrgetter("dtype"), rows)) == {dtype} and isinstance(dtype, torch.dtype):
            return rows
    except AttributeError:  # an unknown name, or None in place of a tensor
        pass
    raise no_column(experiences, name, dtype)


def lengths_of(rows: Sequence[Tensor]) -> np.ndarray:
    return np.fromiter(map(Tensor.numel, rows), np.int64, len(rows))


def check_widths(experiences: Sequence[Experience], lengths: np.ndarray, width: int, what: str) -> None:
    """Every length must fit the width; the error names the first experience that does not; `what`: it in words."""
    wrong = np.flatnonzero((lengths < 0) | (lengths > width))
    if len(wrong):
        uid = experiences[wrong[0]].eid.uid
        raise ExperienceError(f"experience {uid}: expected {what} of at most {width}, got {lengths[wrong[0]]}.")


def to_device(batch: Tensor, device: Device, pin_memory: bool) -> Tensor:
    """The batch on a device, or in page-locked host memory if that is asked for and there is a GPU to copy to."""
    if pin_memory and torch.cuda.is_available() and batch.is_cpu:
        batch = batch.pin_memory()
    return batch if device is None else batch.to(device, non_blocking=pin_memory)


def gather_response_attrs(
    experiences: Sequence[Experience],
    attr_name: str,
    max_response_length: int,
    pad_value: float = 0,
    *,
    device: Device = None,
    pin_memory: bool = False,
) -> Tensor:
    """A per-token field of the response, padded on the right: [B, R] in the dtype of the first.

    Args:
        experiences: at least one.
        attr_name: logprobs, advantages, returns, token_level_reward, teacher_logprobs or action_mask.
        max_response_length: R, in tokens.
        pad_value: what padding is filled with.
        device: of the result; None: host memory.
        pin_memory: put it into page-locked memory (ignored without a GPU).

    Raises:
        ExperienceError: empty list, mixed dtypes, a field that is missing, or one that is too long.
    """
    rows = column_of(experiences, attr_name)
    check_widths(experiences, lengths_of(rows), max_response_length, f"a length of {attr_name}")
    return to_device(gather_rows(rows, max_response_length, pad_value), device, pin_memory)


def gather_rows(rows: list[Tensor], width: int | None = None, pad_value: float = 0) -> Tensor:
    """Vectors of one dtype, at least one and none longer than `width` (None: the longest), padded on the right: [B, R].

    Nothing is checked.
    """
    with torch.no_grad():
        width = max(map(Tensor.numel, rows)) if width is None else width
        if min(map(Tensor.numel, rows)) == width:
            return torch.cat(rows).view(len(rows), width)  # takes a third of the time of what follows
        batch = pad_sequence(rows, batch_first=True, padding_value=pad_value)
        return pad(batch, (0, width - batch.shape[1]), value=pad_value) if batch.shape[1] < width else batch

"""When two experiences are equal."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal: `==` all the way down, except that NaN equals NaN.

    Tensors and arrays must agree in dtype, shape and values; a list never equals a tuple, nor a tensor an array.
    """
    for kind in (Tensor, np.ndarray):
        if isinstance(a, kind) or isinstance(b, kind):
            return isinstance(a, kind) and isinstance(b, kind) and _same_numbers(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if (isinstance(a, list) and isinstance(b, list)) or (isinstance(a, tuple) and isinstance(b, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return same(vars(a), vars(b))
    return bool(a == b) or bool(a != a and b != b)


def _same_numbers(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if isinstance(a, Tensor):
        b = b.to(a.device)
        if torch.equal(a, b):
            return True
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is what differs from itself

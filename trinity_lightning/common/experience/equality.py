"""Equality of values that may hold tensors, arrays and NaN."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _same_tensors(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    b = b.to(a.device)
    if torch.equal(a, b):
        return True
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is what differs from itself


def _same_arrays(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal: `==` all the way down, except that NaN equals NaN.

    Tensors and arrays must agree in dtype, shape and values; a list never equals a tuple, nor a tensor an array.
    """
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and _same_tensors(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and _same_arrays(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if (isinstance(a, list) and isinstance(b, list)) or (isinstance(a, tuple) and isinstance(b, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return same(vars(a), vars(b))
    return bool(a == b) or bool(a != a and b != b)

"""AdamW whose moments take 8 bits each (arXiv 2110.02861), by torchao: the extra `optim`."""

import logging
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

logger = logging.getLogger(__name__)

SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # moments; torchao keeps those of fewer than 4,096 weights in float32


def adamw_8bit(parameters: Any, **settings: Any) -> Optimizer:
    """torchao's, whose state is plain tensors in a checkpoint: one is read before torchao is imported, or without it.

    Of a moment in 8 bits these are its codes, and the scale of each block of them. The first step compiles an update
    for each shape of a parameter: seconds each, and a C++ compiler on a CPU.
    """
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]  # an extra

    warnings.filterwarnings("ignore", "OptimState8bit does not implement", UserWarning)  # torch's, of a cache
    optimizer = AdamW8bit(parameters, **settings)

    def announce(*_: Any) -> None:
        logger.info("optimizer.name=adamw_8bit: the first step compiles an update for each shape of a parameter")
        announced.remove()

    announced = optimizer.register_step_pre_hook(announce)
    optimizer.register_state_dict_post_hook(_to_plain)
    optimizer.register_load_state_dict_pre_hook(_from_plain)
    return optimizer


def _to_plain(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _converted(state_dict, lambda _, v: {"codes": v.codes, "scale": v.scale} if hasattr(v, "codes") else v)


def _from_plain(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _converted(state_dict, lambda name, v: _moment(v, SIGNED[name]) if isinstance(v, dict) else v)


def _converted(state_dict: dict[str, Any], convert: Callable[[str, Any], Any]) -> dict[str, Any]:
    state = {
        position: {name: convert(name, value) for name, value in values.items()}
        for position, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _moment(plain: dict[str, Tensor], signed: bool) -> Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit  # pyright: ignore[reportMissingImports]

    codes, scale = plain["codes"], plain["scale"]
    moment = OptimState8bit.zeros(codes.shape, signed, codes.numel() // scale.numel(), codes.device)
    moment.codes.copy_(codes)
    moment.scale.copy_(scale)
    return moment

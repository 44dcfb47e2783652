"""AdamW and its learning-rate schedule, from the configuration."""

from typing import Any

import torch
from torch.optim import Optimizer

from trinity_lightning.common.config import OptimizerConfig


def adamw(parameters: Any, config: OptimizerConfig) -> Optimizer:
    """AdamW over parameters or parameter groups."""
    beta1, beta2 = config.betas
    return torch.optim.AdamW(
        parameters, config.lr, (beta1, beta2), config.eps, weight_decay=config.weight_decay, fused=True
    )


def learning_rate_schedule(optimizer: Optimizer, config: OptimizerConfig) -> Any:
    """The schedule of that name of transformers, stepped once an optimizer step.

    Raises:
        ValueError: an unknown name, or one that needs `total_steps` where there is none.
    """
    from transformers import get_scheduler

    name = config.lr_scheduler
    if name == "constant" and config.warmup_steps > 0:
        name = "constant_with_warmup"  # transformers would silently not warm up
    return get_scheduler(name, optimizer, config.warmup_steps, config.total_steps)

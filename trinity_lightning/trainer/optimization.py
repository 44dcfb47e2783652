"""AdamW and its learning-rate schedule, from the configuration."""

import re
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trinity_lightning.config.training import OptimizerConfig

# Parameters that do not decay by the last part of their names: down_proj_bias, mixer.A_log, mixer.D, ...
_EXEMPT = re.compile(r"(^|[._])bias$|(^|\.)(A_log|D)$")


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The trained parameters: matrices, which weight decay is for; and, without any, biases, norms and embeddings.

    A head that is tied to the embeddings is one of them; biases and norms are whatever their shape (a mixture of
    experts has a row of biases for each). Nor do logarithms of state matrices decay (`A_log` of Mamba), and parameters
    that their model marks by `_no_weight_decay`, as those of the package mamba_ssm do.
    """
    holders = [each for each in model.modules() if isinstance(each, nn.Embedding) or "Norm" in type(each).__name__]
    exempt_holders = {id(p) for each in holders for p in each.parameters(recurse=False)}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = (
                id(parameter) in exempt_holders or _EXEMPT.search(name) or getattr(parameter, "_no_weight_decay", False)
            )
            (matrices if parameter.ndim >= 2 and not exempt else others).append(parameter)
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def adamw(parameters: Any, config: OptimizerConfig) -> Optimizer:
    """AdamW over parameters or parameter groups; `weight_decay` is that of groups without one of their own."""
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

"""Objectives of the policy: pure functions from per-token tensors to a loss and its metrics.

Every loss of the table of parts is a name of this package too, imported when it is asked for.
"""

from typing import Any

from trinity_lightning.algorithm.policy_loss.policy_loss import POLICY_LOSS_FN as POLICY_LOSS_FN
from trinity_lightning.algorithm.policy_loss.policy_loss import BatchTotals as BatchTotals
from trinity_lightning.algorithm.policy_loss.policy_loss import PolicyLossFn as PolicyLossFn
from trinity_lightning.algorithm.policy_loss.policy_loss import aggregate as aggregate
from trinity_lightning.algorithm.policy_loss.policy_loss import create_policy_loss as create_policy_loss
from trinity_lightning.algorithm.policy_loss.ppo import ppo as ppo  # the function, in place of the module
from trinity_lightning.config.algorithm import LOSS_AGG_MODES as LOSS_AGG_MODES

# For `import *`, the names that are imported on use too.
__all__ = [*(n for n in globals() if n[0] != "_"), *POLICY_LOSS_FN]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in POLICY_LOSS_FN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    loss = globals()[name] = POLICY_LOSS_FN.get(name)  # over a module of its name, which was imported
    return loss

"""Add strategies: they weigh the experiences of an explore step, and write those to train on to a buffer."""

from trinity_lightning.algorithm.add_strategy.add_strategy import (
    ADD_STRATEGY,
    AddStrategy,
    DAPOAddStrategy,
    GroupAdvantageStrategy,
    GRPOAddStrategy,
    OPMDAddStrategy,
    RewardVarianceAddStrategy,
    TaskAdvantageStrategy,
)
from trinity_lightning.algorithm.add_strategy.baseline_add_strategies import (
    ASYMREAddStrategy,
    CriticAddStrategy,
    DrGRPOAddStrategy,
    OnPolicyDistillAddStrategy,
    REINFORCEAddStrategy,
    REINFORCEPlusPlusAddStrategy,
    RLOOAddStrategy,
)
from trinity_lightning.algorithm.add_strategy.compose import ComposedAddStrategy, create_add_strategy
from trinity_lightning.algorithm.add_strategy.correct_bias_add_strategy import CorrectBiasAddStrategy
from trinity_lightning.algorithm.add_strategy.duplicate_add_strategy import DuplicateInformativeAddStrategy
from trinity_lightning.algorithm.add_strategy.step_wise_add_strategy import (
    GiGPOAddStrategy,
    RunAdvantageStrategy,
    StepWiseGRPOStrategy,
)
from trinity_lightning.common.experience import group_by

__all__ = [
    "ADD_STRATEGY",
    "ASYMREAddStrategy",
    "AddStrategy",
    "ComposedAddStrategy",
    "CorrectBiasAddStrategy",
    "CriticAddStrategy",
    "DAPOAddStrategy",
    "DrGRPOAddStrategy",
    "DuplicateInformativeAddStrategy",
    "GRPOAddStrategy",
    "GiGPOAddStrategy",
    "GroupAdvantageStrategy",
    "OPMDAddStrategy",
    "OnPolicyDistillAddStrategy",
    "REINFORCEAddStrategy",
    "REINFORCEPlusPlusAddStrategy",
    "RLOOAddStrategy",
    "RewardVarianceAddStrategy",
    "RunAdvantageStrategy",
    "StepWiseGRPOStrategy",
    "TaskAdvantageStrategy",
    "create_add_strategy",
    "group_by",
]

"""What an experience is worth: strategies that weigh the experiences of an explore step and write them to a buffer."""

from trinity_lightning.algorithm.add_strategy.add_strategy import ADD_STRATEGY as ADD_STRATEGY
from trinity_lightning.algorithm.add_strategy.add_strategy import AddStrategy as AddStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import DAPOAddStrategy as DAPOAddStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import GroupAdvantageStrategy as GroupAdvantageStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import GRPOAddStrategy as GRPOAddStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import OPMDAddStrategy as OPMDAddStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import RewardVarianceAddStrategy as RewardVarianceAddStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import TaskAdvantageStrategy as TaskAdvantageStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import group_by as group_by
from trinity_lightning.algorithm.add_strategy.baseline_add_strategies import ASYMREAddStrategy as ASYMREAddStrategy
from trinity_lightning.algorithm.add_strategy.baseline_add_strategies import DrGRPOAddStrategy as DrGRPOAddStrategy
from trinity_lightning.algorithm.add_strategy.baseline_add_strategies import (
    REINFORCEAddStrategy as REINFORCEAddStrategy,
)
from trinity_lightning.algorithm.add_strategy.baseline_add_strategies import (
    REINFORCEPlusPlusAddStrategy as REINFORCEPlusPlusAddStrategy,
)
from trinity_lightning.algorithm.add_strategy.baseline_add_strategies import RLOOAddStrategy as RLOOAddStrategy
from trinity_lightning.algorithm.add_strategy.compose import ComposedAddStrategy as ComposedAddStrategy
from trinity_lightning.algorithm.add_strategy.compose import create_add_strategy as create_add_strategy
from trinity_lightning.algorithm.add_strategy.correct_bias_add_strategy import (
    CorrectBiasAddStrategy as CorrectBiasAddStrategy,
)
from trinity_lightning.algorithm.add_strategy.duplicate_add_strategy import (
    DuplicateInformativeAddStrategy as DuplicateInformativeAddStrategy,
)
from trinity_lightning.algorithm.add_strategy.gigpo_add_strategy import GiGPOAddStrategy as GiGPOAddStrategy
from trinity_lightning.algorithm.add_strategy.on_policy_distill_add_strategy import (
    OnPolicyDistillAddStrategy as OnPolicyDistillAddStrategy,
)
from trinity_lightning.algorithm.add_strategy.step_wise_add_strategy import RunAdvantageStrategy as RunAdvantageStrategy
from trinity_lightning.algorithm.add_strategy.step_wise_add_strategy import StepWiseGRPOStrategy as StepWiseGRPOStrategy

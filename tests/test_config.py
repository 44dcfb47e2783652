"""The names that are checked before torch is imported are those that the registries know."""

from trinity_lightning.algorithm.add_strategy import ADD_STRATEGY
from trinity_lightning.algorithm.kl import KL_FN
from trinity_lightning.algorithm.policy_loss import POLICY_LOSS_FN
from trinity_lightning.algorithm.policy_loss.aggregate import LOSS_AGG_MODES
from trinity_lightning.algorithm.rollout_correction import LEVELS, MODES
from trinity_lightning.common import config
from trinity_lightning.explorer.tasks.taskset import ORDERS
from trinity_lightning.explorer.workflows import WORKFLOWS


def test_known_names_are_those_of_the_registries() -> None:
    assert sorted(ADD_STRATEGY) == sorted(config.ADD_STRATEGIES) == config.options("add_strategy")
    assert sorted(POLICY_LOSS_FN) == sorted(config.POLICY_LOSSES)
    assert sorted(KL_FN) == sorted(config.KL_ESTIMATES)
    assert sorted(LOSS_AGG_MODES) == sorted(config.LOSS_AGG_MODES)
    assert sorted(("none", *LEVELS)) == sorted(config.CORRECTION_LEVELS)
    assert sorted(MODES) == sorted(config.CORRECTION_MODES)
    assert sorted(WORKFLOWS) == sorted(config.WORKFLOWS) == config.options("workflow")
    assert sorted(ORDERS) == sorted(config.TASK_ORDERS)

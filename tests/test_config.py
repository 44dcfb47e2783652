"""The names that are checked before torch is imported are those that the registries know."""

from trinity_lightning.algorithm.add_strategy import ADD_STRATEGY
from trinity_lightning.algorithm.kl import KL_FN
from trinity_lightning.algorithm.policy_loss import POLICY_LOSS_FN
from trinity_lightning.algorithm.policy_loss.aggregate import LOSS_AGG_MODES
from trinity_lightning.algorithm.rollout_correction import LEVELS, MODES
from trinity_lightning.buffer.operators import EXPERIENCE_OPERATORS
from trinity_lightning.config import names as known_names
from trinity_lightning.config.schema import options
from trinity_lightning.explorer.tasks.taskset import ORDERS
from trinity_lightning.explorer.workflows import WORKFLOWS


def test_known_names_are_those_of_the_registries() -> None:
    assert sorted(ADD_STRATEGY) == sorted(known_names.ADD_STRATEGIES) == options("add_strategy")
    assert sorted(EXPERIENCE_OPERATORS) == sorted(known_names.EXPERIENCE_OPERATORS)
    assert sorted([*EXPERIENCE_OPERATORS, "none"]) == options("operators")
    assert sorted(POLICY_LOSS_FN) == sorted(known_names.POLICY_LOSSES)
    assert sorted(KL_FN) == sorted(known_names.KL_ESTIMATES)
    assert sorted(LOSS_AGG_MODES) == sorted(known_names.LOSS_AGG_MODES)
    assert sorted(("none", *LEVELS)) == sorted(known_names.CORRECTION_LEVELS)
    assert sorted(MODES) == sorted(known_names.CORRECTION_MODES)
    trained = sorted(set(WORKFLOWS) - {"evaluation"})  # which is given as eval_workflow
    assert sorted(WORKFLOWS) == sorted(known_names.WORKFLOWS)
    assert trained == options("workflow")
    assert sorted(ORDERS) == sorted(known_names.TASK_ORDERS)

"""Rules of add strategies that not every objective, workflow or size of a group goes together with."""

from collections.abc import Sequence

from trinity_lightning.config.registry import FILTERING_STRATEGIES, PARTS
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.errors import ConfigError

# Strategies and operators by name; those of one's own are of none of these.
COMPARING_STRATEGIES = ("asymre", "correct_bias", "dr_grpo", "grpo", "opmd", "rloo", "step_wise_grpo")  # within a group
STEP_STRATEGIES = ("critic", "gigpo", "on_policy_distill", "step_wise_grpo")  # they take a reward a step, or need none
SHAPING_OPERATORS = ("judge", "overlong_penalty", "reward_shaping_mapper")  # they change rewards


def check_strategies(run: TrainConfig, named: Sequence[str]) -> None:
    """Refuse strategies, by their names, that do not go together with the rest; a ConfigError."""
    if "asymre" in named and run.algorithm.policy_loss.name == "asymre":
        raise ConfigError(
            "algorithm.policy_loss=asymre and add_strategy=asymre would both shift the baseline: choose "
            "add_strategy=dr_grpo, or algorithm.policy_loss=reinforce."
        )
    own_parts = any("." in each.name for each in (run.workflow, *run.operators.values()))
    asks_none = run.buffer.has_rollouts and run.workflow.name != "on_policy_distill" and not own_parts
    if "on_policy_distill" in named and asks_none:
        raise ConfigError(
            f"add_strategy=on_policy_distill weighs by a teacher, and workflow={run.workflow.name} asks none: choose "
            "workflow=on_policy_distill, and give +auxiliary_models.teacher.model=FOLDER."
        )
    step_wise = run.workflow.args.get("step_reward") == "own"
    if "gigpo" in named and run.workflow.name in ("multi_turn", "tool_use") and not step_wise:
        raise ConfigError("add_strategy=gigpo sums the rewards of single steps: set workflow.args.step_reward=own.")
    if run.workflow.args.get("mode") == "step_wise":
        _check_step_rewards(run, [name for name in named if name in PARTS["add strategy"]])
    if run.explorer.repeat_times == 1 and run.buffer.has_rollouts:
        _check_groups_of_one(named)
    for earlier in list(run.add_strategy.values())[:-1]:
        keeps_some = earlier.args.get("std_threshold") is not None and named[-1] != "critic"
        filters = earlier.name in FILTERING_STRATEGIES or keeps_some
        if earlier.name in PARTS["add strategy"] and not filters:
            raise ConfigError(
                f"add_strategy={earlier.name} sets advantages, and {named[-1]} behind it would set them again: choose "
                f"one of them; in front of it may be filters: {', '.join(FILTERING_STRATEGIES)}."
            )


def _check_step_rewards(run: TrainConfig, built_in: list[str]) -> None:
    """Refuse a strategy that compares runs by one reward if the steps of a run may have different ones."""
    one_a_run = [name for name in built_in if name not in STEP_STRATEGIES]
    shaping = [operator.name for operator in run.operators.values() if operator.name in SHAPING_OPERATORS]
    own = run.workflow.args.get("step_reward") == "own"
    if one_a_run and (own or shaping):
        what = "workflow.args.step_reward=own" if own else f"operator '{shaping[0]}'"
        raise ConfigError(
            f"{what} gives the steps of a run different rewards, and add_strategy={one_a_run[0]} compares runs by one: "
            f"choose add_strategy=step_wise_grpo or gigpo{', or step_reward=return' if own else ''}."
        )


def _check_groups_of_one(named: Sequence[str]) -> None:
    for name in named:
        if name in FILTERING_STRATEGIES:
            raise ConfigError(
                f"explorer.repeat_times is 1, and add_strategy={name} keeps groups whose rewards differ: give "
                "explorer.repeat_times=8, say."
            )
        if name in COMPARING_STRATEGIES:
            raise ConfigError(
                f"explorer.repeat_times is 1, and add_strategy={name} compares the rollouts of a task: give "
                "explorer.repeat_times=8, say, or choose add_strategy=reinforce."
            )

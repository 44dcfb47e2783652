"""Rules of strategies that go together with some workflows, losses and groups only."""

from trinity_lightning.config.registry import FILTERING_STRATEGIES, PARTS
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.errors import ConfigError

# Of parts by name; those of one's own are of none of these. Those that compare a rollout with its group:
COMPARING_STRATEGIES = ("asymre", "correct_bias", "dr_grpo", "grpo", "opmd", "rloo", "step_wise_grpo")
STEP_STRATEGIES = ("critic", "gigpo", "on_policy_distill", "step_wise_grpo")  # they take a reward a step, or need none
SHAPING_OPERATORS = ("judge", "overlong_penalty", "reward_shaping_mapper")  # they change rewards


def check_strategies(run: TrainConfig, named: list[str]) -> None:
    """Refuse strategies, by name, that do not fit the loss, the workflow or groups of one; a ConfigError."""
    if "asymre" in named and run.algorithm.policy_loss.name == "asymre":
        raise ConfigError(
            "algorithm.policy_loss=asymre and add_strategy=asymre would both shift the baseline: choose "
            "add_strategy=dr_grpo, or algorithm.policy_loss=reinforce."
        )
    own_parts = any("." in each.name for each in (run.workflow, *run.operators.values()))
    asks_none = run.buffer.has_rollouts and run.workflow.name != "on_policy_distill" and not own_parts
    if "on_policy_distill" in named and asks_none:
        raise ConfigError(
            "add_strategy=on_policy_distill weighs tokens by a teacher's log-probabilities, and "
            f"workflow={run.workflow.name} asks none: choose workflow=on_policy_distill, and give the teacher as "
            "+auxiliary_models.teacher.model=FOLDER."
        )
    step_wise = run.workflow.args.get("step_reward") == "own"
    if "gigpo" in named and run.workflow.name in ("multi_turn", "tool_use") and not step_wise:
        raise ConfigError(
            "add_strategy=gigpo sums the rewards of an episode's steps: set workflow.args.step_reward=own, as `return` "
            "gives every step the whole episode's."
        )
    if run.workflow.args.get("mode") == "step_wise":
        _check_step_rewards(run, [name for name in named if name in PARTS["add strategy"]])
    if run.explorer.repeat_times == 1 and run.buffer.has_rollouts:
        _check_groups_of_one(named)


def _check_step_rewards(run: TrainConfig, built_in: list[str]) -> None:
    """Refuse a strategy that compares runs by one reward if the steps of a run may have different ones."""
    one_a_run = [name for name in built_in if name not in STEP_STRATEGIES]
    if not one_a_run:
        return
    if run.workflow.args.get("step_reward") == "own":
        raise ConfigError(
            "workflow.args.step_reward=own gives the steps of a run different rewards, and "
            f"add_strategy={one_a_run[0]} compares runs by one: choose add_strategy=step_wise_grpo or gigpo, or "
            "step_reward=return."
        )
    for operator in run.operators.values():
        if operator.name in SHAPING_OPERATORS:
            raise ConfigError(
                f"operator '{operator.name}' gives the steps of a run (workflow.args.mode=step_wise) different "
                f"rewards, and add_strategy={one_a_run[0]} compares runs by one: choose add_strategy=step_wise_grpo or "
                "gigpo."
            )


def _check_groups_of_one(named: list[str]) -> None:
    for name in named:
        if name in FILTERING_STRATEGIES:
            raise ConfigError(
                f"explorer.repeat_times is 1, and add_strategy={name} keeps groups whose rewards differ: none would be "
                "left. Give explorer.repeat_times=8, say."
            )
        if name in COMPARING_STRATEGIES:
            raise ConfigError(
                f"explorer.repeat_times is 1, and add_strategy={name} compares the rollouts of a task with each other: "
                "give explorer.repeat_times=8, say, or choose add_strategy=reinforce, whose advantage is the reward."
            )

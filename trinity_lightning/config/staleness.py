"""Rules for rollouts that do not wait (explorer.max_staleness)."""

from typing import TYPE_CHECKING

from trinity_lightning.config.algorithm import AlgorithmConfig, bounds_ratio, needs_correction
from trinity_lightning.config.engines import Capabilities
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.run import TrainConfig

KEY = "explorer.max_staleness"


def check_staleness(run: "TrainConfig", capabilities: Capabilities) -> None:
    """Refuse settings that contradict `explorer.max_staleness`; a ConfigError."""
    explorer = run.explorer
    if explorer.max_staleness == 0:
        return
    check_groups_under_way(explorer, f"engine={run.engine.name}", capabilities)
    _check_ratio(run.algorithm, explorer.max_staleness)
    if run.algorithm.critic is not None:
        raise _conflict(explorer, "algorithm.critic", "its values would be of other weights than the rollouts")
    if run.engine.per_rank:
        raise _conflict(explorer, "engine.per_rank", "the engines of several processes generate only between trainings")
    tasksets = {f"tasksets.{name}": taskset for name, taskset in run.tasksets.items()} or {"taskset": run.taskset}
    for key, taskset in tasksets.items():
        if taskset.order == "by_difficulty":
            raise ConfigError(
                f"{key}.order=by_difficulty learns from the results of each step before it chooses the next tasks, and "
                f"with {KEY}={explorer.max_staleness} these are under way already",
                key=f"{key}.order",
                fix=f"choose another order, or {KEY}=0",
            )


def check_groups_under_way(explorer: ExplorerConfig, engine: str, capabilities: Capabilities) -> None:
    """Refuse settings of the explorer that contradict `max_staleness`, and an engine that cannot do what it asks for.

    Args:
        explorer: the section.
        engine: the engine's name, for messages.
        capabilities: what the engine can do.

    Raises:
        ConfigError: names the key and the fix.
    """
    if explorer.max_staleness == 0:
        return
    for key, neutral, why in (
        ("sync_offset", 0, "max_staleness replaces it"),
        ("sync_interval", 1, "every step has weights of its own"),
    ):
        if getattr(explorer, key) != neutral:
            raise _conflict(explorer, f"explorer.{key}", why)
    if explorer.over_rollout.ratio > 0:
        raise _conflict(explorer, "explorer.over_rollout.ratio", "slow tasks are trained on later, and none is dropped")
    if explorer.steps_ahead > explorer.max_staleness:
        raise ConfigError(
            f"explorer.run_ahead is {explorer.run_ahead}, and groups that began so many steps before would be older "
            f"than {KEY}={explorer.max_staleness}",
            key="explorer.run_ahead",
            fix=f"give at most {explorer.max_staleness}, or leave it out",
        )
    if explorer.in_flight == "continue" and not capabilities.goes_on_after_sync:
        raise ConfigError(
            f"{engine} cannot go on with a rollout once its weights have changed (explorer.in_flight=continue)",
            key="explorer.in_flight",
            fix="choose engine=vllm, or explorer.in_flight=wait",
        )


def _check_ratio(algorithm: AlgorithmConfig, steps: int) -> None:
    """Refuse a loss whose importance weights are neither clipped nor corrected: at a staleness of 3 it collapses.

    (tinker-cookbook, pull request 822: the KL divergence grew thirtyfold, while PPO's clip learned as without delay.)
    """
    clips = algorithm.old_logprobs == "engine" and bounds_ratio(algorithm)
    corrected = algorithm.rollout_correction.level != "none" or clips
    if needs_correction(algorithm) and not corrected:
        raise ConfigError(
            f"algorithm.policy_loss={algorithm.policy_loss.name} neither clips nor corrects for rollouts of older "
            f"weights ({KEY}={steps})",
            key="algorithm.policy_loss",
            fix="set algorithm.rollout_correction.level=token, or a clipped loss with algorithm.old_logprobs=engine",
        )


def _conflict(explorer: ExplorerConfig, key: str, why: str) -> ConfigError:
    return ConfigError(
        f"{key} does not go with {KEY}={explorer.max_staleness}: {why}", key=key, fix=f"leave it out, or set {KEY}=0"
    )

"""Chooses by which metrics a rollout has solved its task, from the metrics' names alone: without torch."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

REWARD = "reward/"  # prefix of metrics of a reward function, and of parts that it returns: reward/<function>/<part>
WHOLE = "reward"  # all components together
USUAL = ("math", "accuracy")  # each of these components alone says whether an answer is right
RIGHT = 1.0


@dataclass(frozen=True)
class Criterion:
    """Thresholds of metrics; a rollout that reaches all of them has solved its task.

    Attributes:
        thresholds: least value by metric; WHOLE is the reward.
        graded: the only component was taken, since none was named: its values below the threshold mean something too.
    """

    thresholds: Mapping[str, float]
    graded: bool = False

    def __str__(self) -> str:
        return " and ".join(f"{name.removeprefix(REWARD)} at {least:g}" for name, least in self.thresholds.items())


def components(metrics: Iterable[str]) -> list[str]:
    """The components of a reward among the names of metrics: each reward function, or its parts if it returns some."""
    names = [name for name in metrics if name.startswith(REWARD)]
    return [name for name in names if not any(other.startswith(f"{name}/") for other in names)]


def criterion_of(metrics: Collection[str], reward_solved: Mapping[str, float] | None) -> Criterion | None:
    """The criterion for rollouts with metrics of these names.

    Args:
        metrics: names, such as `reward/math`.
        reward_solved: thresholds by component: the name of a reward function, of a part that one returns, or of another
            metric; or `reward` for all together. None: the component `math` or `accuracy`, or the only one, at 1.

    Returns:
        None if a named component is missing, or if there are several and none is named.
    """
    if reward_solved:
        named = {component: _named(component, metrics) for component in reward_solved}
        thresholds = {
            metric: float(reward_solved[name]) for name, named_metrics in named.items() for metric in named_metrics
        }
        return Criterion(thresholds) if all(named.values()) else None
    parts = components(metrics)
    if len(parts) <= 1:
        return Criterion({parts[0] if parts else WHOLE: RIGHT}, graded=True)
    usual = next((names for component in USUAL if (names := _named(component, parts))), [])
    return Criterion(dict.fromkeys(usual, RIGHT)) if usual else None


def why_no_criterion(metrics: Collection[str], reward_solved: Mapping[str, float] | None) -> str:
    """The reason why `criterion_of` has none for these names, and what to do."""
    parts = [name.removeprefix(REWARD) for name in components(metrics)]
    unusual = f"none of them is called {' or '.join(USUAL)}"
    why = f"reward_solved names {', '.join(reward_solved)}" if reward_solved else unusual
    name = parts[0].rpartition("/")[2] if parts else "NAME"
    return (
        f"no pass@k: the components of its reward are {', '.join(parts) or 'not known'}, and {why}. Say by which of "
        f"them a task is solved, such as reward_solved={{{name}: 1.0}}."
    )


def _named(component: str, metrics: Collection[str]) -> list[str]:
    """The metrics that a component's name means: a function's, else metrics of parts, else another, or the reward."""
    parts = [name for name in metrics if name.startswith(REWARD) and name.endswith(f"/{component}")]
    if f"{REWARD}{component}" in metrics:
        return [f"{REWARD}{component}"]
    return parts or [name for name in (*metrics, WHOLE) if name == component][:1]

"""The runs of a task, the members of its group: the reward of each, and the reason why one is not trained on.

A run is one experience, or several: one for each of its steps. Its reward counts once, however many steps it has.
"""

import copy
import logging
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from trinity_lightning.common.experience import Experience, ExperienceError, group_by
from trinity_lightning.common.inference import Spans
from trinity_lightning.config.values import FLOAT32_MOST, as_float, text

logger = logging.getLogger(__name__)

Run = list[Experience]

# Prefix of this package's own metrics and entries of info; workflows may use all other names.
RESERVED = "trinity_lightning/"
# Metric of an experience: its first valid reward, from before operators shaped it.
RAW_REWARD = f"{RESERVED}raw_reward"
# Entry of info: the number of tokens that the policy wrote in several turns, if the action mask no longer shows it.
WRITTEN_TOKENS = f"{RESERVED}written_tokens"
# Entry of info: one of `REASONS` why the experience is not trained on; absent if it is trained on.
UNTRAINED = f"{RESERVED}untrained"
# Entry of info: versions of the weights that sampled the response, [[start in the response, version], ...].
VERSIONS = "versions"


# -- runs --------------------------------------------------------------------------------------------------------------


def runs_of(experiences: Iterable[Experience]) -> list[Run]:
    """The runs, in order of first appearance: each has the experiences with one `eid.rid`, and different steps.

    If two experiences have the same run and step, ids do not say which of them belong together: each experience with
    that `eid.rid` counts as a run of its own.
    """
    runs: list[Run] = []
    for run in group_by(experiences, "run").values():
        in_steps = len(run) == 1 or len({experience.eid.step for experience in run}) == len(run)
        runs += [run] if in_steps else [[experience] for experience in run]
    return runs


def last_step(run: Sequence[Experience]) -> Experience:
    """The experience of a run's greatest step, whatever their order."""
    return max(reversed(run), key=lambda experience: experience.eid.step)


def written_tokens(experience: Experience) -> int:
    """Number of response tokens that the policy wrote: in several turns only those in the action mask."""
    if (count := experience.info.get(WRITTEN_TOKENS)) is not None:
        return int(count)
    if experience.experience_type == "multi_turn" and experience.action_mask is not None:
        return int(experience.action_mask.count_nonzero())
    return len(experience.tokens) - experience.prompt_length


def versions_entry(spans: Spans) -> dict[str, Any]:
    """The entry of `Experience.info` for the versions of the weights that sampled a response; none if they are unknown.

    Args:
        spans: as in `Completion.versions`, with starts in the experience's response.
    """
    return {VERSIONS: [list(span) for span in spans]} if spans else {}


def spans_of(experience: Experience) -> Spans:
    """The versions of the weights that sampled a response, as spans (start in the response, version).

    If a workflow made the experience without them, they are the oldest version of its run alone; () if that is unknown.
    """
    info = experience.info
    if VERSIONS in info:
        return tuple((start, version) for start, version in info[VERSIONS])
    return ((0, info["model_version"]),) if "model_version" in info else ()


# -- rewards -----------------------------------------------------------------------------------------------------------

# Relative to the largest absolute reward. 0.1 + 0.2 and 0.3 differ by 1.8e-16, float32 rounding makes 6e-8.
EQUAL_TOLERANCE = 1e-6


def is_valid_reward(reward: float | None) -> TypeGuard[float]:
    """True if a reward is a finite number in float32."""
    return reward is not None and abs(reward) <= FLOAT32_MOST  # NaN is not


def equal_rewards(rewards: Sequence[float]) -> bool:
    """True if finite rewards are equal up to rounding: max - min <= 1e-6 times the largest absolute value.

    The range decides, not a variance of floating-point numbers: [0.1 + 0.2, 0.3] are equal.
    """
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    return high - low <= EQUAL_TOLERANCE * max(abs(low), abs(high))


def raw_reward(experience: Experience) -> float | None:
    """The first valid reward, from the workflow or an operator (a judge), before shaping; else the present reward."""
    return experience.metrics.get(RAW_REWARD, experience.reward)


def raw_copies(experiences: Iterable[Experience]) -> list[Experience]:
    """Copies of experiences as they were before operators changed their rewards."""
    copies = []
    for experience in experiences:
        copied = copy.copy(experience)
        if RAW_REWARD in copied.metrics:
            copied.reward = copied.metrics[RAW_REWARD]
            copied.metrics = {name: value for name, value in copied.metrics.items() if name != RAW_REWARD}
        copies.append(copied)
    return copies


def run_reward(run: Run) -> float:
    """The reward of a run, which all of its steps must have.

    Raises:
        ExperienceError: the rewards of its steps differ, or one is no finite number.
    """
    rewards = [float(experience.reward) for experience in run if is_valid_reward(experience.reward)]
    if len(rewards) < len(run):
        raise ExperienceError(f"run {run[0].eid.rid}: every reward must be a finite number.")
    if not equal_rewards(rewards):
        raise ExperienceError(
            f"run {run[0].eid.rid}: the rewards of its {len(run)} steps differ ({min(rewards):g} to {max(rewards):g}), "
            "and it is compared with the task's other runs by one reward: choose add_strategy=step_wise_grpo (the last "
            "step's reward) or gigpo (their sum), or give every step the run's reward (step_reward=return)."
        )
    return rewards[0]


# -- statistics over runs, tasks or groups -----------------------------------------------------------------------------


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """`<name>/mean`, `<name>/max` and `<name>/min` of the values; empty without values."""
    if not values:
        return {}
    return {f"{name}/mean": statistics.fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def spread_of_each(metrics: Iterable[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Metrics of several tasks or groups as `<prefix>/<name>/{mean,max,min}`, each over those that have it."""
    columns: dict[str, list[float]] = {}
    for its_metrics in metrics:
        for name, value in its_metrics.items():
            columns.setdefault(name, []).append(float(value))
    spreads: dict[str, float] = {}
    for name, values in columns.items():
        spreads |= spread(f"{prefix}/{name}", values)
    return spreads


# -- the number that a filter judges a run by --------------------------------------------------------------------------


class Criterion:
    """The metric, or the reward, by which a filter judges runs in every explore step.

    Args:
        metric: a metric of the experiences (`metrics[metric]`, or a reward function's `metrics["reward/<metric>"]`) or
            an entry of their info; the last step that has it counts. None: the last step's reward before operators
            shaped it, see `raw_reward`; the add strategy decides whether earlier steps may have other rewards.

    Attributes:
        metric: name of the metric; None: the reward.
        seen: true once an experience has had the metric, in this training run or before it was resumed.

    Raises:
        ConfigError: the metric is no text.
    """

    def __init__(self, metric: str | None = None) -> None:
        self.metric = None if metric is None else text("metric", metric)
        self.seen = False  # once it was seen, a later step, or the few tasks of a refill, may lack it

    def values(self, groups: Mapping[str, Sequence[Experience]]) -> dict[str, list[float | None]]:
        """The number of each run of every group; None for a run without one.

        Raises:
            ExperienceError: as in `metric_of`; or no experience so far has had the metric.
        """
        values = {id_: [self._value(run) for run in runs_of(group)] for id_, group in groups.items()}
        self.seen |= any(value is not None for group in values.values() for value in group)
        if self.metric is not None and values and not self.seen:
            first = next(experience for group in groups.values() for experience in group)
            names = sorted(map(str, first.metrics.keys() | first.info.keys()))
            has = ", ".join(name for name in names if not name.startswith(RESERVED)) or "nothing"
            raise ExperienceError(
                f"no experience has '{self.metric}' to judge it by: name a reward function, another metric or an entry "
                f"of info. {first.eid} has {has}."
            )
        return values

    def _value(self, run: Run) -> float | None:
        return raw_reward(last_step(run)) if self.metric is None else metric_of(run, self.metric)


def metric_of(run: Run, metric: str) -> float | None:
    """The metric or entry of info with this name, from the run's last step that has it; see `Criterion`.

    Raises:
        ExperienceError: it is no number.
    """
    for experience in sorted(run, key=lambda experience: experience.eid.step, reverse=True):
        metrics, info = experience.metrics, experience.info
        for value in (metrics.get(metric), metrics.get(f"reward/{metric}"), info.get(metric)):
            if value is None:
                continue
            if (number := as_float(value)) is None:
                raise ExperienceError(
                    f"experience {experience.eid}: '{metric}' must be a number to judge by, not {value!r}."
                )
            return number
    return None


# -- experiences that are not trained on, and why: for completions, metrics and the log --------------------------------


def mark_untrained(experience: Experience, reason: str) -> None:
    """Note in an experience's info why it is not trained on. The info is a new dict: experiences may share one."""
    experience.info = experience.info | {UNTRAINED: reason}


def forget_notes(experience: Experience) -> None:
    """Remove the notes of an earlier pipeline from an experience: the reason, and the first reward."""
    if UNTRAINED in experience.info:
        experience.info = {name: value for name, value in experience.info.items() if name != UNTRAINED}
    if RAW_REWARD in experience.metrics:
        experience.metrics = {name: value for name, value in experience.metrics.items() if name != RAW_REWARD}


class Untrained:
    """Follows the experiences of an explore step through its stages, and notes which stage left out which of them.

    Args:
        all_rows: the objective trains on experiences without an advantage too.
    """

    def __init__(self, all_rows: bool) -> None:
        self._all_rows = all_rows
        self._reasons: dict[str, str] = {}

    def leave_out(self, before: Iterable[Experience], after: Iterable[Experience], reason: str) -> None:
        """Note the reason for experiences of `before` that a stage left out of `after`.

        A group whose reason is in the info of one of its experiences already (an invalid reward) keeps that reason.
        """
        uids = {experience.eid.uid for experience in after}
        left_out = [experience for experience in before if experience.eid.uid not in uids]
        noted = {exp.eid.tid: exp.info[UNTRAINED] for exp in left_out if UNTRAINED in exp.info}
        for experience in left_out:
            self._reasons.setdefault(experience.eid.uid, noted.get(experience.eid.tid, reason))

    def recall(self, experiences: Iterable[Experience]) -> None:
        """Take over the reasons that these experiences have in their info already."""
        for experience in experiences:
            if UNTRAINED in experience.info:
                self._reasons[experience.eid.uid] = experience.info[UNTRAINED]

    def weigh(self, written: Sequence[Experience]) -> int:
        """Note which of the trainer's experiences have no gradient, and return the number of the others."""
        trained = 0
        for group in group_by(written, "task").values():
            equal = _has_equal_rewards(group)
            for experience in group:
                reason = self._no_gradient(experience, equal)
                trained += reason is None
                if reason is not None:
                    self._reasons.setdefault(experience.eid.uid, reason)
                    mark_untrained(experience, reason)
        return trained

    def note(self, experiences: Iterable[Experience]) -> Counter[str]:
        """Mark the experiences that are not trained on, and return their number for each reason."""
        counts: Counter[str] = Counter()
        for experience in experiences:
            if (reason := self._reasons.get(experience.eid.uid)) is not None:
                mark_untrained(experience, reason)
                counts[reason] += 1
        return counts

    def _no_gradient(self, experience: Experience, equal: bool) -> str | None:
        """The reason why an experience has no gradient; None if it has one. `equal`: its group's rewards are equal."""
        mask, advantages = experience.action_mask, experience.advantages
        if mask is None:  # a preference pair
            return None
        if not mask.any():
            return "no trained tokens" if experience.truncate_status is None else "truncated"
        if self._all_rows or advantages is None or advantages[mask.bool()].any():
            return None
        return "equal rewards" if equal else "zero advantage"


def _has_equal_rewards(group: Sequence[Experience]) -> bool:
    """True if a task has several runs, and their rewards are equal."""
    rewards = [last_step(run).reward for run in runs_of(group)]
    valid = [reward for reward in rewards if is_valid_reward(reward)]
    return len(valid) == len(rewards) > 1 and equal_rewards(valid)


# Every reason, with its meaning and with what helps.
REASONS = {
    "equal rewards": (
        "All runs of the task got the same reward, and their advantages are 0.",
        "If all rewards of the step are one number, check that the reward function looks at the response, and that "
        "the model can get another reward: `completions/` shows what it writes, and whether `sampling.max_tokens` cuts "
        "it off. If tasks differ, choose tasks that are neither too easy nor too hard (`taskset.order=by_difficulty`), "
        "more rollouts per task (`explorer.repeat_times`), a reward with steps between wrong and right, or have such "
        "tasks replaced: `add_strategy=[dapo,grpo] explorer.max_refills=3`.",
    ),
    "zero advantage": (
        "The run's reward equals the baseline, so its advantage is 0; the task's other runs are trained on.",
        "Nothing is wrong.",
    ),
    "filtered by NAME": (
        "The operator or add strategy NAME left it out.",
        "Change its arguments (a threshold, say) so that it leaves out fewer. `dapo` leaves out tasks of equal "
        "rewards: if all rewards are one number, check that the reward function looks at the response. Filters that "
        "compare the runs of a task judge by rewards as they were before operators: if operators make up the reward, "
        "give the filter another number as `metric` (`std_threshold` has none: take `reward_variance` in its place).",
    ),
    "truncated": (
        "The response was cut off, and `mask_response_truncated` masks it.",
        "A larger `sampling.max_tokens`.",
    ),
    "no trained tokens": ("The action mask is zero throughout.", "The workflow, or the operator that masks."),
    "invalid reward": (
        "A reward of the task (`invalid METRIC`: what a filter judges by) is missing, NaN or infinite: its group is "
        "left out.",
        "The reward function; `operators=invalid_reward_filter` drops the run alone.",
    ),
    "surplus": ("The step was full before this group of a refill.", "Nothing is wrong."),
}


def what_helps(reason: str) -> str:
    """The advice against one of the `REASONS`, whatever name or metric it ends with."""
    return next(advice for known, (_, advice) in REASONS.items() if known.split()[0] == reason.split()[0])


def warn_of_idle_step(step: int, received: int, reasons: Counter[str], explained: set[str]) -> None:
    """Log why no response of a step is trained on, and what helps against the most frequent reason.

    Args:
        step: the explore step.
        received: number of its responses.
        reasons: number of responses for each reason.
        explained: reasons whose advice was logged before; the most frequent one joins them.
    """
    causes = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    logger.warning("explore step %d: none of its %d responses is trained on: %s.", step, received, causes)
    [(reason, _)] = reasons.most_common(1)
    if reason not in explained:
        explained.add(reason)
        logger.warning("what helps against '%s': %s", reason, what_helps(reason))

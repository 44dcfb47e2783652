"""Why experiences of an explore step are not trained on: noted in their info, for completions, metrics and the log.

An experience is trained on if a token of it is: by an advantage that is not zero, or by a loss that needs none.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from trinity_lightning.common.experience import Experience, group_by
from trinity_lightning.common.rewards import equal_rewards, is_valid_reward
from trinity_lightning.common.runs import RESERVED, last_step, runs_of

# Entry of `Experience.info`: the reason; absent if the experience is trained on.
UNTRAINED = f"{RESERVED}untrained"

# Each reason, what it means, and what helps.
REASONS = {
    "equal rewards": (
        "All runs of the task got the same reward, and their advantages are 0.",
        "Tasks neither too easy nor too hard (`taskset.order=by_difficulty`), more `explorer.repeat_times`, a reward "
        "with steps between wrong and right, or new tasks in their place: `add_strategy=[dapo,grpo] "
        "explorer.max_refills=3`.",
    ),
    "zero advantage": (
        "The reward is just the baseline; the task's other runs are trained on.",
        "Nothing is wrong.",
    ),
    "filtered by NAME": (
        "The operator or add strategy NAME left it out.",
        "Its threshold, or the `metric` it judges by; with `dapo` what helps against `equal rewards`.",
    ),
    "truncated": (
        "The response was cut off, and `mask_response_truncated` masks it.",
        "A larger `sampling.max_tokens`.",
    ),
    "no trained tokens": (
        "The action mask is zero throughout.",
        "The workflow, or the operator that masks.",
    ),
    "invalid reward": (
        "A reward of the task (`invalid METRIC`: what a filter judges by) is missing, NaN or infinite: its group is "
        "left out.",
        "The reward function; `operators=invalid_reward_filter` drops the run alone.",
    ),
    "surplus": ("The step was full before this group of a refill.", "Nothing is wrong."),
}


def what_helps(reason: str) -> str:
    """What helps against one of the `REASONS`, whatever name or metric it ends with."""
    return next(helps for known, (_, helps) in REASONS.items() if known.split()[0] == reason.split()[0])


def mark_untrained(experience: Experience, reason: str) -> None:
    """Note the reason. The info is a new dict: experiences may share one."""
    experience.info = experience.info | {UNTRAINED: reason}


def forget_reason(experience: Experience) -> None:
    """Remove such a note, which an experience that went through a pipeline before still has."""
    if UNTRAINED in experience.info:
        experience.info = {name: value for name, value in experience.info.items() if name != UNTRAINED}


class Untrained:
    """Follows the experiences of a step through its stages, whatever the stages are: by what they leave out.

    Args:
        all_rows: whether the objective trains on experiences without an advantage too.
    """

    def __init__(self, all_rows: bool) -> None:
        self._all_rows = all_rows
        self._reasons: dict[str, str] = {}

    def leave_out(self, before: Iterable[Experience], after: Iterable[Experience], reason: str) -> None:
        """Take note of a stage, which let `after` through of `before`.

        A group with a reason of its own in the info of one of its experiences (an invalid reward) keeps that.
        """
        kept = {experience.eid.uid for experience in after}
        gone = [experience for experience in before if experience.eid.uid not in kept]
        own = {each.eid.tid: each.info[UNTRAINED] for each in gone if UNTRAINED in each.info}
        for experience in gone:
            self._reasons.setdefault(experience.eid.uid, own.get(experience.eid.tid, reason))

    def weigh(self, written: Sequence[Experience]) -> int:
        """Take note of what the trainer is given, with its advantages: the number of those trained on."""
        trained = 0
        for group in group_by(written, "task").values():
            equal = _equal(group)
            for experience in group:
                reason = self._no_gradient(experience, equal)
                trained += reason is None
                if reason is not None:
                    self._reasons.setdefault(experience.eid.uid, reason)
                    mark_untrained(experience, reason)
        return trained

    def note(self, experiences: Iterable[Experience]) -> Counter[str]:
        """Mark the experiences that are not trained on: how many of them for each reason."""
        counts: Counter[str] = Counter()
        for experience in experiences:
            reason = self._reasons.get(experience.eid.uid)
            if reason is not None:
                mark_untrained(experience, reason)
                counts[reason] += 1
        return counts

    def _no_gradient(self, experience: Experience, equal: bool) -> str | None:
        """Why an experience with these advantages has no gradient; None where it has one."""
        mask, advantages = experience.action_mask, experience.advantages
        if mask is None:  # a preference pair
            return None
        if not mask.any():
            return "no trained tokens" if experience.truncate_status is None else "truncated"
        if self._all_rows or advantages is None or advantages[mask.bool()].any():
            return None
        return "equal rewards" if equal else "zero advantage"


def _equal(group: Sequence[Experience]) -> bool:
    """Whether several runs of a task have equal rewards."""
    rewards = [last_step(run).reward for run in runs_of(group)]
    valid = [reward for reward in rewards if reward is not None and is_valid_reward(reward)]
    return len(valid) == len(rewards) > 1 and equal_rewards(valid)

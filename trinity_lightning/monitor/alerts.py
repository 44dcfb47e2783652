"""Alerts: signs in the metrics of explore steps that a run goes wrong, each told once, with one sentence of advice.

Every threshold is far from what chance does in small batches: tests replay the recorded curves of healthy runs.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

REWARD, SPREAD, GROUPS = "reward/mean", "reward/std", "rollout/tasks"
SILENT, LAG, RATE = "frac_reward_zero_std", "sample/lag/mean", "actor/lr"
LOGPROB_DIFF = "actor/logprob_diff/mean"
# A run with one of these also learns from groups with equal rewards: from a teacher, or by a critic's values.
OTHER_SIGNALS = ("group_advantages/reverse_kl/mean", "critic/lr")

# Means of rewards are taken over the last steps that hold so many groups, and are at least so many steps.
MIN_STEPS, MIN_GROUPS = 5, 64
# Differences of two such means, in standard deviations of one of them: chance does not get there in a million steps.
SURE = 8.0
LOST = 0.5  # share of what the run had gained
LOST_OF_BEST = 0.3  # share of the best mean itself: one step without rewards is no collapse
MOST_SILENT = 0.95  # share of groups with equal rewards
# Rounding makes hundredths, weights that are a few steps old make tenths. At 1 the mean importance weight is e^-1.
MOST_LOGPROB_DIFF = 1.0
# A jump: so many times the median of the last steps whose weights were as old, twice in a row.
JUMP, LEAST_JUMP, EARLIER, LEAST_EARLIER = 10.0, 0.1, 20, 5
MOST_LAG = 8.0  # explore steps


@dataclass(frozen=True, slots=True)
class Alert:
    """A cause, in a few words, and what happened with one sentence of advice."""

    title: str
    text: str


@dataclass
class RewardWindow:
    """Means over the last steps: of the reward and of the share of groups without signal.

    Attributes:
        steps: groups, mean reward, share without signal (-1 if unknown) and variance of the rewards of each step in
            the window.
        first: mean reward of the first step, before anything is trained; None before it.
        best: largest mean reward of a window.
        best_variance: mean variance of the rewards within a step of that window.
    """

    steps: list[list[float]] = field(default_factory=list)
    first: float | None = None
    best: float = -math.inf
    best_variance: float = 0.0

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add a step; the window loses the steps that it can do without."""
        silent = -1.0 if any(name in metrics for name in OTHER_SIGNALS) else metrics.get(SILENT, -1.0)
        self.steps.append([metrics[GROUPS], metrics[REWARD], silent, metrics.get(SPREAD, 0.0) ** 2])
        while len(self.steps) > MIN_STEPS and self.groups - self.steps[0][0] >= MIN_GROUPS:
            del self.steps[0]
        self.first = metrics[REWARD] if self.first is None else self.first
        if self.is_full and self.reward > self.best:
            self.best, self.best_variance = self.reward, self.variance

    @property
    def groups(self) -> float:
        """Groups in the window."""
        return sum(step[0] for step in self.steps)

    @property
    def is_full(self) -> bool:
        """True if the window's means are means of enough."""
        return len(self.steps) >= MIN_STEPS and self.groups >= MIN_GROUPS

    @property
    def reward(self) -> float:
        """Mean reward of the window's groups."""
        return self._mean(1)

    @property
    def silent(self) -> float:
        """Share of the window's groups without signal; 0 if a step does not know its own."""
        return self._mean(2) if all(step[2] >= 0 for step in self.steps) else 0.0

    @property
    def variance(self) -> float:
        """Mean variance of the rewards within a step of the window."""
        return self._mean(3)

    @property
    def noise(self) -> float:
        """Standard deviation that chance gives a window's mean, at most: as if a group's rollouts were all alike.

        It is that of this window or of the best one. The steps between them do not count: rewards that were all 0 for
        a long time say nothing of the noise of those that came after.
        """
        return math.sqrt(max(self.variance, self.best_variance) / self.groups)

    def _mean(self, place: int) -> float:
        return sum(step[0] * step[place] for step in self.steps) / self.groups


@dataclass
class Alerts:
    """Watches the metrics of a run, step by step; its state goes into checkpoints.

    Attributes:
        told: titles of alerts that were told already.
        rewards: the last steps' rewards.
        differences: lag and log-probability difference of the last steps without those that were far above the others.
        was_high: True if the last step's difference was far above the others.
        steps_at_zero: steps in a row that were trained with a learning rate of 0.
    """

    told: list[str] = field(default_factory=list)
    rewards: RewardWindow = field(default_factory=RewardWindow)
    differences: list[list[float]] = field(default_factory=list)
    was_high: bool = False
    steps_at_zero: int = 0

    def check(self, metrics: Mapping[str, float]) -> list[Alert]:
        """The alerts that an explore step's metrics give rise to, without those that were told before.

        Metrics may be missing: a step that trained nothing has no `actor/...`.
        """
        alerts = [*self._rewards(metrics), *self._difference(metrics), *self._lag(metrics), *self._rate(metrics)]
        new = [alert for alert in alerts if alert.title not in self.told]
        self.told += [alert.title for alert in new]
        return new

    def _rewards(self, metrics: Mapping[str, float]) -> list[Alert]:
        window = self.rewards
        if not metrics.get(GROUPS) or not math.isfinite(metrics.get(REWARD, math.nan)):
            return []
        window.add(metrics)
        if not window.is_full or window.first is None:
            return []
        alerts, steps, sure = [], len(window.steps), SURE * window.noise
        fall, gain = window.best - window.reward, window.best - window.first
        if fall > max(LOST * gain, LOST_OF_BEST * abs(window.best), sure):
            alerts.append(_collapsed(window.best, window.reward, steps))
        # A run that has learned its tasks has nothing left to learn from them: that is what it was for.
        if window.silent >= MOST_SILENT and window.reward - window.first <= sure:
            alerts.append(_silent(window.silent, window.reward, steps))
        return alerts

    def _difference(self, metrics: Mapping[str, float]) -> list[Alert]:
        difference, lag = metrics.get(LOGPROB_DIFF, math.nan), metrics.get(LAG, 0.0)
        if not math.isfinite(difference):
            return []
        if difference > MOST_LOGPROB_DIFF:
            return [_far_off(difference)]
        # Older weights differ more. So a step is compared with those whose weights were at least as old.
        comparable = [earlier for age, earlier in self.differences if age >= lag]
        usual = statistics.median(comparable) if len(comparable) >= LEAST_EARLIER else math.inf
        is_high, was_high = difference > max(JUMP * usual, LEAST_JUMP), self.was_high
        self.was_high = is_high
        if not is_high:
            self.differences = [*self.differences, [lag, difference]][-EARLIER:]
        return [_jumped(difference, usual)] if is_high and was_high else []

    def _lag(self, metrics: Mapping[str, float]) -> list[Alert]:
        lag = metrics.get(LAG, 0.0)
        return [_stale(lag)] if lag >= MOST_LAG else []

    def _rate(self, metrics: Mapping[str, float]) -> list[Alert]:
        if RATE in metrics:
            self.steps_at_zero = self.steps_at_zero + 1 if metrics[RATE] == 0 else 0
        # One step at 0 is healthy: the first of a warm-up, and the last of a schedule that ends there.
        return [_no_rate(self.steps_at_zero)] if self.steps_at_zero > 1 else []

    def state_dict(self) -> dict[str, Any]:
        """The state with which a resumed run goes on watching."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, perhaps of another version: fields that it had not keep their values."""
        rewards = RewardWindow(**_fields_of(RewardWindow, state.get("rewards", {})))
        vars(self).update(_fields_of(Alerts, state), rewards=rewards)


def _fields_of(kind: type[Alerts | RewardWindow], state: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in state.items() if name in names}


def _collapsed(best: float, reward: float, steps: int) -> Alert:
    return Alert(
        "the reward collapsed",
        f"the mean reward fell from {best:.3g} to {reward:.3g} (means over {steps} steps). Read the completions of the "
        "steps in which it fell, and resume from a checkpoint before them with a lower optimizer.lr.",
    )


def _silent(share: float, reward: float, steps: int) -> Alert:
    return Alert(
        "groups have no signal",
        f"in {share:.0%} of the groups of the last {steps} steps all rewards are equal ({SILENT}), so that next to "
        f"nothing is trained. Take easier tasks if their mean reward, {reward:.3g}, is low, harder ones if it is high, "
        "or more rollouts of each (explorer.repeat_times).",
    )


def _far_off(difference: float) -> Alert:
    return Alert(
        "engine and trainer disagree",
        f"the log-probabilities that the engine gave its responses are {difference:.1f} nats from the trainer's in the "
        f"mean ({LOGPROB_DIFF}). Either they are not those of the distribution that it samples from, or the weights "
        "that it samples with are too old: look at the engine's own log-probabilities, and at synchronizer and "
        "explorer.sync_interval.",
    )


def _jumped(difference: float, usual: float) -> Alert:
    return Alert(
        "the log-probability difference jumped",
        f"engine and trainer differ by {difference:.2g} nats in the mean ({LOGPROB_DIFF}), and by "
        f"{usual:.1g} before. The last weights did not reach the engine as they are: look at sync/probe_diff and the "
        "engine's log, and resume from a checkpoint, which starts the engine afresh.",
    )


def _stale(lag: float) -> Alert:
    return Alert(
        "rollouts are stale",
        f"the weights that sampled this step were {lag:.0f} steps behind when training began ({LAG}). Lower "
        "explorer.sync_interval, explorer.sync_offset or explorer.max_staleness, or choose a loss for old samples "
        "(docs/algorithms.md).",
    )


def _no_rate(steps: int) -> Alert:
    return Alert(
        "the learning rate is 0",
        f"{steps} steps in a row were trained with a learning rate of 0 ({RATE}): the policy's weights do not change. "
        "Set optimizer.lr, or give optimizer.lr_scheduler and optimizer.total_steps as many steps as the run has.",
    )

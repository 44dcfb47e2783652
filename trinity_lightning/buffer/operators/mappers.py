"""Operators that keep all experiences: they shape rewards, mask or charge for long responses, measure pass rates."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import add, mul, sub, truediv
from typing import Any

import torch

from trinity_lightning.buffer.operators.experience_operator import SELECTOR_METRIC, ExperienceOperatorV1
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.runs import (
    WRITTEN_TOKENS,
    is_valid_reward,
    last_step,
    raw_reward,
    runs_of,
    spread,
    written_tokens,
)
from trinity_lightning.config.values import as_float, number, unknown_name, whole_number
from trinity_lightning.errors import ConfigError

# Functions of a reward and a weighted number that give the new reward.
OPERATIONS: dict[str, Callable[[float, float], float]] = {"ADD": add, "SUB": sub, "MUL": mul, "DIV": truediv}
KEYS = ("stats_key", "op_type", "weight")


@dataclass(frozen=True)
class _Rule:
    stats_key: str
    op_type: str
    weight: float

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> "_Rule":
        if not isinstance(config, Mapping):
            raise ConfigError(f"{where} is {config!r}", key=where, fix="give {stats_key, op_type, weight}")
        for key in config:
            if key not in KEYS:
                raise ConfigError(f"{where}: {unknown_name('key', str(key), KEYS)}", key=f"{where}.{key}")
        if not isinstance(config.get("stats_key"), str):
            raise ConfigError(
                f"{where} does not name an entry of Experience.info that shapes the reward",
                key=f"{where}.stats_key",
                fix="give it as stats_key",
            )
        op_type = str(config.get("op_type", "ADD")).upper()
        if op_type not in OPERATIONS:
            raise ConfigError(f"{where}: {unknown_name('op_type', op_type, OPERATIONS)}", key=f"{where}.op_type")
        return cls(config["stats_key"], op_type, number(f"{where}.weight", config.get("weight", 1.0)))

    def apply(self, exp: Experience, reward: float) -> float | None:
        """The new reward; None if the rule does not apply: info has no such entry, or it would divide by zero."""
        value = exp.info.get(self.stats_key)
        if value is None:
            return None
        if (number := as_float(value)) is None:
            raise ExperienceError(
                f"experience {exp.eid}: info['{self.stats_key}'] must be a number to shape by, not {value!r:.80}."
            )
        weighted = self.weight * number
        return None if self.op_type == "DIV" and weighted == 0 else OPERATIONS[self.op_type](reward, weighted)


class RewardShapingMapper(ExperienceOperatorV1):
    """Shapes rewards by numbers of `Experience.info`, one rule after the other.

    A rule replaces the reward by `reward <op> (weight * info[stats_key])`, with ADD, SUB, MUL or DIV (in any case). An
    experience stays as it is if its info lacks the entry, if its reward would be divided by zero, or if it has no
    reward.

    Args:
        reward_shaping_configs: rules {stats_key, op_type: "ADD", weight: 1.0}, in order.
    """

    def __init__(self, reward_shaping_configs: Sequence[Mapping[str, Any]] | None = None) -> None:
        configs = [] if reward_shaping_configs is None else reward_shaping_configs
        if not isinstance(configs, Sequence) or isinstance(configs, str):
            raise ConfigError(
                f"reward_shaping_configs must be a list of rules, not {configs!r}.", key="reward_shaping_configs"
            )
        self._rules = [_Rule.of(config, f"reward_shaping_configs[{i}]") for i, config in enumerate(configs)]

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """All experiences.

        Metrics: `reward_diff/{mean,min,max}`, new minus old reward; `skipped_count`, the number of experiences to which
        some rule did not apply.

        Raises:
            ExperienceError: an entry of info is no number.
        """
        differences, skipped = [], 0
        for exp in exps:
            if exp.reward is None:
                skipped += bool(self._rules)
                continue
            reward, complete = exp.reward, True
            for rule in self._rules:
                shaped = rule.apply(exp, reward)
                complete &= shaped is not None
                reward = reward if shaped is None else shaped
            skipped += not complete
            differences.append(reward - exp.reward)
            exp.reward = reward
        return exps, {"skipped_count": skipped} | spread("reward_diff", differences)


class MaskResponseTruncated(ExperienceOperatorV1):
    """Masks responses that were cut off, so that no token of them is trained on.

    This is the overlong filtering of DAPO (arXiv 2503.14476, section 3.4). A masked experience stays in its group: its
    reward counts for the others' advantages.
    """

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """All experiences; `masked_truncated_count` is the number of those that were masked."""
        masked = 0
        for exp in exps:
            if exp.truncate_status == "response_truncated" and exp.action_mask is not None:
                if exp.experience_type == "multi_turn":
                    exp.info = exp.info | {WRITTEN_TOKENS: written_tokens(exp)}
                exp.action_mask = torch.zeros_like(exp.action_mask)
                masked += 1
        return exps, {"masked_truncated_count": masked}


class OverlongPenalty(ExperienceOperatorV1):
    """Adds a penalty for length to the reward (soft overlong punishment: DAPO, arXiv 2503.14476, equation 13).

    For a response of L tokens: 0 up to max_length - cache_length, from there on
    ((max_length - cache_length) - L) / cache_length, and -1 from max_length on. With several turns, L counts the tokens
    that the policy wrote in all of them. A missing reward stays missing.

    Args:
        max_length: length from which on the penalty is -1, in tokens.
        cache_length: number of tokens before max_length over which the penalty grows; above 0 and below max_length.
    """

    def __init__(self, max_length: int, cache_length: int) -> None:
        self.max_length = whole_number("max_length", max_length, least=1)
        self.cache_length = whole_number("cache_length", cache_length, least=1)
        if cache_length >= max_length:
            raise ConfigError(
                f"cache_length ({cache_length}) must be below max_length ({max_length}).", key="cache_length"
            )

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """All experiences; `overlong_penalty/mean` is the mean of their penalties."""
        penalties = [self._penalty(written_tokens(exp)) for exp in exps]
        for exp, penalty in zip(exps, penalties, strict=True):
            if exp.reward is not None:
                exp.reward += penalty
        return exps, {"overlong_penalty/mean": sum(penalties) / len(penalties)} if penalties else {}

    def _penalty(self, length: int) -> float:
        return max(min((self.max_length - self.cache_length - length) / self.cache_length, 0.0), -1.0)


class PassRateCalculator(ExperienceOperatorV1):
    """Measures the mean reward of each task, by `info["task_index"]` {taskset_id, index}, before any operator.

    It only measures: a taskset in the order `by_difficulty` gets the rewards of all rollouts from the explorer itself.

    A run of several steps counts once, with its last step's reward. Rewards that are no finite numbers do not count; a
    task without any other is not reported.
    """

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """All experiences.

        Metrics: `selector_metric`, {taskset_id: {"indices": [...], "values": [...]}}, which is no number and is not
        logged; `selection/pass_rate/{mean,min,max}` over tasks, `selection/task_count`, and
        `selection/skipped_count`, the number of experiences without a valid reward.

        Raises:
            ExperienceError: an experience has no info["task_index"], or a misshapen one.
        """
        rewards: dict[Any, dict[Any, list[float]]] = {}
        skipped = 0
        for exp in map(last_step, runs_of(exps)):
            taskset, index = _task_index(exp)
            reward = raw_reward(exp)
            if not is_valid_reward(reward):
                skipped += 1
                continue
            rewards.setdefault(taskset, {}).setdefault(index, []).append(reward)
        selector = {
            taskset: {"indices": list(tasks), "values": [statistics.fmean(values) for values in tasks.values()]}
            for taskset, tasks in rewards.items()
        }
        rates = [value for tasks in selector.values() for value in tasks["values"]]
        metrics: dict[str, Any] = {
            SELECTOR_METRIC: selector,
            "selection/task_count": len(rates),
            "selection/skipped_count": skipped,
        }
        return exps, metrics | spread("selection/pass_rate", rates)


def _task_index(exp: Experience) -> tuple[Any, Any]:
    task_index = exp.info.get("task_index")
    if not isinstance(task_index, dict) or not {"taskset_id", "index"} <= task_index.keys():
        raise ExperienceError(
            f"experience {exp.eid}: info['task_index'] must be {{taskset_id, index}} for pass_rate_calculator, not "
            f"{task_index!r:.80}. Tasksets of this library give it; a workflow of your own has to pass it on."
        )
    return task_index["taskset_id"], task_index["index"]

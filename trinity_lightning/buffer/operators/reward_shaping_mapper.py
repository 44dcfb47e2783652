"""Rewards made of a reward and what is known of the rollout."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from trinity_lightning.buffer.operators.experience_operator import ExperienceOperatorV1
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.config.values import number, unknown_name
from trinity_lightning.errors import ConfigError

# How a reward and a weighted number become the new reward.
OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "ADD": lambda reward, value: reward + value,
    "SUB": lambda reward, value: reward - value,
    "MUL": lambda reward, value: reward * value,
    "DIV": lambda reward, value: reward / value,
}
KEYS = ("stats_key", "op_type", "weight")


@dataclass(frozen=True)
class _Rule:
    stats_key: str
    op_type: str
    weight: float

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> "_Rule":
        if not isinstance(config, Mapping):
            raise ConfigError(f"{where} is {config!r}; give {{stats_key, op_type, weight}}.")
        for key in config:
            if key not in KEYS:
                raise ConfigError(f"{where}: {unknown_name('key', str(key), KEYS)}")
        if not isinstance(config.get("stats_key"), str):
            raise ConfigError(f"{where}: give stats_key, the entry of Experience.info that shapes the reward.")
        op_type = str(config.get("op_type", "ADD")).upper()
        if op_type not in OPERATIONS:
            raise ConfigError(f"{where}: {unknown_name('op_type', op_type, OPERATIONS)}")
        return cls(config["stats_key"], op_type, number(f"{where}: weight", config.get("weight", 1.0)))

    def apply(self, exp: Experience, reward: float) -> float | None:
        """The new reward, or None where the rule does not apply: no such entry, or a division by zero."""
        value = exp.info.get(self.stats_key)
        if value is None:
            return None
        if not isinstance(value, Real):
            raise ExperienceError(
                f"experience {exp.eid}: info['{self.stats_key}'] must be a number to shape by, not {value!r:.80}."
            )
        weighted = self.weight * float(value)
        return None if self.op_type == "DIV" and weighted == 0 else OPERATIONS[self.op_type](reward, weighted)


class RewardShapingMapper(ExperienceOperatorV1):
    """Shapes rewards by numbers of `Experience.info`, one rule after the other.

    A rule makes `reward <op> (weight * info[stats_key])` of the reward, with one of ADD, SUB, MUL and DIV (in any
    case). It leaves an experience as it was whose info has no such entry, and so does a division by zero; without a
    reward there is nothing to shape.

    Args:
        reward_shaping_configs: rules {stats_key, op_type: "ADD", weight: 1.0}, in order.
    """

    def __init__(self, reward_shaping_configs: Sequence[Mapping[str, Any]] | None = None) -> None:
        configs = [] if reward_shaping_configs is None else reward_shaping_configs
        if not isinstance(configs, Sequence) or isinstance(configs, str):
            raise ConfigError(f"reward_shaping_configs must be a list of rules, not {configs!r}.")
        self._rules = [_Rule.of(config, f"reward_shaping_configs[{i}]") for i, config in enumerate(configs)]

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """All experiences.

        Metrics: `reward_diff/{mean,min,max}`, new minus old reward of those that have one; `skipped_count`, the
        experiences that some rule did not apply to.

        Raises:
            ExperienceError: an entry of info is no number.
        """
        differences, skipped = [], 0
        for exp in exps:
            if exp.reward is None:
                skipped += bool(self._rules)
                continue
            reward, complete = self._shaped(exp, exp.reward)
            skipped += not complete
            differences.append(reward - exp.reward)
            exp.reward = reward
        metrics: dict[str, Any] = {"skipped_count": skipped}
        if differences:
            metrics |= {
                "reward_diff/mean": math.fsum(differences) / len(differences),
                "reward_diff/min": min(differences),
                "reward_diff/max": max(differences),
            }
        return exps, metrics

    def _shaped(self, exp: Experience, reward: float) -> tuple[float, bool]:
        """The reward after all rules that apply, and whether all did."""
        complete = True
        for rule in self._rules:
            shaped = rule.apply(exp, reward)
            complete &= shaped is not None
            reward = reward if shaped is None else shaped
        return reward, complete

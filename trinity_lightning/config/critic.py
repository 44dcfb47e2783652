"""The critic of PPO (algorithm.critic): what it is, and what it does not go together with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trinity_lightning.config.models import check_model_name, load_tokenizer
from trinity_lightning.config.own_models import check_on_hub, check_same_vocabulary
from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.config.sections import Section, checked
from trinity_lightning.config.training import LoRAConfig
from trinity_lightning.config.values import flag, number, one_of, text, whole_number
from trinity_lightning.errors import ConfigError


@dataclass
class CriticConfig(Section, key="algorithm.critic"):
    """A critic: what the policy's states are worth, and with that advantages by GAE (arXiv 1506.02438).

    Attributes:
        model: a value model of its own, which has the policy's vocabulary (a folder or a hub name); null: a head on the
            policy's last hidden states, which the policy's weights are trained for, too.
        lr: peak learning rate of the critic's own weights; the schedule is the policy's.
        coef: weight of the value loss, which is added to the policy loss.
        gamma, lam: discount of a trained token, and GAE's lambda; both 1: the reward to go less the value.
        clip_range: no value gains by being further than this from the one before the step; null: not clipped.
        warmup_steps: first optimizer steps of a run that train the critic alone, of a value head the head alone.
        whiten: advantages have mean 0 and standard deviation 1 over the trained tokens of an explore step.
        kl_coef: weight of a token's KL estimate against the initial policy, subtracted from its reward; 0: none.
        kl_name: the estimate: k1, k2, k3, low_var_kl, abs, corrected_k3.
        kl_target: nats a response that an adaptive weight aims at (arXiv 1909.08593, section 2.2); null: it stays.

    Raises:
        ConfigError: a number out of its range, or an unknown estimate.
    """

    model: str | None = None
    lr: float = checked(1e-4, number, above=0)
    coef: float = checked(0.1, number, above=0)
    gamma: float = checked(1.0, number, above=0, most=1)
    lam: float = checked(1.0, number, least=0, most=1)
    clip_range: float | None = checked(0.2, number, above=0, optional=True)
    warmup_steps: int = checked(0, whole_number, least=0)
    whiten: bool = checked(True, flag)
    kl_coef: float = checked(0.0, number, least=0)
    kl_name: str = checked("k1", one_of, names=[name for name in PARTS["KL estimate"] if name != "none"])
    kl_target: float | None = checked(None, number, above=0, optional=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None:
            text("algorithm.critic.model", self.model)
        if self.kl_target is not None and self.kl_coef == 0:
            raise ConfigError(
                "algorithm.critic.kl_target adapts algorithm.critic.kl_coef, which is 0 and would stay so: give it."
            )

    def check_alone(self, lora: LoRAConfig) -> None:
        """Refuse adapters together with a critic; a ConfigError."""
        if lora.r is not None:
            raise ConfigError(
                "algorithm.critic is not for adapters: leave out model.lora, or set algorithm.critic=null."
            )


def critic_config(given: Any) -> CriticConfig:
    """The section out of a mapping, or as it is; a ConfigError as of every section."""
    if isinstance(given, CriticConfig):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"algorithm.critic is {given!r}; give null or a mapping, such as {{lr: 1.0e-4}}.")
    return CriticConfig(**{str(key): value for key, value in given.items()})


def check_value_model(name: str, policy: str) -> None:
    """Refuse a value model that is not there, or has another vocabulary than the policy; a ConfigError."""
    try:
        check_model_name(name)
        check_on_hub(name)
    except ConfigError as error:
        raise ConfigError(f"algorithm.critic.model: {error}") from error
    check_same_vocabulary("algorithm.critic.model", name, load_tokenizer(policy))


def check_critic(run: TrainConfig) -> None:
    """Refuse a critic without what it learns from, and what weighs by a critic without one.

    Raises:
        ConfigError: names the key and the fix.
    """
    critic, weighs = run.algorithm.critic, [each.name for each in run.add_strategy.values()][-1]
    if critic is None:
        raise ConfigError(
            "add_strategy=critic leaves advantages to a critic, and there is none: choose algorithm=ppo_critic, or "
            "another add_strategy."
        )
    if not run.buffer.has_rollouts:
        raise ConfigError(
            f"algorithm.critic learns from the rewards of rollouts, and buffer.storage={run.buffer.storage} has none: "
            "set algorithm.critic=null."
        )
    if weighs != "critic":
        raise ConfigError(
            f"algorithm.critic makes the advantages, and add_strategy={weighs} would, too: choose add_strategy=critic."
        )
    if run.buffer.expert.per_step > 0:
        raise ConfigError(
            "algorithm.critic makes advantages of rewards, and expert data (buffer.expert.per_step) have none: set "
            "buffer.expert.per_step=0, or algorithm.critic=null."
        )
    if run.workflow.args.get("step_reward") == "own" and run.workflow.args.get("mode") != "single":
        raise ConfigError(
            "workflow.args.step_reward=own gives a step its own reward, and algorithm.critic does not see the steps "
            "behind it: set workflow.args.step_reward=return, or workflow.args.mode=single."
        )
    if critic.kl_name != CriticConfig.kl_name and critic.kl_coef == 0:
        raise ConfigError(
            "algorithm.critic.kl_name has no effect without algorithm.critic.kl_coef: set that, or leave it out."
        )
    if critic.warmup_steps >= (steps := run.steps * run.items):
        raise ConfigError(
            f"algorithm.critic.warmup_steps is {critic.warmup_steps}, and the run takes {steps} optimizer steps: none "
            "would train the policy. Give fewer, or more steps."
        )
    critic.check_alone(run.model.lora)

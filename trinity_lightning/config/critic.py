"""The critic of PPO (algorithm.critic), and its rules."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trinity_lightning.config.model import LoRAConfig
from trinity_lightning.config.models import check_model_name, check_on_hub, check_same_vocabulary, load_tokenizer
from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.sections import Section, checked, section_of
from trinity_lightning.config.values import flag, number, one_of, text, whole_number
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.run import TrainConfig


@dataclass
class CriticConfig(Section, key="algorithm.critic"):
    """A critic: values of the policy's states, from which GAE makes the advantages (arXiv 1506.02438).

    Attributes:
        model: a separate value model with the policy's vocabulary (a folder or a hub name). Null: a head on the
            policy's last hidden states; the value loss then trains the policy's weights too.
        lr: peak learning rate of the critic's own weights; the schedule is the policy's.
        coef: weight of the value loss, which is added to the policy loss.
        gamma, lam: discount of a trained token, and GAE's lambda; with both 1, the reward to go minus the value.
        clip_range: range of the clipped value loss: once a value has moved by more than this in a step, moving further
            gains nothing. Null: no clip.
        warmup_steps: first optimizer steps of a run, which train the critic alone (with a value head, the head alone).
        whiten: shift and scale the advantages to mean 0 and standard deviation 1 over the trained tokens of an explore
            step.
        kl_coef: weight of a token's KL estimate against the initial policy, subtracted from its reward; 0: none.
        kl_name: the estimate: k1, k2, k3, low_var_kl, abs, corrected_k3.
        kl_target: nats a response at which an adaptive kl_coef aims (arXiv 1909.08593, section 2.2); null: constant.
    """

    model: str | None = checked(None, text, optional=True)
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
        if self.kl_target is not None and self.kl_coef == 0:
            raise ConfigError(
                "algorithm.critic.kl_target adapts algorithm.critic.kl_coef, which is 0 and would stay so",
                key="algorithm.critic.kl_target",
                fix="give it",
            )

    def check_alone(self, lora: LoRAConfig) -> None:
        """Refuse adapters together with a critic; a ConfigError."""
        if lora.r is not None:
            raise ConfigError(
                "algorithm.critic is not for adapters",
                key="algorithm.critic",
                fix="leave out model.lora, or set algorithm.critic=null",
            )


def critic_config(value: Any) -> CriticConfig:
    """The critic's section, made from a mapping or copied from a section. Errors as `Section`."""
    if not isinstance(value, Mapping | CriticConfig):
        raise ConfigError(
            f"algorithm.critic is {value!r}",
            key="algorithm.critic",
            fix="give null or a mapping, such as {lr: 1.0e-4}",
        )
    return section_of("algorithm.critic", CriticConfig, value)


def check_value_model(run: "TrainConfig") -> None:
    """Refuse a value model that cannot be found, or whose vocabulary is not the policy's; a ConfigError."""
    name = None if run.algorithm.critic is None else run.algorithm.critic.model
    if name is None:
        return
    try:
        check_model_name(name)
        check_on_hub(name)
    except ConfigError as error:
        raise ConfigError(f"algorithm.critic.model: {error}", key="algorithm.critic.model") from error
    check_same_vocabulary("algorithm.critic.model", name, load_tokenizer(run.model.name))


def check_critic(run: "TrainConfig") -> None:
    """Refuse a critic without rewards to learn from, and add_strategy=critic without a critic; a ConfigError."""
    critic = run.algorithm.critic
    strategies = [strategy.name for strategy in run.add_strategy.values()] if run.buffer.has_rollouts else []
    if critic is None:
        if "critic" in strategies:
            raise ConfigError(
                "add_strategy=critic leaves advantages to a critic, and there is none",
                key="add_strategy",
                fix="choose algorithm=ppo_critic, or another add_strategy",
            )
        return
    if not run.buffer.has_rollouts:
        raise ConfigError(
            f"algorithm.critic learns from the rewards of rollouts, and buffer.storage={run.buffer.storage} has none",
            key="algorithm.critic",
            fix="set algorithm.critic=null",
        )
    if strategies[-1] != "critic":
        raise ConfigError(
            f"algorithm.critic makes the advantages, and add_strategy={strategies[-1]} would, too",
            key="algorithm.critic",
            fix="choose add_strategy=critic",
        )
    if run.buffer.expert.per_step > 0:
        raise ConfigError(
            "algorithm.critic makes advantages of rewards, and expert data (buffer.expert.per_step) have none",
            key="algorithm.critic",
            fix="set buffer.expert.per_step=0, or algorithm.critic=null",
        )
    if run.workflow.args.get("step_reward") == "own" and run.workflow.args.get("mode") != "single":
        raise ConfigError(
            "workflow.args.step_reward=own gives a step its own reward, and algorithm.critic does not see the steps "
            "behind it",
            key="workflow.args.step_reward",
            fix="set workflow.args.step_reward=return, or workflow.args.mode=single",
        )
    if critic.kl_name != CriticConfig.kl_name and critic.kl_coef == 0:
        raise ConfigError(
            "algorithm.critic.kl_name has no effect without algorithm.critic.kl_coef",
            key="algorithm.critic.kl_name",
            fix="set that, or leave it out",
        )
    if critic.warmup_steps >= (steps := run.steps * run.items):
        raise ConfigError(
            f"algorithm.critic.warmup_steps is {critic.warmup_steps}, and the run takes {steps} optimizer steps: none "
            "would train the policy. Give fewer, or more steps.",
            key="algorithm.critic.warmup_steps",
        )
    critic.check_alone(run.model.lora)

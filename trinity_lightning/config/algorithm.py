"""The objective: how experiences become optimizer steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from trinity_lightning.config.buffer import OnError
from trinity_lightning.config.engine import Capabilities
from trinity_lightning.config.explorer import TEACHER_OPERATOR, ExplorerConfig
from trinity_lightning.config.losses import LOSSES
from trinity_lightning.config.model import LoRAConfig
from trinity_lightning.config.model_files import check_model_name, check_on_hub, check_same_vocabulary, load_tokenizer
from trinity_lightning.config.registry import FILTERING_STRATEGIES, PARTS, SINGLE_RESPONSE_WORKFLOWS
from trinity_lightning.config.sections import Section, checked, part_config, section_of
from trinity_lightning.config.values import AUTO, flag, number, one_of, text, whole_number
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.run import TrainConfig

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")

CORRECTION_LEVELS = ("token", "sequence")

CORRECTION_MODES = ("truncate", "mask")


class Layout(Enum):
    """How the rows of a micro-batch lie in memory; all are exact.

    `padded`: side by side, padded to the longest. `shared_prefix`: what several prompts begin with is computed once,
    each row's rest behind it, without padding. `auto`: that which computes fewer tokens, for each optimizer batch.
    """

    auto = "auto"
    padded = "padded"
    shared_prefix = "shared_prefix"


@dataclass
class KLConfig(Section, key="algorithm.kl"):
    """KL penalty against the frozen initial policy, as a loss term.

    Attributes:
        name: the estimate: k1, k2, k3, low_var_kl, abs, corrected_k3, none.
        coef: its weight; 0 means none, and no reference model.
    """

    name: str = checked("k3", one_of, names=PARTS["KL estimate"])
    coef: float = checked(0.0, number, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == "none" and self.coef > 0:
            raise ConfigError(
                f"algorithm.kl.coef is {self.coef}, and algorithm.kl.name=none has no penalty to weigh",
                key="algorithm.kl.coef",
                fix="choose k3, or set algorithm.kl.coef=0",
            )


@dataclass
class RolloutCorrectionConfig(Section, key="algorithm.rollout_correction"):
    """Importance weights exp(trainer - engine log-probability) for the mismatch between engine and trainer.

    Attributes:
        level: `token`, `sequence`, or `none`.
        mode: what becomes of weights outside the range: `truncate`, its nearer end; or `mask`, 0.
        low, high: the range of weights.
    """

    level: str = checked("token", one_of, names=("none", *CORRECTION_LEVELS))
    mode: str = checked("truncate", one_of, names=CORRECTION_MODES)
    low: float = checked(0.0, number, least=0)
    high: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high != math.inf:  # weights may be unbounded
            number("algorithm.rollout_correction.high", self.high, above=0)
        if self.low > self.high:
            raise ConfigError(
                f"algorithm.rollout_correction.low ({self.low}) is above its high ({self.high}).",
                key="algorithm.rollout_correction.low",
            )


@dataclass
class AlgorithmConfig(Section, key="algorithm"):
    """The objective, and how a step's experiences become optimizer steps.

    Attributes:
        policy_loss: {name, args}: a registered name (`ppo`, alias `grpo`, ...) or the dotted path of your own function,
            and its keyword arguments (clip_range_low, dual_clip, ...), see the table of losses. A name alone is short
            for {name: it}.
        loss_agg_mode: how token terms become one number: token-mean, seq-mean-token-mean, seq-mean-token-sum, or
            seq-mean-token-sum-norm, which divides by sampling.max_tokens (with several turns engine.max_model_len, of
            a dataset buffer.dataset.max_length); null takes the loss's own default.
        kl: KL penalty.
        entropy_coef: weight of the entropy bonus.
        old_logprobs: what the ratio is against: `trainer`, the policy before the step's first update, computed by the
            trainer; or `engine`, the policy that sampled, by the engine's log-probabilities: rollouts of older weights
            are then clipped, and nothing is computed for several optimizer steps. It needs
            rollout_correction.level=none, as the ratio corrects already.
        rollout_correction: importance weights for the engine's mismatch.
        off_policy_mask_threshold: leave tokens of negative advantage out of the loss in sequences that the policy has
            moved away from by more than so many nats a token (DeepSeek-V3.2's sequence mask; 0.1 is a start). What
            sampled is the engine, or, if its log-probabilities are not recorded, the policy before the step. null:
            none is left out.
        optimizer_steps: optimizer steps the experiences of one explore step are dealt into.
        inner_epochs: passes over them.
        layout: `padded`, rows padded to the longest of their micro-batch; `shared_prefix`, what several prompts begin
            with computed once, each row's rest behind it, without padding; `auto`, the latter if it saves a fifth.
            The loss is the same. Models whose layers are not plain full attention keep `padded`.
        max_tokens_per_micro_batch: computed tokens of one forward and backward pass, padding included and shared
            prefixes once: what bounds memory. A longer row, or pair of rows, is a micro-batch of
            its own. `auto`: on a CPU 256 to 4,096 by what is free when the run starts, recorded in its config.yaml (a
            resumed run keeps its own); on a GPU by the memory plan, 16,384 or a half of that and so on; on several
            GPUs, and with engine=transformers, at most 4,096.
        max_grad_norm: gradients are clipped to this norm, a number above 0; null: never.
        max_bad_steps: a gradient that is not finite is left out and counted; so many in a row stop the run.
        critic: a critic, whose values make the advantages (add_strategy=critic, algorithm=ppo_critic); null: none.
    """

    policy_loss: Any = "ppo"
    loss_agg_mode: str | None = checked(None, one_of, names=LOSS_AGG_MODES, optional=True)
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coef: float = checked(0.0, number, least=0)
    old_logprobs: str = checked("trainer", one_of, names=("trainer", "engine"))
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    off_policy_mask_threshold: float | None = checked(None, number, least=0, optional=True)
    optimizer_steps: int = checked(1, whole_number, least=1)
    inner_epochs: int = checked(1, whole_number, least=1)
    layout: Layout = Layout.auto
    max_tokens_per_micro_batch: int | str = checked(AUTO, whole_number, least=1, auto=True)
    max_grad_norm: float | None = checked(1.0, number, above=0, optional=True)
    max_bad_steps: int = checked(5, whole_number, least=1)
    critic: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic is not None:
            self.critic = critic_config(self.critic)
        self.policy_loss = part_config("algorithm.policy_loss", self.policy_loss)
        one_of("algorithm.policy_loss", self.policy_loss.name, PARTS["policy loss"], with_paths=True)
        if "loss_agg_mode" in self.policy_loss.args:
            raise ConfigError(
                "algorithm.policy_loss.args has no loss_agg_mode",
                key="algorithm.policy_loss.args",
                fix="set algorithm.loss_agg_mode",
            )
        if self.policy_loss.name == "streams":
            streams_of(self)
        if self.old_logprobs == "engine" and self.rollout_correction.level != "none":
            raise ConfigError(
                "algorithm.old_logprobs=engine corrects already, and importance weights would once more",
                key="algorithm.old_logprobs",
                fix="set algorithm.rollout_correction.level=none",
            )
        if not isinstance(self.layout, Layout):  # a script may give its name
            one_of("algorithm.layout", self.layout, [each.value for each in Layout])
            self.layout = Layout(self.layout)


# Strategies and operators by name; those of one's own are of none of these.
COMPARING_STRATEGIES = ("asymre", "correct_bias", "dr_grpo", "grpo", "opmd", "rloo", "step_wise_grpo")  # within a group

STEP_STRATEGIES = ("critic", "gigpo", "on_policy_distill", "step_wise_grpo")  # they take a reward a step, or need none

SHAPING_OPERATORS = ("judge", "overlong_penalty", "reward_shaping_mapper")  # they change rewards


def check_strategies(run: "TrainConfig", named: Sequence[str]) -> None:
    """Refuse strategies of rollouts, by their names, that do not go together with the rest; a ConfigError."""
    if "asymre" in named and run.algorithm.policy_loss.name == "asymre":
        raise ConfigError(
            "algorithm.policy_loss=asymre and add_strategy=asymre would both shift the baseline",
            key="algorithm.policy_loss",
            fix="choose add_strategy=dr_grpo, or algorithm.policy_loss=reinforce",
        )
    own_parts = any("." in each.name for each in (run.workflow, *run.operators.values()))
    if "on_policy_distill" in named and run.workflow.name != "on_policy_distill" and not own_parts:
        raise ConfigError(
            f"add_strategy=on_policy_distill weighs by a teacher, and workflow={run.workflow.name} asks none",
            key="add_strategy",
            fix="choose workflow=on_policy_distill, and give +auxiliary_models.teacher.model=FOLDER",
        )
    step_wise = run.workflow.args.get("step_reward") == "own"
    if "gigpo" in named and run.workflow.name in ("multi_turn", "tool_use") and not step_wise:
        raise ConfigError(
            "add_strategy=gigpo sums the rewards of single steps",
            key="add_strategy",
            fix="set workflow.args.step_reward=own",
        )
    if run.workflow.args.get("mode") == "step_wise":
        _check_step_rewards(run, [name for name in named if name in PARTS["add strategy"]])
    if run.explorer.repeat_times == 1:
        _check_groups_of_one(named)
    for earlier in list(run.add_strategy.values())[:-1]:
        keeps_some = earlier.args.get("std_threshold") is not None and named[-1] != "critic"
        filters = earlier.name in FILTERING_STRATEGIES or keeps_some
        if earlier.name in PARTS["add strategy"] and not filters:
            raise ConfigError(
                f"add_strategy={earlier.name} sets advantages, and {named[-1]} behind it would set them again: choose "
                f"one of them; in front of it may be filters: {', '.join(FILTERING_STRATEGIES)}.",
                key="add_strategy",
            )


def _check_step_rewards(run: "TrainConfig", built_in: list[str]) -> None:
    """Refuse a strategy that compares runs by one reward if the steps of a run may have different ones."""
    one_a_run = [name for name in built_in if name not in STEP_STRATEGIES]
    shaping = [operator.name for operator in run.operators.values() if operator.name in SHAPING_OPERATORS]
    own = run.workflow.args.get("step_reward") == "own"
    if one_a_run and (own or shaping):
        what = "workflow.args.step_reward=own" if own else f"operator '{shaping[0]}'"
        raise ConfigError(
            f"{what} gives the steps of a run different rewards, and add_strategy={one_a_run[0]} compares runs by one",
            fix=f"choose add_strategy=step_wise_grpo or gigpo{', or step_reward=return' if own else ''}",
        )


def _check_groups_of_one(named: Sequence[str]) -> None:
    for name in named:
        if name in FILTERING_STRATEGIES:
            raise ConfigError(
                f"explorer.repeat_times is 1, and add_strategy={name} keeps groups whose rewards differ",
                key="explorer.repeat_times",
                fix="give explorer.repeat_times=8, say",
            )
        if name in COMPARING_STRATEGIES:
            raise ConfigError(
                f"explorer.repeat_times is 1, and add_strategy={name} compares the rollouts of a task",
                key="explorer.repeat_times",
                fix="give explorer.repeat_times=8, say, or choose add_strategy=reinforce",
            )


@dataclass
class CriticConfig(Section, key="algorithm.critic"):
    """A critic: what the policy's states are worth, and with that advantages by GAE (arXiv 1506.02438).

    Attributes:
        model: a value model of its own, which has the policy's vocabulary (a folder or a hub name); null: a head on the
            policy's last hidden states, which the policy's weights are trained for, too.
        lr: peak learning rate of the critic's own weights; the schedule is the policy's.
        coef: weight of the value loss, which is added to the policy loss.
        gamma, lam: discount of a trained token, and GAE's lambda; both 1: the reward to go less the value.
        clip_range: range of the clipped value loss: a value more than this far from its value before the step gains
            nothing by moving further; null: not clipped.
        warmup_steps: first optimizer steps of a run that train the critic alone, of a value head the head alone.
        whiten: advantages have mean 0 and standard deviation 1 over the trained tokens of an explore step.
        kl_coef: weight of a token's KL estimate against the initial policy, subtracted from its reward; 0: none.
        kl_name: the estimate: k1, k2, k3, low_var_kl, abs, corrected_k3.
        kl_target: nats a response that an adaptive weight aims at (arXiv 1909.08593, section 2.2); null: it stays.
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


def critic_config(given: Any) -> CriticConfig:
    """The section out of a mapping, or a copy of one; a ConfigError as of every section."""
    if not isinstance(given, Mapping | CriticConfig):
        raise ConfigError(
            f"algorithm.critic is {given!r}: give null or a mapping, such as {{lr: 1.0e-4}}.", key="algorithm.critic"
        )
    return section_of("algorithm.critic", CriticConfig, given)


def check_value_model(name: str, policy: str) -> None:
    """Refuse a value model that is not there, or has another vocabulary than the policy; a ConfigError."""
    try:
        check_model_name(name)
        check_on_hub(name)
    except ConfigError as error:
        raise ConfigError(f"algorithm.critic.model: {error}", key="algorithm.critic.model") from error
    check_same_vocabulary("algorithm.critic.model", name, load_tokenizer(policy))


def check_critic(run: "TrainConfig") -> None:
    """Refuse a critic without what it learns from, and what weighs by a critic without one; a ConfigError."""
    critic = run.algorithm.critic
    if critic is None:
        raise ConfigError(
            "add_strategy=critic leaves advantages to a critic, and there is none",
            key="add_strategy",
            fix="choose algorithm=ppo_critic, or another add_strategy",
        )
    if not run.buffer.has_rollouts:
        raise ConfigError(
            f"algorithm.critic learns from the rewards of rollouts, and buffer.storage={run.buffer.storage} has none",
            key="algorithm.critic",
            fix="set algorithm.critic=null",
        )
    if (weighs := [each.name for each in run.add_strategy.values()][-1]) != "critic":
        raise ConfigError(
            f"algorithm.critic makes the advantages, and add_strategy={weighs} would, too",
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


STREAMS = "algorithm.policy_loss.args.streams"

TOKENS = ("rollouts", "expert", "observations", "weights")

# Built-in losses that may be a term: of tokens, and no mixture.
TERM_LOSSES = [name for name, loss in LOSSES.items() if not (loss.needs.pairs or loss.needs.terms)]

TAKEN = ("entropy", "kl", "pg")  # actor/NAME_loss is another metric


@dataclass
class StreamConfig(Section):
    """A term of an objective: a loss over tokens of its own, averaged over their number in the optimizer batch.

    Attributes:
        loss: a registered loss of tokens (`ppo`, `sft`, `teacher_kl`, ...), or the dotted path of your own.
        tokens: which tokens: `rollouts`, what the policy wrote in rollouts; `expert`, the responses of expert data
            (buffer.expert); `observations`, what the environment or the tools wrote into rollouts of several turns, by
            the chat template; `weights`, those with a weight in the experience's info["token_weights"][the stream's
            name], a number for each token of the response, which its loss is multiplied by.
        weight: of the term.
        args: arguments of the loss.
    """

    loss: str = checked("ppo", one_of, names=TERM_LOSSES, with_paths=True)
    tokens: str = checked("rollouts", one_of, names=TOKENS)
    weight: float = checked(1.0, number, least=0)
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (built_in := LOSSES.get(self.loss)) is None:
            return
        if self.tokens in ("expert", "observations") and not built_in.needs.supervised:
            raise ConfigError(
                f"loss={self.loss} needs tokens that the policy sampled, not {self.tokens}", fix="use sft"
            )
        if self.tokens == "expert" and built_in.needs.teacher:
            raise ConfigError(f"loss={self.loss} is of rollouts, and no teacher reads tokens=expert", fix="use sft")


def stream_configs(given: Any) -> dict[str, StreamConfig]:
    """The streams by name, in order; None: `ppo` on rollouts.

    Raises:
        ConfigError: no stream, or none with a weight; a name that a metric has, an unknown key, or a value that a
            stream refuses.
    """
    if given is None:
        given = {"rollouts": {}}
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            f"{STREAMS} is {given!r}: give {{name: {{loss, tokens, weight, args}}}}, at least one.", key=STREAMS
        )
    for name in TAKEN:
        if name in given:
            raise ConfigError(
                f"{STREAMS}.{name}: the metric actor/{name}_loss is something else",
                key=f"{STREAMS}.{name}",
                fix="give it another name",
            )
    streams = {str(name): _stream(f"{STREAMS}.{name}", it) for name, it in given.items()}
    if not any(stream.weight for stream in streams.values()):
        raise ConfigError(
            f"{STREAMS}: all weights are 0, and nothing is trained",
            key=STREAMS,
            fix="give one of them a weight above 0",
        )
    return streams


def _stream(key: str, given: Any) -> StreamConfig:
    if not isinstance(given, Mapping | StreamConfig):
        raise ConfigError(
            f"{key} is {given!r}", key=key, fix="give {loss, tokens, weight, args}, each of them optional"
        )
    if isinstance(given, Mapping) and given.get("args", {}) is None:  # `args:` alone, in YAML
        given = {**given, "args": {}}
    return section_of(key, StreamConfig, given)


def streams_of(algorithm: AlgorithmConfig) -> dict[str, StreamConfig]:
    """The terms of the objective; of a loss that is no mixture, one by its own name. Errors as `stream_configs`."""
    loss = algorithm.policy_loss
    if loss.name == "streams":
        return stream_configs(loss.args.get("streams"))
    return {loss.name: StreamConfig(loss.name)}


def check_streams(run: "TrainConfig") -> bool:
    """Whether a stream is of expert data; a ConfigError: a stream without its tokens, or a loss without its teacher."""
    streams = streams_of(run.algorithm)
    one_turn = run.workflow.name in SINGLE_RESPONSE_WORKFLOWS or run.workflow.args.get("mode") == "step_wise"
    if run.buffer.has_rollouts and one_turn:
        for name, stream in streams.items():
            if stream.tokens == "observations":
                raise ConfigError(
                    f"{STREAMS}.{name}: the experiences of workflow={run.workflow.name} have one turn, and nothing "
                    "observed in it",
                    key=f"{STREAMS}.{name}",
                    fix="choose workflow=multi_turn or workflow=tool_use, with workflow.args.mode=single",
                )
    needs = [LOSSES[stream.loss].needs for stream in streams.values() if stream.loss in LOSSES]
    if any(each.teacher for each in needs) and run.buffer.has_rollouts:
        _check_teacher(run)
    return any(stream.tokens == "expert" for stream in streams.values())


def _check_teacher(run: "TrainConfig") -> None:
    operators = run.operators.values()
    if not any(operator.name == TEACHER_OPERATOR or "." in operator.name for operator in operators):
        raise ConfigError(
            "loss teacher_kl needs a teacher",
            fix="choose operators=teacher_top_k, and give its model as +auxiliary_models.teacher.model=FOLDER",
        )
    if run.sampling.temperature != 1:
        raise ConfigError(
            f"loss teacher_kl compares distributions at temperature 1, not {run.sampling.temperature}",
            fix="set sampling.temperature=1",
        )
    for operator in operators:
        if operator.name == TEACHER_OPERATOR and operator.on_error is OnError.skip:
            raise ConfigError(
                "operator teacher_top_k: on_error is skip, and loss teacher_kl cannot do without the teacher",
                fix="leave on_error out",
            )


def check_expert(run: "TrainConfig") -> None:
    """Expert data and the loss that learns from them go together."""
    expert, loss, rollouts = run.buffer.expert, run.algorithm.policy_loss.name, run.buffer.has_rollouts
    learns = loss == "mix"
    if loss in LOSSES and LOSSES[loss].needs.teacher:
        learns = check_streams(run)
    if expert.per_step > 0 and loss in PARTS["policy loss"] and not learns:
        raise ConfigError(
            f"buffer.expert.per_step is {expert.per_step}, and algorithm.policy_loss={loss} learns nothing from expert "
            "data",
            key="buffer.expert.per_step",
            fix="choose algorithm.policy_loss=mix (or a stream with tokens=expert), or buffer.expert.per_step=0",
        )
    if expert.per_step > 0 and not rollouts:
        raise ConfigError(
            "buffer.expert joins rollouts (buffer.storage=memory)",
            key="buffer.expert",
            fix="set buffer.expert.per_step=0",
        )
    if expert.per_step == 0 and learns and rollouts:
        raise ConfigError(
            f"algorithm.policy_loss={loss} needs expert data",
            key="algorithm.policy_loss",
            fix="give buffer.expert.per_step=8 and buffer.expert.dataset.path=FILE of prompts and answers",
        )


def needs_correction(algorithm: AlgorithmConfig) -> bool:
    """Whether the policy loss is for the policy that sampled.

    A loss of one's own may be made for experiences of any policy, as `opmd` and `sft` are. `mix` is as the loss of its
    rollouts, and `streams` as any of its own.
    """
    losses = [algorithm.policy_loss.name]
    if losses == ["mix"]:
        losses = [algorithm.policy_loss.args.get("usual", "ppo")]
    elif losses == ["streams"]:
        losses = [stream.loss for stream in streams_of(algorithm).values()]
    built_in = [LOSSES[loss] for loss in losses if isinstance(loss, str) and loss in LOSSES]
    return any(not loss.needs.any_policy for loss in built_in)


def why_older(run: "TrainConfig") -> str:
    """The setting by which experiences are of older weights, for messages."""
    if not run.buffer.has_rollouts:
        return f" (buffer.storage={run.buffer.storage})"
    key = "sync_offset" if run.explorer.sync_offset > 0 else "sync_interval"
    return f" (explorer.{key}={getattr(run.explorer, key)})"


def check_corrected(algorithm: AlgorithmConfig, why: str = "") -> None:
    """Refuse to train on experiences of older weights with nothing that corrects for them; a ConfigError."""
    if needs_correction(algorithm):
        refuse_uncorrected(algorithm, why)


def refuse_uncorrected(algorithm: AlgorithmConfig, why: str = "") -> None:
    """ConfigError unless something corrects for older weights, which the policy loss needs."""
    corrected = algorithm.old_logprobs == "engine" or algorithm.rollout_correction.level != "none"
    if not corrected:
        raise ConfigError(
            f"algorithm.policy_loss={algorithm.policy_loss.name} needs a correction for experiences of older weights"
            f"{why}, and there is none",
            key="algorithm.policy_loss",
            fix="set algorithm.rollout_correction.level=token, or algorithm.old_logprobs=engine",
        )


def check_older_weights(explorer: ExplorerConfig, engine: str, can: Capabilities) -> None:
    """Refuse an engine, by that name in the message, that cannot have older weights, or generate during training, if it
    has to; a ConfigError.
    """
    if explorer.sync_interval > 1 and can.shares_weights:
        raise ConfigError(
            f"explorer.sync_interval is {explorer.sync_interval}, and {engine} generates with the training model "
            "itself",
            key="explorer.sync_interval",
            fix="leave the key out, or choose another engine",
        )
    if explorer.sync_offset > 0 and not can.overlaps_training:
        raise ConfigError(
            f"explorer.sync_offset is {explorer.sync_offset}, and {engine} cannot generate while the trainer trains. "
            "Choose engine=vllm_server.",
            key="explorer.sync_offset",
        )

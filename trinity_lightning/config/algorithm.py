"""The objective: policy loss, KL penalty and corrections; and their rules with other sections of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from trinity_lightning.config.buffer import OnError
from trinity_lightning.config.critic import critic_config
from trinity_lightning.config.engines import Capabilities
from trinity_lightning.config.explorer import TEACHER_OPERATOR, ExplorerConfig
from trinity_lightning.config.losses import LOSSES, Loss
from trinity_lightning.config.registry import FILTERING_STRATEGIES, PARTS, SINGLE_RESPONSE_WORKFLOWS
from trinity_lightning.config.sections import Section, checked, part_config, section_of
from trinity_lightning.config.values import AUTO, number, one_of, whole_number
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.run import TrainConfig

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")

CORRECTION_LEVELS = ("token", "sequence")
CORRECTION_MODES = ("truncate", "mask")


class Layout(Enum):
    """The layout of a micro-batch's rows in memory. The loss does not depend on it.

    `padded`: rows lie side by side, padded to the longest. `shared_prefix`: a common beginning of prompts is computed
    once, and the rest of each row follows it, without padding. `auto`: the layout with fewer computed tokens, chosen
    for each optimizer batch.
    """

    auto = "auto"
    padded = "padded"
    shared_prefix = "shared_prefix"


@dataclass
class KLConfig(Section, key="algorithm.kl"):
    """KL penalty against the frozen initial policy, as a loss term.

    Attributes:
        name: the estimate: k1, k2, k3, low_var_kl, abs, corrected_k3, none.
        coef: weight of the penalty; 0: no penalty and no reference model.
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
        mode: weights outside the range become the nearer end of the range (`truncate`) or 0 (`mask`).
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
        policy_loss: {name, args}, or a bare name. The name is registered (`ppo`, alias `grpo`, ...) or the dotted path
            of your own function; args are its keyword arguments (clip_range_low, dual_clip, ...). See the table of
            losses.
        loss_agg_mode: the average of token terms: token-mean, seq-mean-token-mean, seq-mean-token-sum, or
            seq-mean-token-sum-norm. The last divides by sampling.max_tokens (with several turns by
            engine.max_model_len, for a dataset by buffer.dataset.max_length). Null: the loss's default.
        kl: KL penalty.
        entropy_coef: weight of the entropy bonus.
        old_logprobs: the denominator of the ratio. `trainer`: the policy before the step's first update, computed by
            the trainer. `engine`: the policy that sampled, by the engine's log-probabilities; rollouts of older weights
            are then clipped, and several optimizer steps need no further pass. `engine` needs
            rollout_correction.level=none, because the ratio corrects already.
        rollout_correction: importance weights for the engine's mismatch.
        off_policy_mask_threshold: in sequences from which the policy has moved away by more than this many nats a
            token, tokens of negative advantage are left out of the loss (DeepSeek-V3.2's sequence mask; 0.1 is a
            start). The sampling policy is the engine or, without its log-probabilities, the policy before the step.
            Null: no mask.
        optimizer_steps: optimizer steps into which the experiences of an explore step are dealt.
        inner_epochs: passes over these experiences.
        layout: `padded`: rows are padded to the longest of their micro-batch. `shared_prefix`: a common beginning of
            prompts is computed once, and the rest of each row follows it, without padding. `auto`: shared prefixes if
            they save a fifth of the tokens. The loss is the same. Models with layers other than full attention keep
            `padded`.
        max_tokens_per_micro_batch: computed tokens of one forward and backward pass, which bound the memory. Padding
            counts; a shared prefix counts once. A longer row or pair is a micro-batch of its own. `auto` on a CPU: 512
            if engine.max_model_len is at most 512; with a longer context, or a dataset of examples, 256 to 4,096, by
            the free memory when the run starts. `auto` on a GPU: by the memory plan, 16,384 or a half of it, and so on;
            several GPUs take the fewest that any of them plans. With engine=transformers: 4,096 to 16,384, by the free
            memory. The number is recorded in config.yaml, and a resumed run keeps it.
        max_grad_norm: norm to which gradients are clipped; null: no clipping.
        max_bad_steps: a step whose gradient is not finite is left out and counted. This many in a row stop the run.
            Overflows of model.dtype=fp16 are left out too, and do not count.
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
        if not isinstance(self.layout, Layout):  # a script may give the layout's name
            one_of("algorithm.layout", self.layout, [layout.value for layout in Layout])
            self.layout = Layout(self.layout)


# -- add strategies ----------------------------------------------------------------------------------------------------

# Built-in strategies and operators. A user's own part belongs to none of these groups.
COMPARING_STRATEGIES = ("asymre", "correct_bias", "dr_grpo", "grpo", "opmd", "rloo", "step_wise_grpo")  # within a group
STEP_STRATEGIES = ("critic", "gigpo", "on_policy_distill", "step_wise_grpo")  # one reward a step, or no reward
SHAPING_OPERATORS = ("judge", "overlong_penalty", "reward_shaping_mapper")  # they change rewards


def check_strategies(run: "TrainConfig") -> None:
    """Refuse strategies that set no advantages, or that do not fit the loss, the workflow or the group size.

    Raises:
        ConfigError: names the key and the fix.
    """
    names = [strategy.name for strategy in run.add_strategy.values()]
    if not names:
        raise ConfigError("add_strategy is empty", key="add_strategy", fix="choose one, such as add_strategy=grpo")
    if names[-1] in FILTERING_STRATEGIES and run.algorithm.policy_loss.name != "sft":
        raise ConfigError(
            f"add_strategy={names[-1]} only filters",
            key="add_strategy",
            fix=f"choose, say, add_strategy=[{names[-1]},grpo]",
        )
    _check_single_strategies(run, names)
    if run.workflow.args.get("mode") == "step_wise":
        _check_step_rewards(run, [name for name in names if name in PARTS["add strategy"]])
    if run.explorer.repeat_times == 1:
        _check_groups_of_one(names)
    for earlier in list(run.add_strategy.values())[:-1]:
        drops_some = earlier.args.get("std_threshold") is not None and names[-1] != "critic"
        filters = earlier.name in FILTERING_STRATEGIES or drops_some
        if earlier.name in PARTS["add strategy"] and not filters:
            raise ConfigError(
                f"add_strategy={earlier.name} sets advantages, and {names[-1]} behind it would set them again: choose "
                f"one of them; in front of it may be filters: {', '.join(FILTERING_STRATEGIES)}.",
                key="add_strategy",
            )


def _check_single_strategies(run: "TrainConfig", names: Sequence[str]) -> None:
    """Refuse asymre beside its loss, on_policy_distill without a teacher, and gigpo without rewards of steps."""
    if "asymre" in names and run.algorithm.policy_loss.name == "asymre":
        raise ConfigError(
            "algorithm.policy_loss=asymre and add_strategy=asymre would both shift the baseline",
            key="algorithm.policy_loss",
            fix="choose add_strategy=dr_grpo, or algorithm.policy_loss=reinforce",
        )
    has_own_parts = any("." in part.name for part in (run.workflow, *run.operators.values()))
    if "on_policy_distill" in names and run.workflow.name != "on_policy_distill" and not has_own_parts:
        raise ConfigError(
            f"add_strategy=on_policy_distill weighs by a teacher, and workflow={run.workflow.name} asks none",
            key="add_strategy",
            fix="choose workflow=on_policy_distill, and give +auxiliary_models.teacher.model=FOLDER",
        )
    has_step_rewards = run.workflow.args.get("step_reward") == "own"
    if "gigpo" in names and run.workflow.name in ("multi_turn", "tool_use") and not has_step_rewards:
        raise ConfigError(
            "add_strategy=gigpo sums the rewards of single steps",
            key="add_strategy",
            fix="set workflow.args.step_reward=own",
        )


def _check_step_rewards(run: "TrainConfig", built_in: list[str]) -> None:
    """Refuse a strategy that compares runs by one reward if the steps of a run may have different rewards."""
    comparing = [name for name in built_in if name not in STEP_STRATEGIES]
    shaping = [operator.name for operator in run.operators.values() if operator.name in SHAPING_OPERATORS]
    has_step_rewards = run.workflow.args.get("step_reward") == "own"
    if comparing and (has_step_rewards or shaping):
        cause = "workflow.args.step_reward=own" if has_step_rewards else f"operator '{shaping[0]}'"
        raise ConfigError(
            f"{cause} gives the steps of a run different rewards, and add_strategy={comparing[0]} compares runs by one",
            key="add_strategy",
            fix=f"choose add_strategy=step_wise_grpo or gigpo{', or step_reward=return' if has_step_rewards else ''}",
        )


def _check_groups_of_one(names: Sequence[str]) -> None:
    """Refuse strategies that compare the rollouts of a task, in a run with one rollout a task."""
    for name in names:
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


# -- terms of a loss, and expert data ----------------------------------------------------------------------------------


STREAMS = "algorithm.policy_loss.args.streams"
TOKENS = ("rollouts", "expert", "observations", "weights")
# Built-in losses that may be a term: all but losses of pairs and mixtures.
TERM_LOSSES = [name for name, loss in LOSSES.items() if not (loss.needs.pairs or loss.needs.terms)]
TAKEN_NAMES = ("entropy", "kl", "pg")  # names whose metric actor/NAME_loss exists already


@dataclass
class StreamConfig(Section):
    """A term of an objective: a loss over some of the tokens, averaged over their number in the optimizer batch.

    Attributes:
        loss: a registered loss of tokens (`ppo`, `sft`, `teacher_kl`, ...), or the dotted path of your own.
        tokens: `rollouts`: tokens that the policy wrote in rollouts. `expert`: responses of expert data
            (buffer.expert). `observations`: text of the environment or the tools in rollouts of several turns.
            `weights`: tokens with a weight in the experience's info["token_weights"][name of the stream]. This list has
            a number for each token of the response, which multiplies the token's loss.
        weight: weight of the term.
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
                f"loss={self.loss} needs tokens that the policy sampled, not {self.tokens}", key="loss", fix="use sft"
            )
        if self.tokens == "expert" and built_in.needs.teacher:
            raise ConfigError(
                f"loss={self.loss} is of rollouts, and no teacher reads tokens=expert", key="loss", fix="use sft"
            )


def stream_configs(values: Any) -> dict[str, StreamConfig]:
    """The streams by name, in order; None stands for `ppo` on rollouts.

    Raises:
        ConfigError: there is no stream with a weight above 0; a metric has a stream's name already; a key is unknown;
            or a stream refuses a value.
    """
    if values is None:
        values = {"rollouts": {}}
    if not isinstance(values, Mapping) or not values:
        raise ConfigError(
            f"{STREAMS} is {values!r}: give {{name: {{loss, tokens, weight, args}}}}, at least one.", key=STREAMS
        )
    for name in TAKEN_NAMES:
        if name in values:
            raise ConfigError(
                f"{STREAMS}.{name}: the metric actor/{name}_loss is something else",
                key=f"{STREAMS}.{name}",
                fix="give it another name",
            )
    streams = {str(name): _stream(f"{STREAMS}.{name}", stream) for name, stream in values.items()}
    if not any(stream.weight for stream in streams.values()):
        raise ConfigError(
            f"{STREAMS}: all weights are 0, and nothing is trained",
            key=STREAMS,
            fix="give one of them a weight above 0",
        )
    return streams


def _stream(key: str, value: Any) -> StreamConfig:
    """The stream under a key, from a mapping or a section; a ConfigError if it is neither."""
    if not isinstance(value, Mapping | StreamConfig):
        raise ConfigError(
            f"{key} is {value!r}", key=key, fix="give {loss, tokens, weight, args}, each of them optional"
        )
    if isinstance(value, Mapping) and value.get("args", {}) is None:  # `args:` without a value, in YAML
        value = {**value, "args": {}}
    return section_of(key, StreamConfig, value)


def streams_of(algorithm: AlgorithmConfig) -> dict[str, StreamConfig]:
    """The terms of the objective by name; a loss other than `streams` is one term. Errors as `stream_configs`."""
    loss = algorithm.policy_loss
    if loss.name == "streams":
        return stream_configs(loss.args.get("streams"))
    return {loss.name: StreamConfig(loss.name)}


def _check_streams(run: "TrainConfig") -> None:
    """Refuse a stream of observations without observations, and teacher_kl without a teacher; a ConfigError."""
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
    if any(need.teacher for need in needs) and run.buffer.has_rollouts:
        _check_teacher(run)


def _check_teacher(run: "TrainConfig") -> None:
    """Refuse the loss teacher_kl unless a teacher answers to every rollout, at temperature 1; a ConfigError."""
    operators = run.operators.values()
    if not any(operator.name == TEACHER_OPERATOR or "." in operator.name for operator in operators):
        raise ConfigError(
            "loss teacher_kl needs a teacher",
            key="operators",
            fix="choose operators=teacher_top_k, and give its model as +auxiliary_models.teacher.model=FOLDER",
        )
    if run.sampling.temperature != 1:
        raise ConfigError(
            f"loss teacher_kl compares distributions at temperature 1, not {run.sampling.temperature}",
            key="sampling.temperature",
            fix="set sampling.temperature=1",
        )
    for operator in operators:
        if operator.name == TEACHER_OPERATOR and operator.on_error is OnError.skip:
            raise ConfigError(
                "operator teacher_top_k: on_error is skip, and loss teacher_kl cannot do without the teacher",
                key="operators",
                fix="leave on_error out",
            )


def check_expert(run: "TrainConfig") -> None:
    """Refuse expert data without a loss that learns from them, and such a loss without expert data; a ConfigError."""
    expert, loss, rollouts = run.buffer.expert, run.algorithm.policy_loss.name, run.buffer.has_rollouts
    learns = loss == "mix"
    if loss == "streams" or (loss in LOSSES and LOSSES[loss].needs.teacher):
        _check_streams(run)
        learns = any(stream.tokens == "expert" for stream in streams_of(run.algorithm).values())
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


# -- experiences of older weights --------------------------------------------------------------------------------------


def _built_in_losses(algorithm: AlgorithmConfig) -> list[Loss]:
    """The policy loss, or the losses that it mixes; none for a user's own loss, which is not judged here."""
    losses = [algorithm.policy_loss.name]
    if losses == ["mix"]:
        losses = [algorithm.policy_loss.args.get("usual", "ppo")]
    elif losses == ["streams"]:
        losses = [stream.loss for stream in streams_of(algorithm).values()]
    return [LOSSES[loss] for loss in losses if isinstance(loss, str) and loss in LOSSES]


def needs_correction(algorithm: AlgorithmConfig) -> bool:
    """True if the policy loss is right only for experiences of the policy that is trained.

    `opmd` and `sft`, for example, are right for experiences of any policy. A user's loss may be too, and is not judged
    here. `mix` counts as the loss of its rollouts, and `streams` needs a correction if one of its losses does.
    """
    return any(not loss.needs.any_policy for loss in _built_in_losses(algorithm))


def bounds_ratio(algorithm: AlgorithmConfig) -> bool:
    """True if each of its losses that needs a correction bounds the ratio to `old_logprobs`."""
    return all(loss.needs.ratio or loss.needs.any_policy for loss in _built_in_losses(algorithm))


def why_older(run: "TrainConfig") -> str:
    """The setting by which experiences come from older weights, in brackets, for messages."""
    if not run.buffer.has_rollouts:
        return f" (buffer.storage={run.buffer.storage})"
    keys = ("max_staleness", "sync_offset")
    key = next((key for key in keys if getattr(run.explorer, key) > 0), "sync_interval")
    return f" (explorer.{key}={getattr(run.explorer, key)})"


def check_corrected(algorithm: AlgorithmConfig, why: str = "") -> None:
    """Refuse to train on experiences of older weights without a correction; a ConfigError. `why`: see `why_older`."""
    if needs_correction(algorithm):
        refuse_uncorrected(algorithm, why)


def refuse_uncorrected(algorithm: AlgorithmConfig, why: str = "") -> None:
    """Refuse settings that do not correct for older weights, which the policy loss needs; a ConfigError."""
    corrected = algorithm.old_logprobs == "engine" or algorithm.rollout_correction.level != "none"
    if not corrected:
        raise ConfigError(
            f"algorithm.policy_loss={algorithm.policy_loss.name} needs a correction for experiences of older weights"
            f"{why}, and there is none",
            key="algorithm.policy_loss",
            fix="set algorithm.rollout_correction.level=token, or algorithm.old_logprobs=engine",
        )


def check_older_weights(explorer: ExplorerConfig, engine: str, capabilities: Capabilities) -> None:
    """Refuse an engine that has to keep older weights, or to generate during training, and cannot; a ConfigError.

    `engine` is the engine's name for the message.
    """
    if explorer.sync_interval > 1 and capabilities.shares_weights:
        raise ConfigError(
            f"explorer.sync_interval is {explorer.sync_interval}, and {engine} generates with the training model "
            "itself",
            key="explorer.sync_interval",
            fix="leave the key out, or choose another engine",
        )
    if explorer.sync_offset > 0 and not capabilities.overlaps_training:
        raise ConfigError(
            f"explorer.sync_offset is {explorer.sync_offset}, and {engine} cannot generate while the trainer trains. "
            "Choose engine=vllm_server.",
            key="explorer.sync_offset",
        )

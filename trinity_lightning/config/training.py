"""The typed sections that say what is trained and how, and the settings of Lightning's Trainer that go with them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from trinity_lightning import config as late
from trinity_lightning.config.chat_template import check_template_variables
from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.sections import Section, checked, part_config
from trinity_lightning.config.values import AUTO, number, one_of, text, whole_number
from trinity_lightning.errors import ConfigError

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
CORRECTION_LEVELS = ("token", "sequence")
CORRECTION_MODES = ("truncate", "mask")


class WeightDtype(Enum):
    """How the policy's weights are held: `bf16` with float32 masters in the optimizer, `fp32` throughout, or `auto`."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


class Dropout(Enum):
    """Dropout while training: `off`, for the first ratio of a step to be 1, or `keep`, as the model's config says."""

    off = "off"
    keep = "keep"


class Layout(Enum):
    """How the rows of a micro-batch lie in memory; all are exact.

    `padded`: side by side, padded to the longest. `shared_prefix`: what several prompts begin with is computed once,
    each row's rest behind it, without padding. `auto`: that which computes fewer tokens, for each optimizer batch.
    """

    auto = "auto"
    padded = "padded"
    shared_prefix = "shared_prefix"


ALL_LINEAR = "all-linear"


@dataclass
class LoRAConfig(Section, key="model.lora"):
    """Low-rank adapters (LoRA, arXiv 2106.09685), trained in place of the model's weights: the extra `lora`.

    Attributes:
        r: rank of the adapters, which take about ten times the learning rate of full training (optimizer.lr); null:
            there are none, and all weights are trained.
        alpha: adapters are scaled by alpha / r; null: twice the rank.
        targets: which linear layers have one, by the last part of their names, such as [q_proj, v_proj]; `all-linear`:
            all but the head.
        dropout: share of its inputs that an adapter does not see in training. It differs from device to device and with
            how a batch is cut, rows share no prefixes, and the first ratio of a step is not 1.
        rslora: scale by alpha / sqrt(r) (arXiv 2312.03732).
    """

    r: int | None = checked(None, whole_number, least=1, optional=True)
    alpha: int | None = checked(None, whole_number, least=1, optional=True, only_with="r")
    targets: Any = field(default=ALL_LINEAR, metadata={"only_with": "r"})
    dropout: float = checked(0.0, number, least=0, most=0.9, only_with="r")
    rslora: bool = checked(False, only_with="r")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.r is not None:
            late.optimization.check_lora(self)


@dataclass
class ModelConfig(Section, key="model"):
    """The policy.

    Attributes:
        name: `smollm2`, `tiny`, a folder with a Hugging Face checkpoint, or a hub name `org/name`.
        dtype: how the weights are held while training: `bf16`, with float32 masters in the optimizer, `fp32`, or
            `auto`: bf16 on a GPU, else whichever multiplies matrices faster on this CPU, timed at the start and
            recorded in the run's config.yaml; a resumed run keeps its own.
        dropout: `off` sets the model's dropout to 0, also in what is saved, since old and new log-probabilities would
            differ by it; `keep` trains with it. (In a YAML file 'off' needs its quotes.)
        compile: compile the layers with torch.compile when training starts: minutes for a large model, and a C++
            compiler on a CPU. Attention runs between the graphs; weights keep their names.
        gradient_checkpointing: recompute activations in the backward pass; slower, less memory.
        attn_implementation: passed to transformers; `sdpa` works everywhere.
        lora: adapters that are trained in place of the weights.
        thoughts: [opening, closing] marker of the model's thoughts, where they are none of the field's, such as <think>
            and </think>: what stands before the last closing marker is no answer, and a response that is cut off in its
            thoughts has given none. Given, they replace the field's; null: those, and what the tokenizer has.
        chat_template_kwargs: variables of the chat template, such as {enable_thinking: false}, for rollouts,
            evaluations, expert data and examples of a dataset (`+model.chat_template_kwargs.enable_thinking=false`); a
            `chat_template_kwargs` of an entry wins, key by key. Judges and teachers are not given them.
    """

    name: str = MISSING
    dtype: WeightDtype = WeightDtype.auto
    dropout: Dropout = Dropout.off
    compile: bool = False
    gradient_checkpointing: bool = False
    attn_implementation: str = "sdpa"
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    thoughts: list[str] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thoughts is not None and not (len(self.thoughts) == len({*self.thoughts} - {""}) == 2):
            raise ConfigError(
                f"model.thoughts is {self.thoughts!r}; give [opening, closing], two different texts, such as "
                "['<think>', '</think>']."
            )
        self.chat_template_kwargs = check_template_variables("model.chat_template_kwargs", self.chat_template_kwargs)


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
                f"algorithm.kl.coef is {self.coef}, and algorithm.kl.name=none has no penalty to weigh: choose k3, or "
                "set algorithm.kl.coef=0."
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
            raise ConfigError(f"algorithm.rollout_correction.low ({self.low}) is above its high ({self.high}).")


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
            self.critic = late.objectives.critic_config(self.critic)
        self.policy_loss = part_config("algorithm.policy_loss", self.policy_loss)
        one_of("algorithm.policy_loss", self.policy_loss.name, PARTS["policy loss"], with_paths=True)
        if "loss_agg_mode" in self.policy_loss.args:
            raise ConfigError("algorithm.policy_loss.args has no loss_agg_mode: set algorithm.loss_agg_mode.")
        if self.policy_loss.name == "streams":
            late.objectives.streams_of(self)
        if self.old_logprobs == "engine" and self.rollout_correction.level != "none":
            raise ConfigError(
                "algorithm.old_logprobs=engine corrects already, and importance weights would once more: set "
                "algorithm.rollout_correction.level=none."
            )
        if not isinstance(self.layout, Layout):  # a script may give its name
            one_of("algorithm.layout", self.layout, [each.value for each in Layout])
            self.layout = Layout(self.layout)


@dataclass
class HeldOutConfig(Section, key="buffer.dataset.held_out"):
    """Examples that are not trained on: the loss on them is `eval/loss`, and of pairs there is `eval/accuracy`.

    Attributes:
        path: a second file, folder or hub name with such examples,
        split: or another split of the dataset (of `path`, if that is given),
        share: or a share of the examples, drawn by the run's seed.
        interval: optimizer steps from one measurement to the next; the last step's weights are measured too.
    """

    path: str | None = None
    split: str | None = None
    share: float | None = checked(None, number, above=0, most=0.9, optional=True)
    interval: int = checked(10, whole_number, least=1)

    @property
    def given(self) -> bool:
        """Whether there are such examples."""
        return (self.path, self.split, self.share) != (None, None, None)


@dataclass
class DatasetConfig(Section, key="buffer.dataset"):
    """Examples to train on without rollouts (`buffer=dataset`).

    The formats are TRL's, plain text or conversations: prompt, chosen and rejected for `algorithm=dpo` (without a
    prompt, or with a text next to messages that contain it, it is what the other two begin with); for `algorithm=sft`
    prompt and completion, messages, of which the assistant's turns are trained on, or text. A column `tools` is shown
    to the model; one `chat_template_kwargs` has further variables of the chat template, such as enable_thinking.

    Attributes:
        subset: name of the dataset's configuration on the hub.
        split: split, or a slice of it (`train[:90%]`).
        shuffle: read in another order in each pass, which follows from the run's seed.
        max_length: longest example in tokens; null: what the tokenizer allows.
        overlong: what becomes of a longer one: `refuse` the run, `drop` it, or `truncate` its end; both are counted.
        held_out: examples to measure the loss on.
    """

    subset: str | None = None
    split: str = checked("train", text)
    shuffle: bool = True
    max_length: int | None = checked(None, whole_number, least=2, optional=True)
    overlong: str = checked("refuse", one_of, names=("refuse", "drop", "truncate"))
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)


OFFLOADED = "adamw_offload"
ADAM = ("adamw", "adamw_8bit", OFFLOADED)  # which `betas` and `eps` are of
BETAS, EPS = [0.9, 0.999], 1e-8


@dataclass
class OptimizerConfig(Section, key="optimizer"):
    """The optimizer and its learning rate.

    Attributes:
        name: adamw; adamw_8bit, whose moments have 8 bits (torchao: the extra `optim`); adamw_offload, whose moments
            and float32 masters are in the host's memory, where it computes the same as adamw does there; or any
            `torch.optim.Optimizer` by its dotted path, such as torch.optim.SGD.
        args: its arguments, of one by its dotted path.
        lr: peak learning rate.
        betas, eps: of adamw, adamw_8bit and adamw_offload.
        weight_decay: of matrices alone: embeddings, norms and biases do not decay.
        lr_scheduler: {name, args}: constant, constant_with_warmup, linear, cosine, polynomial, inverse_sqrt, a class of
            torch.optim.lr_scheduler by its dotted path, or your own function of (optimizer, num_warmup_steps,
            num_training_steps), of which it takes what it needs. A name alone is short for {name: it}.
        warmup_steps: optimizer steps of linear warm-up; the first step has learning rate 0, as in transformers.
        total_steps: horizon of the schedule in optimizer steps; null: those of the run.
    """

    name: str = checked("adamw", one_of, names=PARTS["optimizer"], with_paths=True)
    args: dict[str, Any] = field(default_factory=dict)
    lr: float = checked(1e-6, number, least=0)
    betas: list[float] = field(default_factory=lambda: [*BETAS])
    eps: float = checked(EPS, number, above=0)  # with 0 a weight that had no gradient yet becomes 0 / 0
    weight_decay: float = checked(0.0, number, least=0)
    lr_scheduler: Any = "constant"
    warmup_steps: int = checked(0, whole_number, least=0)
    total_steps: int | None = checked(None, whole_number, least=1, optional=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas is {list(self.betas)}; give two numbers in [0, 1).")
        if self.name != "adamw" or self.args:
            late.optimization.check_optimizer(self)
        self.lr_scheduler = part_config("optimizer.lr_scheduler", self.lr_scheduler)
        one_of("optimizer.lr_scheduler", self.lr_scheduler.name, PARTS["schedule"], with_paths=True)


# Each precision that a policy trains in, by Lightning's names of it.
FULL = (None, 32, "32", "32-true")
MIXED = ("bf16", "bf16-mixed")
HALF = "bf16-true"


# What joins several devices, each with the whole policy or with a share of it.
REPLICAS = "trinity_lightning.trainer.ddp.ReplicaStrategy"
SHARDS = "trinity_lightning.trainer.fsdp.ShardStrategy"


def trains_together(settings: Mapping[str, Any]) -> bool:
    """Whether these settings of `lightning.Trainer` are for processes that train one policy together."""
    return strategy_of(settings) in (REPLICAS, SHARDS)


def strategy_of(settings: Mapping[str, Any]) -> str | None:
    """Dotted path of these settings' strategy, if they give one so."""
    strategy = settings.get("strategy")
    return strategy.get("_target_") if isinstance(strategy, Mapping) else None


def _check_alone(settings: Mapping[str, Any]) -> None:
    """Refuse several devices without trainer=ddp or fsdp2, and any other strategy; a ConfigError."""
    strategy = settings.get("strategy") or AUTO
    if strategy != AUTO:
        name = strategy.get("_target_") if isinstance(strategy, Mapping) else strategy
        raise ConfigError(f"trainer.strategy={name} is not supported: leave it out, or choose trainer=ddp or fsdp2.")
    for key, one in (("num_nodes", 1), ("devices", "1")):
        if (given := settings.get(key, 1)) not in (1, one):
            raise ConfigError(f"trainer.{key} is {given}: for several devices choose trainer=ddp or trainer=fsdp2.")


_CLIPPING = "the policy clips gradients, set algorithm.max_grad_norm"
# Settings of Lightning's Trainer that the policy has its own of: the values that change nothing, and what to set.
SET_INSTEAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "gradient_clip_val": ((None, 0), _CLIPPING),
    "gradient_clip_algorithm": ((None,), _CLIPPING),
    "accumulate_grad_batches": ((1,), "set algorithm.max_tokens_per_micro_batch, and algorithm.optimizer_steps"),
}


def check_trainer_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings of `lightning.Trainer`, by name, under which a policy would not train, or not as they say.

    A ConfigError names the setting and the knob to use.
    """
    for key, (allowed, fix) in SET_INSTEAD.items():
        if (value := settings.get(key, allowed[0])) not in allowed:
            raise ConfigError(f"trainer.{key} is {value}: {fix}.")
    if not trains_together(settings):
        _check_alone(settings)
    if (precision := settings.get("precision")) not in (*FULL, *MIXED, HALF):
        raise ConfigError(f"trainer.precision is {precision}: give 32-true, bf16-mixed or bf16-true.")


def weight_dtype(dtype: WeightDtype, precision: object) -> WeightDtype:
    """How the weights are held: `precision` bf16-true is another name of model.dtype=bf16."""
    return WeightDtype.bf16 if precision == HALF else dtype


def compute_dtype(dtype: WeightDtype, precision: object) -> WeightDtype:
    """What a forward pass computes in: bfloat16 under mixed precision too, over float32 weights."""
    return WeightDtype.bf16 if precision in MIXED else weight_dtype(dtype, precision)

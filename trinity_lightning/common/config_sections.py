"""The typed sections of a run's configuration, one dataclass each."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from trinity_lightning.common import known_names as known
from trinity_lightning.common.checks import AUTO, number, one_of, whole_number
from trinity_lightning.common.errors import ConfigError


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


@dataclass
class ModelConfig:
    """The policy.

    Attributes:
        name: `smollm2`, `tiny`, a folder with a Hugging Face checkpoint, or a hub name `org/name`.
        dtype: how the weights are held while training: `bf16`, with float32 masters in the optimizer, `fp32`, or
            `auto`: bf16 on a GPU, else whichever multiplies matrices faster on this CPU, timed at the start and
            recorded in the run's config.yaml; a resumed run keeps its own.
        dropout: `off` sets the model's dropout to 0, also in what is saved, since old and new log-probabilities would
            differ by it; `keep` trains with it. (In a YAML file 'off' needs its quotes.)
        gradient_checkpointing: recompute activations in the backward pass; slower, less memory.
        attn_implementation: passed to transformers; `sdpa` works everywhere.
    """

    name: str = MISSING
    dtype: WeightDtype = WeightDtype.auto
    dropout: Dropout = Dropout.off
    gradient_checkpointing: bool = False
    attn_implementation: str = "sdpa"


@dataclass
class SamplingConfig:
    """How tokens are sampled; names as in vLLM's SamplingParams. Null leaves the engine's default.

    Training rollouts are drawn from the whole distribution at a temperature above 0, for log-probabilities to be those
    of the policy: `top_p`, `top_k`, `min_p`, penalties and temperature 0 are for evaluation only.

    Attributes:
        temperature: logits are divided by it; 0 is greedy.
        max_tokens: longest response in tokens.
        stop: strings that end a response.
        top_p: sample from the most likely tokens that make up this probability.
        top_k: sample from this many tokens.
        min_p: sample from tokens at least this likely, relative to the likeliest.
        presence_penalty: subtracted from the logits of tokens that have appeared.
        frequency_penalty: the same for each appearance.
        repetition_penalty: logits of tokens that have appeared are divided by it.

    Raises:
        ConfigError: a number that engines refuse.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    stop: list[str] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        number("sampling.temperature", self.temperature, least=0)
        whole_number("sampling.max_tokens", self.max_tokens, least=1)
        number("sampling.top_p", self.top_p, above=0, most=1, optional=True)
        if self.top_k != -1:  # vLLM's word for all of them
            whole_number("sampling.top_k", self.top_k, least=1, optional=True)
        number("sampling.min_p", self.min_p, least=0, most=1, optional=True)
        number("sampling.presence_penalty", self.presence_penalty, least=-2, most=2, optional=True)
        number("sampling.frequency_penalty", self.frequency_penalty, least=-2, most=2, optional=True)
        number("sampling.repetition_penalty", self.repetition_penalty, above=0, optional=True)


@dataclass
class TasksetConfig:
    """What to try: one of the three sources, and which fields of an entry mean what.

    Attributes:
        name: how the taskset is called in metrics (`eval/<name>/...`).
        source: `addition` (the built-in sums), `reasoning_gym`, or `dataset` (a file, a folder, or a hub name).
        path: name of the reasoning-gym dataset; or JSONL, parquet or CSV file, folder or hub name of the dataset.
        split: split of a dataset, or `train` and `heldout` of the sums.
        size: number of reasoning-gym entries.
        seed: seed of generated entries and of the order.
        order: `sequential`, `shuffled` (a permutation from seed and epoch), `easy_to_hard` (a dataset's entries by
            difficulty_field), or `by_difficulty` (those that are solved half of the time).
        difficulty_field: an entry's field with a number, for `easy_to_hard`.
        weight: share of the tasks where several tasksets are trained on (`tasksets`).
        prompt_field, answer_field, messages_field: names of an entry's fields.
        system_prompt: first message of every conversation; null for the chat template's own.
        args: further arguments of the source.
    """

    name: str = MISSING
    source: str = "addition"
    path: str | None = None
    split: str = "train"
    size: int | None = None
    seed: int = 0
    order: str = "shuffled"
    difficulty_field: str | None = None
    weight: float = 1.0
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    messages_field: str = "messages"
    system_prompt: str | None = None
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class OverRolloutConfig:
    """Finish a step when most of its tasks are in.

    Attributes:
        ratio: share of a step's tasks that may be left out; 0: none.
        wait_after_min: seconds to wait for the rest once `1 - ratio` of them are in.

    Raises:
        ConfigError: a number out of its range, or a wait that no ratio asks for.
    """

    ratio: float = 0.0
    wait_after_min: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise ConfigError(f"explorer.over_rollout.ratio is {self.ratio}; give a number from 0 to below 1.")
        number("explorer.over_rollout.wait_after_min", self.wait_after_min, least=0)
        if self.ratio == 0 and self.wait_after_min != OverRolloutConfig.wait_after_min:
            raise ConfigError("explorer.over_rollout.wait_after_min has no effect without explorer.over_rollout.ratio.")


@dataclass
class DynamicTimeoutConfig:
    """Time-out of train tasks from how long they usually take.

    Attributes:
        enable: whether the time-out is min(max_timeout, ratio * average).
        ratio: how many times the average a task may take.
        warmup_min_steps: steps before it applies.

    Raises:
        ConfigError: a number out of its range, or one that is given where the time-out is not enabled.
    """

    enable: bool = False
    ratio: float = 3.0
    warmup_min_steps: int = 1

    def __post_init__(self) -> None:
        number("explorer.dynamic_timeout.ratio", self.ratio, least=1)
        whole_number("explorer.dynamic_timeout.warmup_min_steps", self.warmup_min_steps, least=0)
        for name in ("ratio", "warmup_min_steps"):
            if not self.enable and getattr(self, name) != getattr(DynamicTimeoutConfig, name):
                raise ConfigError(
                    f"explorer.dynamic_timeout.{name} has no effect: set explorer.dynamic_timeout.enable."
                )


@dataclass
class ExplorerConfig:
    """How an explore step is run.

    Attributes:
        batch_size: tasks (prompts) an explore step.
        repeat_times: rollouts a task, the group size.
        runner_per_model: runners a model, each running one task at a time; null, which the commands set: one for every
            task of a step and at least 64, with Ray 8.
        max_timeout: seconds one attempt at a task may take.
        max_retry_times: further attempts after a failed one.
        max_repeat_times_per_runner: a task with more rollouts is cut into chunks of this many; null: never.
        runner: `local`, asyncio tasks in this process; or `ray`, each a process of its own (a Ray actor), which needs
            an engine that is a server. A worker that dies is replaced, and its task tried again.
        ray_address: of a Ray cluster to join, HOST:PORT of its head, or `auto` for the one on this machine; null: one
            is started here, for this run.
        reward_workers: processes that call reward functions, local runners only; 0: threads of this process do, and
            what is slow pure Python there takes its time from rollouts and training ([reward](reward.md)).
        reward_timeout: seconds that one call of a reward function may take in such a process, which is ended then.
        max_refills: how often a step that add_strategy=dapo leaves short may ask for further tasks.
        sync_interval: explore steps between weight syncs; above 1, the steps between are sampled from older weights,
            which engine=transformers does not have.
        sync_offset: steps the trainer lags behind the explorer: 0 is on-policy; with 1 the next step's rollouts go on
            while the trainer trains, which needs engine=vllm_server.
        eval_interval: explore steps between evaluations; 0 means never.
        eval_on_startup: evaluate before the first step too.
        seed: seed of all rollouts.

    Raises:
        ConfigError: a number out of its range, an unknown runner, or what a runner does not use: a Ray
            cluster, reward workers.
    """

    batch_size: int = 8
    repeat_times: int = 8
    runner_per_model: int | None = 8
    max_timeout: float = 1800.0
    max_retry_times: int = 2
    max_repeat_times_per_runner: int | None = None
    runner: str = "local"
    ray_address: str | None = None
    reward_workers: int = 0
    reward_timeout: float = 60.0
    over_rollout: OverRolloutConfig = field(default_factory=OverRolloutConfig)
    dynamic_timeout: DynamicTimeoutConfig = field(default_factory=DynamicTimeoutConfig)
    max_refills: int = 3
    sync_interval: int = 1
    sync_offset: int = 0
    eval_interval: int = 0
    eval_on_startup: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "repeat_times", "sync_interval"):
            whole_number(f"explorer.{name}", getattr(self, name), least=1)
        for name in ("runner_per_model", "max_repeat_times_per_runner"):
            whole_number(f"explorer.{name}", getattr(self, name), least=1, optional=True)
        for name in ("max_retry_times", "max_refills", "sync_offset", "eval_interval", "seed", "reward_workers"):
            whole_number(f"explorer.{name}", getattr(self, name), least=0)
        number("explorer.max_timeout", self.max_timeout, above=0)
        number("explorer.reward_timeout", self.reward_timeout, above=0)
        one_of("explorer.runner", self.runner, ("local", "ray"))
        if self.runner == "local" and self.ray_address is not None:
            raise ConfigError(
                f"explorer.ray_address is {self.ray_address}, and explorer.runner=local does not use Ray: set "
                "explorer.runner=ray, or leave the address out."
            )
        if self.reward_workers and self.runner == "ray":
            raise ConfigError(
                f"explorer.reward_workers is {self.reward_workers}, and Ray runners are processes that call reward "
                "functions themselves: set explorer.reward_workers=0, or explorer.runner=local."
            )
        if not self.reward_workers and self.reward_timeout != ExplorerConfig.reward_timeout:
            raise ConfigError(
                "explorer.reward_timeout has no effect without explorer.reward_workers: a call in a thread cannot be "
                "ended. Set explorer.reward_workers, or leave the time-out out."
            )


def runners_per_model(explorer: ExplorerConfig) -> int:
    """`explorer.runner_per_model`, or what its null stands for: coroutines cost nothing, processes of Ray do."""
    return explorer.runner_per_model or (8 if explorer.runner == "ray" else max(explorer.batch_size, 64))


@dataclass
class KLConfig:
    """KL penalty against the frozen initial policy, as a loss term.

    Attributes:
        name: the estimate: k1, k2, k3, low_var_kl, abs, corrected_k3, none.
        coef: its weight; 0 means none, and no reference model.

    Raises:
        ConfigError: the weight is negative or not finite.
    """

    name: str = "k3"
    coef: float = 0.0

    def __post_init__(self) -> None:
        number("algorithm.kl.coef", self.coef, least=0)


@dataclass
class RolloutCorrectionConfig:
    """Importance weights exp(trainer - engine log-probability) for the mismatch between engine and trainer.

    Attributes:
        level: `token`, `sequence`, or `none`.
        mode: `truncate` (weights above `high` become `high`) or `mask` (they become 0).
        low, high: the range of weights.

    Raises:
        ConfigError: an unknown level or mode, or not 0 <= low <= high and 0 < high.
    """

    level: str = "token"
    mode: str = "truncate"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        one_of("algorithm.rollout_correction.level", self.level, known.CORRECTION_LEVELS)
        one_of("algorithm.rollout_correction.mode", self.mode, known.CORRECTION_MODES)
        number("algorithm.rollout_correction.low", self.low, least=0)
        if self.high != math.inf:  # weights may be unbounded
            number("algorithm.rollout_correction.high", self.high, above=0)
        if self.low > self.high:
            raise ConfigError(
                f"algorithm.rollout_correction.low ({self.low}) is above algorithm.rollout_correction.high "
                f"({self.high}): no weight lies between them."
            )


@dataclass
class AlgorithmConfig:
    """The objective, and how a step's experiences become optimizer steps.

    Attributes:
        policy_loss: a registered name (`ppo`, alias `grpo`, ...) or a dotted path of your own function.
        policy_loss_args: its keyword arguments (clip_range_low, dual_clip, ...); see the table of losses.
        loss_agg_mode: how token terms become one number: token-mean, seq-mean-token-mean, seq-mean-token-sum, or
            seq-mean-token-sum-norm, which divides by sampling.max_tokens (with several turns engine.max_model_len);
            null takes the loss's own default.
        kl: KL penalty.
        entropy_coef: weight of the entropy bonus.
        old_logprobs: what the ratio is against: `trainer`, the policy before the step's first update, computed by the
            trainer; or `engine`, the policy that sampled, by the engine's log-probabilities: rollouts of older weights
            are then clipped, and nothing is computed for several optimizer steps.
        rollout_correction: importance weights for the engine's mismatch; with old_logprobs=engine the ratio is what
            corrects, and level must be none.
        optimizer_steps: optimizer steps the experiences of one explore step are dealt into.
        inner_epochs: passes over them.
        layout: `padded`, rows padded to the longest of their micro-batch; `shared_prefix`, what several prompts begin
            with computed once, each row's rest behind it, without padding; `auto`, the latter where it saves a fifth.
            The loss is the same. Models whose layers are not plain full attention keep `padded`.
        max_tokens_per_micro_batch: computed tokens of one forward and backward pass, padding included and shared
            prefixes once: what bounds memory. `auto`: on a CPU 256 to 1,024 by what is free when the run starts,
            recorded in its config.yaml (a resumed run keeps its own); on a GPU that vLLM shares by the memory plan,
            16,384 or a half of that and so on; on one of its own 4,096.
        max_grad_norm: gradients are clipped to this norm, a number above 0; null: never.
        max_bad_steps: a gradient that is not finite is left out and counted; so many in a row stop the run.

    Raises:
        ConfigError: a value that would train on something else than it says, or on nothing.
    """

    policy_loss: str = "ppo"
    policy_loss_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: str | None = None
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coef: float = 0.0
    old_logprobs: str = "trainer"
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    optimizer_steps: int = 1
    inner_epochs: int = 1
    layout: Layout = Layout.auto
    max_tokens_per_micro_batch: int | str = AUTO
    max_grad_norm: float | None = 1.0
    max_bad_steps: int = 5

    def __post_init__(self) -> None:
        if "loss_agg_mode" in self.policy_loss_args:
            raise ConfigError("algorithm.policy_loss_args has no loss_agg_mode: set algorithm.loss_agg_mode.")
        one_of("algorithm.loss_agg_mode", self.loss_agg_mode, known.LOSS_AGG_MODES, optional=True)
        one_of("algorithm.old_logprobs", self.old_logprobs, known.OLD_LOGPROBS)
        if self.old_logprobs == "engine" and self.rollout_correction.level != "none":
            raise ConfigError(
                "algorithm.old_logprobs=engine corrects by the ratio, and importance weights would do it once more: "
                "set algorithm.rollout_correction.level=none."
            )
        number("algorithm.entropy_coef", self.entropy_coef, least=0)
        for name in ("optimizer_steps", "inner_epochs", "max_bad_steps"):
            whole_number(f"algorithm.{name}", getattr(self, name), least=1)
        if not isinstance(self.layout, Layout):  # a script may give its name
            one_of("algorithm.layout", self.layout, [each.value for each in Layout])
            self.layout = Layout(self.layout)
        whole_number("algorithm.max_tokens_per_micro_batch", self.max_tokens_per_micro_batch, least=1, auto=True)
        number("algorithm.max_grad_norm", self.max_grad_norm, above=0, optional=True)


@dataclass
class OptimizerConfig:
    """AdamW and its learning rate.

    Attributes:
        lr: peak learning rate.
        betas, eps: as in AdamW.
        weight_decay: as in AdamW, of matrices alone: embeddings, norms and biases do not decay.
        lr_scheduler: constant, constant_with_warmup, linear, cosine, polynomial or inverse_sqrt.
        warmup_steps: optimizer steps of linear warm-up.
        total_steps: horizon of the schedule in optimizer steps; null: those of the run.

    Raises:
        ConfigError: a number out of its range, or an unknown schedule.
    """

    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_scheduler: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None

    def __post_init__(self) -> None:
        number("optimizer.lr", self.lr, least=0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas is {list(self.betas)}; give two numbers in [0, 1).")
        number("optimizer.eps", self.eps, above=0)  # with 0 a weight that had no gradient yet becomes 0 / 0
        number("optimizer.weight_decay", self.weight_decay, least=0)
        one_of("optimizer.lr_scheduler", self.lr_scheduler, known.LR_SCHEDULERS)
        whole_number("optimizer.warmup_steps", self.warmup_steps, least=0)
        whole_number("optimizer.total_steps", self.total_steps, least=1, optional=True)


@dataclass
class WorkflowConfig:
    """How a task is tried.

    Attributes:
        name: a registered name, or the dotted path of your own class.
        args: its arguments.
    """

    name: str = MISSING
    args: dict[str, Any] = field(default_factory=dict)

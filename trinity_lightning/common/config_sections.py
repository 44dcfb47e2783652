"""The typed sections of a run's configuration, one dataclass each."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class WeightDtype(Enum):
    """How the policy's weights are held: `bf16` with float32 masters in the optimizer, or `fp32` throughout."""

    bf16 = "bf16"
    fp32 = "fp32"


@dataclass
class ModelConfig:
    """The policy.

    Attributes:
        name: `smollm2`, `tiny`, a folder with a Hugging Face checkpoint, or a hub name `org/name`.
        dtype: how the weights are held while training: bf16, or fp32, which is the faster on a CPU without AMX.
        gradient_checkpointing: recompute activations in the backward pass; slower, less memory.
        attn_implementation: passed to transformers; `sdpa` works everywhere.
    """

    name: str = MISSING
    dtype: WeightDtype = WeightDtype.bf16
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
    """

    ratio: float = 0.0
    wait_after_min: float = 30.0


@dataclass
class DynamicTimeoutConfig:
    """Time-out of train tasks from how long they usually take.

    Attributes:
        enable: whether the time-out is min(max_timeout, ratio * average).
        ratio: how many times the average a task may take.
        warmup_min_steps: steps before it applies.
    """

    enable: bool = False
    ratio: float = 3.0
    warmup_min_steps: int = 1


@dataclass
class ExplorerConfig:
    """How an explore step is run.

    Attributes:
        batch_size: tasks (prompts) an explore step.
        repeat_times: rollouts a task, the group size.
        runner_per_model: runners a model, each running one task at a time.
        max_timeout: seconds one attempt at a task may take.
        max_retry_times: further attempts after a failed one.
        max_repeat_times_per_runner: a task with more rollouts is cut into chunks of this many; null: never.
        runner: `local`, asyncio tasks in this process; or `ray`, each a process of its own (a Ray actor), which needs
            an engine that is a server. A worker that dies is replaced, and its task tried again.
        ray_address: of a Ray cluster to join, HOST:PORT of its head, or `auto` for the one on this machine; null: one
            is started here, for this run.
        max_refills: how often a step that add_strategy=dapo leaves short may ask for further tasks.
        sync_interval: explore steps between weight syncs; above 1, the steps between are sampled from older weights.
        sync_offset: steps the trainer lags behind the explorer: 0 is on-policy; with 1 the next step's rollouts go on
            while the trainer trains, which needs engine=vllm_server.
        eval_interval: explore steps between evaluations; 0 means never.
        eval_on_startup: evaluate before the first step too.
        seed: seed of all rollouts.
    """

    batch_size: int = 8
    repeat_times: int = 8
    runner_per_model: int = 8
    max_timeout: float = 1800.0
    max_retry_times: int = 2
    max_repeat_times_per_runner: int | None = None
    runner: str = "local"
    ray_address: str | None = None
    over_rollout: OverRolloutConfig = field(default_factory=OverRolloutConfig)
    dynamic_timeout: DynamicTimeoutConfig = field(default_factory=DynamicTimeoutConfig)
    max_refills: int = 3
    sync_interval: int = 1
    sync_offset: int = 0
    eval_interval: int = 0
    eval_on_startup: bool = True
    seed: int = 0


@dataclass
class KLConfig:
    """KL penalty against the frozen initial policy, as a loss term.

    Attributes:
        name: the estimate: k1, k2, k3, low_var_kl, abs, corrected_k3, none.
        coef: its weight; 0 means none, and no reference model.
    """

    name: str = "k3"
    coef: float = 0.0


@dataclass
class RolloutCorrectionConfig:
    """Importance weights exp(trainer - engine log-probability) for the mismatch between engine and trainer.

    Attributes:
        level: `token`, `sequence`, or `none`.
        mode: `truncate` (weights above `high` become `high`) or `mask` (they become 0).
        low, high: the range of weights.
    """

    level: str = "token"
    mode: str = "truncate"
    low: float = 0.0
    high: float = 2.0


@dataclass
class AlgorithmConfig:
    """The objective, and how a step's experiences become optimizer steps.

    Attributes:
        policy_loss: a registered name (`ppo`, alias `grpo`, ...) or a dotted path of your own function.
        policy_loss_args: its keyword arguments (clip_range_low, clip_range_high, dual_clip, ...).
        loss_agg_mode: how token terms become one number; null takes the loss's own default.
        kl: KL penalty.
        entropy_coef: weight of the entropy bonus.
        rollout_correction: importance weights for the engine's mismatch.
        optimizer_steps: optimizer steps the experiences of one explore step are dealt into.
        inner_epochs: passes over them.
        max_tokens_per_micro_batch: padded tokens of one forward and backward pass: what bounds memory.
        max_grad_norm: gradients are clipped to this norm; null: never.
    """

    policy_loss: str = "ppo"
    policy_loss_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: str | None = None
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coef: float = 0.0
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    optimizer_steps: int = 1
    inner_epochs: int = 1
    max_tokens_per_micro_batch: int = 4096
    max_grad_norm: float | None = 1.0


@dataclass
class OptimizerConfig:
    """AdamW and its learning rate.

    Attributes:
        lr: peak learning rate.
        betas, eps, weight_decay: as in AdamW.
        lr_scheduler: constant, constant_with_warmup, linear, cosine, polynomial or inverse_sqrt.
        warmup_steps: optimizer steps of linear warm-up.
        total_steps: horizon of the schedule in optimizer steps; null: those of the run.
    """

    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_scheduler: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None


@dataclass
class WorkflowConfig:
    """How a task is tried.

    Attributes:
        name: a registered name, or the dotted path of your own class.
        args: its arguments.
    """

    name: str = MISSING
    args: dict[str, Any] = field(default_factory=dict)

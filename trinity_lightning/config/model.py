"""The policy: its model, adapters, and optimizer."""

import importlib.util
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from trinity_lightning.config.chat_template import check_template_variables
from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.sections import Section, checked, part_config
from trinity_lightning.config.values import number, one_of, whole_number
from trinity_lightning.errors import ConfigError


class WeightDtype(Enum):
    """How the policy's weights are held: `bf16` with float32 masters in the optimizer, `fp32` throughout, or `auto`."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


class Dropout(Enum):
    """Dropout while training: `off`, for the first ratio of a step to be 1, or `keep`, as the model's config says."""

    off = "off"
    keep = "keep"


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
            check_lora(self)


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
                f"model.thoughts is {self.thoughts!r}",
                key="model.thoughts",
                fix="give [opening, closing], two different texts, such as ['<think>', '</think>']",
            )
        self.chat_template_kwargs = check_template_variables("model.chat_template_kwargs", self.chat_template_kwargs)


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
            raise ConfigError(
                f"optimizer.betas is {list(self.betas)}", key="optimizer.betas", fix="give two numbers in [0, 1)"
            )
        if self.name != "adamw" or self.args:
            check_optimizer(self)
        self.lr_scheduler = part_config("optimizer.lr_scheduler", self.lr_scheduler)
        one_of("optimizer.lr_scheduler", self.lr_scheduler.name, PARTS["schedule"], with_paths=True)


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room

LORA_ARGUMENTS = ("enable_lora", "max_lora_rank", "lora_target_modules")  # of vLLM's arguments


def check_lora(lora: LoRAConfig) -> None:
    """Refuse targets that are no names of layers, and adapters without peft; a ConfigError."""
    named = isinstance(lora.targets, list) and lora.targets and all(isinstance(each, str) for each in lora.targets)
    if lora.targets != ALL_LINEAR and not named:
        raise ConfigError(
            f"model.lora.targets is {lora.targets!r}",
            key="model.lora.targets",
            fix=f"give {ALL_LINEAR}, or [q_proj,v_proj], say",
        )
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("model.lora needs peft", key="model.lora", fix="pip install 'trinity-lightning[lora]'")


def settled_alpha(lora: LoRAConfig) -> int:
    """Alpha, or what null stands for."""
    return 2 * (lora.r or 0) if lora.alpha is None else lora.alpha


def room_for(rank: int) -> int:
    """The rank that vLLM makes room for to hold adapters of this one."""
    return next(each for each in LORA_RANKS if each >= rank)


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Refuse an optimizer whose package is missing, and settings of another; a ConfigError."""
    name, args = optimizer.name, optimizer.args
    if name in ADAM and args:
        raise ConfigError(
            f"optimizer.args are for an optimizer of your own: {name} has betas, eps and weight_decay.",
            key="optimizer.args",
        )
    if name not in ADAM and (list(optimizer.betas), optimizer.eps) != (BETAS, EPS):
        raise ConfigError(
            f"optimizer.betas and eps belong to {', '.join(ADAM)}: {name} has optimizer.args.", key="optimizer.betas"
        )
    if taken := sorted({"lr", "weight_decay"} & args.keys()):
        raise ConfigError(f"optimizer.args has {taken[0]}", key="optimizer.args", fix=f"set optimizer.{taken[0]}")
    if name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "optimizer.name=adamw_8bit needs torchao",
            key="optimizer.name",
            fix="pip install 'trinity-lightning[optim]'",
        )

"""The policy: its model, adapters and optimizer."""

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from trinity_lightning.config.chat_template import check_template_variables
from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.sections import Section, checked, part_config
from trinity_lightning.config.values import AUTO, flag, number, one_of, whole_number
from trinity_lightning.errors import ConfigError


class WeightDtype(Enum):
    """Dtype of the policy's weights: `bf16` or `fp16`, with float32 masters in the optimizer, `fp32`, or `auto`."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Dropout(Enum):
    """Dropout while training: `off`, so that the first ratio of a step is 1, or `keep`, as in the model's config."""

    off = "off"
    keep = "keep"


ALL_LINEAR = "all-linear"


@dataclass
class LoRAConfig(Section, key="model.lora"):
    """Low-rank adapters (LoRA, arXiv 2106.09685), trained in place of the model's weights: the extra `lora`.

    Attributes:
        r: rank of the adapters. They need about ten times the learning rate of full training (optimizer.lr). Null: no
            adapters; all weights are trained.
        alpha: numerator of the adapters' scale, alpha / r; null: twice the rank.
        targets: linear layers with an adapter, by the last part of their names, such as [q_proj, v_proj]; `all-linear`:
            all but the head.
        dropout: share of an adapter's inputs that is set to 0 in training. With it, rows share no prefixes, and the
            first ratio of a step is not 1. The random choice depends on the device and on the micro-batches.
        rslora: scale by alpha / sqrt(r) instead (arXiv 2312.03732).
    """

    r: int | None = checked(None, whole_number, least=1, optional=True)
    alpha: int | None = checked(None, whole_number, least=1, optional=True, only_with="r")
    targets: Any = field(default=ALL_LINEAR, metadata={"only_with": "r"})
    dropout: float = checked(0.0, number, least=0, most=0.9, only_with="r")
    rslora: bool = checked(False, only_with="r")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.r is None:
            return
        are_names = self.targets and isinstance(self.targets, list) and all(isinstance(n, str) for n in self.targets)
        if self.targets != ALL_LINEAR and not are_names:
            raise ConfigError(
                f"model.lora.targets is {self.targets!r}",
                key="model.lora.targets",
                fix=f"give {ALL_LINEAR}, or [q_proj,v_proj], say",
            )
        if importlib.util.find_spec("peft") is None:
            raise ConfigError("model.lora needs peft", key="model.lora", fix="pip install 'trinity-lightning[lora]'")


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks for which vLLM can allocate memory
LORA_ARGUMENTS = ("enable_lora", "max_lora_rank", "lora_target_modules")  # arguments of vLLM about adapters


def settled_alpha(lora: LoRAConfig) -> int:
    """The value of `alpha`; null stands for twice the rank."""
    return 2 * (lora.r or 0) if lora.alpha is None else lora.alpha


def room_for(rank: int) -> int:
    """The smallest of vLLM's ranks that holds adapters of this rank."""
    return next(size for size in LORA_RANKS if size >= rank)


@dataclass
class ModelConfig(Section, key="model"):
    """The policy.

    Attributes:
        name: `smollm2`, `tiny`, `tiny_vision`, a folder with a Hugging Face checkpoint, or a hub name `org/name`.
        dtype: dtype of the weights while training: `bf16` or `fp16` with float32 masters in the optimizer, or `fp32`.
            `fp16` scales the loss, so that small gradients survive; it is for GPUs without bfloat16, and on a CPU it is
            slow. `auto`: bf16 on a GPU, or fp16 if it has no bfloat16; on a CPU bf16 or fp32, whichever multiplies
            matrices faster, timed at the start and recorded in the run's config.yaml. A resumed run keeps its dtype.
        dropout: `off` sets the model's dropout to 0, also in the saved model, because old and new log-probabilities
            would differ with dropout. `keep` trains with dropout. (In a YAML file, 'off' needs quotes.)
        compile: compile the layers with torch.compile when training starts. This takes a minute or more, and needs a
            C++ compiler on a CPU. Attention runs between the graphs; weights keep their names. `auto`: on a GPU, if the
            rows of this architecture can be computed as one row of tokens, so that few graphs are compiled (full
            attention, no dropout); not with trainer=fsdp2, and not on a CPU, where it gains little.
        gradient_checkpointing: recompute activations in the backward pass, which is slower and needs less memory.
        attn_implementation: attention of transformers; `sdpa` works everywhere.
        lora: adapters, trained in place of the weights.
        freeze: parameters that are not trained, by patterns of their names, such as [vision] (the tower of Idefics3 and
            SmolVLM), [vision, connector] or [embed_tokens, layers.0]. A pattern matches a name that has it as whole
            words, which end at dots, underscores or the name's ends: `layers.1` is not in `layers.10`. `*` stands for
            any text. With adapters, those of matching weights are not trained.
        thoughts: [opening, closing] marker of the model's thoughts, in place of the usual ones such as <think> and
            </think>. Text before the last closing marker is no part of the answer, and a response that is cut off in
            its thoughts has no answer. Null: the usual markers, and those of the tokenizer.
        processor_args: arguments of a picture model's processor, shared by engine and trainer, such as {max_pixels:
            200000}, {size: {longest_edge: 512}} or {do_image_splitting: false}, by which a picture takes fewer tokens
            (`+model.processor_args.max_pixels=200000`). The saved model keeps the processor's own settings.
        chat_template_kwargs: variables of the chat template, such as {enable_thinking: false}, for rollouts,
            evaluations, expert data and dataset examples (`+model.chat_template_kwargs.enable_thinking=false`). The
            `chat_template_kwargs` of an entry take precedence, key by key. Judges and teachers get no variables.
    """

    name: str = MISSING
    dtype: WeightDtype = WeightDtype.auto
    dropout: Dropout = Dropout.off
    compile: bool | str = checked(AUTO, flag, auto=True)
    gradient_checkpointing: bool = False
    attn_implementation: str = "sdpa"
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    freeze: list[str] = field(default_factory=list)
    thoughts: list[str] | None = None
    processor_args: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thoughts is not None and not (len(self.thoughts) == len({*self.thoughts} - {""}) == 2):
            raise ConfigError(
                f"model.thoughts is {self.thoughts!r}",
                key="model.thoughts",
                fix="give [opening, closing], two different texts, such as ['<think>', '</think>']",
            )
        check_patterns(self.freeze)
        check_processor_args(self.processor_args)
        self.chat_template_kwargs = check_template_variables("model.chat_template_kwargs", self.chat_template_kwargs)


_PATTERN = re.compile(r"[\w.*-]*[\w-][\w.*-]*")


def check_patterns(patterns: Sequence[str]) -> None:
    """Refuse texts that are no patterns of parameter names; a ConfigError."""
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            raise ConfigError(
                f"model.freeze has {pattern!r}, which is no part of a parameter's name",
                key="model.freeze",
                fix="give words of the names, such as [vision] or ['layers.0.*norm']",
            )


# Arguments that the library sets itself, or that would change the form of the processor's tensors.
NO_PROCESSOR_ARGS = (
    "text", "images", "videos", "audio", "return_tensors", "data_format", "input_data_format", "device",
    "disable_grouping", "return_row_col_info", "image_seq_len", "image_seq_length", "add_special_tokens", "padding",
    "truncation", "max_length", "patch_size", "merge_size", "temporal_patch_size",
)  # fmt: skip
_EDGES = ("longest_edge", "shortest_edge", "height", "width")


def check_processor_args(args: Mapping[str, Any]) -> None:
    """Refuse arguments that no processor of pictures may be given; a ConfigError.

    `processor.load_processor` compares their names with those that the model's own processor has.
    """
    for name, value in args.items():
        key = f"model.processor_args.{name}"
        if name in NO_PROCESSOR_ARGS:
            raise ConfigError(f"{key} cannot be chosen: it belongs to the model or to the run", key=key)
        if name in ("min_pixels", "max_pixels"):
            whole_number(key, value, least=1)
        elif name in ("size", "max_image_size"):
            if not isinstance(value, Mapping) or not value:
                raise ConfigError(f"{key} is {value!r}", key=key, fix="give a mapping, such as {longest_edge: 512}")
            for edge, pixels in value.items():
                if edge in _EDGES:
                    whole_number(f"{key}.{edge}", pixels, least=1)
        elif name.startswith("do_") and not isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r}", key=key, fix="give true or false")
    if args.get("min_pixels", 0) > args.get("max_pixels", math.inf):
        raise ConfigError(
            f"model.processor_args.min_pixels is {args['min_pixels']}, above max_pixels, {args['max_pixels']}",
            key="model.processor_args.min_pixels",
        )


OFFLOADED = "adamw_offload"
ADAM = ("adamw", "adamw_8bit", OFFLOADED)  # the optimizers that read `betas` and `eps`
BETAS, EPS = [0.9, 0.999], 1e-8


@dataclass
class OptimizerConfig(Section, key="optimizer"):
    """The optimizer and its learning rate.

    Attributes:
        name: adamw; adamw_8bit, with moments of 8 bits (torchao: the extra `optim`); adamw_offload, which keeps moments
            and float32 masters in the host's memory and computes there, with the results of adamw on the host; or any
            `torch.optim.Optimizer` by its dotted path, such as torch.optim.SGD.
        args: arguments of an optimizer that is given by its dotted path.
        lr: peak learning rate.
        betas, eps: settings of adamw, adamw_8bit and adamw_offload.
        weight_decay: decay of matrices; embeddings, norms and biases do not decay.
        lr_scheduler: {name, args}, or a bare name: constant, constant_with_warmup, linear, cosine, polynomial,
            inverse_sqrt; the dotted path of a class of torch.optim.lr_scheduler; or your own function of (optimizer,
            num_warmup_steps, num_training_steps), which may leave out parameters that it does not need.
        warmup_steps: optimizer steps of linear warm-up; the first step has learning rate 0, as in transformers.
        total_steps: horizon of the schedule in optimizer steps; null: the run's optimizer steps.
    """

    name: str = checked("adamw", one_of, names=PARTS["optimizer"], with_paths=True)
    args: dict[str, Any] = field(default_factory=dict)
    lr: float = checked(1e-6, number, least=0)
    betas: list[float] = field(default_factory=lambda: [*BETAS])
    eps: float = checked(EPS, number, above=0)  # with 0, a weight that never had a gradient would become 0 / 0
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
        self._check_name()
        self.lr_scheduler = part_config("optimizer.lr_scheduler", self.lr_scheduler)
        one_of("optimizer.lr_scheduler", self.lr_scheduler.name, PARTS["schedule"], with_paths=True)

    def _check_name(self) -> None:
        """Refuse settings that belong to another optimizer, and an optimizer whose package is missing."""
        name, args = self.name, self.args
        if name in ADAM and args:
            raise ConfigError(
                f"optimizer.args are for an optimizer of your own: {name} has betas, eps and weight_decay.",
                key="optimizer.args",
            )
        if name not in ADAM and (list(self.betas), self.eps) != (BETAS, EPS):
            raise ConfigError(
                f"optimizer.betas and eps belong to {', '.join(ADAM)}: {name} has optimizer.args.",
                key="optimizer.betas",
            )
        if own_keys := sorted({"lr", "weight_decay"} & args.keys()):
            key = own_keys[0]
            raise ConfigError(f"optimizer.args has {key}", key="optimizer.args", fix=f"set optimizer.{key}")
        if name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                "optimizer.name=adamw_8bit needs torchao",
                key="optimizer.name",
                fix="pip install 'trinity-lightning[optim]'",
            )

"""The engine that generates rollouts, and the synchronizer that sends it the trainer's weights."""

import ctypes
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast

from trinity_lightning.config.model import WeightDtype
from trinity_lightning.config.registry import PARTS, import_object, unfinished_class
from trinity_lightning.config.sections import Section, checked
from trinity_lightning.config.signatures import check_arguments, check_methods, is_of_the_library, parameters_beside
from trinity_lightning.config.values import nearest, number, one_of, url, whole_number
from trinity_lightning.errors import ConfigError, configured_at

# Ways of sending weights to servers without a file, and the arguments of vLLM that each way sets.
SET_BY = {"nccl": ("weight_transfer_config",), "ipc": ("weight_transfer_config", "worker_extension_cls")}
SENT = tuple(SET_BY)
TRAINER_GPU = 0  # a single trainer takes the first GPU


def require_vllm() -> None:
    """Refuse to go on without vLLM; the ConfigError says how to install it."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed",
            key="engine",
            fix=(
                "pip install 'trinity-lightning[cpu]' (no GPU) or 'trinity-lightning[vllm]', or "
                "choose engine=transformers"
            ),
        )


@dataclass(frozen=True)
class Capabilities:
    """Abilities of an engine, declared by its class as the attribute `capabilities`.

    Attributes:
        overlaps_training: True if it may generate while the trainer trains (explorer.sync_offset, max_staleness).
        shares_weights: True if it generates with the trainer's own weights, which it gets by `bind`. No weights are
            sent then, and they are never older than the trainer's.
        picklable: True if a copy works in another process (explorer.runner=ray).
        sync_methods: values of synchronizer.method by which weights reach it.
        keys: the keys of `engine` that it reads, besides name and max_model_len.
        takes_pictures: True if its prompts may have pictures.
        keeps_unsent: True if weights that a sync does not send stay as they are.
        is_vllm: True if it is vLLM, started with the arguments that EngineConfig describes.
        goes_on_after_sync: True if requests under way go on when it takes new weights: they keep their tokens, and
            their next ones are the new weights' (explorer.in_flight=continue). The engine computes what it has cached
            of them again.
    """

    overlaps_training: bool = False
    shares_weights: bool = False
    picklable: bool = False
    sync_methods: tuple[str, ...] = ("memory",)
    keys: tuple[str, ...] = ("dtype", "max_num_seqs", "args")
    takes_pictures: bool = False
    keeps_unsent: bool = False
    is_vllm: bool = False
    goes_on_after_sync: bool = False


# Capabilities of the built-in engines, which their classes refer to. Rules need them before the classes are imported.
CAPABILITIES = {
    "transformers": Capabilities(shares_weights=True, keys=("max_num_seqs", "per_rank"), takes_pictures=True),
    "vllm": Capabilities(
        keys=("dtype", "max_num_seqs", "kv_cache_gb", "sleep", "speculative", "per_rank", "args"),
        takes_pictures=True,
        keeps_unsent=True,
        is_vllm=True,
        goes_on_after_sync=True,
    ),
    "vllm_server": Capabilities(
        overlaps_training=True,
        picklable=True,
        sync_methods=("checkpoint", *SENT),
        keys=("dtype", "max_num_seqs", "kv_cache_gb", "speculative", "args", "urls", "servers", "cpu_cores", "gpus"),
        takes_pictures=True,
        is_vllm=True,
        goes_on_after_sync=True,
    ),
}
ENGINE_KEYS = tuple(dict.fromkeys(key for capabilities in CAPABILITIES.values() for key in capabilities.keys))


def capabilities_of(name: str) -> Capabilities:
    """Capabilities of an engine by its name or dotted path.

    Raises:
        ConfigError: there is no such engine, or it lacks members of `Engine`.
    """
    return CAPABILITIES.get(name) or _declared_capabilities(name)


EngineDtype = WeightDtype  # the engine's compute dtype; `auto` follows the trainer


class EngineSleep(Enum):
    """Says if vLLM sleeps while the trainer trains; `auto`: only if the memory plan finds no room otherwise."""

    auto = "auto"
    always = "always"
    never = "never"


@dataclass
class EngineConfig(Section, key="engine"):
    """The engine that generates rollouts.

    Attributes:
        name: `vllm` runs in this process. `vllm_server` runs in its own processes and can generate while the trainer
            trains. `transformers` generates with the training model itself. Or the dotted path of your own engine, a
            subclass of `trinity_lightning.explorer.models.engine.Engine`, whose docstring is the contract.
        dtype: compute dtype of the engine. `auto` follows the trainer: model.dtype, or bf16 with
            trainer.precision=bf16-mixed. `transformers` computes in the dtype of the weights; with bf16-mixed this is
            float32, and rollouts then differ from training by rounding.
        max_model_len: most tokens of a prompt and its response together.
        max_num_seqs: requests decoded at once. Null: 64 on a CPU; on a GPU the rollouts of a step, from 256 to 1,024.
        kv_cache_gb: memory of vLLM's key-value cache in GiB. Null: 0.5 without a GPU. On a GPU shared with the trainer,
            the memory plan printed at the start decides: as much as the requests can need, or as much as the trainer
            leaves. Servers with GPUs of their own take the memory that vLLM finds free.
        sleep: (`vllm` on a GPU) give up vLLM's cache, and its weights or their place on the GPU, while the trainer
            trains: `auto` (only if the memory plan finds no room otherwise), `always` or `never`. Weights are dropped
            if a weight sync follows, and otherwise, or with rollouts under way, wait in the host's memory.
        speculative: (vLLM on a GPU) n-gram speculative decoding. It proposes at most this many tokens at once: those
            that followed an earlier occurrence of the last few tokens. Proposals that the policy would not have drawn
            are dropped. By vLLM's source, distribution and log-probabilities stay the same; a seed draws other tokens
            than without it, and they may depend on the batch. Not yet tried on a GPU; refused without one. Null: off.
        per_rank: (`vllm` and `transformers`, with trainer=ddp or fsdp2) give every training process an engine. All of
            them then roll out; otherwise rank 0 rolls out alone.
        args: further arguments of vLLM's EngineArgs by name, or the arguments of your own engine.
        urls: (`vllm_server`) servers that already run, such as http://node7:8000. Empty: servers are started here.
        servers: (`vllm_server`) number of servers started here.
        cpu_cores: (`vllm_server` without a GPU) cores of each server. Null: with explorer.sync_offset or max_staleness,
            half of the cores for all servers, and the other half for the trainer; otherwise all cores.
        gpus: (`vllm_server`) GPUs that the servers share out, numbered as this process sees them. A server with several
            GPUs splits the model over them (tensor_parallel_size, unless `args` says otherwise). Null: every server
            takes the first GPU.
    """

    name: str = "vllm"
    dtype: EngineDtype = EngineDtype.auto
    max_model_len: int = checked(1024, whole_number, least=1)
    max_num_seqs: int | None = checked(None, whole_number, least=1, optional=True)
    kv_cache_gb: float | None = checked(None, number, above=0, optional=True)
    sleep: EngineSleep = EngineSleep.auto
    speculative: int | None = checked(None, whole_number, least=1, optional=True)
    per_rank: bool = False
    args: dict[str, Any] = field(default_factory=dict)
    urls: list[str] = field(default_factory=list)
    servers: int = checked(1, whole_number, least=1)
    cpu_cores: int | None = checked(None, whole_number, least=1, optional=True)
    gpus: list[int] | None = None

    def __post_init__(self) -> None:
        one_of("engine", self.name, PARTS["engine"], with_paths=True)
        super().__post_init__()
        for address in self.urls:
            url("engine.urls", address, "http://node7:8000")
        gpus = list(self.gpus or ())
        if any(gpu < 0 for gpu in gpus) or len(set(gpus)) < len(gpus):
            raise ConfigError(f"engine.gpus is {gpus}", key="engine.gpus", fix="give different numbers of 0 or more")

    @property
    def quantizes(self) -> bool:
        """True if vLLM is told to quantise the weights that it loads."""
        return any(self.args.get(name) is not None for name in ("quantization", "quantization_config"))

    def changed(self, *names: str) -> list[str]:
        """The keys among `names` that differ from their defaults."""
        default = EngineConfig()
        return [name for name in names if getattr(self, name) != getattr(default, name)]


@dataclass
class SynchronizerConfig(Section, key="synchronizer"):
    """The way in which the trainer's weights reach the engine, and the checks of this way.

    Attributes:
        method: `memory` for an engine in this process. For `vllm_server`: `checkpoint` (a folder that servers read),
            `nccl` (from GPU to GPU) or `ipc` (within the trainer's GPU, to servers started here). `auto`: `memory` for
            other engines. For servers started here by a trainer on a GPU: `ipc` if they share its GPU, `nccl` if they
            have others. Where neither can be (the table at the start says why): `checkpoint`.
        folder: folder that `checkpoint` writes; engines on other machines must see it. Null: a folder in memory
            (/dev/shm) if servers are started here and there is room, else one in the run's folder.
        check_interval: syncs between two probes; the first sync is always probed.
        drill: before the first step, send perturbed weights and require the engine to compute with them.
        sync_timeout: seconds after which a hanging sync stops the run.
        lora: form in which adapters (model.lora) reach the engine: `merged` into the weights that are sent, or as an
            `adapter` that vLLM computes beside its loaded weights (in this process, or in servers of this run; on a GPU
            in 16 bits only).
    """

    method: str = checked("auto", one_of, names=("auto", "memory", "checkpoint", *SENT))
    folder: str | None = None
    check_interval: int = checked(10, whole_number, least=1)
    drill: bool = True
    sync_timeout: float = checked(600.0, number, above=0)
    lora: str = checked("merged", one_of, names=("merged", "adapter"))


# -- engines of the user's own -----------------------------------------------------------------------------------------


def _declared_capabilities(name: str) -> Capabilities:
    """The capabilities that the class of a user's engine declares."""
    try:
        engine = import_object(PARTS["engine"].get(name, name))
    except ValueError as error:
        raise ConfigError(f"engine.name: {error}", key="engine.name") from error
    if not isinstance(capabilities := getattr(engine, "capabilities", None), Capabilities):
        raise ConfigError(
            f"engine.name: '{name}' is no engine",
            key="engine.name",
            fix="give a subclass of trinity_lightning.explorer.models.engine.Engine",
        )
    with configured_at("engine.name"):
        if getattr(engine, "__abstractmethods__", None):
            raise unfinished_class("engine.name:", engine)
        check_methods("engine", cast("type", engine))
    return capabilities


ENGINE_ARGS = "engine.args"


def engine_arguments(kind: type[Any], model: str, config: EngineConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two mappings of arguments for an engine's constructor: the model's name and this section; and `engine.args`.

    The constructor's parameters `model` and `config`, or else its first two, get the model's name and the section. A
    user's constructor with more parameters gets `engine.args` for them; for others the second mapping is empty.

    Raises:
        ArgumentError: an argument is unknown or missing.
        ConfigError: the constructor takes fewer than two arguments.
    """
    label = f"engine '{config.name}'"
    parameters = inspect.signature(kind).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD][:2]
    if {"model", "config"} <= {parameter.name for parameter in parameters}:
        names = ["model", "config"]
    if len(names) < 2:
        raise ConfigError(
            f"{label} is made as {kind.__name__}(model, config), and takes ({', '.join(names)}).", key="engine.name"
        )
    [owner] = [cls for cls in kind.__mro__ if "__init__" in vars(cls)][:1]
    takes_args = not is_of_the_library(owner) and parameters_beside(kind, names)
    args = dict(config.args) if takes_args else {}
    check_arguments(label, kind, args, ENGINE_ARGS, names)
    return dict(zip(names, (model, config), strict=True)), args


def unread_key(key: str, engine: str) -> str:
    """The message about a key of `engine` that this engine ignores. It names the engines that read the key."""
    owners = [name for name, capabilities in CAPABILITIES.items() if key in capabilities.keys]
    of_vllm = len(owners) > 1 and all(CAPABILITIES[name].is_vllm for name in owners)
    owner = "vLLM" if of_vllm else f"engine={' or '.join(owners)}"
    return f"engine.{key} belongs to {owner}, and {engine} ignores it: leave the key out."


# -- GPUs, and vLLM's own arguments ------------------------------------------------------------------------------------


def visible_gpus() -> list[str] | None:
    """The GPUs listed by CUDA_VISIBLE_DEVICES, numbers or names, in order; None if it is not set."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else [name.strip() for name in listed.split(",") if name.strip()]


PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")  # their product is a server's GPUs


def check_vllm_args(key: str, engine: EngineConfig, in_process: bool, here: bool = True) -> None:
    """Refuse settings with which vLLM computes wrongly, or which it cannot follow in this process; a ConfigError.

    Speculative decoding is refused without a GPU. With n-grams and float32, vLLM's CPU build drew other tokens in a
    batch than alone. It also gave the log-probability 0 to tokens of a random model, which is sure of none. Only greedy
    decoding was exact.

    Args:
        key: dotted key of the engine's section.
        engine: the section.
        in_process: True for vLLM in this process.
        here: False for the plan of a run on another machine.
    """
    names = {"speculative": engine.speculative, "args.speculative_config": engine.args.get("speculative_config")}
    requested = [name for name, value in names.items() if value]
    if len(requested) > 1:
        raise ConfigError(
            f"{key}.speculative asks for n-grams, and {key}.args.speculative_config too",
            key=f"{key}.speculative",
            fix="leave one out",
        )
    if requested and here and not gpu_count():
        raise ConfigError(
            f"{key}.{requested[0]}: without a GPU, vLLM's speculative decoding gives wrong log-probabilities",
            key=f"{key}.{requested[0]}",
            fix="leave it out",
        )
    for name in PARALLEL if in_process else ():
        if engine.args.get(name, 1) != 1:
            raise ConfigError(
                f"engine.args.{name} is {engine.args[name]}, and engine=vllm computes on one device",
                key=f"engine.args.{name}",
                fix="choose engine=vllm_server, and give its GPUs as engine.gpus",
            )


def check_known(args: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse arguments that vLLM does not know; the ConfigError names the nearest known one."""
    names = list(known)
    for name in args:
        if name not in names:
            match = nearest(name, names)  # all of them would fill a screen
            hint = f"did you mean '{match}'?" if match else "`vllm serve --help=all` lists them."
            raise ConfigError(f"engine.args: vLLM has no argument '{name}': {hint}", key=f"engine.args.{name}")


def reason_of(error: Exception) -> str:
    """The reason why vLLM could not load a model, without pydantic's decoration."""
    from pydantic import ValidationError  # installed with vLLM

    if isinstance(error, ValidationError):
        return error.errors()[0]["msg"]
    return f"{type(error).__name__}: {error}"


def gpu_count() -> int:
    """The number of GPUs that this process sees."""
    if "torch" not in sys.modules and not has_driver():
        return 0
    import torch  # late: few configurations need it

    return torch.cuda.device_count()


def has_driver() -> bool:
    """True if this machine may have a driver of GPUs, NVIDIA's or AMD's; without one, torch would see no GPU."""
    if Path("/dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True

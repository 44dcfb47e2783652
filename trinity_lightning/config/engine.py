"""The typed sections that say where rollouts are generated, and how weights get there."""

import importlib.util
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from trinity_lightning.config.model import WeightDtype
from trinity_lightning.config.registry import PARTS, import_object, refuse_unfinished
from trinity_lightning.config.sections import Section, checked
from trinity_lightning.config.signatures import check_arguments, check_methods, parameters_beside
from trinity_lightning.config.values import number, one_of, unknown_name, url, whole_number
from trinity_lightning.errors import ConfigError

# Ways by which weights are sent to servers without a file, and the arguments of vLLM that each sets.
SET_BY = {"nccl": ("weight_transfer_config",), "ipc": ("weight_transfer_config", "worker_extension_cls")}
SENT = tuple(SET_BY)
TRAINER_GPU = 0  # Lightning trains on the first of one


def require_vllm() -> None:
    """ConfigError, with what to install, if vLLM is not."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed",
            fix=(
                "pip install 'trinity-lightning[cpu]' (no GPU) or 'trinity-lightning[vllm]', or "
                "choose engine=transformers"
            ),
        )


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do: its class says it as `capabilities`.

    Attributes:
        overlaps_training: whether it may generate while the trainer trains (explorer.sync_offset).
        shares_weights: whether it generates with the trainer's own weights, which `bind` gives it: nothing has to be
            sent, and there are no older ones.
        picklable: whether a copy of it works in another process (explorer.runner=ray).
        sync_methods: how weights reach it, by the names of synchronizer.method.
        keys: what it reads of `engine`, apart from name and max_model_len.
        is_vllm: whether it is vLLM, started with the arguments that EngineConfig describes.
    """

    overlaps_training: bool = False
    shares_weights: bool = False
    picklable: bool = False
    sync_methods: tuple[str, ...] = ("memory",)
    keys: tuple[str, ...] = ("dtype", "max_num_seqs", "args")
    is_vllm: bool = False


# Of the built-in engines, known before anything heavy is imported; their classes take theirs from here.
CAPABILITIES = {
    "transformers": Capabilities(shares_weights=True, keys=("max_num_seqs", "per_rank")),
    "vllm": Capabilities(
        keys=("dtype", "max_num_seqs", "kv_cache_gb", "sleep", "speculative", "per_rank", "args"), is_vllm=True
    ),
    "vllm_server": Capabilities(
        overlaps_training=True,
        picklable=True,
        sync_methods=("checkpoint", *SENT),
        keys=("dtype", "max_num_seqs", "kv_cache_gb", "speculative", "args", "urls", "servers", "cpu_cores", "gpus"),
        is_vllm=True,
    ),
}


ENGINE_KEYS = tuple(dict.fromkeys(key for each in CAPABILITIES.values() for key in each.keys))


def capabilities_of(name: str) -> Capabilities:
    """Those of an engine by its name; of one of your own as `config.parts.own_capabilities`."""
    return CAPABILITIES.get(name) or own_capabilities(name)


EngineDtype = WeightDtype  # the engine's compute dtype; `auto` follows the trainer's


class EngineSleep(Enum):
    """Whether vLLM sleeps while the trainer trains; `auto`: if the memory plan finds no room otherwise."""

    auto = "auto"
    always = "always"
    never = "never"


@dataclass
class EngineConfig(Section, key="engine"):
    """The engine that generates rollouts.

    Attributes:
        name: `vllm` in this process; `vllm_server`, vLLM in processes of its own, which generates while the trainer
            trains; `transformers`, which generates with the training model itself; or the dotted path of an engine of
            your own, a subclass of `trinity_lightning.explorer.models.engine.Engine`, whose docstring is the contract.
        dtype: compute dtype of the engine; `auto`: the trainer's, which is model.dtype, or bf16 with
            trainer.precision=bf16-mixed. `transformers` computes in the dtype that the weights are held in: with
            bf16-mixed in float32, from which training differs by rounding, as from a vLLM of another dtype.
        max_model_len: longest prompt and response together, in tokens.
        max_num_seqs: requests decoded at once; null: 64 on a CPU; on a GPU the number of rollouts of a step, but at
            least 256 and at most 1,024.
        kv_cache_gb: memory of vLLM's key-value cache in GiB; null: 0.5 without a GPU; with one, what all requests may
            need or what the trainer leaves, by the memory plan that is printed at the start; of servers with GPUs of
            their own what vLLM finds free.
        sleep: of `vllm` on a GPU: whether its weights move to the host and its cache is given up while the trainer
            trains: `auto` (if the memory plan finds no room otherwise), `always` or `never`.
        speculative: of vLLM on a GPU: n-gram speculative decoding. At most this many tokens are proposed at once: those
            that followed an earlier occurrence of the last few in the prompt or response; what the policy would have
            drawn is kept. Null: none. Distribution and log-probabilities are the same, by vLLM's source; a seed draws
            other tokens than without, which may depend on the batch too. Not tried on a GPU yet, and refused without
            one.
        per_rank: of `vllm` and `transformers` with several devices (trainer=ddp, fsdp2): whether every process that
            trains has an engine, and all roll out at once, or rank 0 alone.
        args: further arguments of vLLM's EngineArgs, by their own names, or whatever an engine of your own reads.
        urls: of `vllm_server`: servers that run already, such as http://node7:8000; without, they are started here.
        servers: of `vllm_server`: how many are started here.
        cpu_cores: of `vllm_server`, without a GPU: cores of each server; null: with explorer.sync_offset half of all
            cores for the servers together and half for the trainer, otherwise all.
        gpus: of `vllm_server`: the GPUs that the servers share out among them, counted as this process sees them; a
            server of several splits the model over them (tensor_parallel_size, unless `args` says otherwise); null:
            every server takes the first.
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
        if self.urls or self.gpus:
            check_places(self)

    @property
    def quantizes(self) -> bool:
        """Whether vLLM is asked to quantise the weights that it loads."""
        return any(self.args.get(name) is not None for name in ("quantization", "quantization_config"))

    def changed(self, *names: str) -> list[str]:
        """Those of these keys that are not as they are by default."""
        default = EngineConfig()
        return [name for name in names if getattr(self, name) != getattr(default, name)]


@dataclass
class SynchronizerConfig(Section, key="synchronizer"):
    """How the trainer's weights reach the engine, and how that is checked.

    Attributes:
        method: `memory`, for an engine in the same process; for `vllm_server`: `checkpoint`, a folder that it reads,
            `nccl`, from GPU to GPU, or `ipc`, within the trainer's GPU, if servers that are started here use it. `auto`
            is memory; for servers checkpoint.
        folder: where `checkpoint` writes; engines on other machines must see it. Null: in memory (/dev/shm), if servers
            are started here and there is room, else in the run's folder.
        check_interval: syncs between probes; the first sync is always probed.
        drill: before the first step, send perturbed weights and require the engine to follow.
        sync_timeout: seconds after which a sync that hangs stops the run.
        lora: how adapters (model.lora) reach the engine: `merged` into the weights that it is sent; `adapter`, for vLLM
            to compute with them itself, next to the weights that it has loaded (here, or in servers of the run).
    """

    method: str = checked("auto", one_of, names=("auto", "memory", "checkpoint", *SENT))
    folder: str | None = None
    check_interval: int = checked(10, whole_number, least=1)
    drill: bool = True
    sync_timeout: float = checked(600.0, number, above=0)
    lora: str = checked("merged", one_of, names=("merged", "adapter"))


def own_capabilities(name: str) -> Capabilities:
    """Those of an engine that is not built in; a ConfigError: there is no such, or it lacks members of `Engine`."""
    try:
        engine = import_object(PARTS["engine"].get(name, name))
    except ValueError as error:
        raise ConfigError(f"engine.name: {error}", key="engine.name") from error
    if not isinstance(found := getattr(engine, "capabilities", None), Capabilities):
        raise ConfigError(
            f"engine.name: '{name}' is no engine",
            key="engine.name",
            fix="give a subclass of trinity_lightning.explorer.models.engine.Engine",
        )
    if getattr(engine, "__abstractmethods__", None):
        refuse_unfinished("engine.name:", engine)
    check_methods("engine", cast("type", engine))
    return found


ENGINE_ARGS = "engine.args"


def engine_arguments(kind: type[Any], model: str, config: EngineConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of an engine's constructor: the model's name and the section by name, and its own.

    It has some if the user's constructor takes more than these two, which stand first or are called `model` and
    `config`.

    Raises:
        ArgumentError: an argument that it does not have, or lacks.
        ConfigError: a constructor that does not take these two.
    """
    what = f"engine '{config.name}'"
    parameters = inspect.signature(kind).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][:2]
    if {"model", "config"} <= {each.name for each in parameters}:
        names = ["model", "config"]
    if len(names) < 2:
        raise ConfigError(f"{what} is made as {kind.__name__}(model, config), and takes ({', '.join(names)}).")
    [owner] = [each for each in kind.__mro__ if "__init__" in vars(each)][:1]
    own = parameters_beside(kind, names) if not owner.__module__.startswith("trinity_lightning.") else []
    args = dict(config.args) if own else {}
    check_arguments(what, kind, args, ENGINE_ARGS, names)
    return dict(zip(names, (model, config), strict=True)), args


def unread_key(key: str, engine: str) -> str:
    """A message for a key of `engine` that this engine does not read: which ones do."""
    owners = [name for name, each in CAPABILITIES.items() if key in each.keys]
    of_vllm = len(owners) > 1 and all(CAPABILITIES[name].is_vllm for name in owners)
    owner = "vLLM" if of_vllm else f"engine={' or '.join(owners)}"
    return f"engine.{key} belongs to {owner}, and {engine} ignores it: leave the key out."


def check_places(engine: EngineConfig) -> None:
    """Refuse URLs that are no URLs, and GPUs that are no different numbers; a ConfigError."""
    for each in engine.urls:
        url("engine.urls", each, "http://node7:8000")
    gpus = list(engine.gpus or ())
    if any(gpu < 0 for gpu in gpus) or len(set(gpus)) < len(gpus):
        raise ConfigError(f"engine.gpus is {gpus}", key="engine.gpus", fix="give different numbers of 0 or more")


def visible_gpus() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES lists, numbers or names, in order; None if it is not set: all of the machine."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else [name.strip() for name in listed.split(",") if name.strip()]


PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")  # their product is a server's GPUs


def check_vllm_args(key: str, engine: EngineConfig, in_process: bool, here: bool = True) -> None:
    """Refuse what vLLM would do wrong, here or anywhere, or could not do within this process; a ConfigError.

    `key` is where the engine's section stands. With n-grams and float32, vLLM's CPU build gave a seed other tokens in a
    batch than alone, and some that a random model is unsure of the log-probability 0; only greedy decoding was exact.
    """
    names = {"speculative": engine.speculative, "args.speculative_config": engine.args.get("speculative_config")}
    asked = [name for name, value in names.items() if value]
    if len(asked) > 1:
        raise ConfigError(
            f"{key}.speculative asks for n-grams, and {key}.args.speculative_config too",
            key=f"{key}.speculative",
            fix="leave one out",
        )
    if asked and here and not gpu_count():
        raise ConfigError(
            f"{key}.{asked[0]}: without a GPU, vLLM's speculative decoding gives wrong log-probabilities",
            key=f"{key}.{asked[0]}",
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
    """Refuse arguments that vLLM does not know; a ConfigError with the nearest that it knows."""
    names = list(known)
    for name in args:
        if name not in names:
            raise ConfigError(f"engine.args: {unknown_name('argument of vLLM', name, names)}", key="engine.args")


def reason_of(error: Exception) -> str:
    """Why vLLM could not load a model."""
    from pydantic import ValidationError  # which vLLM brings

    if isinstance(error, ValidationError):  # of vLLM's arguments: what it says besides is of pydantic
        return error.errors()[0]["msg"]
    return f"{type(error).__name__}: {error}"


def gpu_count() -> int:
    """How many GPUs this process sees."""
    import torch  # late: few configurations need it

    return torch.cuda.device_count()

"""Rules about processes and devices: servers, GPUs, cores, ways of sending weights, and workers of Ray."""

import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trinity_lightning.config.engines import (
    PARALLEL,
    SENT,
    SET_BY,
    TRAINER_GPU,
    Capabilities,
    EngineConfig,
    EngineDtype,
    EngineSleep,
    check_vllm_args,
    gpu_count,
    require_vllm,
)
from trinity_lightning.config.explorer import AuxiliaryConfig, ExplorerConfig
from trinity_lightning.config.model import LORA_ARGUMENTS, LORA_RANKS
from trinity_lightning.config.models import check_model_name
from trinity_lightning.config.trainer import compute_dtype, processes_of
from trinity_lightning.config.values import AUTO, whole_number
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.run import TrainConfig


def check_servers(run: "TrainConfig", capabilities: Capabilities, trainer: Mapping[str, Any], here: bool) -> None:
    """Refuse servers, auxiliary models, Ray's workers and GPUs that cannot work together.

    Args:
        run: the configuration.
        capabilities: abilities of the policy's engine.
        trainer: arguments of Lightning's Trainer.
        here: True to refuse also devices, packages and processes that this machine lacks.

    Raises:
        ConfigError: names the key and the fix.
    """
    if run.explorer.runner == "ray":
        check_engine_for_ray(f"engine={run.engine.name}", capabilities)
        _check_reachable(run)
        if here:
            require_ray()
            _check_workers(run)
    for name, model in run.auxiliary_models.items():
        _check_auxiliary_model(f"auxiliary_models.{name}", model, here)
    of_started_servers = ("servers", "gpus", "cpu_cores", "kv_cache_gb", "max_num_seqs", "speculative", "args")
    if run.engine.urls and (ignored := run.engine.changed(*of_started_servers)):
        raise ConfigError(
            f"engine.urls names servers that run already, and engine.{ignored[0]} is for servers that are started here",
            key="engine.urls",
            fix="leave one of them out",
        )
    engines = {f"auxiliary_models.{name}.engine": model.engine for name, model in run.auxiliary_models.items()}
    if "servers" in capabilities.keys:
        engines["engine"] = run.engine
    for key, engine in engines.items():
        _check_share(key, engine, trains_meanwhile(run.explorer), here)
        if engine.gpus:
            # On another machine the number of GPUs is not known, and `trainer.devices` gives those that train.
            gpus = gpu_count() if here else 0
            training = 0 if trainer.get("accelerator") == "cpu" else processes_of(trainer, gpus)
            check_gpus_apart(key, engine.gpus, training, gpus or training + len(engine.gpus))
    if run.synchronizer.method in SENT:
        _check_gpu_to_gpu(run, capabilities, trainer.get("accelerator", AUTO), gpu_count() if here else None)


# -- servers, their GPUs and cores -------------------------------------------------------------------------------------


def trains_meanwhile(explorer: ExplorerConfig) -> str:
    """The setting with which the trainer computes at the same time as servers, for messages; "" if it does not."""
    keys = (key for key in ("sync_offset", "max_staleness") if getattr(explorer, key) > 0)
    return next((f"explorer.{key}={getattr(explorer, key)}" for key in keys), "")


def _check_share(key: str, engine: EngineConfig, meanwhile: str, here: bool) -> None:
    """Refuse GPUs that servers cannot share out, and GPUs and cores that this machine lacks; a ConfigError."""
    gpus = list(engine.gpus or ())
    if here and gpus and max(gpus) >= (count := gpu_count()):
        raise ConfigError(
            f"{key}.gpus is {gpus}, numbers from 0 of the GPUs that this process sees, which are {count} (by "
            "CUDA_VISIBLE_DEVICES, if it is set).",
            key=f"{key}.gpus",
        )
    gpus_of_a_server(key, engine)
    if not here or engine.cpu_cores is None:
        return
    cores, taken = len(os.sched_getaffinity(0)), engine.servers * engine.cpu_cores
    if taken > cores:
        raise ConfigError(
            f"{key}.cpu_cores is {engine.cpu_cores}, for servers that take {taken} cores in all, and this process may "
            f"use {cores}",
            key=f"{key}.cpu_cores",
            fix="give fewer, or null",
        )
    if taken == cores and meanwhile:  # on a shared core, server and trainer are many times slower
        raise ConfigError(
            f"{key}.cpu_cores is {engine.cpu_cores}: that leaves none of the {cores} cores to the trainer, which "
            f"computes at the same time ({meanwhile}). Give fewer, or null.",
            key=f"{key}.cpu_cores",
        )


def gpus_of_a_server(key: str, engine: EngineConfig, model: str = "", heads: int = 0) -> int:
    """The number of GPUs of each server; 1 without `engine.gpus`.

    Args:
        key: dotted key of the engine's section.
        engine: the section.
        model: the model's name, for messages.
        heads: number of the model's attention heads, which tensor parallelism splits; 0: not known yet.

    Raises:
        ConfigError: the GPUs or the heads cannot be divided evenly.
    """
    if not engine.gpus:
        return 1
    per_server, rest = divmod(len(engine.gpus), engine.servers)
    if rest:
        raise ConfigError(
            f"{key}.gpus ({len(engine.gpus)} of them) cannot be shared out evenly among engine.servers "
            f"({engine.servers}): every server takes as many.",
            key=f"{key}.gpus",
        )
    sizes = {name: engine.args[name] for name in PARALLEL if name in engine.args}
    for name, size in sizes.items():
        whole_number(f"{key}.args.{name}", size, least=1)
    if sizes and math.prod(sizes.values()) != per_server:
        degrees = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"{key}.args ({degrees}) spread a server over {math.prod(sizes.values())} GPUs, and {key}.gpus gives each "
            f"{per_server}",
            key=f"{key}.args",
            fix=f"leave them out for tensor_parallel_size={per_server}, or give as many",
        )
    if heads % (split := sizes.get("tensor_parallel_size", 1 if sizes else per_server)):
        raise ConfigError(
            f"{key}.gpus gives a server {per_server} GPUs, and the {heads} heads of {model} cannot be split over "
            f"{split}",
            key=f"{key}.gpus",
            fix=f"give a number that divides them{', or more servers (engine.servers)' if key == 'engine' else ''}",
        )
    return per_server


def check_gpus_apart(key: str, gpus: Sequence[int], training: int, count: int) -> None:
    """Refuse server GPUs that are also training GPUs; only GPU 0 may be shared, by the memory plan.

    Args:
        key: dotted key of the engine's section.
        gpus: the servers' GPUs.
        training: number of training GPUs, which are the machine's first.
        count: number of all GPUs of the machine, for the message.
    """
    if any(TRAINER_GPU < gpu < training for gpu in gpus):
        devices = max(count - len(gpus), 1)
        raise ConfigError(
            f"{key}.gpus is {gpus}, and trainer.devices={training} trains on the first {training} GPUs",
            key=f"{key}.gpus",
            fix=f"give the servers others, such as trainer.devices={devices} {key}.gpus={list(range(devices, count))}",
        )


# -- ways of sending weights -------------------------------------------------------------------------------------------


OLDEST_VLLM = (0, 32)  # whose requests of weight transfer the senders follow


def sync_method(
    run: "TrainConfig", capabilities: Capabilities, trainer: Mapping[str, Any], gpus: int | None
) -> tuple[str, str]:
    """The method of weight sync, and the reason, in words, why `auto` takes a folder; "" if it does not.

    `auto` sends weights to servers within the GPU (ipc) if they share the trainer's, and from GPU to GPU (nccl) if they
    have others. A folder, which works everywhere, is slower.

    Args:
        run: the configuration.
        capabilities: abilities of the policy's engine.
        trainer: arguments of Lightning's Trainer.
        gpus: number of this machine's GPUs; None for a run on another machine, which is taken to have what it needs.
    """
    engine, chosen = run.engine, run.synchronizer
    if chosen.method != AUTO:
        return chosen.method, ""
    if not set(SENT) <= set(capabilities.sync_methods):
        return next(iter(capabilities.sync_methods), "memory"), ""
    method = "ipc" if not engine.gpus or TRAINER_GPU in engine.gpus else "nccl"
    in_args = [name for name in SET_BY[method] if name in engine.args]
    version, nodes = vllm_version() if gpus is not None else None, trainer.get("num_nodes", 1)
    reasons = {
        "the trainer has no GPU": gpus == 0 or trainer.get("accelerator") == "cpu",
        "the servers of engine.urls run already": bool(engine.urls),
        "synchronizer.folder is set": chosen.folder is not None,
        "servers read adapters from a folder": chosen.lora == "adapter",
        f"trainer.num_nodes is {nodes}": nodes > 1,
        f"engine.args sets {', '.join(in_args)}": bool(in_args),
        f"vLLM is older than {'.'.join(map(str, OLDEST_VLLM))}": version is not None and version < OLDEST_VLLM,
        "memory in expandable segments (PYTORCH_CUDA_ALLOC_CONF) is not shared": method == "ipc" and _is_expandable(),
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    return ("checkpoint", why) if why else (method, "")


def vllm_version() -> tuple[int, ...] | None:
    """The first two numbers of the installed vLLM's version; None if they are not known."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return None if numbers is None else tuple(map(int, numbers.groups()))


def _is_expandable() -> bool:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return any("expandable_segments:true" in os.environ.get(name, "").lower() for name in names)


def check_synchronizer(run: "TrainConfig", capabilities: Capabilities) -> None:
    """Refuse a way of sending weights that the engine does not accept, and an unused folder; a ConfigError."""
    synchronizer, engine = run.synchronizer, run.engine
    method, methods = synchronizer.method, capabilities.sync_methods
    if method not in ("auto", *methods):
        raise ConfigError(
            f"synchronizer.method is {method}, and weights reach engine={engine.name} by {' or '.join(methods)}",
            key="synchronizer.method",
            fix=f"set synchronizer={methods[0]}, or auto",
        )
    if synchronizer.folder is not None and (method in SENT or "checkpoint" not in methods):
        other = f"synchronizer={method}" if method in SENT else f"engine={engine.name}"
        raise ConfigError(
            f"synchronizer.folder belongs to synchronizer=checkpoint, not to {other}",
            key="synchronizer.folder",
            fix="leave it out",
        )


def _check_gpu_to_gpu(run: "TrainConfig", capabilities: Capabilities, accelerator: str, gpus: int | None) -> None:
    """Refuse synchronizer=nccl or ipc between devices that do not allow it; a ConfigError.

    `gpus` is the number of GPUs of this machine; None for a run on another machine.
    """
    method, engine = run.synchronizer.method, run.engine
    own_arguments = [name for name in SET_BY[method] if name in engine.args]
    if own_arguments:
        raise ConfigError(
            f"synchronizer={method} sets {own_arguments[0]} of the servers itself",
            key="synchronizer",
            fix="leave it out of engine.args, or take synchronizer=checkpoint",
        )
    if method == "nccl" and gpus is not None:
        require_vllm()  # the sender of weights is in vLLM
    if gpus == 0 or accelerator == "cpu":
        why = "this process sees none" if gpus == 0 else "trainer.accelerator is cpu"
        how = "from GPU to GPU" if method == "nccl" else "within a GPU"
        raise ConfigError(
            f"synchronizer={method} sends weights {how}, and {why}",
            key="synchronizer",
            fix="take synchronizer=checkpoint",
        )
    if method == "nccl":
        _check_nccl(engine, capabilities, gpus)
    elif engine.urls:
        raise ConfigError(
            "synchronizer=ipc shares memory of the trainer's GPU with servers that are started here, and engine.urls "
            "names servers that run already",
            key="synchronizer",
            fix="take synchronizer=nccl or checkpoint",
        )
    elif engine.gpus and set(engine.gpus) != {TRAINER_GPU}:
        raise ConfigError(
            f"engine.gpus is {engine.gpus}, and synchronizer=ipc shares memory of the trainer's GPU ({TRAINER_GPU})",
            key="engine.gpus",
            fix="leave engine.gpus out, or take synchronizer=nccl",
        )


def _check_nccl(engine: EngineConfig, capabilities: Capabilities, gpus: int | None) -> None:
    """Refuse synchronizer=nccl if servers that the run starts have no GPUs other than the trainer's; a ConfigError."""
    if engine.urls or "gpus" not in capabilities.keys:  # another program chose the servers' GPUs
        return
    if gpus == 1:
        raise ConfigError(
            "synchronizer=nccl needs a GPU for the trainer and others for the servers, and this process sees one",
            key="synchronizer",
            fix="take synchronizer=checkpoint",
        )
    if not engine.gpus or TRAINER_GPU in engine.gpus:
        others = "others, such as [1]" if gpus is None else f"some of {list(range(1, gpus))}"
        raise ConfigError(
            f"engine.gpus is {engine.gpus}, and synchronizer=nccl needs GPUs for the servers that are not the "
            f"trainer's ({TRAINER_GPU})",
            key="engine.gpus",
            fix=f"give {others}",
        )


# -- adapters that vLLM computes ---------------------------------------------------------------------------------------


MERGE = "leave synchronizer.lora merged"


def _check_dtype_of_adapters(run: "TrainConfig", trainer: Mapping[str, Any]) -> None:
    """Refuse adapters in float32 on a GPU, for which vLLM has no kernels; a ConfigError."""
    dtype = run.engine.dtype
    if dtype is EngineDtype.auto:
        dtype = compute_dtype(run.model.dtype, trainer.get("precision"))
    if dtype is EngineDtype.fp32:
        raise ConfigError(
            "synchronizer.lora=adapter, and on a GPU vLLM computes adapters in 16 bits only, not in float32",
            key="engine.dtype",
            fix=f"set engine.dtype=bf16, or {MERGE}",
        )


def check_adapters(run: "TrainConfig", trainer: Mapping[str, Any], here: bool) -> None:
    """Refuse synchronizer.lora=adapter without adapters, or with an engine that does not take them; a ConfigError.

    Args:
        run: the configuration.
        trainer: arguments of Lightning's Trainer.
        here: True to refuse also what this machine's GPUs do not compute.
    """
    engine, rank = run.engine, run.model.lora.r
    if run.synchronizer.lora != "adapter":
        return
    if rank is None:
        raise ConfigError(
            "synchronizer.lora=adapter, and there is none",
            key="synchronizer.lora",
            fix=f"set model.lora.r=16, say, or {MERGE}",
        )
    if engine.name not in ("vllm", "vllm_server"):
        raise ConfigError(
            f"synchronizer.lora=adapter is for engine=vllm and vllm_server, not for engine={engine.name}: {MERGE}.",
            key="synchronizer.lora",
        )
    if engine.urls:
        raise ConfigError(
            f"synchronizer.lora=adapter is for servers that are started here, and engine.urls names others: {MERGE}.",
            key="synchronizer.lora",
        )
    if engine.name == "vllm_server" and run.explorer.max_staleness > 0 and run.explorer.in_flight == "continue":
        message = "with synchronizer.lora=adapter a server goes on with the adapters that a request began with"
        raise ConfigError(message, key="synchronizer.lora", fix=f"{MERGE}, or set explorer.in_flight=wait")
    if run.synchronizer.method in SENT:
        raise ConfigError(
            f"synchronizer.lora=adapter gives servers a folder, and synchronizer={run.synchronizer.method} sends none",
            key="synchronizer.lora",
            fix=f"take synchronizer=checkpoint, or {MERGE}",
        )
    if engine.quantizes:
        raise ConfigError(
            "synchronizer.lora=adapter, and engine.args quantises the weights that the adapters are trained for: "
            f"{MERGE}, or leave the quantization out.",
            key="synchronizer.lora",
        )
    if here and gpu_count():
        _check_dtype_of_adapters(run, trainer)
    if rank > LORA_RANKS[-1]:
        raise ConfigError(
            f"model.lora.r is {rank}, and vLLM takes adapters up to rank {LORA_RANKS[-1]}: {MERGE}.", key="model.lora.r"
        )
    for name in LORA_ARGUMENTS:
        if name in engine.args:
            raise ConfigError(
                f"synchronizer.lora=adapter sets {name} of vLLM itself",
                key="synchronizer.lora",
                fix="leave it out of engine.args",
            )


# -- auxiliary models --------------------------------------------------------------------------------------------------


def _check_auxiliary_model(key: str, model: AuxiliaryConfig, here: bool) -> None:
    """Refuse an auxiliary model that vLLM cannot serve, or whose package or API key is missing here; a ConfigError."""
    check_vllm_args(f"{key}.engine", model.engine, in_process=False, here=here)
    if model.url is None:
        check_model_name(model.model)
    if not here:
        return
    if model.url is None:
        require_vllm()
    elif importlib.util.find_spec("openai") is None:
        raise ConfigError(
            f"{key}.url needs the package openai: `pip install 'trinity-lightning[openai]'`.", key=f"{key}.url"
        )
    elif model.api_key_env is not None and not os.environ.get(model.api_key_env):
        raise ConfigError(
            f"{key}.api_key_env: the environment variable {model.api_key_env} is not set. Set it to the endpoint's "
            "key, or leave api_key_env out for a server that needs none.",
            key=f"{key}.api_key_env",
        )


# -- Ray ---------------------------------------------------------------------------------------------------------------


WORKERS_PER_CORE = 8  # a Ray worker takes seconds of a core to start, and 0.2 GB


def require_ray() -> None:
    """Refuse to go on without Ray; the ConfigError says how to install it."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "explorer.runner=ray: Ray is not installed. Install it with `pip install 'trinity-lightning[ray]'`, or "
            "choose explorer.runner=local.",
            key="explorer.runner",
        )


def check_engine_for_ray(engine: str, capabilities: Capabilities) -> None:
    """Refuse an engine that runners in other processes cannot reach; a ConfigError. `engine` is its name, to show."""
    if not capabilities.picklable:
        raise ConfigError(
            f"explorer.runner=ray cannot reach {engine}, which computes in this process",
            key="explorer.runner",
            fix="set explorer.runner=local, or engine=vllm_server, say",
        )


def _check_workers(run: "TrainConfig") -> None:
    """Refuse more Ray workers than this machine can start; a ConfigError."""
    explorer, engine = run.explorer, run.engine
    cores, workers = len(os.sched_getaffinity(0)), explorer.runners * (len(engine.urls) or engine.servers)
    if explorer.ray_address is None and workers > WORKERS_PER_CORE * cores:
        fewer = max(WORKERS_PER_CORE * cores * explorer.runners // (2 * workers), 1)
        raise ConfigError(
            f"explorer.runner=ray starts a process for each runner, and {workers} of them (explorer."
            f"runner_per_model={explorer.runners}) are too many for {cores} cores",
            key="explorer.runner",
            fix=f"give explorer.runner_per_model={fewer}",
        )


def _check_reachable(run: "TrainConfig") -> None:
    """Refuse a Ray cluster whose machines cannot reach this machine's servers; a ConfigError."""
    address = run.explorer.ray_address
    host = ((address or "").rpartition(":")[0] or address or "auto").strip("[]")
    if host in ("auto", "localhost", "::1") or host.startswith("127."):
        return
    unreachable = f"explorer.ray_address={address}: workers on other machines cannot reach"
    if not run.engine.urls:
        raise ConfigError(
            f"{unreachable} a server that is started here, which listens on a socket of this machine",
            key="engine.urls",
            fix="start it yourself and give engine.urls=[http://HOST:PORT]",
        )
    for name, model in run.auxiliary_models.items():
        if model.url is None:
            raise ConfigError(
                f"{unreachable} the server of auxiliary model '{name}', which is started here",
                key=f"auxiliary_models.{name}.url",
                fix=f"start it yourself and give auxiliary_models.{name}.url=http://HOST:PORT/v1",
            )


# -- vLLM's own arguments (engine.args), speculative decoding and sleep ------------------------------------------------


def check_vllm(run: "TrainConfig", in_process: bool, here: bool) -> None:
    """Refuse settings of the policy's vLLM that contradict others or cannot work on this machine; a ConfigError."""
    check_vllm_args("engine", run.engine, in_process, here)
    if run.engine.speculative and run.eval_sampling.min_p:
        raise ConfigError(
            "eval_sampling.min_p: vLLM has no speculative decoding (engine.speculative) with it.",
            key="eval_sampling.min_p",
        )
    if here and run.engine.sleep is EngineSleep.always and not gpu_count():
        raise ConfigError(
            "engine.sleep=always: vLLM sleeps on a GPU only, and this process sees none",
            key="engine.sleep",
            fix="leave it auto",
        )

"""Checks of where engines compute, before torch is imported: cores, GPUs, running servers, and who can reach them."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig

from trinity_lightning.common import known_names as known
from trinity_lightning.common.config import AuxiliaryConfig, EngineConfig, runners_per_model
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.gpus import visible_gpus
from trinity_lightning.common.ports import free_port
from trinity_lightning.common.require import require_vllm

LOOPBACK = "127.0.0.1"
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")  # their product is a server's GPUs
WORKERS_PER_CORE = 8  # Ray's: each takes seconds of a core to start, and 0.2 GB
TRAINER_GPU = 0  # Lightning trains on the first of one


def check_engine(config: DictConfig) -> None:
    """Refuse settings of the policy's engine that have no effect, contradict each other, or ask for too much.

    Raises:
        ConfigError: names the key and the fix.
    """
    engine = config.engine
    if engine.kind.value != "vllm_server" and (given := _set_ones(engine, "urls", "servers", "gpus", "cpu_cores")):
        raise ConfigError(
            f"engine.{given[0]} is of engine=vllm_server, and engine={engine.kind.value} computes in this process: "
            "choose that engine, or leave the key out."
        )
    if engine.kind.value == "transformers" and (given := _set_ones(engine, "kv_cache_gb", "args", "dtype")):
        raise ConfigError(
            f"engine.{given[0]} is of vLLM, and engine=transformers generates with the training model itself: choose "
            "another engine, or leave the key out."
        )
    if engine.kind.value != "vllm" and _set_ones(engine, "sleep"):
        raise ConfigError(
            "engine.sleep is of engine=vllm, which shares a GPU with the trainer, not of "
            f"engine={engine.kind.value}: leave it out."
        )
    if engine.kind.value == "transformers" and config.explorer.sync_interval > 1:
        raise ConfigError(
            f"explorer.sync_interval is {config.explorer.sync_interval}, and engine=transformers generates with the "
            "training model itself, whose weights are always the present ones: leave the key out, or choose another "
            "engine."
        )
    started = ("servers", "gpus", "cpu_cores", "kv_cache_gb", "max_num_seqs", "args")
    if engine.urls and (given := _set_ones(engine, *started)):
        raise ConfigError(
            f"engine.urls names servers that run already, and engine.{given[0]} is of servers that are started here: "
            "leave one of them out."
        )
    check_speculation(engine.args)
    if engine.kind.value == "vllm":
        check_one_device(engine.args)
        _check_sleep(engine)
    _check_gpus("engine", engine, engine.servers)
    _check_cores("engine", engine, engine.servers, config.explorer.sync_offset)


def _check_sleep(engine: DictConfig) -> None:
    if engine.sleep.value != "always":
        return
    import torch  # late: nothing else here needs it

    if not torch.cuda.is_available():
        raise ConfigError("engine.sleep=always: vLLM sleeps on a GPU only, and this process sees none: leave it auto.")


def _set_ones(engine: DictConfig, *names: str) -> list[str]:
    """Those of the engine's keys that are not as they are by default."""
    default = EngineConfig()
    return [name for name in names if engine[name] != getattr(default, name)]


def check_one_device(args: Mapping[str, Any]) -> None:
    """Refuse arguments of vLLM that spread a model over devices, for an engine within a process; a ConfigError."""
    for name in PARALLEL:
        if args.get(name, 1) != 1:
            raise ConfigError(
                f"engine.args.{name} is {args[name]}, and engine=vllm computes in this process, on one device: choose "
                "engine=vllm_server, and give its GPUs as engine.gpus."
            )


def check_speculation(args: Mapping[str, Any]) -> None:
    """Refuse speculative decoding by vLLM's CPU build, whose samples are not the policy's then; a ConfigError.

    With n-grams and float32, a seed gave other tokens in a batch than alone, and some that a random model is unsure of
    the log-probability 0; only greedy decoding was exact.
    """
    if "speculative_config" not in args:
        return
    import torch  # late: nothing else here needs it

    if not torch.cuda.is_available():
        raise ConfigError(
            "engine.args.speculative_config: without a GPU, vLLM's speculative decoding draws other tokens for a seed, "
            "depending on the batch, and gives wrong log-probabilities: leave it out."
        )


def check_synchronizer(config: DictConfig) -> None:
    """Refuse a way of sending weights that cannot work, and settings of another way; a ConfigError."""
    synchronizer, engine = config.synchronizer, config.engine
    method = synchronizer.method
    if method != "tcp" and synchronizer.address != LOOPBACK:
        raise ConfigError(f"synchronizer.address is of synchronizer=tcp, not of {method}: leave it out.")
    if synchronizer.folder is not None and (method in known.WEIGHT_GROUPS or engine.kind.value != "vllm_server"):
        how = f"synchronizer={method}" if method in known.WEIGHT_GROUPS else f"engine={engine.kind.value}"
        raise ConfigError(f"synchronizer.folder is of synchronizer=checkpoint, not of {how}: leave it out.")
    if method in known.WEIGHT_GROUPS:
        for name in ("weight_transfer_config", "worker_extension_cls"):
            if name in engine.args:
                raise ConfigError(
                    f"synchronizer={method} sets {name} of the servers itself: leave it out of engine.args, or take "
                    "synchronizer=checkpoint."
                )
    if method == "tcp":
        _check_address(synchronizer.address, engine.urls)
    elif method == "nccl":
        _check_nccl(config)


def _check_address(address: str, urls: Sequence[str]) -> None:
    if address in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"synchronizer.address is {address!r}: give the one address of this machine that the servers reach it by."
        )
    free_port(address)
    elsewhere = [url for url in urls if _is_elsewhere(urlsplit(url).netloc.rpartition("@")[2])]
    if elsewhere and not _is_elsewhere(f"{address}:0"):
        raise ConfigError(
            f"synchronizer.address is {address}, where the server {elsewhere[0]} cannot reach this machine: give the "
            "address that it can."
        )


def _check_nccl(config: DictConfig) -> None:
    require_vllm()  # its sending end
    import torch  # late: nothing else here needs it

    engine, there = config.engine, torch.cuda.device_count()
    accelerator = (config.trainer or {}).get("accelerator", "auto")
    if there == 0 or accelerator == "cpu":
        why = "this process sees none" if there == 0 else "trainer.accelerator is cpu"
        raise ConfigError(
            f"synchronizer=nccl sends weights from GPU to GPU, and {why}: take synchronizer=tcp or checkpoint."
        )
    if engine.urls:
        return
    if there == 1:
        raise ConfigError(
            "synchronizer=nccl needs a GPU for the trainer and others for the servers, and this process sees one: take "
            "synchronizer=checkpoint."
        )
    if not engine.gpus or TRAINER_GPU in engine.gpus:
        raise ConfigError(
            f"engine.gpus is {engine.gpus}, and synchronizer=nccl needs GPUs for the servers that are not the "
            f"trainer's ({TRAINER_GPU}): give some of {list(range(1, there))}."
        )


def check_auxiliary_engine(name: str, model: AuxiliaryConfig, sync_offset: int) -> None:
    """Refuse knobs of an auxiliary model's own server that cannot work; a ConfigError."""
    key, engine = f"auxiliary_models.{name}.engine", model.engine
    if engine.urls:
        raise ConfigError(f"{key}.urls has no meaning: give the endpoint as auxiliary_models.{name}.url.")
    if engine.servers != 1:
        raise ConfigError(f"{key}.servers is {engine.servers}: an auxiliary model has one server, leave the key out.")
    _check_gpus(key, engine, servers=1)
    _check_cores(key, engine, servers=1, sync_offset=sync_offset)


def check_reach(config: DictConfig, models: Mapping[str, AuxiliaryConfig]) -> None:
    """Refuse a Ray cluster whose machines cannot reach a server started here; a ConfigError."""
    explorer = config.explorer
    if explorer.runner == "local":
        return
    if explorer.ray_address is None:
        _check_workers(config)
    if not _is_elsewhere(explorer.ray_address):
        return
    told = f"explorer.ray_address={explorer.ray_address}: workers on other machines cannot reach"
    if not config.engine.urls:
        raise ConfigError(
            f"{told} a server that is started here, which listens on a socket of this machine: start it yourself and "
            "give engine.urls=[http://HOST:PORT]."
        )
    for name, model in models.items():
        if model.url is None:
            raise ConfigError(
                f"{told} the server of auxiliary model '{name}', which is started here: start it yourself and give "
                f"auxiliary_models.{name}.url=http://HOST:PORT/v1."
            )


def _check_workers(config: DictConfig) -> None:
    """Ray's workers are processes, of which a machine holds fewer than runners within one."""
    cores, each = len(os.sched_getaffinity(0)), runners_per_model(config.explorer)
    engines = len(config.engine.urls) or config.engine.servers
    if each * engines > WORKERS_PER_CORE * cores:
        raise ConfigError(
            f"explorer.runner=ray starts a process for each runner, and {each * engines} of them (explorer."
            f"runner_per_model={each}) are too many for {cores} cores: give "
            f"explorer.runner_per_model={max(WORKERS_PER_CORE * cores // (2 * engines), 1)}."
        )


def _is_elsewhere(address: str | None) -> bool:
    if address in (None, "auto"):
        return False
    host = (address.rpartition(":")[0] or address).strip("[]")
    return host not in ("localhost", "::1") and not host.startswith("127.")


def _check_gpus(key: str, engine: DictConfig | EngineConfig, servers: int) -> None:
    gpus = list(engine.gpus or ())
    visible = visible_gpus()
    if visible is not None and max(gpus, default=-1) >= len(visible):
        raise ConfigError(
            f"{key}.gpus is {gpus}, numbers from 0 of what CUDA_VISIBLE_DEVICES shows this process, which is "
            f"{len(visible)} GPUs."
        )
    if not gpus:
        return
    import torch  # late: nothing else here needs it

    if max(gpus) >= (there := torch.cuda.device_count()):
        raise ConfigError(
            f"{key}.gpus is {gpus}, numbers from 0 of the GPUs that this process sees, which are {there}."
        )
    if len(gpus) % servers:
        raise ConfigError(
            f"{key}.gpus ({len(gpus)} of them) cannot be shared out evenly among engine.servers ({servers}): every "
            "server takes as many."
        )
    sizes = {name: engine.args[name] for name in PARALLEL if name in engine.args}
    if sizes and math.prod(sizes.values()) != len(gpus) // servers:
        asked = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"{key}.args ({asked}) spread a server over {math.prod(sizes.values())} GPUs, and {key}.gpus gives each "
            f"{len(gpus) // servers}: leave them out for tensor_parallel_size={len(gpus) // servers}, or give as many."
        )


def _check_cores(key: str, engine: DictConfig | EngineConfig, servers: int, sync_offset: int) -> None:
    """Two that compute at once on one core slow each other down many times over, the trainer among them."""
    if engine.cpu_cores is None:
        return
    there, taken = len(os.sched_getaffinity(0)), servers * engine.cpu_cores
    if taken > there:
        raise ConfigError(
            f"{key}.cpu_cores is {engine.cpu_cores}, for servers that take {taken} cores in all, and this process may "
            f"use {there}: give fewer, or null."
        )
    if taken == there and sync_offset > 0:
        raise ConfigError(
            f"{key}.cpu_cores is {engine.cpu_cores}: that leaves none of the {there} cores to the trainer, which "
            f"computes at the same time (explorer.sync_offset={sync_offset}). Give fewer, or null."
        )

"""Values that cannot work are refused before torch is imported, with the key and the fix."""

import dataclasses
import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf, open_dict

from trinity_lightning.config.engines import (
    WEIGHT_GROUPS,
    AuxiliaryConfig,
    EngineConfig,
    auxiliary_configs,
    free_port,
    require_ray,
    require_vllm,
    visible_gpus,
)
from trinity_lightning.config.models import check_model_name, check_trainable
from trinity_lightning.config.older_weights import check_corrected, samples_older_weights
from trinity_lightning.config.parts import operator_configs, strategies
from trinity_lightning.config.registry import (
    ASKING_WORKFLOWS,
    FILTERING_STRATEGIES,
    PARTS,
    SHAPING_OPERATORS,
    STEP_STRATEGIES,
)
from trinity_lightning.config.sampling import check_trained_sampling
from trinity_lightning.config.schema import (
    BUFFER_ORDERS,
    BUFFER_STORAGES,
    EXPERT_STORAGES,
    TASK_ORDERS,
    TASK_SOURCES,
    TrainConfig,
    runners_per_model,
)
from trinity_lightning.config.training import check_trainer_settings
from trinity_lightning.config.values import one_of, unknown_name, whole_number
from trinity_lightning.errors import ConfigError

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
    if synchronizer.folder is not None and (method in WEIGHT_GROUPS or engine.kind.value != "vllm_server"):
        how = f"synchronizer={method}" if method in WEIGHT_GROUPS else f"engine={engine.kind.value}"
        raise ConfigError(f"synchronizer.folder is of synchronizer=checkpoint, not of {how}: leave it out.")
    if method in WEIGHT_GROUPS:
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


def check_models(config: DictConfig) -> None:
    """Refuse models and engines that are not there, or do not go together.

    Raises:
        ConfigError: names the key and the fix.
    """
    if OmegaConf.is_missing(config.model, "name"):
        raise ConfigError("model=custom needs model.name=FOLDER or model.name=org/name.")
    check_model_name(config.model.name)
    check_trainable(config.model.name)
    if config.buffer.storage in ("file", "sql"):  # no rollouts, no engine
        return
    engine = config.engine.kind.value
    _check_vllm(config)
    _check_auxiliary_models(config)
    if config.explorer.sync_offset > 0 and engine != "vllm_server":
        raise ConfigError(
            f"explorer.sync_offset is {config.explorer.sync_offset}: engine={engine} computes in this process and "
            "cannot generate while the trainer trains. Choose engine=vllm_server."
        )
    methods = ("checkpoint", *WEIGHT_GROUPS) if engine == "vllm_server" else ("memory",)
    if config.synchronizer.method not in ("auto", *methods):
        raise ConfigError(
            f"synchronizer.method is {config.synchronizer.method}, and weights reach engine={engine} by "
            f"{' or '.join(methods)}: set synchronizer={methods[0]}, or auto."
        )
    if config.explorer.runner == "ray":
        require_ray()
        if engine != "vllm_server":
            raise ConfigError(
                f"explorer.runner=ray: engine={engine} computes in this process, where Ray runners cannot reach it. "
                "Choose engine=vllm_server, or explorer.runner=local."
            )
    check_engine(config)
    check_synchronizer(config)
    check_reach(config, auxiliary_configs(config.auxiliary_models))


def _check_vllm(config: DictConfig) -> None:
    engine = config.engine
    here = engine.kind.value == "vllm" or (engine.kind.value == "vllm_server" and not engine.urls)
    here = here or any(model.url is None for model in auxiliary_configs(config.auxiliary_models).values())
    if here:
        require_vllm()


def _check_auxiliary_models(config: DictConfig) -> None:
    models = auxiliary_configs(config.auxiliary_models)
    for name, model in models.items():
        check_auxiliary_engine(name, model, config.explorer.sync_offset)
        if model.url is None:
            check_model_name(model.model)
        else:
            _check_endpoint(name, model)
    if config.workflow.name == "evaluation":
        raise ConfigError("workflow.name=evaluation trains nothing: give it as eval_workflow.")
    if config.workflow.name in ASKING_WORKFLOWS:
        _check_asked(config.workflow, list(models))
    for operator in operator_configs(config.operators):
        if operator.name == "judge" and operator.args.get("model") not in models:
            message = unknown_name("auxiliary model", str(operator.args.get("model")), list(models))
            raise ConfigError(f"operator judge: {message} Give it, such as +auxiliary_models.judge.model=FOLDER.")


def _check_endpoint(name: str, model: AuxiliaryConfig) -> None:
    key = f"auxiliary_models.{name}"
    if importlib.util.find_spec("openai") is None:
        raise ConfigError(f"{key}.url needs the package openai: `pip install 'trinity-lightning[openai]'`.")
    if model.api_key_env is not None and not os.environ.get(model.api_key_env):
        raise ConfigError(
            f"{key}.api_key_env: the environment variable {model.api_key_env} is not set. Set it to the endpoint's "
            "key, or leave api_key_env out for a server that needs none."
        )


def _check_asked(workflow: DictConfig, models: list[str]) -> None:
    """The workflow's argument that says which model is asked is a number of one."""
    key = ASKING_WORKFLOWS[workflow.name]
    asked = workflow.args.get(key, 0)
    if isinstance(asked, bool) or not isinstance(asked, int):
        number = models.index(asked) if asked in models else 0
        raise ConfigError(
            f"workflow.args.{key} is {asked!r}: workflows number auxiliary models, from 0. Give "
            f"workflow.args.{key}={number}."
        )
    if not 0 <= asked < len(models):
        raise ConfigError(
            f"workflow={workflow.name} asks auxiliary model {asked}, and there are {len(models)}: give one, such as "
            "+auxiliary_models.judge.model=FOLDER."
        )


# Lightning's own objects have keys that we do not know.
FREE = ("trainer", "logger", "callbacks")

AT_LEAST_ONE = (
    "steps",
    "eval_repeat_times",
    "buffer.batch_size",
)
AT_LEAST_ZERO = (
    "buffer.expert.per_step",
    "seed",
)

# Sections whose own rules are in their dataclasses.
SECTIONS = ("algorithm", "optimizer", "engine", "sampling", "explorer", "synchronizer")

# Keys that hold one of a few names; those of a second element take a dotted path too.
NAMES = {
    "workflow.name": (PARTS["workflow"], True),
    "eval_workflow": (PARTS["workflow"], True),
    "algorithm.policy_loss": (PARTS["policy loss"], True),
    "algorithm.kl.name": (PARTS["KL estimate"], False),
    "buffer.storage": (BUFFER_STORAGES, False),
    "buffer.order": (BUFFER_ORDERS, False),
    "buffer.expert.storage": (EXPERT_STORAGES, False),
}


def validate(config: DictConfig) -> None:
    """Refuse values that cannot work, before anything heavy is imported.

    Raises:
        ConfigError: names the key and the fix.
    """
    _check_keys(config, "")
    _restore_left_out(config)
    for section in SECTIONS:
        OmegaConf.to_object(config[section])
    try:
        OmegaConf.to_object(config.eval_sampling)
    except ConfigError as error:
        raise ConfigError(f"eval_{error}") from error
    for key, (names, with_paths) in NAMES.items():
        one_of(key, OmegaConf.select(config, key), names, with_paths=with_paths, optional=True)
    _check_buffer(config)
    check_models(config)
    last = ""
    for label, arguments in strategies(config.add_strategy):
        if not isinstance(arguments, dict):
            raise ConfigError(f"add_strategy.{label} is {arguments!r}; give its arguments as {{name: value}}.")
        last = str(arguments.get("name", label))
        one_of("add_strategy", last, PARTS["add strategy"], with_paths=True)
    if last in FILTERING_STRATEGIES and config.algorithm.policy_loss != "sft":
        raise ConfigError(
            f"add_strategy={last} only filters: put a strategy that sets advantages behind it, such as "
            f"add_strategy=[{last},grpo]."
        )
    for operator in operator_configs(config.operators):
        one_of("operator", operator.name, PARTS["experience operator"], with_paths=True)
    expert = (config.buffer.expert.dataset,)
    for source in (config.taskset, *config.tasksets.values(), *config.eval_tasksets.values(), *expert):
        one_of(f"source of taskset '{source.name}'", source.source, TASK_SOURCES)
        one_of(f"order of taskset '{source.name}'", source.order, TASK_ORDERS)
        _check_data_file(source)
    _check_together(config)
    _check_expert(config)
    _check_numbers(config)
    _check_trainer(config)


def check_checkpoint(config: DictConfig) -> None:
    """Refuse a checkpoint to resume from that does not exist; a ConfigError."""
    if config.ckpt_path not in (None, "last") and not Path(config.ckpt_path).is_file():
        what = "is a folder, and one of its files is needed" if Path(config.ckpt_path).is_dir() else "is no file"
        raise ConfigError(f"ckpt_path: '{config.ckpt_path}' {what}: give FOLDER/checkpoints/NAME.ckpt, or last.")


def _check_data_file(source: DictConfig) -> None:
    """A name with a suffix is a file, one that begins with a dot or a slash a file or folder; the rest is the hub's."""
    path = source.path
    if source.source == "dataset" and path and (Path(path).suffix or path[0] in "./~") and not Path(path).exists():
        raise ConfigError(f"path of taskset '{source.name}': there is no file or folder '{path}'.")


def _check_together(config: DictConfig) -> None:
    """Refuse combinations that would fail late, or train on something else than they seem to."""
    named = [str(getattr(args, "get", {}.get)("name", label)) for label, args in strategies(config.add_strategy)]
    step_wise = config.workflow.args.get("step_reward") == "own"
    if "gigpo" in named and config.workflow.name in ("multi_turn", "tool_use") and not step_wise:
        raise ConfigError(
            "add_strategy=gigpo sums the rewards of an episode's steps: set workflow.args.step_reward=own, as `return` "
            "gives every step the whole episode's."
        )
    _check_step_rewards(config, named)
    algorithm, explorer = config.algorithm, config.explorer
    if samples_older_weights(explorer) or config.buffer.storage != "memory":
        check_corrected(algorithm)
    if config.buffer.storage != "memory" and (
        algorithm.kl.coef > 0 or algorithm.optimizer_steps > 1 or algorithm.inner_epochs > 1
    ):
        raise ConfigError(
            "without rollouts (buffer.storage) there is no reference and one optimizer step a read: set "
            "algorithm.kl.coef=0, algorithm.optimizer_steps=1 and algorithm.inner_epochs=1."
        )


def _check_step_rewards(config: DictConfig, strategies: Sequence[str]) -> None:
    """Refuse a strategy that compares runs by one reward where the steps of a run would have different ones."""
    args = config.workflow.args
    one_a_run = [name for name in strategies if name in PARTS["add strategy"] and name not in STEP_STRATEGIES]
    if args.get("mode") != "step_wise" or not one_a_run:
        return
    if args.get("step_reward") == "own":
        raise ConfigError(
            "workflow.args.step_reward=own gives the steps of a run different rewards, and "
            f"add_strategy={one_a_run[0]} compares runs by one: choose add_strategy=step_wise_grpo or gigpo, or "
            "step_reward=return."
        )
    for operator in operator_configs(config.operators):
        if operator.name in SHAPING_OPERATORS:
            raise ConfigError(
                f"operator '{operator.name}' gives the steps of a run (workflow.args.mode=step_wise) different "
                f"rewards, and add_strategy={one_a_run[0]} compares runs by one: choose add_strategy=step_wise_grpo or "
                "gigpo."
            )


def _check_buffer(config: DictConfig) -> None:
    buffer = config.buffer
    if buffer.storage not in ("file", "sql"):
        return
    path = None if OmegaConf.is_missing(buffer, "path") else buffer.path
    if path is None and (buffer.storage == "file" or buffer.url is None):
        raise ConfigError(
            f"buffer.storage={buffer.storage} reads what another run wrote: give buffer.path=PLACE, such as the folder "
            "outputs/grpo/TIME/experiences of a run with buffer.keep=true."
        )
    if path is not None and not Path(path).exists():
        raise ConfigError(f"buffer.path: there is no file or folder '{path}'.")


def _check_expert(config: DictConfig) -> None:
    """Expert data and the loss that learns from them go together."""
    expert, loss, rollouts = config.buffer.expert, config.algorithm.policy_loss, config.buffer.storage == "memory"
    if expert.per_step > 0 and loss in PARTS["policy loss"] and loss != "mix":
        raise ConfigError(
            f"buffer.expert.per_step is {expert.per_step}, and algorithm.policy_loss={loss} learns nothing from expert "
            "data, which have no advantages: choose algorithm.policy_loss=mix, or buffer.expert.per_step=0."
        )
    if expert.per_step > 0 and not rollouts:
        raise ConfigError("buffer.expert joins rollouts (buffer.storage=memory): set buffer.expert.per_step=0.")
    if expert.per_step == 0 and loss == "mix" and rollouts:
        raise ConfigError(
            "algorithm.policy_loss=mix needs expert data: give buffer.expert.per_step=8 and "
            "buffer.expert.dataset.path=FILE of prompts and answers."
        )
    if expert.per_step == 0:
        return
    if expert.storage == "dataset":
        if (expert.dataset.source == "addition") != (expert.dataset.path is None):
            raise ConfigError(
                "buffer.expert needs prompts and answers: give buffer.expert.dataset.source=dataset and "
                "buffer.expert.dataset.path=FILE; the source `addition` has no path."
            )
    elif expert.path is None and (expert.storage == "file" or expert.url is None):
        raise ConfigError(f"buffer.expert.storage={expert.storage} reads stored experiences: give buffer.expert.path.")
    elif expert.path is not None and not Path(expert.path).exists():
        raise ConfigError(f"buffer.expert.path: there is no file or folder '{expert.path}'.")


def _restore_left_out(config: DictConfig) -> None:
    """A section that `~NAME` left out is as if nothing had been said of it."""
    defaults = OmegaConf.structured(TrainConfig)
    present = list(config)
    with open_dict(config):
        for name in (str(each) for each in defaults if each not in present):
            config[name] = defaults._get_node(name)


def _check_keys(node: DictConfig, prefix: str) -> None:
    """Refuse keys that the schema does not have; `+key=value` gets them past Hydra."""
    schema = OmegaConf.get_type(node)
    fields = [field.name for field in dataclasses.fields(schema)] if dataclasses.is_dataclass(schema) else None
    for key in map(str, node):
        name = f"{prefix}{key}"
        if fields is not None and key not in fields:
            raise ConfigError(unknown_name("key", name, [f"{prefix}{field}" for field in fields]))
        apart = OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key) or name in FREE
        if not apart and isinstance(node[key], DictConfig):
            _check_keys(node[key], f"{name}.")


def _check_numbers(config: DictConfig) -> None:
    for least, keys in ((1, AT_LEAST_ONE), (0, AT_LEAST_ZERO)):
        for key in keys:
            whole_number(key, OmegaConf.select(config, key), least=least)
    if config.seed >= 2**32:
        raise ConfigError(f"seed is {config.seed}; give a number below 2**32.")
    _check_explorer(config)
    for sampling in ("sampling", "eval_sampling"):
        if config[sampling].max_tokens >= config.engine.max_model_len:
            raise ConfigError(
                f"{sampling}.max_tokens ({config[sampling].max_tokens}) leaves no room for a prompt in "
                f"engine.max_model_len ({config.engine.max_model_len})."
            )
    check_trained_sampling(OmegaConf.to_container(config.sampling))  # type: ignore[arg-type]


def _check_explorer(config: DictConfig) -> None:
    explorer = config.explorer
    if config.algorithm.optimizer_steps > explorer.batch_size and config.buffer.storage == "memory":
        raise ConfigError(
            f"algorithm.optimizer_steps ({config.algorithm.optimizer_steps}) is more than explorer.batch_size "
            f"({explorer.batch_size}): the rollouts of a prompt stay together, so some optimizer steps would be empty."
        )


def _check_trainer(config: DictConfig) -> None:
    trainer: Any = config.trainer or {}
    for key in ("callbacks", "logger", "plugins"):
        if trainer.get(key) is not None:
            raise ConfigError(f"trainer.{key} is set by the run itself: use the groups `callbacks` and `logger`.")
    if (epochs := trainer.get("max_epochs")) != config.steps:
        raise ConfigError(f"trainer.max_epochs is {epochs}, and a run has `steps` of them ({config.steps}): set steps.")
    check_trainer_settings(trainer)

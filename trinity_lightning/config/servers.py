"""Settings of servers: models in processes of their own, with GPUs and cores, auxiliary models, and Ray's workers.

Imported by the runs that have any of them.
"""

import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from trinity_lightning.config.engines import (
    SENT,
    SET_BY,
    TRAINER_GPU,
    Capabilities,
    EngineConfig,
    SynchronizerConfig,
    gpu_count,
    require_vllm,
)
from trinity_lightning.config.models import check_model_name, load_tokenizer, resolve_model
from trinity_lightning.config.operators import OperatorConfig
from trinity_lightning.config.own_models import check_same_vocabulary
from trinity_lightning.config.registry import ASKING_WORKFLOWS
from trinity_lightning.config.schema import ExplorerConfig, TrainConfig
from trinity_lightning.config.sections import Section, section_of
from trinity_lightning.config.values import AUTO, one_of, unknown_name, url, whole_number
from trinity_lightning.config.vllm_args import PARALLEL, check_vllm_args
from trinity_lightning.errors import ConfigError

TEACHER_OPERATOR, TEACHER_WORKFLOW = "teacher_top_k", "on_policy_distill"  # they ask a teacher
WORKERS_PER_CORE = 8  # Ray's: each takes seconds of a core to start, and 0.2 GB


def check_places(engine: EngineConfig) -> None:
    """Refuse URLs and GPUs of servers that are none; a ConfigError."""
    for each in engine.urls:
        url("engine.urls", each, "http://node7:8000")
    gpus = list(engine.gpus or ())
    if any(gpu < 0 for gpu in gpus) or len(set(gpus)) < len(gpus):
        raise ConfigError(f"engine.gpus is {gpus}; give different numbers of 0 or more.")


def check_method(synchronizer: SynchronizerConfig) -> None:
    """Refuse a way of sending weights that there is not, and a folder that it does not write to; a ConfigError."""
    method, folder = synchronizer.method, synchronizer.folder
    if method == "tcp":
        raise ConfigError("synchronizer.method=tcp is no more: set synchronizer=checkpoint, or nccl between GPUs.")
    one_of("synchronizer.method", method, ("auto", "memory", "checkpoint", *SENT))
    if folder is not None and method in SENT:
        raise ConfigError(
            f"synchronizer.folder is of synchronizer=checkpoint, not of synchronizer={method}: leave it out."
        )


def visible_gpus() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES lists, numbers or names, in order; None if it is not set: all of the machine."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else [name.strip() for name in listed.split(",") if name.strip()]


def require_ray() -> None:
    """ConfigError, with what to install, if Ray is not."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "explorer.runner=ray: Ray is not installed. Install it with `pip install 'trinity-lightning[ray]'`, or "
            "choose explorer.runner=local."
        )


@dataclass
class AuxiliaryConfig(Section):
    """Another model than the policy, for workflows and operators that ask one: a judge, a teacher.

    Attributes:
        model: `smollm2`, `tiny`, a folder, or a hub name: a vLLM server of it is started here; with `url`, the name
            that requests carry.
        url: of an OpenAI-compatible endpoint to ask instead, such as https://api.openai.com/v1.
        api_key_env: environment variable that holds the endpoint's key, such as OPENAI_API_KEY; null: none is sent.
        engine: knobs of a server started here, without `name`, `urls`, `servers` and `sleep`; max_model_len of a
            teacher (workflow on_policy_distill, operator teacher_top_k) is the policy's and one more.

    Raises:
        ConfigError: a URL that is none, what belongs to a server together with an endpoint, or the other way round, or
            a knob that such a server does not have.
    """

    model: str = MISSING
    url: str | None = None
    api_key_env: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.url is not None:
            url("url", self.url, "http://node7:8000/v1")
            if self.engine != EngineConfig():
                raise ConfigError(
                    f"engine is of a server that is started here, and {self.url} is there: leave one out."
                )
        if self.engine.urls:
            raise ConfigError("engine.urls is not read: give the endpoint as url.")
        for name in self.engine.changed("name", "servers", "sleep"):
            value = getattr(self.engine, name)
            raise ConfigError(
                f"engine.{name} is {getattr(value, 'value', value)}, and an auxiliary model has one server of vLLM "
                "that never sleeps: leave the key out, and give the knobs of its engine one by one."
            )
        if self.url is None and self.api_key_env is not None:
            raise ConfigError("api_key_env is of an endpoint, and there is no url: give it, or leave the key out.")


def auxiliary_config(key: str, given: Any) -> AuxiliaryConfig:
    """The auxiliary model that stands under a key: a section already, or a mapping.

    Raises:
        ConfigError: a key or a value that such a model does not have, or no model.
    """
    named = {"model": "", **given} if isinstance(given, Mapping) else given
    section = section_of(key, AuxiliaryConfig, named) if isinstance(named, Mapping | AuxiliaryConfig) else None
    if section is None or not section.model:
        raise ConfigError(f"{key} needs a model: {key}.model=FOLDER, or the name that an endpoint (url) knows.")
    return section


def auxiliary_configs(run: TrainConfig) -> dict[str, Any]:
    """The auxiliary models by name. A teacher that reads whole rollouts has room for those and the token it samples.

    Args:
        run: a configuration whose auxiliary models are sections, or mappings.

    Raises:
        ConfigError: as `auxiliary_config`.
    """
    given = run.auxiliary_models
    configs = {str(name): auxiliary_config(f"auxiliary_models.{name}", each) for name, each in given.items()}
    teachers = teachers_of(run)
    for name, each in given.items():
        starts = isinstance(each, Mapping) and not each.get("url")
        if name in teachers and starts and "max_model_len" not in (each.get("engine") or {}):
            configs[str(name)].engine.max_model_len = run.engine.max_model_len + 1
    return configs


def asked_model(section: str, workflow: str, key: str, asked: Any, models: Sequence[str]) -> int:
    """The auxiliary model that a workflow asks, by its number.

    Args:
        section: what to call the workflow's section in messages.
        workflow: its name.
        key: the argument that says which model.
        asked: its value: a name, or a number.
        models: names of the auxiliary models.

    Raises:
        ConfigError: there is no such model.
    """
    fix = f"Give one, such as +auxiliary_models.{key}.model=FOLDER."
    if isinstance(asked, str):
        if asked not in models:
            message = unknown_name("auxiliary model", asked, models)
            raise ConfigError(f"{section}.args.{key}: {message} {fix}")
        asked = list(models).index(asked)
    whole_number(f"{section}.args.{key}", asked, least=0)
    if asked >= len(models):
        raise ConfigError(f"{section}={workflow} asks auxiliary model {asked}, and there are {len(models)}. {fix}")
    return asked


# -- teachers: auxiliary models that read the policy's own tokens ------------------------------------------------------


def teachers_of(run: TrainConfig) -> list[str]:
    """Names of the auxiliary models that teach, as operators give them, there or not, and as the workflow asks one."""
    names = [str(each.args.get("model", "teacher")) for each in run.operators.values() if each.name == TEACHER_OPERATOR]
    if run.workflow.name == TEACHER_WORKFLOW:
        key, models = ASKING_WORKFLOWS[TEACHER_WORKFLOW], list(map(str, run.auxiliary_models))
        number = asked_model("workflow", TEACHER_WORKFLOW, key, run.workflow.args.get(key, 0), models)
        names.append(models[number])
    return names


def auxiliary_servers(run: TrainConfig) -> list[tuple[str, str, EngineConfig, bool]]:
    """Of each auxiliary model that is started here the key of its engine, its name, its engine, and whether that has
    its context from the policy's, as teachers do.
    """
    teachers, own = teachers_of(run), run.engine.max_model_len + 1
    return [
        (f"auxiliary_models.{name}.engine", it.model, it.engine, name in teachers and it.engine.max_model_len == own)
        for name, it in run.auxiliary_models.items()
        if it.url is None
    ]


def check_teachers(run: TrainConfig) -> None:
    """Refuse teachers that are not there, cannot read the policy's longest sequences, or are asked for too much.

    So is one that is asked for what no strategy weighs by.

    Raises:
        ConfigError: names the key and the fix.
    """
    for operator in (each for each in run.operators.values() if each.name == TEACHER_OPERATOR):
        _check_operator(run, operator)
    _check_weighed(run)
    longest, teachers = run.engine.max_model_len, teachers_of(run)
    for name in teachers:
        teacher = run.auxiliary_models[name]
        if run.workflow.name == TEACHER_WORKFLOW and run.sampling.temperature != 1:
            raise ConfigError(
                f"workflow={TEACHER_WORKFLOW} compares log-probabilities at temperature 1, not "
                f"{run.sampling.temperature}: set sampling.temperature=1."
            )
        if teacher.url is not None and run.workflow.name == TEACHER_WORKFLOW and name == teachers[-1]:
            raise ConfigError(
                f"workflow={TEACHER_WORKFLOW} asks for log-probabilities, and an endpoint (auxiliary_models.{name}.url)"
                " only chats: leave out the url for a model that the run starts, or choose operators=teacher_top_k."
            )
        if teacher.url is None and teacher.engine.max_model_len <= longest:
            raise ConfigError(
                f"auxiliary_models.{name}.engine.max_model_len is {teacher.engine.max_model_len}, and this teacher "
                f"reads sequences of up to {longest} tokens (engine.max_model_len) and samples one more: give "
                f"{longest + 1}."
            )


def _check_weighed(run: TrainConfig) -> None:
    """Refuse a workflow that asks a teacher for what nothing trains on, as parts of your own may."""
    strategies = [each.name for each in run.add_strategy.values()]
    parts = [*strategies, run.algorithm.policy_loss.name, *(each.name for each in run.operators.values())]
    weighed = TEACHER_WORKFLOW in strategies or any("." in name for name in parts)
    if run.workflow.name == TEACHER_WORKFLOW and not weighed:
        raise ConfigError(
            f"workflow={TEACHER_WORKFLOW} asks a teacher, and add_strategy={strategies[-1]} does not weigh by its "
            f"answers: choose add_strategy={TEACHER_WORKFLOW}, or another workflow."
        )


def check_asked(run: TrainConfig) -> None:
    """Refuse a judge that is not there, and a model that nothing asks, as parts of your own may; a ConfigError."""
    models, operators = list(map(str, run.auxiliary_models)), list(run.operators.values())
    for operator in operators:
        if operator.name == "judge" and operator.args.get("model") not in models:
            message = unknown_name("auxiliary model", str(operator.args.get("model")), models)
            raise ConfigError(f"operator judge: {message} Give it, such as +auxiliary_models.judge.model=FOLDER.")
    workflows = {run.workflow.name: run.workflow.args}
    if run.eval_workflow is not None:
        workflows.setdefault(run.eval_workflow, {})
    if any("." in name for name in (*workflows, *(each.name for each in operators))):
        return
    asked = {*teachers_of(run), *(each.args.get("model") for each in operators if each.name == "judge")}
    for name in workflows.keys() & ASKING_WORKFLOWS.keys():
        key = ASKING_WORKFLOWS[name]
        asked.add(models[asked_model("workflow", name, key, workflows[name].get(key, 0), models)])
    for name in models:
        if name not in asked:
            raise ConfigError(
                f"auxiliary_models.{name}: no workflow or operator of this run asks it: leave it out, or choose one "
                f"that does, such as operators=judge with operators.judge.args.model={name}."
            )


def _check_operator(run: TrainConfig, operator: OperatorConfig) -> None:
    model, models = str(operator.args.get("model", "teacher")), list(run.auxiliary_models)
    if model not in models:
        fix = f"Give it, such as +auxiliary_models.{model}.model=FOLDER."
        raise ConfigError(f"operator {TEACHER_OPERATOR}: {unknown_name('auxiliary model', model, models)} {fix}")
    k, vocabulary = operator.args.get("k", 16), _vocabulary(run.model.name)
    if vocabulary is not None and isinstance(k, int) and k > vocabulary:
        raise ConfigError(f"operator {TEACHER_OPERATOR}: k is {k}, and the model's vocabulary has {vocabulary} tokens.")


def check_vocabularies(run: TrainConfig) -> None:
    """Refuse a teacher, served here, with another vocabulary than the policy's; a ConfigError."""
    for name in teachers_of(run):
        teacher = run.auxiliary_models[name]
        if teacher.url is None:
            check_same_vocabulary(f"auxiliary_models.{name}.model", teacher.model, load_tokenizer(run.model.name))


def _vocabulary(model: str) -> int | None:
    """How many tokens the model knows, by its configuration; None: it is not on this machine yet, or does not say."""
    file = Path(resolve_model(model)) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    return config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))


# -- what is there, and what is asked of it ----------------------------------------------------------------------------


def check_servers(run: TrainConfig, can: Capabilities, trainer: Mapping[str, Any]) -> None:
    """Refuse servers, auxiliary models, Ray's workers and GPUs that are not there, or ask for more than there is.

    Args:
        run: the configuration.
        can: what the policy's engine can do.
        trainer: the arguments of Lightning's Trainer.

    Raises:
        ConfigError: names the key and the fix.
    """
    if run.explorer.runner == "ray":
        check_engine_for_ray(f"engine={run.engine.name}", can)
        require_ray()
        _check_ray(run)
    for name, model in run.auxiliary_models.items():
        _check_auxiliary_model(f"auxiliary_models.{name}", model, run.explorer.sync_offset)
    if "servers" in can.keys:
        _check_policy_servers(run)
    engines = {f"auxiliary_models.{name}.engine": model.engine for name, model in run.auxiliary_models.items()}
    for key, engine in {"engine": run.engine, **engines}.items():
        if engine.gpus:
            check_gpus_apart(key, engine.gpus, gpus_that_train(trainer, gpu_count()), gpu_count())
    if run.synchronizer.method in SENT:
        _check_gpu_to_gpu(run.synchronizer.method, run.engine, can, trainer.get("accelerator", AUTO))


def check_synchronizer(run: TrainConfig, can: Capabilities) -> None:
    """Refuse a way of sending weights that the engine does not take; a ConfigError."""
    synchronizer, engine = run.synchronizer, run.engine
    method, methods = synchronizer.method, can.sync_methods
    if method not in ("auto", *methods):
        raise ConfigError(
            f"synchronizer.method is {method}, and weights reach engine={engine.name} by {' or '.join(methods)}: set "
            f"synchronizer={methods[0]}, or auto."
        )
    if synchronizer.folder is not None and "checkpoint" not in methods:
        raise ConfigError(
            f"synchronizer.folder is of synchronizer=checkpoint, not of engine={engine.name}: leave it out."
        )


def _check_policy_servers(run: TrainConfig) -> None:
    engine = run.engine
    started = ("servers", "gpus", "cpu_cores", "kv_cache_gb", "max_num_seqs", "speculative", "args")
    if engine.urls and (given := engine.changed(*started)):
        raise ConfigError(
            f"engine.urls names servers that run already, and engine.{given[0]} is of servers that are started here: "
            "leave one of them out."
        )
    _check_gpus("engine", engine, engine.servers)
    _check_cores("engine", engine, engine.servers, run.explorer.sync_offset)


def _check_gpus(key: str, engine: EngineConfig, servers: int) -> None:
    gpus = list(engine.gpus or ())
    if gpus and max(gpus) >= (there := gpu_count()):
        raise ConfigError(
            f"{key}.gpus is {gpus}, numbers from 0 of the GPUs that this process sees, which are {there} (by "
            "CUDA_VISIBLE_DEVICES, if it is set)."
        )
    gpus_of_a_server(key, engine, servers)


def gpus_of_a_server(key: str, engine: EngineConfig, servers: int, model: str = "", heads: int = 0) -> int:
    """GPUs that each server has of `engine.gpus`, 1 without; a ConfigError if they, or heads, cannot be shared out."""
    gpus = list(engine.gpus or ())
    if not gpus:
        return 1
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
    each = len(gpus) // servers
    if heads % (split := sizes.get("tensor_parallel_size", 1 if sizes else each)):
        raise ConfigError(
            f"{key}.gpus gives a server {each} GPUs, and the {heads} heads of {model} cannot be split over {split}: "
            f"give a number that divides them{', or more servers (engine.servers)' if key == 'engine' else ''}."
        )
    return each


def check_gpus_apart(key: str, gpus: Sequence[int], training: int, there: int) -> None:
    """Refuse GPUs that train, of so many; the first one alone is shared by the plan that rank 0 makes."""
    if any(TRAINER_GPU < gpu < training for gpu in gpus):
        left = max(there - len(gpus), 1)
        raise ConfigError(
            f"{key}.gpus is {gpus}, and trainer.devices={training} trains on the first {training} GPUs: give the "
            f"servers others, such as trainer.devices={left} {key}.gpus={list(range(left, there))}."
        )


def gpus_that_train(trainer: Mapping[str, Any], there: int) -> int:
    """How many GPUs of each machine train, by the arguments of Lightning's Trainer: its first ones of so many."""
    devices = str(trainer.get("devices", 1))
    if trainer.get("accelerator") == "cpu":
        return 0
    if devices in (AUTO, "-1"):
        return there
    return int(devices)


def _check_cores(key: str, engine: EngineConfig, servers: int, sync_offset: int) -> None:
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


def _check_gpu_to_gpu(method: str, engine: EngineConfig, can: Capabilities, accelerator: str) -> None:
    taken = [name for name in SET_BY[method] if name in engine.args]
    if taken:
        raise ConfigError(
            f"synchronizer={method} sets {taken[0]} of the servers itself: leave it out of engine.args, or take "
            "synchronizer=checkpoint."
        )
    if method == "nccl":
        require_vllm()  # its sending end
    there = gpu_count()
    if there == 0 or accelerator == "cpu":
        why = "this process sees none" if there == 0 else "trainer.accelerator is cpu"
        how = "from GPU to GPU" if method == "nccl" else "within a GPU"
        raise ConfigError(f"synchronizer={method} sends weights {how}, and {why}: take synchronizer=checkpoint.")
    if method == "nccl":
        _check_nccl(engine, can, there)
    else:
        _check_ipc(engine)


def _check_ipc(engine: EngineConfig) -> None:
    if engine.urls:
        raise ConfigError(
            "synchronizer=ipc shares memory of the trainer's GPU with servers that are started here, and engine.urls "
            "names servers that run already: take synchronizer=nccl or checkpoint."
        )
    if engine.gpus and set(engine.gpus) != {TRAINER_GPU}:
        raise ConfigError(
            f"engine.gpus is {engine.gpus}, and synchronizer=ipc shares memory of the trainer's GPU ({TRAINER_GPU}): "
            "leave engine.gpus out, or take synchronizer=nccl."
        )


def _check_nccl(engine: EngineConfig, can: Capabilities, there: int) -> None:
    if engine.urls or "gpus" not in can.keys:  # its GPUs are not this run's to give
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


def _check_auxiliary_model(key: str, model: AuxiliaryConfig, sync_offset: int) -> None:
    check_vllm_args(f"{key}.engine", model.engine, in_process=False)
    _check_gpus(f"{key}.engine", model.engine, servers=1)
    _check_cores(f"{key}.engine", model.engine, servers=1, sync_offset=sync_offset)
    if model.url is None:
        require_vllm()
        check_model_name(model.model)
    elif importlib.util.find_spec("openai") is None:
        raise ConfigError(f"{key}.url needs the package openai: `pip install 'trinity-lightning[openai]'`.")
    elif model.api_key_env is not None and not os.environ.get(model.api_key_env):
        raise ConfigError(
            f"{key}.api_key_env: the environment variable {model.api_key_env} is not set. Set it to the endpoint's "
            "key, or leave api_key_env out for a server that needs none."
        )


def check_runner(explorer: ExplorerConfig) -> None:
    """Refuse what the runners of explorer.runner do not use; a ConfigError."""
    if explorer.runner == "local":
        raise ConfigError(f"explorer.ray_address is {explorer.ray_address}, and needs explorer.runner=ray: set that.")
    if explorer.ray_address is not None and "://" in explorer.ray_address:
        raise ConfigError(f"explorer.ray_address is {explorer.ray_address!r}; give HOST:PORT, or auto.")
    if explorer.reward_workers:
        raise ConfigError(
            "explorer.reward_workers: the runners of explorer.runner=ray are processes already, leave it out."
        )


def check_engine_for_ray(engine: str, can: Capabilities) -> None:
    """Refuse an engine, of that name in the message, that runners in other processes cannot reach; a ConfigError."""
    if not can.picklable:
        raise ConfigError(f"{engine} computes in this process: explorer.runner=ray needs engine=vllm_server, say.")


def _check_ray(run: TrainConfig) -> None:
    """Refuse more workers than this machine can start, and a cluster whose machines cannot reach a server of it."""
    explorer, engine = run.explorer, run.engine
    cores, workers = len(os.sched_getaffinity(0)), explorer.runners * (len(engine.urls) or engine.servers)
    if explorer.ray_address is None and workers > WORKERS_PER_CORE * cores:
        fewer = max(WORKERS_PER_CORE * cores * explorer.runners // (2 * workers), 1)
        raise ConfigError(
            f"explorer.runner=ray starts a process for each runner, and {workers} of them (explorer."
            f"runner_per_model={explorer.runners}) are too many for {cores} cores: give "
            f"explorer.runner_per_model={fewer}."
        )
    if not _is_elsewhere(explorer.ray_address):
        return
    unreachable = f"explorer.ray_address={explorer.ray_address}: workers on other machines cannot reach"
    if not engine.urls:
        raise ConfigError(
            f"{unreachable} a server that is started here, which listens on a socket of this machine: start it "
            "yourself and give engine.urls=[http://HOST:PORT]."
        )
    for name, model in run.auxiliary_models.items():
        if model.url is None:
            raise ConfigError(
                f"{unreachable} the server of auxiliary model '{name}', which is started here: start it yourself and "
                f"give auxiliary_models.{name}.url=http://HOST:PORT/v1."
            )


def _is_elsewhere(address: str | None) -> bool:
    if address in (None, "auto"):
        return False
    host = (address.rpartition(":")[0] or address).strip("[]")
    return host not in ("localhost", "::1") and not host.startswith("127.")

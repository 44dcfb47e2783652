"""What a run needs, from its configuration and its model's config: memory by device and part, seconds of a step."""

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig

from trinity_lightning.common.devices import GPUS, Gpu, best_flops, free_memory, known_gpu
from trinity_lightning.common.hardware import GIB, TORCH_DTYPES
from trinity_lightning.common.memory_plan import (
    CUDA_CONTEXT,
    WORKSPACES,
    MemoryPlan,
    Rollouts,
    beside_others,
    cache_bytes,
    engine_alone,
    engine_weights,
    gib,
    plan,
)
from trinity_lightning.common.model_memory import GPU_TOKENS, ModelShape, Training, tokens_that_fit
from trinity_lightning.config.engines import SENT, TRAINER_GPU, capabilities_of
from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.schema import TrainConfig, typed_config
from trinity_lightning.config.servers import check_gpus_apart, check_one_device, gpus_of_a_server, gpus_that_train
from trinity_lightning.config.training import OFFLOADED, Layout, WeightDtype, compute_dtype, trains_together
from trinity_lightning.config.values import AUTO, unknown_name
from trinity_lightning.engines import settle_dtypes
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.vllm_engine import engine_args
from trinity_lightning.gpu_plan import (
    Gpus,
    adapters_of,
    planned,
    rollouts_of,
    trainers_of,
    training_of,
    value_model_of,
    with_auxiliary_shares,
)
from trinity_lightning.sync.stream import skeleton
from trinity_lightning.trainer.flops import ModelSize, Work, attended
from trinity_lightning.trainer.layout import worth_sharing
from trinity_lightning.trainer.objective import Objective

if TYPE_CHECKING:
    from trinity_lightning.plan import PlanConfig

FORWARD = 1 / 3  # of the operations of a forward and backward pass
# 10^9 bytes a second that weights are sent with: within a process on a CPU (benchmarks/weight_sync.py); on a GPU and
# between GPUs, and as a folder, from what others report.
CPU_GB, GPU_GB, FOLDER_GB = 2.0, 10.0, 1.0
ENOUGH_HOST = 1 << 50  # assumed host memory of another machine, in bytes


@dataclass(frozen=True)
class Hardware:
    """A device, of which the run may have several.

    Attributes:
        name: as people call it.
        on_cpu: whether it is this machine's CPU.
        machine: how many of these devices a machine has, and their memory; a CPU is one device with all of the
            machine's memory.
        flops: operations a second of its best matrix product; None: not known for the dtype that is computed in.
        bandwidth: bytes a second of its memory.
    """

    name: str
    on_cpu: bool
    machine: Gpus
    flops: float | None
    bandwidth: float


@dataclass(frozen=True)
class Engines:
    """How a run's engines are spread over devices.

    Attributes:
        count: how many share the rollouts; each copy of the model in a server (data_parallel_size) is one.
        gpus: GPUs that each of them splits the model over.
        on_one: how many of them compute on the same device.
        server_gpus: GPUs of each server that are not the trainer's; 0: there are none.
    """

    count: int = 1
    gpus: int = 1
    on_one: int = 1
    server_gpus: int = 0


@dataclass(frozen=True)
class Share:
    """Devices that hold the same."""

    name: str
    devices: int
    memory: MemoryPlan


@dataclass(frozen=True)
class RunPlan:
    """What a run needs.

    Attributes:
        model: its name, and how its weights are held.
        parameters: of the model.
        hardware: what it is planned for.
        shares: the memory of every device, alike ones together: the first is rank 0's.
        tokens: of a step, by what happens to them.
        seconds: of a step, by part; none if the speed of the device is not known.
        assumed: what tokens and seconds rest on, by the key that sets it.
    """

    model: str
    parameters: int
    hardware: Hardware
    shares: list[Share]
    tokens: dict[str, int]
    seconds: dict[str, float]
    assumed: dict[str, str]


def plan_run(config: DictConfig, asked: "PlanConfig") -> RunPlan:
    """The plan of a run.

    Args:
        config: a configuration that was checked; its dtypes are settled here.
        asked: what to plan for.

    Raises:
        ConfigError: the model has no config, the device is not known, numbers do not divide, or something does not fit.
    """
    trainer = config.trainer or {}
    gpu = gpu_of(asked, trainer.get("accelerator", "auto"))
    if gpu is not None and config.model.dtype is WeightDtype.auto:
        config.model.dtype = WeightDtype.bf16
    settle_dtypes(config, None)
    run = replace(typed_config(config), trainer=trainer)
    hardware, model = _hardware(asked, gpu, run), _model(run.model.name)
    shape, size = ModelShape.of(model), ModelSize.of(model)
    devices = trainers_of(trainer, hardware.machine.count)
    step, engines = step_of(run, asked), _engines(run, shape, hardware, devices) if run.buffer.has_rollouts else None
    run, shares = (_on_a_cpu if hardware.on_cpu else _on_gpus)(run, shape, hardware, devices, engines)
    work, seconds = training_work(run, step), {}
    if hardware.flops is not None:
        # All processes of a machine compute with one CPU.
        computing = int(trainer.get("num_nodes", 1)) if hardware.on_cpu else devices
        training = training_flops(run, size, work) / (hardware.flops * computing) / asked.training_share
        seconds = {**_rollout_parts(run, asked, step, hardware, engines, shares, shape, size), "training": training}
    return RunPlan(
        model=_described(run, shape),
        parameters=shape.parameters,
        hardware=hardware,
        shares=shares,
        tokens={
            "of a prompt": step.prompt,
            "of a response": step.response,
            **({"generated": step.rows * step.response} if engines else {}),
            "computed by training": work.tokens,
            "of a micro-batch": shares[0].memory.micro_batch_tokens,
        },
        seconds=seconds,
        assumed=_assumed(run, asked, hardware),
    )


def _described(run: TrainConfig, shape: ModelShape) -> str:
    adapters, _ = adapters_of(run)
    trained = f", {adapters / 1e9:.3g} billion of adapters" if adapters else ""
    return f"{run.model.name}: {shape.parameters / 1e9:.3g} billion parameters{trained}, {run.model.dtype.value}"


def _model(name: str) -> Any:
    try:
        return skeleton(str(resolve_model(name)))
    except Exception as error:  # whatever a wrong config provokes in transformers
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise ConfigError(f"model.name: '{name}' has no config that transformers can read: {reason}") from error


# -- what it runs on ---------------------------------------------------------------------------------------------------


def gpu_of(asked: "PlanConfig", accelerator: str) -> tuple[str, Gpu] | None:
    """The GPU to plan for and its name; None: this machine's CPU.

    Raises:
        ConfigError: it is not in the table, or the trainer is to be on the CPU.
    """
    if asked.device is not None:
        if accelerator == "cpu":
            raise ConfigError(f"plan.device is {asked.device}, and trainer.accelerator is cpu: leave one of them out.")
        if asked.device not in GPUS:
            raise ConfigError(unknown_name("plan.device", asked.device, GPUS))
        if (asked.memory_gb or 0) > (most := GPUS[asked.device].gib):
            raise ConfigError(f"plan.memory_gb is {asked.memory_gb:g}, and {asked.device} has {most:g} GiB: give less.")
        return asked.device, GPUS[asked.device]
    if accelerator == "cpu" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    if (gpu := known_gpu(name)) is None:
        raise ConfigError(f"this machine's GPU, {name}, is not in the table: give one that is like it as plan.device.")
    return name, gpu


def _hardware(asked: "PlanConfig", gpu: tuple[str, Gpu] | None, run: TrainConfig) -> Hardware:
    """The values given under `plan`; for the rest, those of the GPU table or of this machine."""
    settings = run.trainer or {}
    dtype = compute_dtype(run.model.dtype, settings.get("precision"))
    flops = best_flops(gpu and gpu[1], TORCH_DTYPES[dtype]) if asked.tflops is None else asked.tflops * 1e12
    bandwidth = None if asked.bandwidth_gb is None else asked.bandwidth_gb * 1e9
    given = None if asked.memory_gb is None else int(asked.memory_gb * GIB)
    host = None if asked.host_gb is None else int(asked.host_gb * GIB)
    if gpu is None:
        free = given or free_memory()
        return Hardware("this machine's CPU", True, Gpus(1, free, free, free), flops, bandwidth or _copied_a_second())
    name, known = gpu
    if asked.device is None:
        count, (free, total), host = torch.cuda.device_count(), torch.cuda.mem_get_info(), host or free_memory()
    else:
        if trains_together(settings) and str(settings.get("devices", AUTO)) in (AUTO, "-1"):
            raise ConfigError(f"trainer.devices is {AUTO}, and {name} is planned for: give a number.")
        count, total, host = 1, int(known.gib * GIB), host or ENOUGH_HOST
        free = total - (CUDA_CONTEXT - WORKSPACES)
    return Hardware(name, False, Gpus(count, given or free, given or total, host), flops, bandwidth or known.bandwidth)


def _copied_a_second() -> float:
    """Bytes a second that this CPU reads and writes as it copies memory."""
    source = torch.ones(1 << 26, dtype=torch.uint8)
    target = source.clone()
    start = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    return 8 * source.nbytes / (time.perf_counter() - start)


def _engines(run: TrainConfig, shape: ModelShape, hardware: Hardware, devices: int) -> Engines:
    """How the engines of a run with rollouts are spread.

    Raises:
        ConfigError: their GPUs are not shared out evenly, or are the trainer's, or the heads cannot be split.
    """
    engine, gpus = run.engine, list(run.engine.gpus or ())
    if not capabilities_of(engine.name).overlaps_training:
        check_one_device(engine.args)
        each = devices if engine.per_rank else 1
        return Engines(each, on_one=each if hardware.on_cpu else 1)
    if engine.urls:
        return Engines(len(engine.urls))
    if gpus and not hardware.on_cpu:
        training = gpus_that_train(run.trainer or {}, hardware.machine.count)
        check_gpus_apart("engine", gpus, training, training + len(gpus))
    each = gpus_of_a_server("engine", engine, engine.servers, run.model.name, shape.heads)
    copies = engine.args.get("data_parallel_size", 1)
    if not gpus or TRAINER_GPU in gpus:
        return Engines(engine.servers, on_one=engine.servers)
    return Engines(engine.servers * copies, gpus=each // copies, server_gpus=each)


# -- memory ------------------------------------------------------------------------------------------------------------


def _on_gpus(
    run: TrainConfig, shape: ModelShape, hardware: Hardware, devices: int, engines: Engines | None
) -> tuple[TrainConfig, list[Share]]:
    machine, training = hardware.machine, training_of(run, hardware.machine.count)

    def rank_0(run: TrainConfig, training: Training) -> tuple[TrainConfig, MemoryPlan]:
        if engines and capabilities_of(run.engine.name).is_vllm:
            run, found = planned(run, machine, training.tokens)
            if found is not None:
                return run, found
        run, beside = with_auxiliary_shares(run, machine.total) if engines else (run, 0)
        return run, beside_others(plan(shape, training, None, machine.free - beside, machine.host), beside)

    run, first = rank_0(run, training)
    if devices == 1:
        shares = _ranks(1, first)
    else:
        if training.tokens is None:  # ranks agree on the fewest, once rank 0 has planned its engine
            training = replace(training, tokens=min(first.micro_batch_tokens, GPU_TOKENS))
            run, first = rank_0(run, training)
        alike = run.engine.per_rank and first.shared
        shares = _ranks(devices, first, first if alike else plan(shape, training, None, machine.free, machine.host))
    if engines and engines.server_gpus:
        memory = engine_alone(shape, replace(rollouts_of(run, machine.count), gpus=engines.gpus), machine.total)
        servers, gpus = run.engine.servers, engines.server_gpus
        shares.append(Share(f"{_counted(servers, 'server')}, {_counted(gpus, 'GPU')} each", servers * gpus, memory))
    return run, shares


def _on_a_cpu(
    run: TrainConfig, shape: ModelShape, hardware: Hardware, devices: int, engines: Engines | None
) -> tuple[TrainConfig, list[Share]]:
    """Processes that share this machine's memory: what the others take is planned first, and rank 0 has the rest."""
    free, training = hardware.machine.free, replace(training_of(run, 1), on_cpu=True)
    here = devices // int((run.trainer or {}).get("num_nodes", 1))  # on each machine
    if training.tokens is None:
        training = replace(training, tokens=tokens_that_fit(shape, training.width, free // here, training.value_model))
    rollouts: Rollouts | None = None
    if engines and capabilities_of(run.engine.name).is_vllm and not run.engine.urls:
        args = engine_args(run.model.name, run.engine, on_cpu=True)
        cache, at_once = args["kv_cache_memory_bytes"] / GIB, args["max_num_seqs"]
        run = replace(run, engine=replace(run.engine, kv_cache_gb=cache, max_num_seqs=at_once))
        rollouts = rollouts_of(run, 1)
    theirs = rollouts if run.engine.per_rank else None
    if devices == 1:
        return run, _ranks(1, plan(shape, training, rollouts, free, 0))
    other = plan(shape, training, theirs, free // here, 0)
    free -= (here - 1) * (other.device - other.left)
    return run, _ranks(devices, plan(shape, training, rollouts, free, 0), other)


def rows_on_a_cpu(run: TrainConfig) -> list[tuple[str, str]]:
    """What this machine's memory is expected to hold, for the table at a run's start; if too much, the run goes on."""
    free, devices = free_memory(), trainers_of(run.trainer or {}, 1)
    hardware = Hardware("this machine's CPU", True, Gpus(1, free, free, free), None, 0.0)
    engines = Engines() if run.buffer.has_rollouts else None
    try:
        _, shares = _on_a_cpu(run, ModelShape.of(_model(run.model.name)), hardware, devices, engines)
    except ConfigError as error:
        return [("memory expected", str(error))]
    others = [(f"memory of {each.name}, each", gib(each.memory.device - each.memory.left)) for each in shares[1:]]
    (_, free_now), *rows = shares[0].memory.rows()
    return [("memory", free_now), *rows, *others]


def _ranks(devices: int, first: MemoryPlan, *others: MemoryPlan) -> list[Share]:
    """Rank 0, and the others, which are alike."""
    names = ("trainer",) if devices == 1 else ("rank 0", "rank 1" if devices == 2 else f"ranks 1 to {devices - 1}")
    return [Share(*each) for each in zip(names, (1, devices - 1), (first, *others), strict=False)]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number > 1 else "")


# -- tokens and seconds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The rows of a step, all as long as they are assumed to be: `size` responses to each of `groups` prompts."""

    groups: int
    size: int
    prompt: int
    response: int

    @property
    def rows(self) -> int:
        """Rollouts, or stored experiences."""
        return self.groups * self.size


def step_of(run: TrainConfig, asked: "PlanConfig") -> Step:
    """The rows of a step; of stored experiences that are no pairs it is not known which share a prompt.

    Raises:
        ConfigError: a prompt and a response together are longer than the context.
    """
    context, response = run.engine.max_model_len, asked.response_tokens or run.sampling.max_tokens
    prompt = asked.prompt_tokens or context - response
    if prompt < 1 or prompt + response > context:
        raise ConfigError(
            f"prompts of {prompt} tokens (plan.prompt_tokens) and responses of {response} (plan.response_tokens) do "
            f"not fit into engine.max_model_len={context}."
        )
    if not run.buffer.has_rollouts:
        return Step(run.buffer.batch_size, 2 if Objective(run.algorithm).pairs else 1, prompt, response)
    return Step(run.explorer.batch_size, run.explorer.repeat_times, prompt, response)


def training_work(run: TrainConfig, step: Step) -> Work:
    """What a step sends through the model in one pass over its rollouts."""
    padded, shared = step.rows * (step.prompt + step.response), step.groups * (step.prompt + step.size * step.response)
    layout, pairs = run.algorithm.layout, step.rows * attended(step.prompt + step.response)
    shares = layout is Layout.auto and run.model.attn_implementation == "sdpa" and worth_sharing(padded, shared)
    if layout is Layout.shared_prefix or shares:
        pairs = step.groups * (attended(step.prompt) + step.size * attended(step.response, step.prompt))
        return Work(shared, step.rows * step.response, pairs)
    return Work(padded, step.rows * step.response, pairs)


def training_flops(run: TrainConfig, size: ModelSize, work: Work) -> float:
    """Operations of a step's training, with those that checkpointing repeats and those of further forward passes."""
    objective = Objective(run.algorithm)
    critic = run.algorithm.critic
    forwards = objective.needs_reference + (objective.needs_old_logprobs or critic is not None)
    # With adapters no gradient of the weights is computed: as many operations as of a forward pass.
    backward = FORWARD * (run.model.gradient_checkpointing - (run.model.lora.r is not None))
    passes = run.algorithm.inner_epochs * (1 + backward) + FORWARD * forwards
    values = 0.0
    if (model := value_model_of(run)) is not None:  # it predicts no tokens, and has no reference
        own = passes - FORWARD * objective.needs_reference
        values = ModelSize.of(model).training_flops(replace(work, predicted=0)) * own
    return size.training_flops(work) * passes + values


def _rollout_parts(
    run: TrainConfig,
    asked: "PlanConfig",
    step: Step,
    hardware: Hardware,
    engines: Engines | None,
    shares: list[Share],
    shape: ModelShape,
    size: ModelSize,
) -> dict[str, float]:
    """Seconds of a step's rollouts and of the weight sync, if it has them; engines on one device share its speed."""
    if engines is None or hardware.flops is None:
        return {}
    rollouts = replace(rollouts_of(run, hardware.machine.count), gpus=engines.gpus)
    cache = next((share.memory.kv_cache for share in shares if share.memory.kv_cache), 0)
    flops, bandwidth = hardware.flops / engines.on_one, hardware.bandwidth / engines.on_one
    generating = rollout_seconds(step, rollouts, engines.count, cache, shape, size, flops, bandwidth)
    seconds = {"rollout": generating / asked.rollout_share}
    if not capabilities_of(run.engine.name).shares_weights:
        # Adapters are sent as they are trained: `rollouts` counts the rank that vLLM makes room for.
        sent = adapters_of(run)[0] if rollouts.adapters else shape.parameters
        seconds["weight sync"] = rollouts.width * sent / (_sync_gb(run, asked, hardware) * 1e9)
    return seconds


def rollout_seconds(
    step: Step,
    rollouts: Rollouts,
    engines: int,
    cache: int,
    shape: ModelShape,
    size: ModelSize,
    flops: float,
    bandwidth: float,
) -> float:
    """Seconds of a step's rollouts at the full speed of the engines' devices.

    Every pass makes one token of each request that is decoded at once, and reads the weights and the keys and values
    so far: it takes as long as its operations or as those reads, whichever is more. Prompts are computed once a group.

    Args:
        step, rollouts: what is generated, and how.
        engines: that share the rollouts.
        cache: bytes of the key-value cache on each GPU of an engine; 0: as many as are of use.
        shape, size: of the model.
        flops, bandwidth: operations and bytes a second of each GPU of an engine, of which it has a share if others
            compute on it.
    """
    requests = -(-step.rows // engines)
    request = cache_bytes(shape, replace(rollouts, context=step.prompt + step.response), 1)
    at_once = max(min(requests, rollouts.at_once, cache // request if cache else requests), 1)
    written = (step.prompt + step.response / 2) / (step.prompt + step.response)  # of a request's cache, on average
    operations = 2 * (size.body + size.head) * at_once / rollouts.gpus
    read = engine_weights(shape, rollouts) + at_once * request * written
    passes = -(-requests // at_once) * step.response
    prompts = 2 * size.body * step.groups * step.prompt / (engines * rollouts.gpus)
    return passes * max(operations / flops, read / bandwidth) + prompts / flops


def _sync_gb(run: TrainConfig, asked: "PlanConfig", hardware: Hardware) -> float:
    """10^9 bytes a second that weights are sent with."""
    if asked.sync_gb is not None:
        return asked.sync_gb
    if capabilities_of(run.engine.name).overlaps_training and run.synchronizer.method not in SENT:
        return FOLDER_GB
    return CPU_GB if hardware.on_cpu else GPU_GB


def _assumed(run: TrainConfig, asked: "PlanConfig", hardware: Hardware) -> dict[str, str]:
    step = step_of(run, asked)
    lengths = {
        "plan.prompt_tokens": f"every prompt has {step.prompt} tokens",
        "plan.response_tokens": f"every response has {step.response} tokens",
        **_servers_left_out(run, hardware),
    }
    if run.optimizer.name == OFFLOADED:
        lengths["optimizer.name"] = "the optimizer's steps in the host's memory are not counted"
    if run.buffer.storage == "dataset" and run.buffer.dataset.max_length is None:
        lengths["buffer.dataset.max_length"] = "no example, or pair, is longer than a micro-batch"
    if hardware.flops is None:
        return lengths | {"plan.tflops": f"the speed of {hardware.name} in float32 is not known: give it for times"}
    said = {
        "plan.tflops": f"a device multiplies matrices at {hardware.flops / 1e12:.3g} TFLOP/s",
        "plan.training_share": f"training reaches {asked.training_share:g} of the speed of products",
    }
    if run.buffer.has_rollouts:
        said["plan.bandwidth_gb"] = f"a device reads its memory with {hardware.bandwidth / 1e9:.4g} GB/s"
        said["plan.rollout_share"] = f"rollouts reach {asked.rollout_share:g} of either speed, whichever takes longer"
        if not capabilities_of(run.engine.name).shares_weights:
            said["plan.sync_gb"] = f"weights are sent with {_sync_gb(run, asked, hardware):g} GB/s"
    return lengths | said


def _servers_left_out(run: TrainConfig, hardware: Hardware) -> dict[str, str]:
    """The auxiliary models whose servers the plan does not count: it knows those beside the trainer on a GPU."""
    counts = run.buffer.has_rollouts and not hardware.on_cpu
    return {
        f"auxiliary_models.{name}": "the server of an auxiliary model is not counted"
        for name, model in run.auxiliary_models.items()
        if model.url is None and not (counts and TRAINER_GPU in (model.engine.gpus or [TRAINER_GPU]))
    }

"""The plan of a whole run: memory of every device, seconds of a step. No weights are loaded."""

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig

from trinity_lightning.common.hardware import GIB, GPUS, TORCH_DTYPES, Gpu, free_memory, known_gpu, product_flops
from trinity_lightning.common.model_memory import FLOAT, ModelShape, tokens_that_fit
from trinity_lightning.config.algorithm import Layout
from trinity_lightning.config.engines import SENT, TRAINER_GPU, capabilities_of
from trinity_lightning.config.model import OFFLOADED, WeightDtype
from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.run import TrainConfig, typed_config
from trinity_lightning.config.servers import check_gpus_apart, gpus_of_a_server, sync_method
from trinity_lightning.config.trainer import compute_dtype, processes_of, trains_together
from trinity_lightning.config.values import AUTO, unknown_name
from trinity_lightning.engines import settle_dtypes
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.vllm_engine import engine_args
from trinity_lightning.plan.gpu import (
    Gpus,
    adapters_of,
    planned,
    rollouts_of,
    tokens_on_a_cpu,
    trainers_of,
    training_of,
    value_model_of,
)
from trinity_lightning.plan.memory import (
    CUDA_CONTEXT,
    WORKSPACES,
    MemoryPlan,
    Rollouts,
    cache_bytes,
    engine_alone,
    engine_weights,
    gib,
    plan,
)
from trinity_lightning.plan.pictures import Pictures, pictures_of
from trinity_lightning.sync.stream import skeleton
from trinity_lightning.trainer.flops import ModelSize, Work, attended
from trinity_lightning.trainer.layout import worth_sharing
from trinity_lightning.trainer.objective import Objective

if TYPE_CHECKING:
    from trinity_lightning.plan.command import PlanConfig

FORWARD = 1 / 3  # share of a forward pass in the operations of a forward and backward pass
# 10^9 bytes a second at which weights are sent: within a process on a CPU, as measured (benchmarks/weight_sync.py);
# within or between GPUs, and as a folder, as others report.
CPU_GB, GPU_GB, FOLDER_GB = 2.0, 10.0, 1.0
ENOUGH_HOST = 1 << 50  # assumed host memory of another machine, in bytes


@dataclass(frozen=True)
class Hardware:
    """A kind of device, on which a run computes.

    Attributes:
        name: its usual name.
        on_cpu: True if it is this machine's CPU.
        machine: number of these devices in a machine, and their memory. A CPU is one device with all memory of the
            machine.
        flops: operations a second of its best matrix product; None: not known for the run's dtype.
        bandwidth: bytes a second at which its memory is read.
    """

    name: str
    on_cpu: bool
    machine: Gpus
    flops: float | None
    bandwidth: float


@dataclass(frozen=True)
class Engines:
    """The engines of a run, and their devices.

    Attributes:
        count: engines that share the rollouts. Each copy of the model in a server (data_parallel_size) counts as one.
        gpus: GPUs over which each engine splits the model.
        on_one: engines that compute on the same device.
        server_gpus: GPUs of each server that has GPUs of its own; 0: no server has any.
    """

    count: int = 1
    gpus: int = 1
    on_one: int = 1
    server_gpus: int = 0


@dataclass(frozen=True)
class Share:
    """The memory plan of one device, or of several with the same contents."""

    name: str
    devices: int
    memory: MemoryPlan


@dataclass(frozen=True)
class RunPlan:
    """Memory, tokens and seconds of a run.

    Attributes:
        model: name of the model, number of its parameters and their dtype, as text.
        parameters: number of the model's parameters.
        hardware: device for which the run is planned.
        shares: memory of all devices, one entry for those with the same contents; the first entry is rank 0's.
        tokens: numbers of tokens, by name.
        pictures: the pictures of a step; None without any.
        seconds: seconds of a step, by part; empty if the speed of the device is not known.
        assumed: assumptions behind tokens and seconds, by the key that changes them.
    """

    model: str
    parameters: int
    hardware: Hardware
    shares: list[Share]
    tokens: dict[str, int]
    pictures: Pictures | None
    seconds: dict[str, float]
    assumed: dict[str, str]


def plan_run(config: DictConfig, plan_config: "PlanConfig") -> RunPlan:
    """The plan of a run.

    Args:
        config: a checked configuration. Its dtypes are settled here.
        plan_config: the section `plan`.

    Raises:
        ConfigError: the model has no config; the device is not known; GPUs cannot be shared out evenly; or a part does
            not fit.
    """
    trainer = config.trainer or {}
    gpu = gpu_of(plan_config, trainer.get("accelerator", "auto"))
    if gpu is not None and config.model.dtype is WeightDtype.auto:
        config.model.dtype = gpu[1].half
    settle_dtypes(config, None)
    run = replace(typed_config(config), trainer=trainer)
    hardware, model = _hardware(plan_config, gpu, run), _model(run.model.name)
    shape, step = ModelShape.of(model), step_of(run, plan_config)
    pictures = pictures_of(run, plan_config, step.groups, step.prompt)
    engines = _engines(run, shape, hardware) if run.buffer.has_rollouts else None
    if hardware.on_cpu:
        run, shares = _on_a_cpu(run, shape, hardware.machine.free)
    else:
        run, shares = _on_gpus(run, shape, hardware.machine, engines)
    estimate = _Estimate(run, plan_config, hardware, step, engines, shape, ModelSize.of(model))
    work = training_work(run, step)
    if pictures is not None:
        work = replace(work, pictures=(pictures.seen,) * pictures.count)
    cache = next((share.memory.kv_cache for share in shares if share.memory.kv_cache), 0)
    return RunPlan(
        model=_described(run, shape),
        parameters=shape.parameters,
        hardware=hardware,
        shares=shares,
        tokens={
            "of a prompt": step.prompt,
            "of a response": step.response,
            **({"generated": step.rows * step.response} if engines else {}),
            **({"computed again after a sync, at most": again} if (again := estimate.computed_again()) else {}),
            "computed by training": work.tokens,
            "of a micro-batch": shares[0].memory.micro_batch_tokens,
        },
        pictures=pictures,
        seconds=estimate.seconds(work, cache),
        assumed=estimate.assumed() | _assumed_of(pictures, plan_config),
    )


def _assumed_of(pictures: Pictures | None, plan_config: "PlanConfig") -> dict[str, str]:
    """The assumptions about pictures, by the key that changes them."""
    if pictures is None:
        return {}
    count, edge = plan_config.pictures or 1, plan_config.picture_edge
    return {
        "plan.pictures": f"every prompt has {_counted(count, 'picture')} of its own",
        "plan.picture_edge": f"every picture has {edge} x {edge} pixels",
    }


def _described(run: TrainConfig, shape: ModelShape) -> str:
    """Name, parameters and dtype of the model, as text."""
    adapters, _ = adapters_of(run)
    trained = f", {adapters / 1e9:.3g} billion of adapters" if adapters else ""
    return f"{run.model.name}: {shape.parameters / 1e9:.3g} billion parameters{trained}, {run.model.dtype.value}"


def _model(name: str) -> Any:
    """The skeleton of a model; a ConfigError if transformers cannot read its config."""
    try:
        return skeleton(str(resolve_model(name)))
    except Exception as error:  # a wrong config provokes many kinds of errors in transformers
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise ConfigError(
            f"model.name: '{name}' has no config that transformers can read: {reason}", key="model.name"
        ) from error


# -- devices and engines -----------------------------------------------------------------------------------------------


def gpu_of(plan_config: "PlanConfig", accelerator: str) -> tuple[str, Gpu] | None:
    """The name and data of the GPU to plan for; None: this machine's CPU.

    Raises:
        ConfigError: the GPU is not in the table or has less memory than `plan.memory_gb`; or the trainer uses the CPU.
    """
    if plan_config.device is not None:
        if accelerator == "cpu":
            raise ConfigError(
                f"plan.device is {plan_config.device}, and trainer.accelerator is cpu",
                key="plan.device",
                fix="leave one of them out",
            )
        if plan_config.device not in GPUS:
            raise ConfigError(unknown_name("plan.device", plan_config.device, GPUS), key="plan.device")
        if (plan_config.memory_gb or 0) > (most := GPUS[plan_config.device].gib):
            raise ConfigError(
                f"plan.memory_gb is {plan_config.memory_gb:g}, and {plan_config.device} has {most:g} GiB",
                key="plan.memory_gb",
                fix="give less",
            )
        return plan_config.device, GPUS[plan_config.device]
    if accelerator == "cpu" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    if (gpu := known_gpu(name)) is None:
        raise ConfigError(
            f"this machine's GPU, {name}, is not in the table",
            key="plan.device",
            fix="give one that is like it as plan.device",
        )
    return name, gpu


def _hardware(plan_config: "PlanConfig", gpu: tuple[str, Gpu] | None, run: TrainConfig) -> Hardware:
    """The device with the values of the section `plan`; null stands for the GPU table's value or this machine's."""
    settings = run.trainer or {}
    dtype = compute_dtype(run.model.dtype, settings.get("precision"))
    # Each is 0 if its key is null.
    flops, bandwidth = (plan_config.tflops or 0) * 1e12, (plan_config.bandwidth_gb or 0) * 1e9
    memory, host = int((plan_config.memory_gb or 0) * GIB), int((plan_config.host_gb or 0) * GIB)
    if gpu is None:
        free = memory or free_memory()
        flops = flops or product_flops(TORCH_DTYPES[dtype], torch.get_num_threads())
        return Hardware("this machine's CPU", True, Gpus(1, free, free, free), flops, bandwidth or _copied_a_second())
    name, known = gpu
    fast = dtype is not WeightDtype.fp32 and (dtype is not WeightDtype.bf16 or known.half is dtype)
    speed = flops or (known.flops if fast else None)
    if plan_config.device is None:
        count, (free, total), host = torch.cuda.device_count(), torch.cuda.mem_get_info(), host or free_memory()
    else:
        if trains_together(settings) and str(settings.get("devices", AUTO)) in (AUTO, "-1"):
            raise ConfigError(
                f"trainer.devices is {AUTO}, and {name} is planned for", key="trainer.devices", fix="give a number"
            )
        count, total, host = 1, int(known.gib * GIB), host or ENOUGH_HOST
        free = total - (CUDA_CONTEXT - WORKSPACES)
    gpus = Gpus(count, memory or free, memory or total, host, known.before_ampere)
    return Hardware(name, False, gpus, speed, bandwidth or known.bandwidth)


def _copied_a_second() -> float:
    """Bytes a second that this CPU reads and writes while it copies memory, measured."""
    source = torch.ones(1 << 26, dtype=torch.uint8)
    target = source.clone()
    start = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    return 8 * source.nbytes / (time.perf_counter() - start)


def _engines(run: TrainConfig, shape: ModelShape, hardware: Hardware) -> Engines:
    """The engines of the run.

    Raises:
        ConfigError: the GPUs cannot be shared out evenly among servers, some of them are the trainer's, or the model's
            heads cannot be split over them.
    """
    engine, gpus = run.engine, list(run.engine.gpus or ())
    if not capabilities_of(engine.name).overlaps_training:
        count = trainers_of(run.trainer or {}, hardware.machine.count) if engine.per_rank else 1
        return Engines(count, on_one=count if hardware.on_cpu else 1)
    if engine.urls:
        return Engines(len(engine.urls))
    if gpus and not hardware.on_cpu:
        training = processes_of(run.trainer or {}, hardware.machine.count)
        check_gpus_apart("engine", gpus, training, training + len(gpus))
    server_gpus = gpus_of_a_server("engine", engine, run.model.name, shape.heads)
    copies = engine.args.get("data_parallel_size", 1)
    if not gpus or TRAINER_GPU in gpus:
        return Engines(engine.servers, on_one=engine.servers)
    return Engines(engine.servers * copies, gpus=server_gpus // copies, server_gpus=server_gpus)


# -- memory ------------------------------------------------------------------------------------------------------------


def _on_gpus(
    run: TrainConfig, shape: ModelShape, machine: Gpus, engines: Engines | None
) -> tuple[TrainConfig, list[Share]]:
    """The configuration with the plan's values, and the memory of the trainers' GPUs and of the servers' GPUs."""
    devices = trainers_of(run.trainer or {}, machine.count)
    training = training_of(run, machine.count, machine.before_ampere)
    unplanned = run.buffer.has_rollouts and not capabilities_of(run.engine.name).is_vllm
    if training.tokens is None and unplanned:  # the trainer chooses them when its weights are loaded
        loaded = (training.width + (FLOAT if training.width < FLOAT else 0)) * shape.parameters // training.shards
        tokens = tokens_that_fit(shape, training.width, machine.free - loaded, training.value_model, on_cpu=False)
        training = replace(training, tokens=tokens)
    run, first = planned(run, machine, training.tokens)
    if devices == 1:
        shares = _ranks(1, first)
    else:
        alike = run.engine.per_rank and first.shared
        other = first if alike else plan(shape, training, None, machine.free, machine.host)
        if training.tokens is None:  # rank 0 plans its engine first; then all ranks take the fewest tokens of any rank
            training = replace(training, tokens=min(first.micro_batch_tokens, other.micro_batch_tokens))
            run, first = planned(run, machine, training.tokens)
            other = first if alike else plan(shape, training, None, machine.free, machine.host)
        shares = _ranks(devices, first, other)
    if engines and engines.server_gpus:
        memory = engine_alone(shape, replace(rollouts_of(run, machine.count), gpus=engines.gpus), machine.total)
        servers, gpus = run.engine.servers, engines.server_gpus
        shares.append(Share(f"{_counted(servers, 'server')}, {_counted(gpus, 'GPU')} each", servers * gpus, memory))
    return run, shares


def _on_a_cpu(run: TrainConfig, shape: ModelShape, free: int) -> tuple[TrainConfig, list[Share]]:
    """The configuration with the plan's values, and the memory of each process of this machine.

    The processes share the memory. The plan of the other ranks is made first, and rank 0 has the rest.
    """
    devices, training = trainers_of(run.trainer or {}, 1), replace(training_of(run, 1), on_cpu=True)
    local = devices // int((run.trainer or {}).get("num_nodes", 1))  # processes of each machine
    if training.tokens is None:
        tokens = tokens_on_a_cpu(run) or tokens_that_fit(shape, training.width, free // local, training.value_model)
        training = replace(training, tokens=tokens)
    rollouts: Rollouts | None = None
    if run.buffer.has_rollouts and capabilities_of(run.engine.name).is_vllm and not run.engine.urls:
        args = engine_args(run.model.name, run.engine, on_cpu=True)
        cache, at_once = args["kv_cache_memory_bytes"] / GIB, args["max_num_seqs"]
        run = replace(run, engine=replace(run.engine, kv_cache_gb=cache, max_num_seqs=at_once))
        rollouts = rollouts_of(run, 1)
    if devices == 1:
        return run, _ranks(1, plan(shape, training, rollouts, free, 0))
    other = plan(shape, training, rollouts if run.engine.per_rank else None, free // local, 0)
    free -= (local - 1) * (other.device - other.left)
    return run, _ranks(devices, plan(shape, training, rollouts, free, 0), other)


def rows_on_a_cpu(run: TrainConfig) -> list[tuple[str, str]]:
    """The expected memory of a run on this CPU, as rows of the table at its start.

    If the plan does not fit, a row says so, and the run goes on.
    """
    try:
        _, shares = _on_a_cpu(run, ModelShape.of(_model(run.model.name)), free_memory())
    except ConfigError as error:
        return [("memory expected", str(error))]
    others = [(f"memory of {share.name}, each", gib(share.memory.device - share.memory.left)) for share in shares[1:]]
    (_, free_now), *rows = shares[0].memory.rows()
    return [("memory", free_now), *rows, *others]


def _ranks(devices: int, first: MemoryPlan, *others: MemoryPlan) -> list[Share]:
    """The share of rank 0, and the share of the other ranks, which all hold the same."""
    names = ("trainer",) if devices == 1 else ("rank 0", "rank 1" if devices == 2 else f"ranks 1 to {devices - 1}")
    return [Share(*values) for values in zip(names, (1, devices - 1), (first, *others), strict=False)]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number > 1 else "")


# -- tokens and seconds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The rows of a step: `size` responses to each of `groups` prompts.

    All prompts have `prompt` tokens, and all responses `response` tokens.
    """

    groups: int
    size: int
    prompt: int
    response: int

    @property
    def rows(self) -> int:
        """Number of rollouts, or of stored experiences."""
        return self.groups * self.size


def step_of(run: TrainConfig, plan_config: "PlanConfig") -> Step:
    """The rows of a step. It is assumed that stored experiences share no prompts, unless they are pairs.

    Raises:
        ConfigError: a prompt and a response together are longer than the context.
    """
    context, response = run.engine.max_model_len, plan_config.response_tokens or run.sampling.max_tokens
    prompt = plan_config.prompt_tokens or context - response
    if prompt < 1 or prompt + response > context:
        raise ConfigError(
            f"prompts of {prompt} tokens (plan.prompt_tokens) and responses of {response} (plan.response_tokens) do "
            f"not fit into engine.max_model_len={context}.",
            key="plan.prompt_tokens" if plan_config.prompt_tokens else "plan.response_tokens",
        )
    if not run.buffer.has_rollouts:
        return Step(run.buffer.batch_size, 2 if Objective(run.algorithm).pairs else 1, prompt, response)
    return Step(run.explorer.batch_size, run.explorer.repeat_times, prompt, response)


def training_work(run: TrainConfig, step: Step) -> Work:
    """The work of one pass over the rows of a step."""
    padded, shared = step.rows * (step.prompt + step.response), step.groups * (step.prompt + step.size * step.response)
    layout, pairs = run.algorithm.layout, step.rows * attended(step.prompt + step.response)
    shares = layout is Layout.auto and run.model.attn_implementation == "sdpa" and worth_sharing(padded, shared)
    if layout is Layout.shared_prefix or shares:
        pairs = step.groups * (attended(step.prompt) + step.size * attended(step.response, step.prompt))
        return Work(shared, step.rows * step.response, pairs)
    return Work(padded, step.rows * step.response, pairs)


def training_flops(run: TrainConfig, size: ModelSize, work: Work) -> float:
    """Operations of a step's training: all passes, the activations recomputed by checkpointing, and forward passes."""
    objective = Objective(run.algorithm)
    critic = run.algorithm.critic
    forwards = objective.needs_reference + (objective.needs_old_logprobs or critic is not None)
    # Checkpointing adds a forward pass. Adapters save as much, because weights need no gradients.
    backward = FORWARD * (run.model.gradient_checkpointing - (run.model.lora.r is not None))
    passes = run.algorithm.inner_epochs * (1 + backward) + FORWARD * forwards
    values = 0.0
    if (model := value_model_of(run)) is not None:  # it predicts no tokens, and has no reference
        value_passes = passes - FORWARD * objective.needs_reference
        values = ModelSize.of(model).training_flops(replace(work, predicted=0)) * value_passes
    return size.training_flops(work) * passes + values


@dataclass(frozen=True)
class _Estimate:
    """Estimates the seconds of a run's step. `engines` is None if the run has no rollouts."""

    run: TrainConfig
    plan_config: "PlanConfig"
    hardware: Hardware
    step: Step
    engines: Engines | None
    shape: ModelShape
    size: ModelSize

    def seconds(self, work: Work, cache: int) -> dict[str, float]:
        """Seconds of a step by part, empty if the speed of the device is not known. `cache`: see `_rollout`."""
        run, hardware, parts = self.run, self.hardware, {}
        if hardware.flops is None:
            return {}
        if self.engines:
            flops, bandwidth = hardware.flops / self.engines.on_one, hardware.bandwidth / self.engines.on_one
            parts["rollout"] = self._rollout(self.engines, cache, flops, bandwidth) / self.plan_config.rollout_share
            if not capabilities_of(run.engine.name).shares_weights:
                rollouts = rollouts_of(run, hardware.machine.count)
                # Adapters are sent at their own rank; `rollouts.adapters` counts them at the rank of vLLM's memory.
                sent = adapters_of(run)[0] if rollouts.adapters else self.shape.parameters
                parts["weight sync"] = rollouts.width * sent / (self._sync_gb() * 1e9)
            if again := self.computed_again():
                operations = 2 * self.size.body * again / (self.engines.count * self.engines.gpus)
                parts["computing again, at most"] = operations / flops / self.plan_config.rollout_share
        # All processes of a machine share one CPU.
        nodes = int((run.trainer or {}).get("num_nodes", 1))
        computing = nodes if hardware.on_cpu else trainers_of(run.trainer or {}, hardware.machine.count)
        training = training_flops(run, self.size, work) / (hardware.flops * computing)
        return {**parts, "training": training / self.plan_config.training_share}

    def _rollout(self, engines: Engines, cache: int, flops: float, bandwidth: float) -> float:
        """Seconds of a step's rollouts at the full speed of the engines' devices.

        A pass makes one token for each request that is decoded at once. It reads the weights, and the keys and values
        so far. It takes the time of its operations or of these reads, whichever is longer. Prompts are computed once a
        group.

        Args:
            engines: the engines that share the rollouts.
            cache: bytes of the key-value cache on each GPU of an engine; 0: as many as are useful.
            flops, bandwidth: operations and bytes a second that each GPU gives to an engine.
        """
        step, size, rollouts = self.step, self.size, rollouts_of(self.run, self.hardware.machine.count)
        rollouts = replace(rollouts, gpus=engines.gpus, context=step.prompt + step.response)
        requests, request = -(-step.rows // engines.count), cache_bytes(self.shape, rollouts, 1)
        at_once = max(min(requests, rollouts.at_once, cache // request if cache else requests), 1)
        written = (step.prompt + step.response / 2) / rollouts.context  # mean share of a request's cache
        operations = 2 * (size.body + size.head) * at_once / rollouts.gpus
        read = engine_weights(self.shape, rollouts) + at_once * request * written
        passes = -(-requests // at_once) * step.response
        prompts = 2 * size.body * step.groups * step.prompt / (engines.count * rollouts.gpus)
        return passes * max(operations / flops, read / bandwidth) + prompts / flops

    def computed_again(self) -> int:
        """Most tokens that a weight sync makes the engines compute again: prompts, and half of responses under way."""
        explorer = self.run.explorer
        if not self.engines or explorer.max_staleness == 0 or explorer.in_flight != "continue":
            return 0
        at_once = rollouts_of(self.run, self.hardware.machine.count).at_once * self.engines.count
        under_way = min(explorer.steps_ahead * self.step.rows, explorer.max_concurrent or at_once, at_once)
        return under_way * (self.step.prompt + self.step.response // 2)

    def _sync_gb(self) -> float:
        """The 10^9 bytes a second at which weights are sent."""
        if self.plan_config.sync_gb is not None:
            return self.plan_config.sync_gb
        capabilities = capabilities_of(self.run.engine.name)
        gpus = 0 if self.hardware.on_cpu else None
        method, _ = sync_method(self.run, capabilities, self.run.trainer or {}, gpus)
        if capabilities.overlaps_training and method not in SENT:
            return FOLDER_GB
        return CPU_GB if self.hardware.on_cpu else GPU_GB

    def assumed(self) -> dict[str, str]:
        """The assumptions behind tokens and seconds, by the key that changes them."""
        run, hardware = self.run, self.hardware
        assumptions = {
            "plan.prompt_tokens": f"every prompt has {self.step.prompt} tokens",
            "plan.response_tokens": f"every response has {self.step.response} tokens",
            **self._servers_left_out(),
        }
        if run.optimizer.name == OFFLOADED:
            assumptions["optimizer.name"] = "the optimizer's steps in the host's memory are not counted"
        if run.buffer.storage == "dataset" and run.buffer.dataset.max_length is None:
            assumptions["buffer.dataset.max_length"] = "no example, or pair, is longer than a micro-batch"
        if hardware.flops is None:
            assumptions["plan.tflops"] = f"the speed of {hardware.name} in float32 is not known: give it for times"
            return assumptions
        assumptions["plan.tflops"] = f"a device multiplies matrices at {hardware.flops / 1e12:.3g} TFLOP/s"
        assumptions["plan.training_share"] = (
            f"training reaches {self.plan_config.training_share:g} of the speed of products"
        )
        if self.engines:
            share = f"rollouts reach {self.plan_config.rollout_share:g} of either speed, whichever takes longer"
            assumptions["plan.bandwidth_gb"] = f"a device reads its memory with {hardware.bandwidth / 1e9:.4g} GB/s"
            assumptions["plan.rollout_share"] = share
            if self.computed_again():
                assumptions["explorer.run_ahead"] = "a weight sync finds all rollouts of later steps half written"
            if not capabilities_of(run.engine.name).shares_weights:
                assumptions["plan.sync_gb"] = f"weights are sent with {self._sync_gb():g} GB/s"
        return assumptions

    def _servers_left_out(self) -> dict[str, str]:
        """The auxiliary models whose servers the plan does not count: all that are not on the trainer's GPU."""
        counts = self.engines and not self.hardware.on_cpu
        return {
            f"auxiliary_models.{name}": "the server of an auxiliary model is not counted"
            for name, model in self.run.auxiliary_models.items()
            if model.url is None and not (counts and TRAINER_GPU in (model.engine.gpus or [TRAINER_GPU]))
        }

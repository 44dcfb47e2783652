"""The memory plan: the parts of a device for trainer and vLLM, computed from the model's shape before any loading.

The trainer keeps weights, float32 masters and Adam's moments all the time, and gradients and activations while it
trains. vLLM keeps weights and a key-value cache, and needs working memory while it generates. `plan` tries three ways,
the cheapest first, and takes the first one whose cache has room for the rollouts of a step at once:

1. side by side: everything stays on the device;
2. vLLM sleeps while the trainer trains: its weights move to the host, and its cache is freed;
3. vLLM sleeps, and masters and moments move to the host while vLLM generates.

On a CPU there is one way: vLLM's weights stay, and its cache is freed while the trainer trains. `plan` also serves a
trainer that has its device to itself.

All functions are pure. Sizes are bytes unless a name says otherwise.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trinity_lightning.common.hardware import GIB
from trinity_lightning.common.model_memory import FLOAT, ModelShape, Training, activations
from trinity_lightning.errors import ConfigError

# Sizes of a micro-batch in tokens. More than 16,384 gain nothing on a GPU. Only halves are tried: if a little less
# memory is free at the next start, the size stays the same. Sizes below WANTED_TOKENS cost further passes over the
# gradient.
TOKENS = tuple(16384 >> half for half in range(15))
WANTED_TOKENS = TOKENS[:3]

BATCHED_TOKENS = 8192  # prompt tokens that vLLM computes in one pass
FEWEST_REQUESTS, MOST_REQUESTS = 256, 1024
ENOUGH = 0.5  # share of the cache for all requests at full length that suffices for the rollouts of a step
CUDA_CONTEXT = GIB  # driver, kernels and workspaces of a process that computes with torch and vLLM
WORKSPACES = CUDA_CONTEXT // 2  # the part of CUDA_CONTEXT that the trainer allocates after its context exists
CUDA_GRAPHS = GIB  # of vLLM
FRAGMENTS = 0.04  # share of the device that allocators lose between blocks
FIRST_SHARDS = 8  # devices that the message of a refusal suggests to a trainer of one device
MOST_DOUBLED = 8  # numbers of devices that are tried for this message, each twice the one before
PINNED = 2  # host bytes for each byte of sleeping weights, at most: vLLM pins each tensor as a power of two
BLOCK_TOKENS = 32  # tokens of a block of vLLM's cache on a CPU, and of two blocks on a GPU
SERVER_SHARE = 0.92  # share of a GPU that vLLM takes by default

# Memory of a process on a CPU, measured (benchmarks/memory.py): libraries, vLLM's libraries, working memory.
LIBRARIES, VLLM_LIBRARIES, CPU_RESERVE = (int(gb * 1e9) for gb in (0.5, 0.4, 0.3))

POLICY, MASTERS, MOMENTS, GRADIENTS = "policy", "masters", "Adam's moments", "gradients"
REFERENCE, GATHERED, VALUE_MODEL = "reference", "gathered layers and gradients", "value model"
ACTIVATIONS, ENGINE_WEIGHTS, CACHE = "activations and logits", "vLLM's weights", "key-value cache"
GRAPHS, WORKING, BESIDE = "vLLM's graphs", "what vLLM computes with", "auxiliary models"
COUNTS = "vLLM's token counts"
CONTEXTS, RESERVE = "servers' contexts", "libraries, workspaces and fragments"
COPIES, PICTURES = "copies of gradients", "states of pictures"


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of a step, and how vLLM generates them.

    Attributes:
        width: bytes of a weight and of an element of the cache: 2 or 4.
        context: longest prompt and response together, in tokens.
        requests: rollouts of a step.
        max_num_seqs: requests decoded at once; None: all of a step, at least 256 and at most 1,024.
        kv_cache: bytes of the key-value cache; None: as many as the requests may need, but no more than are free.
        sleep: True: vLLM sleeps while the trainer trains; None: only if there is no room otherwise.
        servers: vLLM processes that share the device with the trainer; 0: vLLM runs in the trainer's process, and the
            two use the same working memory in turns. Servers never sleep.
        beside: bytes of the device that servers of auxiliary models take.
        gpus: GPUs that an engine is split over (tensor parallelism).
        drafted: tokens that speculative decoding proposes for a request at once.
        adapters: parameters of adapters that vLLM keeps besides the weights (synchronizer.lora=adapter).
        processes: processes of a machine that each have an engine, on a device of their own (engine.per_rank).

    Raises:
        ConfigError: a server is to sleep.
    """

    width: int
    context: int
    requests: int
    max_num_seqs: int | None = None
    kv_cache: int | None = None
    sleep: bool | None = None
    servers: int = 0
    beside: int = 0
    gpus: int = 1
    drafted: int = 0
    adapters: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        if self.sleep and self.servers:
            raise ConfigError(
                "engine.sleep=always is of engine=vllm: a server never sleeps, leave it out or choose that engine.",
                key="engine.sleep",
            )

    @property
    def at_once(self) -> int:
        """Number of requests that vLLM decodes at once."""
        return self.max_num_seqs or min(max(self.requests, FEWEST_REQUESTS), MOST_REQUESTS)


@dataclass(frozen=True)
class MemoryPlan:
    """The division of a device's memory.

    Attributes:
        device: bytes that were free at the start.
        training, generating: bytes of each part by its name, in each of the two phases.
        micro_batch_tokens: computed tokens of a micro-batch.
        kv_cache: bytes of the key-value cache of each engine.
        engine: all bytes of each engine, its working memory included.
        sleep: True if vLLM sleeps while the trainer trains.
        offload: True if masters and moments are on the host while vLLM generates.
        on_host: bytes by name that all processes of a machine keep in host memory (optimizer.name=adamw_offload).
    """

    device: int
    training: Mapping[str, int]
    generating: Mapping[str, int]
    micro_batch_tokens: int = 0
    kv_cache: int = 0
    engine: int = 0
    sleep: bool = False
    offload: bool = False
    on_host: Mapping[str, int] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """Bytes that are still free in the fuller phase; below 0 if the plan does not fit."""
        return self.device - max(sum(self.training.values()), sum(self.generating.values()))

    @property
    def shared(self) -> bool:
        """True if trainer and vLLM are both on the device."""
        return POLICY in self.training and self.engine > 0

    @property
    def way(self) -> str:
        """The way in which the device is shared, in words."""
        if not self.shared:
            return "the trainer alone" if POLICY in self.training else "vLLM alone"
        ways = {(False, False): "side by side", (True, False): "vLLM sleeps while the trainer trains"}
        return ways.get((self.sleep, self.offload), "vLLM sleeps, and masters and moments move to the host in turns")

    def rows(self) -> list[tuple[str, str]]:
        """The plan as rows of the table that a run prints at its start."""
        return [
            ("device memory", f"{gib(self.device)} free: {self.way}, leaves {gib(self.left)}"),
            ("while training", _listed(self.training)),
            *([("while generating", _listed(self.generating))] if self.shared else []),
            *([("on the host", _listed(self.on_host))] if self.on_host else []),
        ]


def gib(size: float) -> str:
    """A number of bytes as text: `12.3 GiB`."""
    return f"{size / GIB:.1f} GiB"


def _listed(parts: Mapping[str, int]) -> str:
    return f"{gib(sum(parts.values()))}: " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())


# -- the trainer's memory ----------------------------------------------------------------------------------------------


def weight_states(shape: ModelShape, training: Training) -> dict[str, int]:
    """Bytes of each state that a device of the trainer keeps, by name.

    Gradients are always float32. Weights of 2 bytes have float32 masters in the optimizer. If adapters are trained,
    only they have masters, moments and gradients; frozen parameters have none.

    In shards (trainer/fsdp.py) the trained weights are float32, and there are no masters. Each device gathers the
    layer in use, the next layer, and the weights outside the layers (and a tower's), at `width` bytes an element. The
    gradients of a micro-batch are whole until they are added up: `width` bytes an element in a layer, float32 outside
    the layers. They are copied to float32 to be sent. Gradients of adapters are small and not counted here.
    """
    parameters, width = -(-shape.parameters // training.shards), training.width  # of one shard
    frozen = shape.parameters if training.adapters else training.frozen
    trained = -(-(training.adapters or shape.parameters - frozen) // training.shards)
    on_device = not training.on_host  # True if masters and moments are on the device; else see `states_on_host`
    trained_width = width + on_device * ((FLOAT if width < FLOAT else 0) + training.moments) + FLOAT
    split, outside = training.shards > 1, shape.outside + shape.tower_layers
    layer = (shape.parameters - outside) // shape.layers
    gradients = 0 if training.adapters else 2 * FLOAT * outside + (width + FLOAT) * layer
    states = {
        POLICY: (FLOAT if split else width) * trained + width * -(-frozen // training.shards),
        MASTERS: FLOAT * trained if on_device and width < FLOAT and not split else 0,
        MOMENTS: on_device * training.moments * trained,
        GRADIENTS: FLOAT * trained,
        REFERENCE: width * parameters if training.reference else 0,
        VALUE_MODEL: 0 if training.value_model is None else trained_width * training.value_model.parameters,
        GATHERED: width * (outside + 2 * layer) + gradients if split else 0,
        PICTURES: training.kept_states,
        **(states_on_host(shape, replace(training, on_host=1)) if training.on_cpu and training.on_host else {}),
    }
    return {name: size for name, size in states.items() if size}


def states_on_host(shape: ModelShape, training: Training) -> dict[str, int]:
    """Bytes by name that all processes of a machine keep in host memory (`trainer.host`), with adamw_offload."""
    trained = (training.adapters or shape.parameters - training.frozen) + getattr(training.value_model, "parameters", 0)
    of_a_process = {MASTERS: FLOAT * trained, MOMENTS: training.moments * trained, COPIES: FLOAT * trained}
    return {name: training.on_host * size for name, size in of_a_process.items()} if training.on_host else {}


def micro_batch_tokens(shape: ModelShape, training: Training, free: int) -> int:
    """The largest of TOKENS whose activations fit into `free` bytes; 0 if none does."""
    return next((tokens for tokens in TOKENS if activations(shape, training, tokens) <= free), 0)


# -- the plan ----------------------------------------------------------------------------------------------------------


def plan(shape: ModelShape, training: Training, rollouts: Rollouts | None, device: int, host: int) -> MemoryPlan:
    """The first way whose cache has room for the rollouts of a step at once, otherwise the one with the largest cache.

    If no way fits and vLLM cannot sleep, micro-batches get smaller until trainer and vLLM fit side by side.

    Args:
        shape: the model, which both trainer and engine hold.
        training: the configured training.
        rollouts: the configured rollouts; None: the trainer has the device to itself.
        device: free bytes of the device, once this process has its CUDA context.
        host: free bytes of host memory.

    Raises:
        ConfigError: no way has room for a micro-batch and one request, or host memory has no room for the optimizers
            configured for it. The message has numbers and the keys that help.
    """
    on_host = {} if training.on_cpu else states_on_host(shape, training)
    if (needed := sum(on_host.values())) > host:
        raise ConfigError(
            f"optimizer.name=adamw_offload does not fit into the {gib(host)} that are free of the host's memory: all "
            f"trainers need {_listed(on_host)}. "
            "Choose adamw or adamw_8bit, fewer trainer.devices, or a host with more.",
            key="optimizer.name",
        )
    planner = _Planner(shape, training, rollouts, device, host - needed)
    ways = list(planner.ways())
    fitting = [way for way in ways if planner.fits(way)]
    if not fitting and not ways[-1].sleep:  # no way with sleep, which would take the least memory
        ways = list(planner.side_by_side(TOKENS))
        fitting = [way for way in ways if planner.fits(way)][:1]
    if not fitting:
        raise ConfigError(planner.refusal(ways[-1]))
    enough_cache = ENOUGH * cache_bytes(shape, rollouts, rollouts.at_once) if rollouts else 0
    roomy = (way for way in fitting if way.kv_cache >= enough_cache)
    return replace(next(roomy, max(fitting, key=lambda way: way.kv_cache)), on_host=on_host)


def beside_others(alone: MemoryPlan, others: int) -> MemoryPlan:
    """The plan for a device on which servers of auxiliary models take `others` more bytes."""
    if not others:
        return alone
    training, generating = ({**parts, BESIDE: others} for parts in (alone.training, alone.generating))
    return replace(alone, device=alone.device + others, training=training, generating=generating)


@dataclass(frozen=True)
class _Planner:
    """Makes the ways to share a device. Attributes as in `plan`, but `host` is without the optimizers' bytes."""

    shape: ModelShape
    training: Training
    rollouts: Rollouts | None
    device: int
    host: int

    def ways(self) -> Iterator[MemoryPlan]:
        """All ways that configuration and host memory allow, the cheapest first. They may not fit on the device."""
        training, rollouts = self.training, self.rollouts
        if rollouts is None or rollouts.sleep is not True or training.on_cpu:
            yield from self.side_by_side(WANTED_TOKENS)
        if rollouts is None or rollouts.sleep is False or rollouts.servers or training.on_cpu:
            return
        states = weight_states(self.shape, training)
        moved = states.get(MASTERS, 0) + states.get(MOMENTS, 0)
        for offload in (False, True) if moved else (False,):
            needed = _asleep(self.shape, rollouts) + (moved if offload else 0)
            if self.host >= needed or (rollouts.sleep and not offload):
                free = self.device - sum(states.values()) - CUDA_GRAPHS - sum(self._others().values())
                tokens = max(training.tokens or micro_batch_tokens(self.shape, training, free), training.longest_row)
                yield self.way(tokens, sleep=True, offload=offload)

    def side_by_side(self, sizes: Sequence[int]) -> Iterator[MemoryPlan]:
        """One way for each size of a micro-batch, the largest first; a micro-batch holds at least the longest row."""
        wanted = (self.training.tokens,) if self.training.tokens else sizes
        budgets = {max(tokens, self.training.longest_row) for tokens in wanted}
        return (self.way(tokens) for tokens in sorted(budgets, reverse=True))

    def way(self, tokens: int, sleep: bool = False, offload: bool = False) -> MemoryPlan:
        """The plan of one way: the parts on the device in each phase, with a cache for at least one request.

        Within one process, trainer and vLLM compute in turns, in the same working memory.
        """
        shape, training, rollouts, rest = self.shape, self.training, self.rollouts, self._others()
        states = weight_states(shape, training)
        away = {GRADIENTS, GATHERED, PICTURES, *((MASTERS, MOMENTS) if offload else ())}
        resting = {name: size for name, size in states.items() if name not in away}
        trainer = {**states, ACTIVATIONS: activations(shape, training, tokens)}
        if rollouts is None:
            return MemoryPlan(self.device, {**trainer, **rest}, {**resting, **rest}, tokens)
        engines = max(rollouts.servers, 1)
        weights = {ENGINE_WEIGHTS: engines * engine_weights(shape, rollouts)}
        if not training.on_cpu:
            weights[COUNTS] = engines * token_counts(shape, rollouts)
        working = {WORKING: engines * _working(shape, rollouts)}
        rest = {GRAPHS: engines * (VLLM_LIBRARIES if training.on_cpu else CUDA_GRAPHS), **rest}
        if rollouts.servers:  # they compute at the same time as the trainer
            trainer |= working
            rest |= {CONTEXTS: engines * (LIBRARIES if training.on_cpu else CUDA_CONTEXT)}
        training_phase = {**trainer, **({} if sleep else weights), **rest}
        generating = {**resting, **weights, **working, **rest}
        cache_stays = not sleep and (not training.on_cpu or rollouts.servers > 0)
        fullest = max(sum(training_phase.values()) if cache_stays else 0, sum(generating.values()))
        cache = _room(shape, rollouts, (self.device - fullest) // engines)
        generating[CACHE] = engines * cache
        if cache_stays:
            training_phase[CACHE] = engines * cache
        engine = _engine(shape, rollouts, cache)
        return MemoryPlan(self.device, training_phase, generating, tokens, cache, engine, sleep, offload)

    def fits(self, way: MemoryPlan) -> bool:
        """True if all parts have room, and the cache is as large as configured."""
        configured = None if self.rollouts is None else self.rollouts.kv_cache
        return way.left >= 0 and configured in (None, way.kv_cache)

    def _others(self) -> dict[str, int]:
        """Bytes of the device that belong neither to the trainer nor to the engine, by name."""
        beside = {BESIDE: self.rollouts.beside} if self.rollouts and self.rollouts.beside else {}
        return {**beside, RESERVE: LIBRARIES + CPU_RESERVE if self.training.on_cpu else _reserve(self.device)}

    # -- the message if no way fits ------------------------------------------------------------------------------------

    def refusal(self, way: MemoryPlan) -> str:
        """The message that even the most frugal way does not fit, with the keys that help."""
        phases = {"training": way.training, "generating": way.generating}
        phase = max(phases, key=lambda name: sum(phases[name].values()))
        room: float = way.device - way.left
        if not self.training.on_cpu:  # `device` does not contain the CUDA context of this process
            room = (room - _reserve(way.device) + WORKSPACES) / (1 - FRAGMENTS) + CUDA_CONTEXT - WORKSPACES
        request = ""
        if self.rollouts is not None:
            one = gib(_smallest_cache(self.shape, self.rollouts))
            request = f" (one request of engine.max_model_len={self.rollouts.context} needs {one} of cache)"
        advice = [*self._knobs(way), f"a device of {gib(room)} has room"]
        return (
            f"the model does not fit into the {gib(way.device)} that are free on this device{request}. While {phase}, "
            f"with micro-batches of {way.micro_batch_tokens} tokens, {_listed(phases[phase])}. {'; '.join(advice)}."
        )

    def _knobs(self, way: MemoryPlan) -> Iterator[str]:
        """Settings that save memory, each with the bytes that it saves in the fuller phase."""
        training, rollouts, tokens = self.training, self.rollouts, way.micro_batch_tokens
        options: list[tuple[str, _Planner, int]] = [
            ("model.gradient_checkpointing=true takes {} less", self._trained(checkpointing=True), tokens),
            ("without a reference (algorithm.kl.coef=0) {} less", self._trained(reference=False), tokens),
            ("model.dtype=bf16 (fp16 on a GPU without it) takes {} less", self._trained(width=2), tokens),
        ]
        if not training.adapters:
            shards = self._shards_that_fit(way)
            split = f"trainer=fsdp2 with trainer.devices={shards} (of all machines together) takes {{}} less"
            options.append((split, self._trained(shards=shards), tokens))
        if self._moves_to_host(way):
            on_host = "optimizer.name=adamw_offload, with masters and moments in the host's memory, takes {} less"
            options.append((on_host, self._trained(on_host=1), tokens))
        if training.tokens:
            fewer = "algorithm.max_tokens_per_micro_batch=auto (in a new run) or fewer tokens take up to {} less"
            options.append((fewer, self, training.longest_row))
        if rollouts is not None and rollouts.kv_cache is not None:
            cache = "engine.kv_cache_gb=null takes what there is, up to {} less"
            options.append((cache, replace(self, rollouts=replace(rollouts, kv_cache=0)), tokens))
        if rollouts is not None and rollouts.beside:
            apart = "GPUs of their own (auxiliary_models.NAME.engine.gpus) free {}"
            options.append((apart, replace(self, rollouts=replace(rollouts, beside=0)), tokens))
        if rollouts is not None and not training.on_cpu:
            alone = "GPUs of its own for the engine (engine=vllm_server engine.gpus) free {}"
            options.append((alone, replace(self, rollouts=None), tokens))
        for sentence, changed, size in options:
            if (saved := changed.way(size, way.sleep, way.offload).left - way.left) > 0:
                yield sentence.format(gib(saved))
        if rollouts is not None and rollouts.sleep is False and not rollouts.servers:
            yield "engine.sleep=auto frees vLLM's memory for training"

    def _trained(self, **changed: Any) -> "_Planner":
        """A copy with other values in `training`."""
        return replace(self, training=replace(self.training, **changed))

    def _shards_that_fit(self, way: MemoryPlan) -> int:
        """The smallest number of shards that fits, found by doubling; the first number if none is enough."""
        first = 2 * self.training.shards if self.training.shards > 1 else FIRST_SHARDS
        numbers = [first << doubled for doubled in range(MOST_DOUBLED)]
        split = ((number, self._trained(shards=number)) for number in numbers)
        tokens, sleep, offload = way.micro_batch_tokens, way.sleep, way.offload
        return next((number for number, planner in split if planner.way(tokens, sleep, offload).left >= 0), first)

    def _moves_to_host(self, way: MemoryPlan) -> bool:
        """True if adamw_offload is possible, and host memory has room for it beside the weights of a sleeping vLLM."""
        training = self.training
        offloaded = replace(training, on_host=training.offloadable, moments=2 * FLOAT)
        asleep = _asleep(self.shape, self.rollouts) if self.rollouts and way.sleep else 0
        fits = sum(states_on_host(self.shape, offloaded).values()) + asleep <= self.host
        return training.offloadable > 0 and training.shards == 1 and not training.on_cpu and fits


# -- vLLM's memory -----------------------------------------------------------------------------------------------------


def engine_weights(shape: ModelShape, rollouts: Rollouts) -> int:
    """Bytes of vLLM's weights on each of its GPUs: the model, and adapters that are not merged into it."""
    return rollouts.width * (shape.parameters + rollouts.adapters) // rollouts.gpus


def token_counts(shape: ModelShape, rollouts: Rollouts) -> int:
    """Bytes of a GPU in which vLLM counts tokens for penalties, whether or not a request has any.

    Its Model Runner V2 keeps an int32 for each request and token of the vocabulary, and a bit for those of the prompt.
    It allocates them with its weights, and they sleep with these.
    """
    return rollouts.at_once * (4 * shape.vocabulary + shape.vocabulary // 8)


def _asleep(shape: ModelShape, rollouts: Rollouts) -> int:
    """Bytes of host memory for what a machine's engines keep there while they sleep."""
    return PINNED * rollouts.processes * (engine_weights(shape, rollouts) + token_counts(shape, rollouts))


def cache_bytes(shape: ModelShape, rollouts: Rollouts, requests: int) -> int:
    """Bytes of the keys and values of `requests` requests of full length, in whole blocks, on each GPU of an engine."""
    width = max(shape.key_width // rollouts.gpus, shape.query_width // shape.heads)  # a GPU has at least one head
    tokens = requests * BLOCK_TOKENS * math.ceil(rollouts.context / BLOCK_TOKENS)
    return tokens * 2 * shape.layers * width * rollouts.width


def _smallest_cache(shape: ModelShape, rollouts: Rollouts) -> int:
    """Bytes of a cache for one request, and for the block that vLLM leaves empty."""
    return cache_bytes(shape, replace(rollouts, context=rollouts.context + BLOCK_TOKENS), 1)


def _room(shape: ModelShape, rollouts: Rollouts, free: int) -> int:
    """Bytes of the cache: as configured, otherwise as many as are useful and free. It holds at least one request."""
    useful = min(free, cache_bytes(shape, rollouts, rollouts.at_once))
    return max(useful if rollouts.kv_cache is None else rollouts.kv_cache, _smallest_cache(shape, rollouts))


def _working(shape: ModelShape, rollouts: Rollouts) -> int:
    """Bytes of vLLM's working memory: one layer of a pass over prompts, and float32 logits to sample from."""
    width = rollouts.width
    split = 4 * shape.intermediate + shape.query_width + 2 * shape.key_width
    layer = BATCHED_TOKENS * width * (split // rollouts.gpus + 4 * shape.hidden)
    return layer + rollouts.at_once * (1 + rollouts.drafted) * shape.vocabulary * (width + 4 * FLOAT)


def _engine(shape: ModelShape, rollouts: Rollouts, cache: int) -> int:
    """All bytes of an engine with a cache of `cache` bytes."""
    constant = engine_weights(shape, rollouts) + token_counts(shape, rollouts) + CUDA_GRAPHS
    return constant + _working(shape, rollouts) + cache


def auxiliary_server(shape: ModelShape, rollouts: Rollouts) -> tuple[int, int]:
    """Bytes of the cache of an auxiliary model's server, and all bytes of the server, its CUDA context included.

    The cache is as configured, otherwise the share ENOUGH of the bytes that all requests may need.
    """
    cache = rollouts.kv_cache
    if cache is None:
        cache = max(int(ENOUGH * cache_bytes(shape, rollouts, rollouts.at_once)), _smallest_cache(shape, rollouts))
    return cache, _engine(shape, rollouts, cache) + CUDA_CONTEXT


def _reserve(device: int) -> int:
    """Bytes of a GPU that workspaces and fragments take."""
    return WORKSPACES + int(FRAGMENTS * device)


def engine_alone(shape: ModelShape, rollouts: Rollouts, device: int) -> MemoryPlan:
    """The plan of each GPU that an engine has to itself. The cache is as configured, or all that vLLM finds free.

    Raises:
        ConfigError: the cache has no room for one request.
    """
    parts = {ENGINE_WEIGHTS: engine_weights(shape, rollouts), COUNTS: token_counts(shape, rollouts)}
    parts |= {WORKING: _working(shape, rollouts), GRAPHS: CUDA_GRAPHS, RESERVE: CUDA_CONTEXT}
    cache, one = rollouts.kv_cache, cache_bytes(shape, rollouts, 1)
    if cache is None:
        cache = max(int(SERVER_SHARE * device) - sum(parts.values()), 0)
    parts[CACHE] = cache
    alone = MemoryPlan(device, parts, parts, 0, cache, sum(parts.values()))
    if cache < one or alone.left < 0:
        listed = _listed({**parts, CACHE: max(cache, one)})
        raise ConfigError(
            f"an engine on {rollouts.gpus} x {gib(device)} has no room for a request of engine.max_model_len="
            f"{rollouts.context}, which needs {gib(one)} of cache. On each {listed}. Give it more GPUs (engine.gpus), "
            "over which the model is split, or a shorter context.",
            key="engine.gpus",
        )
    return alone

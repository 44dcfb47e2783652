"""What fits into a device's memory, worked out from a model's shape before any weight is loaded.

Trainer and engine share one device. The trainer keeps weights, float32 masters and Adam's moments all the time, and
gradients and activations while it trains; vLLM keeps weights and a key-value cache, and computes while it generates.
`plan` tries three ways, the cheapest first, and takes the first whose cache has room for a step's rollouts at once:

1. side by side: all of it stays where it is;
2. vLLM sleeps while the trainer trains: its weights move to the host, its cache is given up;
3. and while vLLM generates, masters and moments are on the host too.

Pure functions of numbers: bytes unless a name says otherwise. The activations are counted from what autograd saves in
a layer of a transformer with root-mean-square norms and a gated feed-forward part; tests hold them against real models.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trinity_lightning.common.hardware import GIB
from trinity_lightning.common.model_memory import FLOAT, ModelShape, Training, layer_bytes
from trinity_lightning.errors import ConfigError

# Tokens of a micro-batch: more than the first gain nothing on a GPU. They are halved, so that a little less memory at
# another start makes no difference. Fewer than the last that is wanted cost passes over the gradient.
TOKENS = tuple(16384 >> half for half in range(15))
WANTED_TOKENS = TOKENS[:3]
HEAD_CHUNK, HEAD_BLOCK = GIB, GIB // 4  # logits, and their float32 copies: trainer/logprobs.py

BATCHED_TOKENS = 8192  # prompt tokens that vLLM computes in one pass
FEWEST_REQUESTS, MOST_REQUESTS = 256, 1024
ENOUGH = 0.5  # of the cache that all requests would need were each as long as it may be
CUDA_CONTEXT = GIB  # driver, kernels and workspaces of a process that computes with torch and vLLM
WORKSPACES = CUDA_CONTEXT // 2  # of these, what a process still takes whose context is there: the trainer's
CUDA_GRAPHS = GIB  # vLLM's
FRAGMENTS = 0.04  # of the device, which allocators lose between blocks

MASTERS, MOMENTS, CACHE, RESERVE = "masters", "Adam's moments", "key-value cache", "workspaces and fragments"


@dataclass(frozen=True)
class Rollouts:
    """How vLLM generates.

    Attributes:
        width: bytes of a weight and of an element of the cache: 2 or 4.
        context: longest prompt and response together, in tokens.
        requests: rollouts of a step.
        max_num_seqs: requests decoded at once; None: those of a step, 256 to 1,024.
        kv_cache: bytes of the key-value cache; None: what all requests at once may need, or what there is.
        sleep: whether vLLM sleeps while the trainer trains; None: if there is no room otherwise.
        servers: how many processes of vLLM share the device with the trainer; 0: it runs in the trainer's own, and the
            two use the same memory to compute with. Servers never sleep.
        beside: bytes that servers of auxiliary models take of the device.

    Raises:
        ConfigError: a server that is to sleep.
    """

    width: int
    context: int
    requests: int
    max_num_seqs: int | None = None
    kv_cache: int | None = None
    sleep: bool | None = None
    servers: int = 0
    beside: int = 0

    def __post_init__(self) -> None:
        if self.sleep and self.servers:
            raise ConfigError(
                "engine.sleep=always is of engine=vllm: a server never sleeps, leave the key out or choose that engine."
            )

    @property
    def at_once(self) -> int:
        """Requests that vLLM decodes at once."""
        return self.max_num_seqs or requests_at_once(self.requests)


def requests_at_once(requests: int) -> int:
    """How many of a step's rollouts a GPU decodes at once, unless the configuration says."""
    return min(max(requests, FEWEST_REQUESTS), MOST_REQUESTS)


@dataclass(frozen=True)
class MemoryPlan:
    """Who gets how much of a device.

    Attributes:
        device: bytes of it that were free at the start.
        training, generating: bytes by name in each of the two phases; the same if vLLM does not sleep.
        micro_batch_tokens: computed tokens of a micro-batch.
        kv_cache: bytes of the key-value cache of each engine.
        engine: all bytes of each engine, what it computes with included.
        max_num_seqs: requests that an engine decodes at once.
        sleep: whether vLLM sleeps while the trainer trains.
        offload: whether masters and moments are on the host while vLLM generates.
    """

    device: int
    training: Mapping[str, int]
    generating: Mapping[str, int]
    micro_batch_tokens: int
    kv_cache: int
    engine: int
    max_num_seqs: int
    sleep: bool = False
    offload: bool = False

    @property
    def left(self) -> int:
        """Bytes that nobody takes in the fuller phase; below 0 if the plan does not fit."""
        return self.device - max(sum(self.training.values()), sum(self.generating.values()))

    def rows(self) -> list[tuple[str, str]]:
        """The plan for the table that a run begins with."""
        ways = {(False, False): "side by side", (True, False): "vLLM sleeps while the trainer trains"}
        way = ways.get((self.sleep, self.offload), "vLLM sleeps, and masters and moments move to the host in turns")
        phases = [("while training", self.training), ("while generating", self.generating)]
        return [
            ("device memory", f"{gib(self.device)} free: {way}, leaves {gib(self.left)}"),
            *((name, _listed(parts)) for name, parts in phases[: 2 if self.sleep else 1]),
        ]


def gib(size: float) -> str:
    """A number of bytes as people read it: `12.3 GiB`."""
    return f"{size / GIB:.1f} GiB"


def _listed(parts: Mapping[str, int]) -> str:
    return f"{gib(sum(parts.values()))}: " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())


def weight_states(shape: ModelShape, training: Training) -> dict[str, int]:
    """Bytes that the trainer keeps for each of its states; gradients are float32, whatever the weights are."""
    each = -(-shape.parameters // training.shards)
    states = {
        "policy": training.width * each,
        MASTERS: FLOAT * each if training.width < FLOAT else 0,
        MOMENTS: 2 * FLOAT * each,
        "gradients": FLOAT * each,
        "reference": training.width * each if training.reference else 0,
    }
    return {name: size for name, size in states.items() if size}


def activations(shape: ModelShape, training: Training, tokens: int) -> int:
    """Bytes that a forward and backward pass over so many computed tokens takes at its peak, gradients aside."""
    width, layer = training.width, layer_bytes(shape, training)
    saved = shape.layers * width * shape.hidden + layer if training.checkpointing else shape.layers * layer
    last_norm = (FLOAT + 2 * width) * shape.hidden
    backward = 3 * width * shape.intermediate + 2 * FLOAT * shape.hidden  # of the layer that is under way
    head = min(width * tokens * shape.vocabulary, 2 * HEAD_CHUNK) + 3 * HEAD_BLOCK  # one chunk kept, one computed again
    largest_gradient = (width + FLOAT) * shape.largest  # as autograd makes it, and on its way into float32
    return tokens * (saved + last_norm + backward) + head + largest_gradient


def micro_batch_tokens(shape: ModelShape, training: Training, free: int) -> int:
    """The most computed tokens whose activations fit into `free` bytes, of 16,384 and its halves; 0: none."""
    return next((tokens for tokens in TOKENS if activations(shape, training, tokens) <= free), 0)


def plan(shape: ModelShape, training: Training, rollouts: Rollouts, device: int, host: int) -> MemoryPlan:
    """The first way with room enough for all rollouts of a step at once, or else the one with the largest cache.

    If none fits and vLLM cannot sleep, both stay side by side with as many tokens a micro-batch as leave room.

    Args:
        shape: the model, which trainer and engine both hold.
        training, rollouts: what the run is configured to do.
        device: bytes of the device that are free, once this process has its CUDA context.
        host: bytes of the host's memory that are free.

    Raises:
        ConfigError: no way has room for a micro-batch and for one request; with numbers and the knobs that help.
    """
    ways = list(_ways(shape, training, rollouts, device, host))
    fitting = _fitting(shape, rollouts, ways)
    if not fitting and not ways[-1].sleep:  # a way in turns needs less than any side by side
        ways = [_side_by_side(shape, training, rollouts, device, tokens) for tokens in _budgets(training, TOKENS)]
        fitting = _fitting(shape, rollouts, ways)[:1]
    if not fitting:
        raise ConfigError(_refusal(shape, training, rollouts, ways[-1]))
    wanted = ENOUGH * _cache(shape, rollouts, rollouts.at_once) if rollouts.kv_cache is None else rollouts.kv_cache
    enough = (way for way in fitting if way.kv_cache >= wanted)
    return next(enough, max(fitting, key=lambda way: way.kv_cache))


def _fitting(shape: ModelShape, rollouts: Rollouts, ways: Sequence[MemoryPlan]) -> list[MemoryPlan]:
    """Those with room for what they are made of, and for one request."""
    return [way for way in ways if way.left >= 0 and way.kv_cache >= _cache(shape, rollouts, 1)]


def _ways(shape: ModelShape, training: Training, rollouts: Rollouts, device: int, host: int) -> Iterator[MemoryPlan]:
    """Every way that the configuration and the host allow, the cheapest first; each may be too large for the device."""
    if rollouts.sleep is not True:
        for tokens in _budgets(training, WANTED_TOKENS):
            yield _side_by_side(shape, training, rollouts, device, tokens)
    weights = rollouts.width * shape.parameters
    states = weight_states(shape, training)
    moved = states.get(MASTERS, 0) + states[MOMENTS]
    if rollouts.sleep is not False and not rollouts.servers:
        for offload in (False, True):
            if host >= weights + (moved if offload else 0) or (rollouts.sleep and not offload):
                yield _in_turns(shape, training, rollouts, device, offload)


def _budgets(training: Training, sizes: Sequence[int]) -> list[int]:
    """Tokens of a micro-batch to try, the most first; a row that is longer than all of them has one of its own."""
    wanted = (training.tokens,) if training.tokens else sizes
    return sorted({max(tokens, training.longest_row) for tokens in wanted}, reverse=True)


def _side_by_side(shape: ModelShape, training: Training, rollouts: Rollouts, device: int, tokens: int) -> MemoryPlan:
    states, engines = weight_states(shape, training), max(rollouts.servers, 1)
    trains = states["gradients"] + activations(shape, training, tokens)
    working = _working(shape, rollouts)
    # In one process they use the same memory in turns: gradients and activations, and what vLLM computes with.
    shared = max(trains, working) if not rollouts.servers else trains + engines * (working + CUDA_CONTEXT)
    fixed = {
        **{name: size for name, size in states.items() if name != "gradients"},
        "gradients and activations": shared,
        "vLLM": engines * (rollouts.width * shape.parameters + CUDA_GRAPHS),
        **_others(rollouts, device),
    }
    cache = _room(shape, rollouts, (device - sum(fixed.values())) // engines)
    parts = {**fixed, CACHE: engines * cache}
    return MemoryPlan(device, parts, parts, tokens, cache, _engine(shape, rollouts, cache), rollouts.at_once)


def _in_turns(shape: ModelShape, training: Training, rollouts: Rollouts, device: int, offload: bool) -> MemoryPlan:
    states = weight_states(shape, training)
    rest = {"vLLM's graphs": CUDA_GRAPHS, **_others(rollouts, device)}
    free = device - sum(states.values()) - sum(rest.values())
    tokens = training.tokens or micro_batch_tokens(shape, training, free)
    tokens = max(tokens, training.longest_row)
    trains = {**states, f"activations of {tokens} tokens": activations(shape, training, tokens), **rest}
    away = {"gradients", *((MASTERS, MOMENTS) if offload else ())}
    fixed = {
        **{name: size for name, size in states.items() if name not in away},
        "vLLM's weights": rollouts.width * shape.parameters,
        "what vLLM computes with": _working(shape, rollouts),
        **rest,
    }
    cache = _room(shape, rollouts, device - sum(fixed.values()))
    generates = {**fixed, CACHE: cache}
    engine = _engine(shape, rollouts, cache)
    return MemoryPlan(device, trains, generates, tokens, cache, engine, rollouts.at_once, sleep=True, offload=offload)


def _cache(shape: ModelShape, rollouts: Rollouts, requests: int) -> int:
    """Bytes of the keys and values of so many requests, each as long as it may be."""
    return requests * rollouts.context * 2 * shape.layers * shape.key_width * rollouts.width


def _room(shape: ModelShape, rollouts: Rollouts, free: int) -> int:
    """Bytes of the cache: as configured, or as much as is of use and free."""
    if rollouts.kv_cache is not None:
        return rollouts.kv_cache
    return max(0, min(free, _cache(shape, rollouts, rollouts.at_once)))


def _working(shape: ModelShape, rollouts: Rollouts) -> int:
    """Bytes that vLLM computes with: a layer of a pass over prompts, and logits of which it samples, in float32."""
    width = rollouts.width
    layer = (
        BATCHED_TOKENS * width * (4 * shape.intermediate + 4 * shape.hidden + shape.query_width + 2 * shape.key_width)
    )
    return layer + rollouts.at_once * shape.vocabulary * (width + 4 * FLOAT)


def _engine(shape: ModelShape, rollouts: Rollouts, cache: int) -> int:
    return rollouts.width * shape.parameters + CUDA_GRAPHS + _working(shape, rollouts) + cache


def auxiliary_server(shape: ModelShape, rollouts: Rollouts) -> tuple[int, int]:
    """Bytes of the cache of an auxiliary model's server, and all that it takes of a device, its CUDA context included.

    Its cache is as configured, or has room for as much as the policy's has to have room for (`ENOUGH`).
    """
    cache = rollouts.kv_cache
    if cache is None:
        cache = max(int(ENOUGH * _cache(shape, rollouts, rollouts.at_once)), _cache(shape, rollouts, 1))
    return cache, _engine(shape, rollouts, cache) + CUDA_CONTEXT


def _others(rollouts: Rollouts, device: int) -> dict[str, int]:
    """Bytes of the device that neither trainer nor engine has."""
    beside = {"auxiliary models": rollouts.beside} if rollouts.beside else {}
    return {**beside, RESERVE: _reserve(device)}


def _reserve(device: int) -> int:
    return WORKSPACES + int(FRAGMENTS * device)


def _refusal(shape: ModelShape, training: Training, rollouts: Rollouts, way: MemoryPlan) -> str:
    """Why not even the most frugal way fits, and what to change."""
    trains = sum(way.training.values()) > way.device
    phase, parts = ("training", way.training) if trains else ("generating", way.generating)
    cache = max(way.kv_cache, _cache(shape, rollouts, 1))
    needed = sum({**parts, **({} if trains else {CACHE: cache})}.values()) - _reserve(way.device)
    advice = []
    if trains and not training.checkpointing:
        spared, tokens = replace(training, checkpointing=True), way.micro_batch_tokens
        saved = activations(shape, training, tokens) - activations(shape, spared, tokens)
        advice.append(f"model.gradient_checkpointing=true takes {gib(saved)} less")
    if trains and training.tokens and training.tokens > training.longest_row:
        advice.append("algorithm.max_tokens_per_micro_batch=auto (in a new run) or fewer tokens need less")
    if not trains and rollouts.kv_cache is not None:
        advice.append("engine.kv_cache_gb=null takes what there is")
    if rollouts.sleep is False and not rollouts.servers:
        advice.append("engine.sleep=auto frees vLLM's memory for training")
    if rollouts.beside:
        advice.append(f"GPUs of their own (auxiliary_models.NAME.engine.gpus) free {gib(rollouts.beside)}")
    room = (needed + WORKSPACES) / (1 - FRAGMENTS) + CUDA_CONTEXT - WORKSPACES  # the context that is there takes some
    advice.append(f"a device of {gib(room)} has room")
    return (
        f"the model does not fit into the {gib(way.device)} that are free on this device (one request of "
        f"engine.max_model_len={rollouts.context} needs {gib(_cache(shape, rollouts, 1))} of cache). While {phase} "
        f"{_listed(parts)}. {'; '.join(advice)}."
    )

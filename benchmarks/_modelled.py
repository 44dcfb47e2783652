"""Engines that are modelled by their speed, and an event loop whose clock jumps from one event to the next."""

import asyncio
import heapq
import selectors
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from trinity_lightning.common.inference import Completion

DEADLOCK_SECONDS = 5.0  # real time in which something outside the loop may still happen
_SLACK = 1e-6  # tokens by which a response may seem to lack its end, because times are rounded
T = TypeVar("T")
_TABLE = 1 << 14  # groups whose lengths are drawn; later groups have the same lengths again


# -- virtual time ------------------------------------------------------------------------------------------------------


class _Jumps(selectors.DefaultSelector):
    """A selector that moves its clock on by the time that it was asked to wait for."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            if events := super().select(DEADLOCK_SECONDS):
                return events
            raise RuntimeError("nothing is left that could happen: a deadlock")
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which sleeping takes no time: `time()` jumps to the next timer once nothing else is to do."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, from 0 on."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


# -- lengths -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Lengths of responses.

    Attributes:
        kind: `lognormal` (with sigma=1 one response in 740 has 20 times the median), `uniform` (from 1 to twice the
            median), `fixed`, or `seen`.
        median: tokens.
        sigma: of the logarithm of lognormal lengths.
        most: tokens at which a response is cut off.
        seen: with `seen`: the lengths of each group of a run.
    """

    kind: str = "lognormal"
    median: int = 2_000
    sigma: float = 1.0
    most: int = 40_000
    seen: Sequence[Sequence[int]] = ()

    def table(self, groups: int, rollouts: int, seed: int = 0) -> Sequence[Sequence[int]]:
        """The lengths of so many groups, but at most `_TABLE` of them, or of those seen: [group][rollout]."""
        draw, shape = np.random.default_rng(seed), (min(groups, _TABLE), rollouts)
        match self.kind:
            case "lognormal":
                lengths = draw.lognormal(np.log(self.median), self.sigma, shape)
            case "uniform":
                lengths = draw.uniform(1, 2 * self.median, shape)
            case "fixed":
                lengths = np.full(shape, self.median)
            case "seen":
                return self.seen
            case _:
                raise ValueError(f"no such lengths: {self.kind}")
        return np.clip(lengths, 1, self.most).astype(int).tolist()


# -- the engine --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """Speed of an engine: a forward pass of n requests takes step + n * request seconds, and gives each a token.

    The defaults are those of a model of 8 billion parameters on one H200, estimated from its data sheet: 16 GB of
    weights are read in 6 ms (launches included), a request's cache of 4,000 tokens in 0.1 ms, and prompts are computed
    at half of the GPU's speed.

    Attributes:
        step: seconds of a forward pass beside its requests.
        request: seconds more for each request.
        prompt_token: seconds for a token of a prompt.
        most_requests: requests of a forward pass; others wait.
    """

    step: float = 0.006
    request: float = 0.0001
    prompt_token: float = 0.00003
    most_requests: int = 256


@dataclass(eq=False)
class _Call:
    """A call of `generate`: its responses that have not ended, and the future of its caller."""

    prompt: int
    left: int
    ended: asyncio.Future[None]
    has_begun: bool = False


@dataclass(eq=False)
class ModelledEngine:
    """An engine that answers after the time that a real one would take; it has continuous batching.

    All requests under way get their tokens at the same rate, which changes only when their number does. So `work`, the
    tokens that a request under way since the start would have, says when each of them ends: it began at some `work`,
    and ends when its length is added. Prompts are computed first; meanwhile no request gets tokens.

    Attributes:
        speed: its speed.
        lengths: lengths of the responses of each group: [group][rollout].
        prompt_tokens: length of each prompt.
        model_version: version of its weights.
        work: tokens decoded for a request that has been under way since the start.
        generating: seconds in which it generated.
        tokens: tokens of ended responses.
        computed_again: tokens that syncs made it compute again.
        own_seconds: CPU seconds that this model of an engine took, so that they can be told from the scheduler's.
    """

    speed: Speed
    lengths: Sequence[Sequence[int]]
    prompt_tokens: int = 500
    model_version: int = 0
    max_model_len: int = 1 << 20
    work: float = 0.0
    generating: float = 0.0
    tokens: int = 0
    computed_again: float = 0.0
    own_seconds: float = 0.0
    _running: list[tuple[float, int, int, _Call]] = field(default_factory=list)  # (work at its end, tie, length, call)
    _waiting: deque[tuple[int, _Call]] = field(default_factory=deque)
    _number: int = 0
    _offset: float = 0.0  # sum over running requests of prompt + length - work at the end: tokens so far less work
    _owed: float = 0.0  # seconds of prompts that are not computed yet
    _at: float = 0.0  # time up to which the above is computed
    _rests: bool = False
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return len(self._running) + len(self._waiting)

    async def generate(self, prompt: Sequence[int], n: int = 1, **sampling: Any) -> list[Completion]:
        """n responses; the prompt is the number of the group, which stands for a prompt of `prompt_tokens`."""
        start = time.process_time()
        lengths = self.lengths[prompt[0] % len(self.lengths)][:n]
        call = _Call(self.prompt_tokens, len(lengths), self._loop.create_future())
        self._advance()
        self._waiting.extend((length, call) for length in lengths)
        self._arrange()
        self.own_seconds += time.process_time() - start
        await call.ended
        return [Completion(prompt, [length], [-1.0], "", "stop") for length in lengths]

    async def generate_all(self, groups: Iterable[int]) -> None:
        """Answer all calls of these groups, which come at once."""
        await asyncio.gather(*(self.generate([group], len(self.lengths[group])) for group in groups))

    def rest(self) -> None:
        """Stop, with all requests as they are: the trainer's turn."""
        self._advance()
        self._rests = True
        self._cancel()

    def go_on(self) -> None:
        self._advance()
        self._rests = False
        self._arrange()

    def sync(self, version: int) -> None:
        """Take new weights: prompts and responses so far of requests under way are computed again."""
        self._advance()
        self.model_version = version
        tokens = self._offset + len(self._running) * self.work if self._running else 0.0
        self.computed_again += tokens
        self._owed += tokens * self.speed.prompt_token
        self._arrange()

    def _step_seconds(self) -> float:
        return self.speed.step + self.speed.request * len(self._running)

    def _advance(self) -> None:
        """Compute all up to the present."""
        now = self._loop.time()
        seconds, self._at = now - self._at, now
        if self._rests or not self._running:
            return
        self.generating += seconds
        for_prompts = min(seconds, self._owed)
        self._owed -= for_prompts
        self.work += (seconds - for_prompts) / self._step_seconds()

    def _arrange(self) -> None:
        """End what has ended, begin what has a place, and wait for the next end."""
        while self._running and self._running[0][0] <= self.work + _SLACK:
            self._end(*heapq.heappop(self._running))
        while self._waiting and len(self._running) < self.speed.most_requests:
            self._begin(*self._waiting.popleft())
        if self._rests or not self._running:
            return
        end = self._at + self._owed + max(self._running[0][0] - self.work, 0) * self._step_seconds()
        if self._timer is None or self._timer.when() > end:  # one that comes too early sets the next one
            self._cancel()
            self._timer = self._loop.call_at(end, self._wake)

    def _begin(self, length: int, call: _Call) -> None:
        end = self.work + length
        self._number += 1
        heapq.heappush(self._running, (end, self._number, length, call))
        self._offset += call.prompt + length - end
        if not call.has_begun:  # the others of the group find its prompt in the cache
            self._owed += call.prompt * self.speed.prompt_token
            call.has_begun = True

    def _end(self, end: float, number: int, length: int, call: _Call) -> None:
        self._offset -= call.prompt + length - end
        self.tokens += length
        call.left -= 1
        if not call.left and not call.ended.done():
            call.ended.set_result(None)

    def _wake(self) -> None:
        start = time.process_time()
        self._timer = None
        self._advance()
        self._arrange()
        self.own_seconds += time.process_time() - start

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def load(self) -> None: ...

    async def shutdown(self) -> None:
        self._cancel()

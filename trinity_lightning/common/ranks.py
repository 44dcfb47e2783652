"""The processes that train one policy together: they exchange values in rounds, and an error of one ends all."""

import contextlib
import json
import math
import pickle
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trinity_lightning.errors import RankError, RankTerminatedError

CPU = torch.device("cpu")
CALL = "a call"  # the round in which rank 0 calls the others
PATIENCE = timedelta(days=30)  # wait for rank 0 while it rolls out: should it die, its connections end, and so the wait
LOOK = timedelta(seconds=0.2)  # a rank that waits for others handles signals this often
STUCK_SECONDS = 1.0  # after a failure, NCCL's work is aborted if a rank within a pass begins no work for this long
CAUSE_SECONDS = 1.0  # most time between the end of a process's connection and of the process itself
LEAST_SECONDS = 3.0  # the least wait in a round, even if it begins just before the limit set by `within`
LENGTH_BYTES, FIRST_BYTES = 8, 1 << 10  # in a round: the size of the length of an answer; and the bytes sent at first
BUCKET_BYTES = 64 << 20  # most bytes of tensors that are added up in one sending
BEAT_SECONDS = 5.0  # between two beats of a rank that waits for rank 0
SILENT_SECONDS = 30.0  # after which rank 0, rolling out, ends the run if a waiting rank has sent no beat
FAILED, BEATS = "failed", "beats"  # keys in the store: the failure that came first; the last beat of each rank

T = TypeVar("T")


class Alone:
    """The only process that trains; `Ranks`, one of several, overrides these methods."""

    rank = 0
    size = 1
    hangs = False  # true if another rank did not answer in time

    def failure(self) -> BaseException | None:
        """The error of another process that must end this run, if there is one."""

    def exchange(self, value: T, patient: bool = False, at: str = "an exchange") -> list[T]:
        """The values that all ranks hand in, by rank."""
        return [value]

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value that rank `source` hands in."""
        return value

    def add_up(self, tensors: Sequence[Tensor], at: str = "a sum") -> None:
        """Make each tensor the sum of that tensor on all ranks."""

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Wait for others no longer than `seconds` from now on."""
        return nullcontext()

    def end(self, error: BaseException) -> None:
        """Tell the others that this rank has failed."""


ALONE = Alone()


def ranks_of(trainer: Any) -> Alone:
    """The processes that a Lightning Trainer trains with; alone with any other strategy than ReplicaStrategy."""
    return getattr(trainer.strategy, "ranks", ALONE)


# -- one of several ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """The failure of a rank: its error, or SIGTERM, which it was sent."""

    rank: int
    reason: str
    terminated: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"


Answer = tuple[Any, Failure | None, str]  # a rank's part in a round: a value, its failure, the round's name


@dataclass
class Ranks(Alone):
    """This process among those that train one policy together.

    Ranks meet in rounds, to which each hands in a value and gets the values of all. All take part in the same rounds in
    the same order. A rank that fails hands in its error instead, whichever round is next, so that nobody waits for a
    rank that does not come; rank 0, which may be rolling out, sees the error at once by `failure`. Every method but
    `failure` and `end` raises a RankError if another rank has failed, died, or was later than `timeout`.

    While the others wait in a round, rank 0 may `call` for work that takes all of them; they `serve` the call first.

    A pass of a model in shards begins with a round and has none within: its collectives only call torch's, so that a
    GPU sends and computes at once. A rank that fails within a pass ends `pass_group`. That ends the others' waits in
    the pass, and they learn the reason in a round, for which `group` is still there.

    Attributes:
        group, store: the connections between ranks: torch's process group, and its store of keys and values.
        pass_group: the process group of `collect`: on a CPU another one, on a GPU `group`, which has NCCL for tensors
            and gloo for rounds. None: there are no passes in shards, or one has failed.
        timeout: longest wait for the others in a round.
        lost: returns the processes of this machine that have died, in words; None: none has.
        terminated: returns True if this process was sent SIGTERM.
        serve: does the work that rank 0 calls for, by name and arguments.
        meanwhile: does a piece of pending work, or waits a moment, while this rank waits for rank 0.
        hangs: true if another rank did not answer in time.
    """

    rank: int
    size: int
    group: Any = None
    store: Any = None
    pass_group: Any = None
    timeout: timedelta = PATIENCE
    lost: Callable[[], str | None] = lambda: None
    terminated: Callable[[], bool] = lambda: False
    serve: Callable[[str, tuple[Any, ...]], None] = lambda name, arguments: None
    meanwhile: Callable[[], None] | None = None
    hangs: bool = False
    _knows_error: bool = False  # true if nobody needs to be told of an error any more
    _has_ended: bool = False
    _in_pass: bool = False  # true from the round before a pass to the next round that succeeds
    _broken: Callable[[], RankError] | None = None  # makes the error that ended a wait; no later wait is possible
    _deadline: float = math.inf  # set by `within`
    _waits: int = 0  # number of waits begun: equal on all ranks that have come as far
    _last_beat: tuple[int, float] = 0, 0.0  # the wait in which this rank last sent a beat, and when
    _last_look: float = 0.0  # when rank 0 last looked for beats
    _heard: dict[int, tuple[bytes, float]] = field(default_factory=dict)  # on rank 0: others' last beats, since when

    # -- rounds --------------------------------------------------------------------------------------------------------

    def exchange(self, value: T, patient: bool = False, at: str = "an exchange") -> list[T]:
        """The values that all ranks hand in, by rank; tensors in them are on the CPU.

        Args:
            value: this rank's value.
            patient: rank 0 may be rolling out: wait for it as long as it takes.
            at: the round's name, the same on all ranks, or it is a RankError.
        """
        while True:
            answers = self._round((value, None, at), PATIENCE if patient and self.rank else self.timeout, at)
            called = self._serve_call(answers)
            if failures := _failures(answers):
                self._knows_error = True
                raise _error(failures)
            if not called:
                break
        if len({name for *_, name in answers}) > 1:
            self._knows_error = True
            places = "; ".join(f"rank {rank} is at {name}" for rank, (*_, name) in enumerate(answers))
            raise RankError(f"the processes went different ways, such as a callback that only one has: {places}.")
        self._in_pass = False
        return [value for value, *_ in answers]

    def call(self, name: str, *arguments: Any, saving: bool = False) -> None:
        """Have all other ranks do something in the round that they wait in; rank 0 does the same next.

        Args:
            name, arguments: the work, for `serve`; an error names the first argument.
            saving: the run is ending, and failures of other ranks do not keep rank 0 from saving it.
        """
        if self.rank > 0:
            return
        if saving:
            self.leave_pass()
        at = " for ".join([CALL, *map(str, arguments[:1])])
        failures = _failures(self._round(((name, arguments, saving), None, CALL), self.timeout, at))
        self._knows_error = self._knows_error or bool(failures)
        if failures and not saving:
            raise _error(failures)
        self._in_pass = False

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value that rank `source` hands in, however large and however late."""
        data = pickle.dumps(value) if self.rank == source else b""
        buffer = _padded(data, self.exchange(len(data), patient=True, at="a broadcast")[source])
        self.wait(lambda limit: self.group.broadcast(buffer, source, limit), "a broadcast")
        self.beat()  # others may still wait in it, for a rank that hangs: show them that this rank has come
        return value if self.rank == source else _unpickled(buffer.numpy().tobytes())

    def add_up(self, tensors: Sequence[Tensor], at: str = "a sum") -> None:
        """Make each tensor the sum of that tensor on all ranks: the same bits everywhere.

        They are sent many at a time: a model has hundreds, and each sending waits for all ranks.

        Args:
            tensors: the same number on all ranks, each of the same shape and dtype everywhere.
            at: the round's name, as in `exchange`.
        """
        if not tensors:
            return
        buckets = [(bucket, _in_place(bucket)) for bucket in _buckets(tensors)]
        needed = max((_bytes(bucket) for bucket, whole in buckets if whole is None), default=0)
        # Before the round: if this rank is out of memory, the others get that error in the round.
        space = torch.empty(needed, dtype=torch.uint8, device=tensors[0].device)
        self.exchange(None, at=at)
        for bucket, whole in buckets:
            total = space[: _bytes(bucket)].view(bucket[0].dtype) if whole is None else whole
            if whole is None:
                torch.cat([tensor.flatten() for tensor in bucket], out=total)
            self.wait(lambda limit, total=total: self.group.allreduce(total, timeout=limit), at, total.device)
            if whole is None:
                for tensor, part in zip(bucket, total.split([tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def send(self, collective: Callable[..., Any], received: Tensor, sent: Tensor, options: Any, at: str) -> None:
        """Have a collective of the group fill `received`, after a round: nobody waits for a rank that failed."""

        def begin(limit: timedelta) -> Any:
            options.timeout = limit
            return collective(received, sent, options)

        self.exchange(None, at=at)
        self.wait(begin, at, sent.device)

    # -- passes of a model in shards ----------------------------------------------------------------------------------

    def enter_pass(self) -> None:
        """Meet before a pass. Until the next round, this rank is taken to be within it."""
        self.exchange(None, at="a pass")
        self._in_pass = True

    def collect(self, collective: str, tensors: Sequence[Any], options: Any, at: str, device: torch.device) -> None:
        """Begin a collective of `pass_group` without a round; only a CPU waits until it has ended.

        Args:
            collective: the name of the group's method.
            tensors, options: its arguments.
            at: the collective's name in errors.
            device: the device that sends.
        """
        if self.pass_group is None:
            raise RankError("no pass is possible after one that failed.")

        def begin(limit: timedelta) -> Any:
            options.timeout, options.asyncOp = limit, False  # NCCL then sends on the stream that torch has chosen
            return getattr(self.pass_group, collective)(*tensors, options)

        error, hangs = self._error_of(begin, device)
        if error is None:
            return
        if hangs:
            raise self._end_of_waits(at, error, hangs) from error
        traceback.clear_frames(error.__traceback__)  # they hold the work, and that the connection
        self.end_passes()
        self.exchange(None, at="the end of a failed pass")  # raises the failure of the rank that ended the pass
        self._knows_error = True
        raise RankError(f"the connection between processes ended at {at} ({error})") from error

    def leave_pass(self) -> None:
        """Do as `end_passes` if this rank has failed within a pass, which others may wait in."""
        if self._in_pass:
            self.end_passes()

    def end_passes(self) -> None:
        """End `pass_group`, so that no other rank waits in a pass for this one."""
        group, self.pass_group = self.pass_group, None
        if group is not None:
            group.abort()  # NCCL's work; gloo's connections end with the last reference to the group

    def is_stuck(self, waits: int) -> bool:
        """True if this rank, within a pass, has begun no work since it had begun `waits`, and another has failed.

        A rank that was sent SIGTERM ends with the others, after the passes that it takes part in.
        """
        if not self._in_pass or waits != self._waits:
            return False
        try:
            failure = self._reported()
            return (failure is not None and not failure.terminated) or self.lost() is not None
        except RuntimeError:  # rank 0 has ended
            return True

    def _serve_call(self, answers: Sequence[Answer]) -> bool:
        """Serve rank 0's call, unless a failure keeps rank 0 from it; True if there was a call."""
        request, _, name = answers[0]
        if self.rank == 0 or name != CALL:
            return False
        work, arguments, saving = request
        if saving or not _failures(answers):
            self.serve(work, arguments)
        return True

    def _round(self, answer: Answer, timeout: timedelta, at: str) -> list[Answer]:
        """The answers of all ranks: first lengths and FIRST_BYTES, which hold most answers whole, then the rests."""
        pickled = pickle.dumps(answer)
        data = len(pickled).to_bytes(LENGTH_BYTES) + pickled
        answers = self._gathered(data[:FIRST_BYTES], FIRST_BYTES, timeout, at)
        longest = LENGTH_BYTES + max(int.from_bytes(first[:LENGTH_BYTES]) for first in answers)
        if longest > FIRST_BYTES:
            rests = self._gathered(data[FIRST_BYTES:], longest - FIRST_BYTES, self.timeout, at)
            answers = [first + rest for first, rest in zip(answers, rests, strict=True)]
        return [_unpickled(memoryview(data)[LENGTH_BYTES:]) for data in answers]  # a pickle knows where it ends

    def _gathered(self, data: bytes, length: int, timeout: timedelta, at: str) -> list[bytes]:
        """The data of all ranks, each padded to the length."""
        sent = _padded(data, length)
        gathered = [torch.empty_like(sent) for _ in range(self.size)]
        self.wait(lambda limit: self.group.allgather(gathered, sent, limit), at, timeout=timeout)
        return [received.numpy().tobytes() for received in gathered]

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait(
        self, begin: Callable[[timedelta], Any], at: str, device: torch.device = CPU, timeout: timedelta | None = None
    ) -> None:
        """Begin work of `group`, and wait for its end.

        Args:
            begin: begins the work, given the time that it may take.
            at: the work's name in errors.
            device: the device that sends.
            timeout: the longest wait; None: `self.timeout`.
        """
        error, hangs = self._error_of(begin, device, timeout)
        if error is not None:
            raise self._end_of_waits(at, error, hangs) from error

    def _error_of(
        self, begin: Callable[[timedelta], Any], device: torch.device, timeout: timedelta | None = None
    ) -> tuple[RuntimeError | None, bool]:
        """Do as `wait` does; returns the error that ended the work, if there was one, and whether its time was up."""
        if self._broken is not None:
            raise self._broken()
        self._waits += 1
        began, limit = time.monotonic(), min(timeout or self.timeout, self._time_left())
        try:
            work = begin(limit)
            if work is None:  # NCCL's, if it is not asynchronous: it is in the present stream, and nothing waits for it
                return None, False
            if device.type == "cpu":
                self._watch(work, timeout == PATIENCE)
            work.wait()
        except RuntimeError as error:
            waited = time.monotonic() - began
            return error, waited > limit.total_seconds() - 0.01  # gloo cuts its limits to whole milliseconds
        return None, False

    def _end_of_waits(self, at: str, error: RuntimeError, hangs: bool) -> RankError:
        """The cause of an error of work, as far as it is known; from now on every wait raises it."""
        self._knows_error = self._has_ended = True  # a rank that still waits for this one sees its connection end
        self.hangs = hangs
        why = f"{self._late_ranks()} hangs" if hangs else error
        unknown = f"another process of the run ended, or did not answer in time, at {at} ({why})"
        cause = (self.failure() if hangs else self._failure_soon()) or RankError(unknown)
        self._broken = partial(type(cause), str(cause))  # not the error: its frames would keep the connection
        return cause

    def _watch(self, work: Any, patient: bool) -> None:
        """Wait until the CPU's sending has ended, well or not.

        Signals are handled meanwhile: a wait of torch's own keeps them from Python.
        """
        while not work.is_completed():
            if patient and self.meanwhile is not None:
                self.meanwhile()
            else:
                with contextlib.suppress(RuntimeError):  # LOOK has passed; `wait` learns at the end how the work ended
                    work.wait(LOOK)
            if not work.is_completed():
                self.beat()
                if self.terminated():
                    self._report(self._sigterm)

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Wait for others no longer than `seconds` from now on, on the CPU, in everything that is done inside.

        Inside, another `within` has seconds of its own, which do not count here. A round that begins later than
        LEAST_SECONDS before the limit waits for LEAST_SECONDS.
        """
        began, before = time.monotonic(), self._deadline
        self._deadline = began + seconds
        try:
            yield
        finally:
            self._deadline = before + time.monotonic() - began

    def _time_left(self) -> timedelta:
        """The longest wait that the limit of `within` leaves to work that begins now."""
        return timedelta(seconds=max(LEAST_SECONDS, min(self._deadline - time.monotonic(), PATIENCE.total_seconds())))

    # -- failures ------------------------------------------------------------------------------------------------------

    def failure(self) -> RankError | None:
        """The error of another rank that must end the run, if there is one.

        The rank has reported it, or has died: on another machine, SILENT_SECONDS ago.
        """
        silent = None
        try:
            if self.store is not None:
                if (reported := self._reported()) is not None:
                    return _error([reported])
                silent = self._silent_ranks()
                if silent is not None:  # nobody waits any more for a rank that does not answer
                    self.hangs = self._knows_error = self._has_ended = True
                    self._broken, self.group = partial(RankError, silent), None  # so that the others see it end
                    self.pass_group = None
        except RuntimeError as error:
            return RankError(f"rank 0 has ended, or what started it ({error})")
        reason = self.lost() or silent
        return None if reason is None else RankError(reason)

    def _reported(self) -> Failure | None:
        """The failure that a rank has reported first."""
        return Failure(**json.loads(self.store.get(FAILED))) if self.store.check([FAILED]) else None

    def _failure_soon(self) -> RankError | None:
        """The `failure`, or one a moment later: the connection to a process ends just before the process does."""
        end = time.monotonic() + CAUSE_SECONDS
        while (cause := self.failure()) is None and time.monotonic() < end:
            time.sleep(CAUSE_SECONDS / 20)
        return cause

    def end(self, error: BaseException) -> None:
        """Tell the others that this rank has failed, unless they know, and wait until rank 0 has saved what it can.

        Rank 0 calls it when it has saved. A second call does nothing.
        """
        if self._has_ended:
            return
        self._has_ended = True
        self.leave_pass()
        failure = None if self._knows_error else self._failure_by(error)
        if failure is not None:
            self._report(failure)
        try:
            ended = False  # true once rank 0 hands in neither a failure nor a call
            while not ended:
                timeout = PATIENCE if failure and self.rank else self.timeout
                answers = self._round((None, failure, ""), timeout, "its end")
                failure, ended = self._serve_or_fail(answers), answers[0][1:] == (None, "")
        except RankError:
            return  # another process has ended: there is nobody to tell

    def _serve_or_fail(self, answers: Sequence[Answer]) -> Failure | None:
        """Serve rank 0's call, if there is one; returns the failure to hand in next, if serving it failed."""
        try:
            self._serve_call(answers)
        except RankError:
            raise
        except Exception as error:  # a full disk, say
            return self._failure_by(error)
        return None

    def _failure_by(self, error: BaseException) -> Failure:
        if isinstance(error, SystemExit) and self.terminated():
            return self._sigterm
        return Failure(self.rank, f"{type(error).__name__}: {error}".removesuffix(": "))

    @property
    def _sigterm(self) -> Failure:
        return Failure(self.rank, "SIGTERM", terminated=True)

    def _report(self, failure: Failure) -> None:
        """Let `failure` return it on the other ranks, unless another one came first."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # the store's process has ended: this rank learns that next
                self.store.compare_set(FAILED, "", json.dumps(asdict(failure)))

    # -- beats, the sign of life of ranks that wait --------------------------------------------------------------------

    def beat(self) -> None:
        """Let the others know that this rank waits: rank 0, which may be rolling out, and every rank that waits too."""
        now, (wait, before) = time.monotonic(), self._last_beat
        if self.store is not None and (wait != self._waits or now > before + BEAT_SECONDS):
            self._last_beat = self._waits, now
            with contextlib.suppress(RuntimeError):  # as in `_report`
                self.store.set(f"{BEATS}/{self.rank}", f"{self._waits} {now}")

    def _silent_ranks(self) -> str | None:
        """The ranks, in words, that wait for rank 0 while it rolls out, and have sent no beat for SILENT_SECONDS.

        A rank that does not wait yet sends none: it computes, or reads a checkpoint.
        """
        now = time.monotonic()
        if self.rank > 0 or now < self._last_look + BEAT_SECONDS:
            return None
        if now > self._last_look + SILENT_SECONDS / 2:  # rank 0 was stopped (SIGSTOP), perhaps all were: count anew
            self._heard.clear()
        self._last_look, silent = now, []
        for rank in range(1, self.size):
            key = f"{BEATS}/{rank}"
            beat = self.store.get(key) if self.store.check([key]) else b""
            if beat != self._heard.get(rank, (b"", now))[0]:
                self._heard[rank] = beat, now
            if self._has_come(beat, 1) and now > self._heard[rank][1] + SILENT_SECONDS:
                silent.append(f"rank {rank}")
        return f"{', '.join(silent)} did not answer for {SILENT_SECONDS:g} s: killed, or cut off." if silent else None

    def _late_ranks(self) -> str:
        """The ranks, in words, that this one waits for: the others have sent a beat from the same wait."""
        beats = {rank: f"{BEATS}/{rank}" for rank in range(self.size) if rank != self.rank}
        try:
            waiting = {
                rank for rank, key in beats.items() if self.store.check([key]) and self._has_come(self.store.get(key))
            }
        except RuntimeError:  # rank 0 has the store, and took it along
            return "rank 0"
        return " or ".join(f"rank {rank}" for rank in sorted(beats.keys() - waiting or beats))

    def _has_come(self, beat: bytes, ahead: int = 0) -> bool:
        """True if a beat was sent from the wait that this rank is in, or at least `ahead` waits later."""
        return int(beat.partition(b" ")[0] or 0) >= self._waits + ahead


def watch_passes(ranks: "weakref.ref[Ranks]") -> None:
    """Abort NCCL's work once the run has failed and these ranks are stuck: then they wait for a GPU, and cannot look.

    A rank that failed within a pass takes no part in what the others' GPUs have begun.
    """
    waits = -1
    while (watched := ranks()) is not None and (group := watched.pass_group) is not None:
        if watched.is_stuck(waits):
            group.abort()
            return
        waits = watched._waits
        del watched, group
        time.sleep(STUCK_SECONDS)


def _error(failures: Sequence[Failure]) -> RankError:
    """The error that ends this rank after failures of others."""
    kind = RankTerminatedError if all(failure.terminated for failure in failures) else RankError
    return kind("; ".join(map(str, failures)))


def _failures(answers: Iterable[Answer]) -> list[Failure]:
    """The failures in answers, by rank."""
    return [failure for _, failure, _ in answers if failure is not None]


# -- bytes and tensors that are sent -----------------------------------------------------------------------------------


def add_up_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Add up the gradients of all ranks, after the last micro-batch; a rank without rows joins with zeros.

    Each rank's loss is its rows' share of the whole optimizer batch's loss. A parameter that has no gradient on any
    rank keeps none.
    """
    parameters = list(parameters)
    has_gradient = ranks.exchange([parameter.grad is not None for parameter in parameters])
    trained = [parameter for parameter, *has in zip(parameters, *has_gradient, strict=True) if any(has)]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    ranks.add_up([parameter.grad for parameter in trained if parameter.grad is not None])


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, together at most BUCKET_BYTES, or one that alone is larger; the same on all ranks."""
    filling: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bucket = filling.setdefault(tensor.dtype, [])
        if bucket and _bytes(bucket) + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = filling[tensor.dtype] = []
        bucket.append(tensor)
    yield from filling.values()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _in_place(bucket: Sequence[Tensor]) -> Tensor | None:
    """The only tensor of a bucket, flat, if it can be sent as it lies in memory."""
    return bucket[0].view(-1) if len(bucket) == 1 and bucket[0].is_contiguous() else None


def _padded(data: bytes, length: int) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)


def _unpickled(data: bytes | memoryview) -> Any:
    return pickle.loads(data)  # noqa: S301 - from another process of this run, over its own connection

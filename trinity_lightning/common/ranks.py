"""The processes that train one policy together: they exchange values in rounds, and an error of one ends all."""

import contextlib
import json
import math
import pickle
import time
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
CALL = "a call"
PATIENCE = timedelta(days=30)  # for rank 0 to roll out: should it die, its connections end, and with them the wait
LOOK = timedelta(seconds=0.2)  # so long no signal is handled while a rank waits for others
CAUSE_SECONDS = 1.0
LEAST_SECONDS = 3.0  # a round waits at least so long, even if it begins just before the limit set by `within`
LENGTH_BYTES, FIRST_BYTES = 8, 1 << 10  # of a round: the length of what is handed in; and what is sent at first
BUCKET_BYTES = 64 << 20  # of tensors that are added up in one sending
BEAT_SECONDS = 5.0  # between two beats of a rank that waits for rank 0
SILENT_SECONDS = 30.0  # without a beat, and rank 0, which rolls out, ends the run
FAILED, BEATS = "failed", "beats"  # in the store: the failure that came first; the last beat of each rank

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """What a rank has failed by: its error, or SIGTERM, which it was sent."""

    rank: int
    reason: str
    terminated: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"


Answer = tuple[Any, Failure | None, str]  # what a rank hands in to a round: a value, what it failed by, which round


class Alone:
    """The only process that trains; `common.ranks.Ranks`, one of several, overrides these methods."""

    rank = 0
    size = 1
    hangs = False  # another rank, as far as this one knows

    def failure(self) -> BaseException | None:
        """What the run has to end with, as far as that is known of other processes."""

    def exchange(self, value: T, patient: bool = False, at: str = "an exchange") -> list[T]:
        """What every rank hands in, by rank."""
        return [value]

    def broadcast(self, value: T, source: int = 0) -> T:
        """What rank `source` hands in."""
        return value

    def add_up(self, tensors: Sequence[Tensor], at: str = "a sum") -> None:
        """Make each tensor the sum of those of all ranks."""

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Wait for others no longer than that from now on."""
        return nullcontext()

    def end(self, error: BaseException) -> None:
        """This rank fails: tell the others."""


ALONE = Alone()


@dataclass
class Ranks(Alone):
    """This process among those that train one policy together.

    Ranks meet in rounds, to which each hands in something and gets what all have handed in: all take part in the same
    rounds in the same order. A rank that fails hands in its error instead, whichever round is next, so that nobody
    waits for one that does not come; rank 0, which may be rolling out, sees it at once by `failure`. Every method but
    `failure` and `end` raises a RankError if another rank has failed, died, or was later than `timeout`.

    While the others wait in a round, rank 0 may `call` for something that takes all of them, which they `serve` first.

    Attributes:
        group, store: what connects the ranks.
        lost: says which processes of this machine have died, if any have.
        terminated: says whether this process was sent SIGTERM.
        meanwhile: does a piece of what there is to do while this rank waits for rank 0, or waits a moment.
        hangs: whether another rank did not answer in time.
    """

    rank: int
    size: int
    group: Any = None
    store: Any = None
    timeout: timedelta = PATIENCE
    lost: Callable[[], str | None] = lambda: None
    terminated: Callable[[], bool] = lambda: False
    serve: Callable[[str, tuple[Any, ...]], None] = lambda name, arguments: None
    meanwhile: Callable[[], None] | None = None
    hangs: bool = False
    _known: bool = False  # of an error, whoever's
    _ended: bool = False  # for one
    _broken: Callable[[], RankError] | None = None  # what a wait has ended by: its messages may be on their way
    _deadline: float = math.inf  # of `within`
    _waits: int = 0  # begun, the same on all ranks but for those that others wait for
    _beaten: tuple[int, float] = 0, 0.0  # at which of them this rank last sent a beat, and when
    _looked: float = 0.0  # when rank 0 last looked for beats
    _heard: dict[int, tuple[bytes, float]] = field(default_factory=dict)  # rank 0's: others' last beats, and since when

    def failure(self) -> RankError | None:
        """Why the run has to end, if another rank has said so, or has died: on another machine, SILENT_SECONDS ago."""
        silent = None
        try:
            if self.store is not None:
                if self.store.check([FAILED]):
                    return _error([Failure(**json.loads(self.store.get(FAILED)))])
                silent = self._silent()
                if silent is not None:  # what it does not answer to is not waited for any more
                    self.hangs = self._known = self._ended = True
                    self._broken, self.group = partial(RankError, silent), None  # others hear that it is over
        except RuntimeError as error:
            return RankError(f"rank 0 has ended, or what started it ({error})")
        reason = self.lost() or silent
        return None if reason is None else RankError(reason)

    def exchange(self, value: T, patient: bool = False, at: str = "an exchange") -> list[T]:
        """What every rank hands in, by rank; tensors are of the CPU.

        `patient`: rank 0 may be rolling out. `at`: a name of the round, the same on all ranks, or it is a RankError.
        """
        while True:
            answers = self._round((value, None, at), PATIENCE if patient and self.rank else self.timeout, at)
            called = self._served(answers)
            if failures := _failures(answers):
                self._known = True
                raise _error(failures)
            if not called:
                break
        if len({place for *_, place in answers}) > 1:
            self._known = True
            places = "; ".join(f"rank {rank} is at {place}" for rank, (*_, place) in enumerate(answers))
            raise RankError(f"the processes went different ways, such as a callback that only one has: {places}.")
        return [value for value, *_ in answers]

    def call(self, name: str, *arguments: Any, saving: bool = False) -> None:
        """Have all other ranks do something, in the round that they wait in; rank 0 does the same next.

        An error names the first argument. `saving`: the run is ending, and what another rank has failed by does not
        keep rank 0 from saving it.
        """
        if self.rank > 0:
            return
        at = " for ".join([CALL, *map(str, arguments[:1])])
        failures = _failures(self._round(((name, arguments, saving), None, CALL), self.timeout, at))
        self._known = self._known or bool(failures)
        if failures and not saving:
            raise _error(failures)

    def broadcast(self, value: T, source: int = 0) -> T:
        """What rank `source` hands in, however large and however late."""
        data = pickle.dumps(value) if self.rank == source else b""
        buffer = _padded(data, self.exchange(len(data), patient=True, at="a broadcast")[source])
        self.wait(lambda limit: self.group.broadcast(buffer, source, limit), "a broadcast")
        self.beat()  # others, which wait for one that hangs, may not have ended it
        return value if self.rank == source else _unpickled(buffer.numpy().tobytes())

    def add_up(self, tensors: Sequence[Tensor], at: str = "a sum") -> None:
        """Make each tensor, of one shape and dtype everywhere, the sum of those of all ranks: the same bits on all.

        They are sent many at a time: a model has hundreds, and each sending waits for all ranks. `at`: see `exchange`.
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
                torch.cat([each.flatten() for each in bucket], out=total)
            self.wait(lambda limit, total=total: self.group.allreduce(total, timeout=limit), at, total.device)
            if whole is None:
                for tensor, part in zip(bucket, total.split([each.numel() for each in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def end(self, error: BaseException) -> None:
        """This rank fails: tell the others, unless they know, and wait with them until rank 0 has saved what it can.

        Rank 0 calls it when it has. Twice is allowed.
        """
        if self._ended:
            return
        self._ended = True
        failure = None if self._known else self._failure_by(error)
        if failure is not None:
            self._report(failure)
        try:
            ended = False  # rank 0, which has nothing to say any more
            while not ended:
                timeout = PATIENCE if failure and self.rank else self.timeout
                answers = self._round((None, failure, ""), timeout, "its end")
                failure, ended = self._attempt(answers), answers[0][1:] == (None, "")
        except RankError:
            return  # another process has ended: there is nobody to tell

    def _attempt(self, answers: Sequence[Answer]) -> Failure | None:
        """Serve rank 0, which may wait for this rank: what that failed by, for the next round."""
        try:
            self._served(answers)
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
        """Let `failure` say it on the other ranks, if nothing else came before it."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # its process has ended, which is what this rank hears next
                self.store.compare_set(FAILED, "", json.dumps(asdict(failure)))

    def beat(self) -> None:
        """Let the others know that this rank waits: rank 0, which may be rolling out, and whoever waits as well."""
        now, (wait, before) = time.monotonic(), self._beaten
        if self.store is not None and (wait != self._waits or now > before + BEAT_SECONDS):
            self._beaten = self._waits, now
            with contextlib.suppress(RuntimeError):  # as above
                self.store.set(f"{BEATS}/{self.rank}", f"{self._waits} {now}")

    def _silent(self) -> str | None:
        """Which ranks have not sent a beat for SILENT_SECONDS since they began to wait for rank 0, which rolls out.

        One that does not wait yet sends none: it computes, or reads a checkpoint.
        """
        now = time.monotonic()
        if self.rank > 0 or now < self._looked + BEAT_SECONDS:
            return None
        if now > self._looked + SILENT_SECONDS / 2:  # it was stopped (SIGSTOP), and so perhaps were they: count anew
            self._heard.clear()
        self._looked, silent = now, []
        for rank in range(1, self.size):
            key = f"{BEATS}/{rank}"
            beat = self.store.get(key) if self.store.check([key]) else b""
            if beat != self._heard.get(rank, (b"", now))[0]:
                self._heard[rank] = beat, now
            if self._has_come(beat, 1) and now > self._heard[rank][1] + SILENT_SECONDS:
                silent.append(f"rank {rank}")
        return f"{', '.join(silent)} did not answer for {SILENT_SECONDS:g} s: killed, or cut off." if silent else None

    def _served(self, answers: Sequence[Answer]) -> bool:
        """Whether rank 0 called: done, unless it does not go on itself because a rank has failed."""
        request, _, place = answers[0]
        if self.rank == 0 or place != CALL:
            return False
        name, arguments, saving = request
        if saving or not _failures(answers):
            self.serve(name, arguments)
        return True

    def _round(self, answer: Answer, timeout: timedelta, place: str) -> list[Answer]:
        """What all ranks hand in: the length first, and as much with it as most rounds need, to wait once."""
        pickled = pickle.dumps(answer)
        data = len(pickled).to_bytes(LENGTH_BYTES) + pickled
        answers = self._gathered(data[:FIRST_BYTES], FIRST_BYTES, timeout, place)
        longest = LENGTH_BYTES + max(int.from_bytes(each[:LENGTH_BYTES]) for each in answers)
        if longest > FIRST_BYTES:
            rests = self._gathered(data[FIRST_BYTES:], longest - FIRST_BYTES, self.timeout, place)
            answers = [first + rest for first, rest in zip(answers, rests, strict=True)]
        return [_unpickled(memoryview(each)[LENGTH_BYTES:]) for each in answers]  # it knows where it ends

    def _gathered(self, data: bytes, length: int, timeout: timedelta, place: str) -> list[bytes]:
        own = _padded(data, length)
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        self.wait(lambda limit: self.group.allgather(gathered, own, limit), place, timeout=timeout)
        return [each.numpy().tobytes() for each in gathered]

    def _watch(self, work: Any, patient: bool) -> None:
        """Wait until what the CPU sends has ended, well or not.

        Signals are handled meanwhile: a wait of torch's own keeps them from Python.
        """
        while not work.is_completed():
            if patient and self.meanwhile is not None:
                self.meanwhile()
            else:
                with contextlib.suppress(RuntimeError):  # LOOK has passed; how the work ended, `wait` learns at the end
                    work.wait(LOOK)
            if not work.is_completed():
                self.beat()
                if self.terminated():
                    self._report(self._sigterm)

    def _late(self) -> str:
        """Which ranks this one waits for: others that have come as far have sent a beat from here."""
        beats = {rank: f"{BEATS}/{rank}" for rank in range(self.size) if rank != self.rank}
        try:
            here = {
                rank for rank, key in beats.items() if self.store.check([key]) and self._has_come(self.store.get(key))
            }
        except RuntimeError:  # the store is of rank 0, and went with it
            return "rank 0"
        return " or ".join(f"rank {rank}" for rank in sorted(beats.keys() - here or beats))

    def _has_come(self, beat: bytes, ahead: int = 0) -> bool:
        """Whether a beat was sent in the wait that this rank is in, or at least so many ahead."""
        return int(beat.partition(b" ")[0] or 0) >= self._waits + ahead

    def send(self, collective: Callable[..., Any], received: Tensor, own: Tensor, options: Any, at: str) -> None:
        """Have a collective of the group fill `received`, after a round: a rank that failed is not waited for."""

        def begin(limit: timedelta) -> Any:
            options.timeout = limit
            return collective(received, own, options)

        self.exchange(None, at=at)
        self.wait(begin, at, own.device)

    def wait(
        self, begin: Callable[[timedelta], Any], at: str, device: torch.device = CPU, timeout: timedelta | None = None
    ) -> None:
        """Begin something on `group`, in so much time, and wait for its end.

        `at`: what an error calls it. `device`: what sends.
        """
        if self._broken is not None:
            raise self._broken()
        self._waits += 1
        began, limit = time.monotonic(), min(timeout or self.timeout, self._left())
        try:
            work = begin(limit)
            if device.type == "cpu":
                self._watch(work, timeout == PATIENCE)
            work.wait()
        except RuntimeError as error:
            self._known = self._ended = True  # whoever still waits for this rank sees its connection end
            waited = time.monotonic() - began
            self.hangs = waited > limit.total_seconds() - 0.01  # gloo cuts its limits to whole milliseconds
            why = f"{self._late()} hangs" if self.hangs else error
            unknown = f"another process of the run ended, or did not answer in time, at {at} ({why})"
            cause = self.failure() if self.hangs else self._cause()
            found = cause or RankError(unknown)
            self._broken = partial(type(found), str(found))  # not the error: its frames would keep the connection
            raise found from error

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """In whatever is done meanwhile the CPU waits for others no longer than that from now on.

        A part of it may have seconds of its own, which do not count. A round that begins later than LEAST_SECONDS
        before the limit waits for those.
        """
        began, before = time.monotonic(), self._deadline
        self._deadline = began + seconds
        try:
            yield
        finally:
            self._deadline = before + time.monotonic() - began

    def _left(self) -> timedelta:
        """How long what begins now may wait, by the limit of `within`."""
        return timedelta(seconds=max(LEAST_SECONDS, min(self._deadline - time.monotonic(), PATIENCE.total_seconds())))

    def _cause(self) -> RankError | None:
        """What `failure` says: a connection ends a moment before the process that it led to."""
        end = time.monotonic() + CAUSE_SECONDS
        while (cause := self.failure()) is None and time.monotonic() < end:
            time.sleep(CAUSE_SECONDS / 20)
        return cause


def _error(failures: Sequence[Failure]) -> RankError:
    """What ends this rank, for failures of others."""
    kind = RankTerminatedError if all(each.terminated for each in failures) else RankError
    return kind("; ".join(map(str, failures)))


def _failures(answers: Iterable[Answer]) -> list[Failure]:
    """What ranks have failed by, by rank."""
    return [failure for _, failure, _ in answers if failure is not None]


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, together at most BUCKET_BYTES, or one that alone is larger; alike on all ranks."""
    filling: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bucket = filling.setdefault(tensor.dtype, [])
        if bucket and _bytes(bucket) + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = filling[tensor.dtype] = []
        bucket.append(tensor)
    yield from filling.values()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


def _in_place(bucket: Sequence[Tensor]) -> Tensor | None:
    """The only tensor of a bucket, flat, if it can be sent as it lies in memory."""
    return bucket[0].view(-1) if len(bucket) == 1 and bucket[0].is_contiguous() else None


def _padded(data: bytes, length: int) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)


def _unpickled(data: bytes | memoryview) -> Any:
    return pickle.loads(data)  # noqa: S301 - of another process of this run, by its own connection


def add_up_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Make gradients those of all ranks together, after the last micro-batch; a rank without rows joins with zeros.

    The loss of each is its rows' share of the whole optimizer batch's. Without a gradient on any rank there is none.
    """
    parameters = list(parameters)
    found = ranks.exchange([each.grad is not None for each in parameters])
    trained = [parameter for parameter, *has in zip(parameters, *found, strict=True) if any(has)]
    for each in trained:
        if each.grad is None:
            each.grad = torch.zeros_like(each, dtype=each.grad_dtype)
    ranks.add_up([each.grad for each in trained if each.grad is not None])


def ranks_of(trainer: Any) -> Alone:
    """The processes that a Lightning Trainer trains with; one of another strategy than ReplicaStrategy is alone."""
    return getattr(trainer.strategy, "ranks", ALONE)

"""Ranks as threads: values reach all of them, and an error, a delay or the death of one ends all."""

import itertools
import json
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from trinity_lightning.common import ranks as ranks_module
from trinity_lightning.common.ranks import ALONE, Ranks
from trinity_lightning.errors import RankError, RankTerminatedError
from trinity_lightning.trainer.ddp import join
from trinity_lightning.trainer.fsdp import Gather, Scatter

SIZE = 3
CPU = torch.device("cpu")
MEETINGS = itertools.count()


@cache
def store() -> Any:
    """The store that all ranks of these tests share: a store that ends keeps the interpreter busy for a while."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def together(work: Callable[[Ranks], Any], timeout: float = 20.0, size: int = SIZE) -> list[Any]:
    """The result of the work on each rank, or the exception that it raises, which ends that rank."""
    meeting, address = next(MEETINGS), ("127.0.0.1", store().port)

    def run(rank: int) -> Any:
        ranks = join(address, Ranks(rank, size), CPU, timedelta(minutes=1), meeting, passes_together=True)
        ranks.timeout = timedelta(seconds=timeout)
        try:
            return work(ranks)
        except Exception as error:
            ranks.end(error)
            return type(error)(*error.args)  # without its frames, which would keep the connection

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_alone_nothing_is_sent() -> None:
    tensor = torch.ones(3)
    ALONE.add_up([tensor])
    ALONE.end(ValueError())
    assert ALONE.exchange("mine") == ["mine"]
    assert ALONE.broadcast(tensor) is tensor
    assert tensor.tolist() == [1, 1, 1]


def test_everyone_has_what_each_hands_in() -> None:
    def work(ranks: Ranks) -> Any:
        return ranks.exchange("x" * 1000 * ranks.rank), ranks.broadcast(bytes(10**6) if ranks.rank == 1 else None, 1)

    assert together(work) == [(["", "x" * 1000, "x" * 2000], bytes(10**6))] * SIZE


def test_what_is_handed_in_arrives_whole_and_at_once_unless_that_of_one_is_long() -> None:
    """On both sides of what is sent at first, and exactly that; on one rank alone, which is another each time."""
    first = ranks_module.FIRST_BYTES

    def handed_in(rank: int, length: int) -> bytes:
        return random.Random(rank).randbytes(length if rank == length % SIZE else rank)

    def work(ranks: Ranks) -> list[int]:
        begun = []
        for length in (0, *range(first - 80, first + 20), 10 * first):
            before = ranks._waits
            assert ranks.exchange(handed_in(ranks.rank, length)) == [handed_in(rank, length) for rank in range(SIZE)]
            begun.append(ranks._waits - before)
        return begun

    begun, *others = together(work)
    assert others == [begun] * 2
    assert begun == sorted(begun)
    assert set(begun) == {1, 2}


def test_on_one_machine_nothing_can_be_reached_from_outside() -> None:
    def listening() -> set[Any]:
        return {
            connection.laddr
            for connection in psutil.Process().net_connections()
            if connection.status == psutil.CONN_LISTEN
        }

    store()
    before, meeting = listening(), next(MEETINGS)
    with socket.socket() as free:
        free.bind(("", 0))
        address = ("a name that nobody looks up", free.getsockname()[1])

    def work(rank: int) -> Any:
        ranks = join(address, Ranks(rank, 2), CPU, timedelta(minutes=1), meeting)
        return ranks.exchange(listening())

    with ThreadPoolExecutor(2) as pool:
        opened = set().union(*next(pool.map(work, range(2)))) - before
    assert address[1] in {port for _, port in opened}
    assert {host for host, _ in opened} == {"127.0.0.1"}


def test_ranks_in_different_rounds_are_refused() -> None:
    def work(ranks: Ranks) -> Any:
        return ranks.exchange(1) if ranks.rank else ranks.add_up([torch.ones(2)])

    for error in together(work):
        assert isinstance(error, RankError)
        assert "rank 0 is at a sum; rank 1 is at an exchange" in str(error)


def test_sums_of_different_names_are_different_rounds() -> None:
    def work(ranks: Ranks) -> None:
        ranks.add_up([torch.ones(2)], *["a layer's gradient"][: ranks.rank])

    for error in together(work, size=2):
        assert "rank 0 is at a sum; rank 1 is at a layer's gradient" in str(error)


@pytest.mark.parametrize("bucket", [0, 100, 1 << 20])
def test_sums_are_the_same_bits_on_all_ranks(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "BUCKET_BYTES", bucket)

    def some(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        tensors = [torch.randn(shape, generator=generator) for shape in ((7, 3), (), (0,), (100,))]
        return [
            *tensors,
            torch.arange(4) * rank,
            tensors[0].double().T,
            tensors[3].round().bfloat16(),
            tensors[0].T.clone(),
        ]

    def work(ranks: Ranks) -> list[torch.Tensor]:
        tensors = some(ranks.rank)
        ranks.add_up(tensors)
        return tensors

    first, *others = together(work)
    assert all(torch.equal(*pair) for other in others for pair in zip(other, first, strict=True))
    expected = [torch.stack(terms).sum(0) for terms in zip(*map(some, range(SIZE)), strict=True)]
    torch.testing.assert_close(first, expected)


def gather(ranks: Ranks) -> None:
    """A pass with one collective."""
    ranks.enter_pass()
    collect(ranks)


def collect(ranks: Ranks) -> None:
    Gather(ranks)(torch.empty(2 * ranks.size), torch.ones(2), ranks.pass_group)


ROUNDS: list[Callable[[Ranks], Any]] = [
    lambda ranks: ranks.exchange(ranks.rank),
    lambda ranks: ranks.exchange(ranks.rank, patient=True),
    lambda ranks: ranks.broadcast(b"0" * 1000),
    lambda ranks: ranks.add_up([torch.ones(10)]),
    gather,
]


PATIENT = (1, 2)


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("before", range(len(ROUNDS)))
def test_an_error_at_any_round_ends_all_with_its_message(rank: int, before: int) -> None:
    def work(ranks: Ranks) -> None:
        for number, meet in enumerate(ROUNDS):
            if (ranks.rank, number) == (rank, before):
                raise KeyError("broken")
            meet(ranks)

    errors = together(work)
    assert isinstance(errors.pop(rank), KeyError)
    assert [f"{type(error).__name__}: {error}" for error in errors] == [
        f"RankError: rank {rank}: KeyError: 'broken'"
    ] * 2


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("collectives", [0, 2])
def test_an_error_within_a_pass_ends_all_with_its_message(rank: int, collectives: int) -> None:
    """The others wait in the pass, where there is no round: one of them perhaps for another that waits."""

    def work(ranks: Ranks) -> None:
        ranks.exchange(None)
        ranks.enter_pass()
        for number in range(3):
            if (ranks.rank, number) == (rank, collectives):
                raise KeyError("broken")
            collect(ranks)

    errors = together(work)
    assert isinstance(errors.pop(rank), KeyError)
    assert [f"{type(error).__name__}: {error}" for error in errors] == [
        f"RankError: rank {rank}: KeyError: 'broken'"
    ] * 2


def test_rank_0_that_fails_within_a_pass_still_calls_the_others_that_waited_in_it() -> None:
    """To save a checkpoint. In the pass that rank 0 has failed in, nothing more is sent."""
    served: list[int] = []

    def work(ranks: Ranks) -> None:
        def serve(name: str, arguments: tuple[Any, ...]) -> None:
            served.append(ranks.rank)
            ranks.add_up([torch.ones(2)])

        ranks.serve = serve
        ranks.enter_pass()
        if ranks.rank == 0:
            ranks.call("gather", saving=True)
            total = torch.ones(2)
            ranks.add_up([total])
            assert total.tolist() == [SIZE] * 2
            with pytest.raises(RankError):
                collect(ranks)
            raise KeyError("broken")
        collect(ranks)

    first, *others = together(work)
    assert isinstance(first, KeyError)
    assert sorted(served) == [1, 2]
    assert [str(error) for error in others] == ["rank 0: KeyError: 'broken'"] * 2


def test_connections_that_end_within_a_pass_end_all_though_no_rank_has_failed() -> None:
    def work(ranks: Ranks) -> None:
        ranks.enter_pass()
        if ranks.rank == 1:
            ranks.end_passes()
        collect(ranks)

    for error in together(work):
        assert isinstance(error, RankError)


def test_a_round_after_a_pass_is_its_end() -> None:
    """A rank that fails later, and saves, leaves the connections as they are."""

    def work(ranks: Ranks) -> bool:
        gather(ranks)
        ranks.exchange(None)
        ranks.call("save", saving=True)
        ranks.exchange(None)
        return ranks.pass_group is not None

    assert together(work) == [True] * SIZE


def test_nccl_is_aborted_once_the_run_has_failed_and_a_rank_is_stuck_within_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU may wait for what the rank that failed does not send, and the main thread for the GPU."""
    monkeypatch.setattr(ranks_module, "STUCK_SECONDS", 0.0)
    reported = {"rank": 1, "reason": "broken"}
    states: list[tuple[bool, int, Any]] = [  # within a pass, works begun, what was reported
        (False, 1, reported),
        (True, 1, None),
        (True, 1, reported | {"terminated": True}),
        (True, 2, reported),
        (True, 2, reported),
    ]
    ranks, looks, failure = Ranks(0, 2), list[str](), None

    def sleep(seconds: float) -> None:
        nonlocal failure
        ranks._in_pass, ranks._waits, failure = states[len(looks)]
        looks.append("looked")

    ranks.store = SimpleNamespace(check=lambda keys: failure is not None, get=lambda key: json.dumps(failure))
    ranks.pass_group = SimpleNamespace(abort=lambda: looks.append("aborted"))
    monkeypatch.setattr(ranks_module, "time", SimpleNamespace(sleep=sleep))
    ranks_module.watch_passes(weakref.ref(ranks))
    assert looks == [*["looked"] * len(states), "aborted"]


@pytest.mark.parametrize("end", ["of rank 0", "of a process"])
def test_nccl_is_aborted_for_a_rank_that_is_stuck_when_another_process_ends(end: str) -> None:
    def check(keys: list[str]) -> bool:
        if end == "of rank 0":  # which has the store
            raise RuntimeError("connection reset")
        return False

    store = SimpleNamespace(check=check)
    ranks = Ranks(1, 2, store=store, lost=lambda: "the process of rank 2 was ended by signal 9.")
    assert not ranks.is_stuck(ranks._waits)
    ranks._in_pass = True
    assert ranks.is_stuck(ranks._waits)


def test_nothing_waits_for_a_collective_that_nccl_puts_into_the_present_stream() -> None:
    """`ProcessGroupNCCL::collective` ends with `return asyncOp ? work : nullptr`; `meta` stands for a GPU."""
    begun: list[tuple[str, bool]] = []

    def begin(collective: str, received: torch.Tensor, sent: torch.Tensor, options: Any) -> None:
        begun.append((collective, options.asyncOp))

    names = ("_allgather_base", "_reduce_scatter_base")
    group: Any = SimpleNamespace(**{name: partial(begin, name) for name in names})
    ranks, (one, two) = Ranks(0, 2, pass_group=group), (torch.empty(size, device="meta") for size in (2, 4))
    Gather(ranks)(two, one, group)
    Scatter(ranks)(one, two, group, None)
    assert begun == [(name, False) for name in names]


def rolling_out(ranks: Ranks, seconds: float = 20.0) -> None:
    """Wait as rank 0 does while it rolls out: it looks now and then for an error that ends the run."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (failure := ranks.failure()) is not None:
            raise failure
        time.sleep(0.02)


FAULTS = ("an error", "SIGTERM", "a delay")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_nobody_waits_for_long_and_all_learn_the_reason(fault: str) -> None:
    """At a round of any kind, on either rank, in 102 cases; while rank 0 rolls out, before patient rounds, too."""

    def run(seed: int) -> tuple[int, bool, list[Any]]:
        drawn = random.Random(f"{fault} {seed}")
        rounds = [drawn.randrange(len(ROUNDS)) for _ in range(4)]
        rank, number = (1 if fault == "SIGTERM" else drawn.randrange(2)), drawn.randrange(4)
        stopped = threading.Event()

        def work(ranks: Ranks) -> None:
            ranks.terminated = lambda: ranks.rank == rank and stopped.is_set()
            for at, kind in enumerate(rounds):
                if at == number:
                    strike(ranks)
                ROUNDS[kind](ranks)

        def strike(ranks: Ranks) -> None:
            if ranks.rank != rank:
                if rank > 0 and fault != "a delay":
                    rolling_out(ranks)
            elif fault == "an error":
                raise ValueError("broken")
            elif fault == "a delay":
                time.sleep(3.0)
            else:
                stopped.set()  # it waits in its round

        patient = rank == 0 and rounds[number] in PATIENT
        return rank, patient, together(work, timeout=1.5 if fault == "a delay" else 20.0, size=2)

    store()  # before threads ask for it
    with ThreadPoolExecutor(34) as pool:
        for rank, patient, results in pool.map(run, range(34)):
            if fault == "a delay" and patient:
                assert results == [None, None]
                continue
            assert all(isinstance(error, RankError) for error in results if not isinstance(error, ValueError)), results
            reasons = [str(error) for error in results]
            if fault == "an error":
                assert reasons.pop(rank) == "broken"
                assert f"rank {rank}: ValueError: broken" in reasons[0]
            elif fault == "SIGTERM":
                assert all("rank 1: SIGTERM" in reason for reason in reasons)
                assert isinstance(results[0], RankTerminatedError)


def test_an_error_that_reads_like_sigterm_is_none() -> None:
    def work(ranks: Ranks) -> None:
        if ranks.rank == 1:
            raise ValueError("nobody sent it: SIGTERM")
        rolling_out(ranks)

    error, _ = together(work, size=2)
    assert type(error) is RankError


@pytest.mark.slow
def test_a_rank_of_which_nothing_is_heard_while_rank_0_rolls_out_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits is heard of, however long it waits; one that is in no round yet, and reads, is waited for."""
    monkeypatch.setattr(ranks_module, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(ranks_module, "SILENT_SECONDS", 1.0)
    passed = []

    def work(ranks: Ranks) -> None:
        if ranks.rank == 0:
            for activity in ("reads", "waits"):
                rolling_out(ranks, 1.3)
                passed.append(activity)
                if activity == "reads":
                    ranks.exchange(None)
            try:
                rolling_out(ranks)
            finally:
                passed.append(f"hangs: {ranks.hangs}")
        time.sleep(1.5)
        ranks.exchange(None)
        beat, cut_off = ranks.beat, time.monotonic() + 1.5
        monkeypatch.setattr(ranks, "beat", lambda: beat() if time.monotonic() < cut_off else None)
        ranks.exchange(None, patient=True)

    error = together(work, size=2)[0]
    assert passed == ["reads", "waits", "hangs: True"]
    assert isinstance(error, RankError)
    assert str(error).startswith("rank 1 ")


def test_ranks_that_were_stopped_together_with_rank_0_have_as_long_as_ever_to_be_heard_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, beats = [100.0], {"beats/1": b"1 100.0"}
    store = SimpleNamespace(check=lambda keys: keys[0] in beats, get=lambda key: beats[key])
    monkeypatch.setattr(ranks_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ranks = Ranks(0, 2, store=store)

    def failure_after(seconds: float) -> RankError | None:
        end = now[0] + seconds
        while (failure := ranks.failure()) is None and now[0] < end:
            now[0] += 0.5
        return failure

    assert failure_after(20) is None
    now[0] += 3600  # both are stopped, and rank 0 is the first to go on
    assert failure_after(20) is None
    beats["beats/1"] = b"1 3750.0"
    assert failure_after(25) is None
    failure = failure_after(15)  # no further beat
    assert str(failure).startswith("rank 1 ")


def test_what_another_rank_fails_by_while_it_serves_the_last_call_ends_both() -> None:
    """Rank 0 saves a run that an error of rank 1 ended, which has no room for its share either."""

    def serve(name: str, arguments: tuple[Any, ...]) -> None:
        raise OSError("disk full")

    def work(ranks: Ranks) -> None:
        ranks.serve = serve
        if ranks.rank == 1:
            raise ValueError("broken")
        with pytest.raises(RankError, match="broken"):
            ranks.exchange(None)
        ranks.call("write", saving=True)
        ranks.exchange(None, at="the end of a checkpoint")

    saving, broken = together(work, size=2)
    assert (str(saving), str(broken)) == ("rank 1: OSError: disk full", "broken")


def test_errors_of_several_ranks_at_once_keep_their_own() -> None:
    def work(ranks: Ranks) -> None:
        ranks.exchange(None)
        if ranks.rank > 0:
            raise ValueError(f"of {ranks.rank}")
        ranks.exchange(None)

    first, *others = together(work)
    assert str(first) == "rank 1: ValueError: of 1; rank 2: ValueError: of 2"
    assert [str(error) for error in others] == ["of 1", "of 2"]


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "CAUSE_SECONDS", 0.0)

    def work(ranks: Ranks) -> None:
        if ranks.rank < 2:
            ranks.exchange(None)

    first, second, _ = together(work, timeout=0.3)
    assert "at an exchange" in str(first)
    assert isinstance(second, RankError)


@pytest.mark.slow
def test_within_a_limit_a_rank_that_hangs_is_named_and_nobody_is_waited_for_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks_module, "CAUSE_SECONDS", 0.0)
    monkeypatch.setattr(ranks_module, "LEAST_SECONDS", 0.0)

    def work(ranks: Ranks) -> Any:
        if ranks.rank == 1:
            time.sleep(0.6)
            with ranks.within(0.3):
                return ranks.exchange(None)
        with ranks.within(0.3), pytest.raises(RankError) as late:
            ranks.call("gather", "a weight")
        with pytest.raises(RankError) as later:
            ranks.call("gather", "a weight", saving=True)
        assert str(later.value) == str(late.value)
        return str(late.value)

    message, error = together(work, size=2)
    assert "a call for a weight (rank 1 hangs)" in message
    assert isinstance(error, RankError)


COLLECTIVES: dict[str, Callable[[Ranks], Any]] = {
    "allgather": lambda ranks: ranks.exchange(None),
    "broadcast": lambda ranks: ranks.broadcast(b"it"),
    "allreduce": lambda ranks: ranks.add_up([torch.ones(2)]),
    "_allgather_base": gather,
}


@pytest.mark.slow
def test_of_three_ranks_only_that_which_stops_before_a_collective_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank came to the round before, and waited there for those that were late."""
    monkeypatch.setattr(ranks_module, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(ranks_module, "LOOK", timedelta(seconds=0.02))
    monkeypatch.setattr(ranks_module, "CAUSE_SECONDS", 0.0)

    class Before:
        """A group that does something before a collective."""

        def __init__(self, group: Any, collective: str, first: Callable[[], None]) -> None:
            self._group, self._collective, self._first = group, collective, first

        def __getattr__(self, called: str) -> Any:
            if called == self._collective:
                self._first()
            return getattr(self._group, called)

    def reason(name: str) -> str:
        start, over = threading.Barrier(3), threading.Event()

        def work(ranks: Ranks) -> Any:
            def stop() -> None:
                assert over.wait(20)

            def wait_for_rank_2() -> None:  # its limit begins then, as a busy machine may be late
                key, end = f"{ranks_module.BEATS}/2", time.monotonic() + 20
                while not (ranks.store.check([key]) and ranks._has_come(ranks.store.get(key))):
                    assert time.monotonic() < end
                    time.sleep(0.01)

            if ranks.rank < 2:
                first = stop if ranks.rank else wait_for_rank_2
                ranks.group, ranks.pass_group = (
                    Before(group, name, first) for group in (ranks.group, ranks.pass_group)
                )
            start.wait(20)
            if ranks.rank == 2:
                time.sleep(0.1)
            try:
                with ranks.within(1.5 if ranks.rank == 0 else 20.0):
                    return COLLECTIVES[name](ranks)
            finally:
                if ranks.rank == 0:
                    ranks.group = ranks.pass_group = None  # as at the end of its process
                    over.set()

        return str(together(work)[0])

    store()  # before threads ask for it
    with ThreadPoolExecutor(len(COLLECTIVES)) as pool:
        reasons = dict(zip(COLLECTIVES, pool.map(reason, COLLECTIVES), strict=True))
    assert {name for name, why in reasons.items() if "(rank 1 hangs)" in why} == {*COLLECTIVES}, reasons


def test_a_part_with_a_limit_of_its_own_takes_no_time_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ranks = [100.0], Ranks(0, 2)
    monkeypatch.setattr(ranks_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def limit() -> float:
        """The seconds that work which begins now may take."""
        limits: list[timedelta] = []

        def begin(limit: timedelta) -> Any:
            limits.append(limit)
            return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

        ranks.wait(begin, "a wait")
        return limits[0].total_seconds()

    with ranks.within(10.0):
        now[0] += 4.0
        with ranks.within(30.0):
            now[0] += 20.0
            assert limit() == 10.0
        assert limit() == 6.0
    assert limit() == ranks_module.PATIENCE.total_seconds()


def test_others_are_not_to_blame_for_a_rank_that_comes_after_its_limit() -> None:
    def work(ranks: Ranks) -> Any:
        with ranks.within(0.1):
            time.sleep(0.2 if ranks.rank == 0 else 0.4)
            return ranks.exchange(ranks.rank)

    assert together(work, size=2) == [[0, 1]] * 2


@pytest.mark.slow
def test_rank_0_may_take_longer_than_the_time_out() -> None:
    def work(ranks: Ranks) -> Any:
        if ranks.rank == 0:
            time.sleep(0.6)
        return ranks.exchange(ranks.rank, patient=True)

    assert together(work, timeout=0.2, size=2) == [[0, 1]] * 2


@pytest.mark.parametrize("rank", range(2))
def test_a_process_that_ends_before_it_came_is_not_waited_for(rank: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    with pytest.raises(RankError, match="code 3"):
        join(address, Ranks(rank, 2, lost=lambda: "the other ended with code 3."), CPU, timedelta(seconds=30))

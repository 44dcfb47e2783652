"""Tensors over plain connections: what arrives, who is let in, and that breaking off wakes everybody."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_lightning.common import tcp_group
from trinity_lightning.common.tcp_group import TCPGroup, TCPReceiver
from trinity_lightning.config.engines import free_port

HERE = "127.0.0.1"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def joined(pool: ThreadPoolExecutor, receivers: int) -> tuple[TCPGroup, list[TCPReceiver]]:
    group = TCPGroup(HERE, free_port(HERE), receivers)
    opening = pool.submit(group.open)
    made = [TCPReceiver(**group.invitation(1)) for _ in range(receivers)]  # type: ignore[arg-type]
    opening.result(30)
    return group, made


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    receivers=st.integers(1, 3),
)
def test_every_receiver_gets_every_tensor_bit_for_bit(
    shapes: list[list[int]], dtype: torch.dtype, receivers: int
) -> None:
    sent = [(torch.randn(shape) * 9).to(dtype) for shape in shapes]
    with ThreadPoolExecutor(8) as pool:
        group, made = joined(pool, receivers)

        def receive(receiver: TCPReceiver) -> list[torch.Tensor]:
            tensors = [torch.full(shape, 1, dtype=dtype) for shape in shapes]
            for tensor in tensors:
                receiver.receive(tensor)
            return tensors

        receiving = [pool.submit(receive, receiver) for receiver in made]
        for tensor in sent:
            group.broadcast(tensor)
        for got in receiving:
            assert all(torch.equal(a, b) for a, b in zip(got.result(30), sent, strict=True))
        group.close()
        for receiver in made:
            receiver.close()


def test_it_listens_on_its_own_address_and_only_until_all_are_there(pool: ThreadPoolExecutor) -> None:
    port = free_port(HERE)
    group = TCPGroup(HERE, port, 1)
    assert listeners(port) == [f"0100007F:{port:04X}"]
    opening = pool.submit(group.open)
    receiver = TCPReceiver(**group.invitation(1))  # type: ignore[arg-type]
    opening.result(30)
    assert listeners(port) == []
    group.close()
    receiver.close()


def listeners(port: int) -> list[str]:
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [line[1] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"]


def test_who_was_not_invited_is_not_let_in(pool: ThreadPoolExecutor) -> None:
    group = TCPGroup(HERE, free_port(HERE), 1)
    opening = pool.submit(group.open)
    invitation: dict[str, Any] = group.invitation(1)
    with pytest.raises(ConnectionError):
        TCPReceiver(**{**invitation, "token": "x" * 64})
    assert not opening.done()
    receiver = TCPReceiver(**invitation)
    opening.result(30)
    receiving = pool.submit(receiver.receive, got := torch.zeros(2))
    group.broadcast(torch.ones(2))
    receiving.result(30)
    assert got.tolist() == [1, 1]
    group.close()
    receiver.close()


def test_who_says_the_token_slowly_holds_nobody_up(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_group, "TOKEN_SECONDS", 0.5)
    group = TCPGroup(HERE, free_port(HERE), 1)
    opening = pool.submit(group.open)
    invitation: dict[str, Any] = group.invitation(1)
    start = time.monotonic()
    with socket.create_connection((HERE, invitation["port"])) as slow:
        slow.sendall(b"x")
        receiver = TCPReceiver(**invitation)
        opening.result(30)
        assert time.monotonic() - start < 10
        assert slow.recv(1) == b""  # shown out
    group.close()
    receiver.close()


# -- breaking off -----------------------------------------------------------------------------------------------------


def blocked(pool: ThreadPoolExecutor, work: Callable[[], None]) -> Future[None]:
    future = pool.submit(work)
    time.sleep(0.2)
    assert not future.done()
    return future


def fails_soon(future: Future[None]) -> None:
    with pytest.raises(OSError, match=r"."):
        future.result(10)


def test_closing_wakes_who_waits_for_receivers(pool: ThreadPoolExecutor) -> None:
    group = TCPGroup(HERE, free_port(HERE), 1)
    opening = blocked(pool, group.open)
    group.close()
    fails_soon(opening)


def test_closing_wakes_a_sender_whose_receiver_hangs_and_the_other_receivers(pool: ThreadPoolExecutor) -> None:
    group, (idle, waiting) = joined(pool, 2)
    large = torch.zeros(50_000_000)
    sending = blocked(pool, lambda: group.broadcast(large))  # the first one never receives
    receiving = blocked(pool, lambda: waiting.receive(torch.empty(50_000_001)))
    group.close()
    group.close()
    fails_soon(sending)
    fails_soon(receiving)
    idle.close()
    waiting.close()


def test_closing_lets_go_whom_it_meets_in_the_door(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    group = TCPGroup(HERE, free_port(HERE), 1)
    welcome = group._welcome

    def closed_behind(connection: socket.socket) -> None:
        welcome(connection)
        group.close()

    monkeypatch.setattr(group, "_welcome", closed_behind)
    opening = pool.submit(group.open)
    receiver = TCPReceiver(**group.invitation(1))  # type: ignore[arg-type]
    fails_soon(opening)
    fails_soon(pool.submit(lambda: receiver.receive(torch.empty(1))))
    receiver.close()


def test_a_receiver_that_ends_fails_the_sender(pool: ThreadPoolExecutor) -> None:
    group, [receiver] = joined(pool, 1)
    sending = blocked(pool, lambda: group.broadcast(torch.zeros(50_000_000)))
    receiver.close()
    fails_soon(sending)
    group.close()


def test_nobody_there(pool: ThreadPoolExecutor) -> None:
    with pytest.raises(ConnectionRefusedError):
        TCPReceiver(HERE, free_port(HERE), "x" * 64)


def test_a_port_that_is_taken() -> None:
    group = TCPGroup(HERE, port := free_port(HERE), 1)
    with pytest.raises(OSError, match="in use"):
        TCPGroup(HERE, port, 1)
    group.close()

"""Tensors from one process to others over plain connections: no GPU, no file, and it can be broken off at any time."""

import contextlib
import hmac
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

TOKEN_SECONDS = 5.0  # for who connects to say the whole token
JOIN_SECONDS = 60.0  # for the sender to answer: it hears one after the other
WELCOME = b"\x01"
# A machine that has vanished is noticed after that many seconds of silence: begun to ask, between questions, in all.
IDLE_SECONDS, ASK_SECONDS, ASKED = 60, 10, 6


class TCPGroup:
    """The sending end. It takes connections only of who knows its token, and none once all are there.

    Args:
        address: of this process, as the receivers see it; it listens there and nowhere else.
        port: where it listens.
        receivers: how many there will be.

    Raises:
        OSError: it cannot listen there.
    """

    device = torch.device("cpu")

    def __init__(self, address: str, port: int, receivers: int) -> None:
        self._address, self._port, self._receivers = address, port, receivers
        self._token = secrets.token_hex(32)
        self._listening = socket.create_server((address, port), backlog=receivers)
        self._connections: list[socket.socket] = []
        self._closed = False
        self._senders = ThreadPoolExecutor(receivers, thread_name_prefix="weights")

    def invitation(self, workers: int) -> dict[str, str | int]:
        """What the workers of a server, however many, have to know: the arguments of `TCPReceiver`."""
        return {"address": self._address, "port": self._port, "token": self._token}

    def open(self) -> None:
        """Wait until all receivers have joined.

        Raises:
            OSError: `close` was called.
        """
        with self._listening:
            while len(self._connections) < self._receivers:
                connection, _ = self._listening.accept()
                try:
                    self._welcome(connection)
                except OSError:
                    connection.close()
                else:
                    self._connections.append(connection)
                    if self._closed:  # while this one was welcomed
                        self.close()
                        raise OSError("the group was closed")

    def _welcome(self, connection: socket.socket) -> None:
        """Let in who knows the token; ConnectionError, or TimeoutError, otherwise."""
        said = bytearray(len(self._token))
        _receive_into(connection, memoryview(said), time.monotonic() + TOKEN_SECONDS)
        if not hmac.compare_digest(bytes(said), self._token.encode()):
            raise ConnectionError("a wrong token")
        connection.sendall(WELCOME)
        _keep(connection)

    def broadcast(self, tensor: Tensor) -> None:
        """Send a contiguous CPU tensor to every receiver; returns once all of it is on its way.

        Raises:
            OSError: a receiver has ended, or `close` was called.
        """
        data = _bytes_of(tensor)
        list(self._senders.map(lambda connection: connection.sendall(data), self._connections))

    def flush(self) -> None:
        """Nothing is left to wait for: a receiver answers for what it has loaded."""

    def close(self) -> None:
        """Break off; what is under way in other threads fails at once, here and there. Twice is allowed."""
        self._closed = True
        for connection in (self._listening, *self._connections):
            _break(connection)
        self._senders.shutdown(wait=False)


class TCPReceiver:
    """A receiving end.

    Args:
        address: of the sender.
        port: of the sender.
        token: what the sender has invited with.

    Raises:
        OSError: nobody listens there, or one who does not take the token.
    """

    def __init__(self, address: str, port: int, token: str) -> None:
        self._connection = socket.create_connection((address, port), timeout=JOIN_SECONDS)
        try:
            self._connection.sendall(token.encode())
            _receive_into(self._connection, memoryview(bytearray(1)), time.monotonic() + JOIN_SECONDS)
        except OSError:
            self._connection.close()
            raise
        _keep(self._connection)

    def receive(self, tensor: Tensor) -> None:
        """Fill a contiguous CPU tensor with what was sent next.

        Raises:
            OSError: the sender has ended, or has broken off.
        """
        _receive_into(self._connection, _bytes_of(tensor))

    def close(self) -> None:
        """Break off; twice is allowed."""
        _break(self._connection)


def _receive_into(connection: socket.socket, room: memoryview, deadline: float | None = None) -> None:
    """Fill `room`; ConnectionError where the other side ends before it is full, TimeoutError after the deadline."""
    while room:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        count = connection.recv_into(room)
        if count == 0:
            raise ConnectionError("the other side of the connection has ended it")
        room = room[count:]


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _keep(connection: socket.socket) -> None:
    """No time limit, as weights come when a step is done; but notice a machine that has vanished."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", IDLE_SECONDS), ("TCP_KEEPINTVL", ASK_SECONDS), ("TCP_KEEPCNT", ASKED)):
        if hasattr(socket, option):  # some systems have other names for them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _break(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was not connected any more
        connection.shutdown(socket.SHUT_RDWR)  # `close` alone wakes no thread that waits in it
    connection.close()

"""Processes forked off the warm one, see `support/warm.py`: asked for, watched, and in the place of vLLM's servers."""

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from trinity_lightning.explorer.models import server


class Forked:
    """A process at work; used like a `subprocess.Popen`.

    Args:
        address: where the warm process listens.
        arguments: a module, or a file that ends in .py, and its command line.
        folder: where it works.
        environment: variables on top of those of the warm process.
        output: where what it prints goes.
        serves: whether it is a vLLM server: the leader of a session of its own, with a pipe as its `stdin`.
    """

    def __init__(
        self,
        address: str,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        output: IO[Any],
        serves: bool = False,
    ) -> None:
        command = {"folder": str(folder), "environment": dict(environment), "arguments": arguments, "serves": serves}
        reading, writing = os.pipe()
        self.stdin = os.fdopen(writing, "wb")
        if not serves:
            self.stdin.close()
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.connect(address)
        socket.send_fds(self._link, [json.dumps(command).encode()], [reading, output.fileno()])
        os.close(reading)
        self.pid = int(self._link.recv(64))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended; subprocess.TimeoutExpired if it has not by then."""
        if self.returncode is None:
            if not select.select([self._link], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = int(self._link.recv(64))
            self._link.close()
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code, or None while it is at work."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        """Send it a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, if it has not ended."""
        self.send_signal(signal.SIGKILL)
        self.wait()


def fork_servers(address: str, patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on, vLLM servers of this process are forked off the warm one that listens there."""

    def popen(command: Sequence[str], env: Mapping[str, str], stdout: IO[Any], **_: Any) -> Forked:
        arguments = command[command.index(str(server.MAIN)) :]
        return Forked(address, arguments, Path.cwd(), env, stdout, serves=True)

    patch(server, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))

"""A process forked off the warm one, see `support/warm.py`: asked for, and watched.

It imports nothing of the package: programs that only ask for one start at once.
"""

import json
import math
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self


class Forked:
    """A process at work; used like a `subprocess.Popen`.

    Args:
        address: where the warm process listens.
        arguments: a module, or a file that ends in .py, and its command line.
        folder: where it works.
        environment: variables on top of those of the warm process.
        output: where what it prints goes.
        errors: where what it prints as errors goes; None: there, too.
        serves: whether it is a vLLM server: the leader of a session of its own.
        asked: whether it has a pipe as its `stdin`, as servers do.
        leads: whether it leads a session, without being a server.
    """

    stdout: IO[str]

    def __init__(
        self,
        address: str,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        output: IO[Any],
        errors: IO[Any] | None = None,
        serves: bool = False,
        asked: bool = False,
        leads: bool = False,
    ) -> None:
        self.args = arguments
        command = {"folder": str(folder), "environment": dict(environment), "arguments": arguments}
        command |= {"serves": serves, "leads": leads}
        reading, writing = os.pipe()
        self.stdin = os.fdopen(writing, "w")
        if not (serves or asked):
            self.stdin.close()
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.connect(address)
        files = [reading, output.fileno(), (errors or output).fileno()]
        socket.send_fds(self._link, [json.dumps(command).encode()], files)
        os.close(reading)
        self.pid = int(self._link.recv(64))
        self.returncode: int | None = None
        self._one_reads = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """As `subprocess.Popen` does: close what is read from it, and wait."""
        self.stdout.close()
        self.wait()

    def poll(self) -> int | None:
        """Its exit code, or None while it is at work."""
        with self._one_reads:
            if self.returncode is None and select.select([self._link], [], [], 0)[0]:
                self.returncode = int(self._link.recv(64))
                self._link.close()
            return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Its exit code, once it has ended; subprocess.TimeoutExpired if it has not by then."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, if it has not ended."""
        self.send_signal(signal.SIGKILL)
        self.wait()

"""A vLLM server that this run starts and ends, reachable by this user alone."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from trinity_lightning.common.errors import ModelLoadError

MAIN = Path(__file__).with_name("server_main.py")
END_SECONDS = 10.0
ENDING_LOOKS, LOOK_SECONDS = 10, 0.05  # a process that was killed is still there for a moment after its connections
LOG_LINES = 15


class ServerProcess:
    """A process that serves on a socket in a private folder: no port is opened, and no other user can connect.

    It ends with this process, also where that is killed. The requests that change weights have no password: that is
    why the socket is not a port.

    Args:
        flags: command line of vLLM's server.
        environment: variables on top of this process's.
        log: where its output goes; None for the private folder.
        append: after what is there, of one that died.

    Attributes:
        socket: path of the Unix socket.
    """

    def __init__(
        self, flags: Sequence[str], environment: Mapping[str, str], log: Path | None = None, append: bool = False
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-"))  # mode 0700
        self.socket = self._folder / "socket"
        self._log = log or self._folder / "server.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a" if append else "w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(MAIN), "--uds", str(self.socket), *flags],
                env=os.environ | dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._process.poll() is not None

    def check(self) -> None:
        """Raise ModelLoadError, with the end of its log, where the process has ended."""
        if (code := self._process.poll()) is not None:
            raise ModelLoadError(f"the vLLM server ended with exit code {code}. The end of its log:\n{self.log_end()}")

    async def ended(self) -> str:
        """How it ended, " It was ended by signal 9." say; nothing while it runs."""
        for _ in range(ENDING_LOOKS):
            if (code := self._process.poll()) is not None:
                break
            await asyncio.sleep(LOOK_SECONDS)
        else:
            return ""
        killed = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f" It was ended by signal {-code}{killed}." if code < 0 else f" It ended with exit code {code}."

    def log_end(self) -> str:
        """The last lines of its output."""
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(lines[-LOG_LINES:])

    async def end(self) -> None:
        """Stop it and wait for its end; twice is allowed."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, END_SECONDS)
        self._signal(signal.SIGKILL)  # whatever of the group is left
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

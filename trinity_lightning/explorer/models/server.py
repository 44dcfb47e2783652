"""A vLLM server: a client for it, over a Unix socket or by URL, and the process of a server that this run starts."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from trinity_lightning.common.words import how_it_ended
from trinity_lightning.config.engines import EngineConfig
from trinity_lightning.errors import RolloutError

CONNECT_SECONDS = 2.0  # short: a connection is accepted by the kernel at once, even if the server is slow

# -- requests ----------------------------------------------------------------------------------------------------------


async def _nothing() -> str:
    return ""


class ServerClient:
    """Talks to one server; used on one event loop.

    Args:
        address: a URL, or the path of a Unix socket.
        diagnose: called after the server failed, for more to say about it, such as how its process ended.
    """

    def __init__(self, address: str, diagnose: Callable[[], Awaitable[str]] = _nothing) -> None:
        is_url = address.startswith(("http://", "https://"))
        # The number of connections has no limit, because the server decides how many requests it decodes at once. No
        # connection is kept: vLLM closes idle ones after 5 s, unnoticed while training holds the event loop.
        connector = (
            aiohttp.TCPConnector(limit=0, force_close=True)
            if is_url
            else aiohttp.UnixConnector(address, limit=0, force_close=True)
        )
        self._session = aiohttp.ClientSession(
            address if is_url else "http://engine", connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )
        self._diagnose = diagnose

    async def close(self) -> None:
        """Close the connections; twice is allowed."""
        await self._session.close()

    async def answers(self) -> bool:
        """True if the server accepts a connection and answers that it is healthy."""
        try:
            timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)
            async with self._session.get("/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def get(self, path: str) -> Any:
        """The server's answer; errors as in `post`."""
        return await self._request("GET", path)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The server's answer.

        Raises:
            ValueError: it refused the request.
            RolloutError: it failed, or does not answer any more.
        """
        return await self._request("POST", path, json=body)

    async def _request(self, method: str, path: str, **body: Any) -> Any:
        if self._session.closed:
            raise RolloutError("the engine was shut down")
        try:
            async with self._session.request(method, path, **body) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            diagnosis = await self._diagnose()
            message = f"the vLLM server does not answer: {type(error).__name__}: {error}.{diagnosis}"
            raise RolloutError(message) from error
        if response.status == 200:
            return json.loads(text) if response.content_type == "application/json" else None
        message = f"{path.partition('?')[0]}: status {response.status}: {_message(text)}"
        if 400 <= response.status < 500:
            raise ValueError(message)
        raise RolloutError(message + await self._diagnose())


def _message(text: str) -> str:
    """The message in the text of an error response."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]


# -- a process that this run starts and ends, reachable by this user alone ---------------------------------------------


MAIN = Path(__file__).with_name("server_main.py")
END_SECONDS = 10.0
LOG_LINES = 15


class ServerProcess:
    """A process that serves on a socket in a private folder: no port is opened, and no other user can connect.

    It ends with this process, even if this process is killed. It opens no port, because requests that change weights
    need no password.

    Args:
        flags: command line of vLLM's server.
        environment: variables on top of this process's.
        log: file for its output; None for one in the private folder.

    Attributes:
        address: path at which other processes find the server once it is `publish`ed; restarts do not change it.
    """

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str], log: Path | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-"))  # mode 0700
        self.address = self._folder / "socket"
        self._flags, self._environment = list(flags), dict(environment)
        self._log = log or self._folder / "server.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_bytes(b"")
        self._starts = 0
        self._start()

    @property
    def socket(self) -> Path:
        """The socket on which the server of the last start listens."""
        return self._folder / f"socket-{self._starts}"

    def _start(self) -> None:
        self._starts += 1
        with self._log.open("a") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(MAIN), "--uds", str(self.socket), *self._flags],
                env=os.environ | self._environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def start_again(self) -> None:
        """Start it once more; the log goes on."""
        await self.stop()  # processes that it started may still live
        self._start()

    def publish(self) -> None:
        """Let `address` lead to this server, which has its weights now."""
        new = self._folder / "new"
        new.symlink_to(self.socket)
        new.replace(self.address)

    @property
    def has_ended(self) -> bool:
        """True if the process has ended."""
        return self._process.poll() is not None

    def last_words(self) -> str:
        """A sentence on how it ended (" It was ended by signal 9.") and the end of its log; "" while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        return f" It {how_it_ended(code)}. The end of its log:\n{self.log_end()}"

    def log_end(self) -> str:
        """The last lines of its output."""
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(lines[-LOG_LINES:])

    async def end(self) -> None:
        """Stop it for good; twice is allowed."""
        await self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def stop(self) -> None:
        """Stop it and wait for its end; twice is allowed."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, END_SECONDS)
        self._signal(signal.SIGKILL)  # any process left in the group
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


# -- the command line and the cores of a server ------------------------------------------------------------------------


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """EngineArgs as flags of vLLM's server: `--max-model-len 256`, `--enforce-eager`, `--no-...`."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(_word, value)]
        else:
            flags += [f"--{flag}", _word(value)]
    return flags


def _word(value: Any) -> str:
    """A value, or an entry of a list, as a word of vLLM's command line; a mapping or list becomes JSON."""
    return json.dumps(value) if isinstance(value, Mapping | list) else str(value)


def server_cores(cores: Sequence[int], engine: EngineConfig, overlaps: bool) -> list[list[int]]:
    """The CPU cores of each server. Two processes that compute on one core slow each other down many times over.

    Args:
        cores: the cores that this process may use.
        engine: the section, with `cpu_cores` and `servers`.
        overlaps: True if the trainer computes while servers do.
    """
    usable = cores[len(cores) // 2 :] if overlaps else cores
    per_server = engine.cpu_cores or max(len(usable) // engine.servers, 1)
    return dealt(list(cores)[-per_server * engine.servers :], engine.servers, per_server)


def dealt(parts: Sequence[int], servers: int, per_server: int) -> list[list[int]]:
    """GPUs or cores dealt to servers in their order: [0, 1, 2, 3] for two servers -> [[0, 1], [2, 3]]."""
    return [[parts[(server * per_server + i) % len(parts)] for i in range(per_server)] for server in range(servers)]

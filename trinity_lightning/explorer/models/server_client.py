"""Requests to a vLLM server, over a Unix socket or to a URL, and what its answers mean."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from trinity_lightning.errors import RolloutError


async def _nothing() -> str:
    return ""


class ServerClient:
    """Talks to one server; used on one event loop.

    Args:
        where: a URL, or the path of a Unix socket.
        why: asked for what else is known after the server has failed: how its process ended, say.
    """

    def __init__(self, where: str, why: Callable[[], Awaitable[str]] = _nothing) -> None:
        is_url = where.startswith(("http://", "https://"))
        # No limit of connections: how many requests are decoded at once is the server's to decide.
        connector = aiohttp.TCPConnector(limit=0) if is_url else aiohttp.UnixConnector(where, limit=0)
        self._session = aiohttp.ClientSession(
            where if is_url else "http://engine", connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )
        self._why = why

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._session.closed

    async def close(self) -> None:
        """Close the connections; twice is allowed."""
        await self._session.close()

    async def answers(self) -> bool:
        """Whether the server is up."""
        try:
            async with self._session.get("/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def get(self, path: str) -> Any:
        """The server's answer; errors as of `post`."""
        return await self._request("GET", path)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The server's answer.

        Raises:
            ValueError: it refused the request.
            RolloutError: it failed, or does not answer any more.
        """
        return await self._request("POST", path, json=body)

    async def _request(self, method: str, path: str, **body: Any) -> Any:
        if self.closed:
            raise RolloutError("the engine was shut down")
        try:
            async with self._session.request(method, path, **body) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            why = await self._why()
            raise RolloutError(f"the vLLM server does not answer: {type(error).__name__}: {error}.{why}") from error
        if response.status == 200:
            return json.loads(text) if text else None
        message = f"{path.partition('?')[0]}: status {response.status}: {_message(text)}"
        if 400 <= response.status < 500:
            raise ValueError(message)
        raise RolloutError(message + await self._why())


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]

"""Middleware of vLLM's server that answers requests of this package, which vLLM's own paths do not answer."""

from __future__ import annotations

import asyncio
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.models.vllm_outputs import token_logprobs

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class ServerPath(ABC):
    """Base of middleware of vLLM's server that answers requests to one path, and passes all others on.

    A server is started with it by `--middleware` and the name of the class.

    Args:
        app: the server's application.

    Attributes:
        path: the path.
    """

    path: ClassVar[str]

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != self.path:
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        answering = asyncio.create_task(self._answer(scope["app"].state.engine_client, body))
        leaving = asyncio.create_task(_left(receive))
        # A client that goes away cancels its request, which aborts it in vLLM.
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not answering.done():
            answering.cancel()
            return
        status, answer = answering.result()
        head = {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        await send(head)
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _answer(self, engine: Any, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and content of the answer; errors have the form of vLLM's."""
        try:
            return 200, await self._answered(engine, json.loads(body or b"{}"))
        except (RolloutError, ValueError, TypeError, LookupError) as error:
            return 400, _error(error)
        except Exception as error:  # else the connection would end without a word
            return 500, _error(error)

    @abstractmethod
    async def _answered(self, engine: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request; {} to one that is empty, by which clients ask if there is such a path."""


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    return bytes(body)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(error: Exception) -> dict[str, Any]:
    return {"error": {"message": str(error) or type(error).__name__, "type": type(error).__name__}}


async def generated(
    engine: Any, rendered: Mapping[str, Any], sampling: Mapping[str, Any], request_id: str | None = None
) -> dict[str, Any]:
    """The answer of vLLM's engine: `choices`, or `logprobs` of the prompt's tokens but the first if they are asked for.

    Args:
        engine: the server's engine.
        rendered: the prompt, as the engine takes it.
        sampling: arguments of vLLM's SamplingParams.
        request_id: the request's name in the engine; None: any.

    Raises:
        ValueError: vLLM refuses the request.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    try:
        params = SamplingParams(flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
        output: Any = None
        async for output in engine.generate(rendered, params, request_id or uuid.uuid4().hex):  # noqa: B007
            pass
    except VLLMClientError as error:
        raise ValueError(str(error)) from error
    if output.prompt_logprobs is not None:
        return {"logprobs": token_logprobs(output.prompt_logprobs[1:])}  # the first token has none
    return {"choices": [_choice(sample) for sample in output.outputs]}


def _choice(sample: Any) -> dict[str, Any]:
    versions = (
        None if sample.weight_versions is None else [[span.start, span.version] for span in sample.weight_versions]
    )
    return {
        "index": sample.index,
        "token_ids": list(sample.token_ids),
        "logprobs": token_logprobs(sample.logprobs),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "versions": versions,
    }

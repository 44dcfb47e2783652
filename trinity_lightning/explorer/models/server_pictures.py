"""Prompts with pictures over HTTP, for vLLM servers: what the client sends, and the part of the server that answers.

vLLM's server takes exact token ids, or pictures with a text that it expands itself, but not both: in a later turn it
would expand the pictures of earlier turns anew, and take a token for pictures that the policy has sampled for a
picture's place. So the server is started with `--middleware` and the class `PicturePrompts`, which gives vLLM a prompt
in the same way as the engine in this process. Pictures are sent with the first prompt that has them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128_hexdigest

from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.pictures.prompt import Expansion, PicturePrompt
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.models.vllm_pictures import VLLMPictures, bytes_of, token_logprobs

if TYPE_CHECKING:
    from PIL import Image

PATH = "/picture_prompts"
UNKNOWN = "unknown"  # key of the answer to a request with pictures that the server does not have
MOST_BYTES = 1 << 30  # of processed pictures that a server keeps for later requests

# -- the client's side -------------------------------------------------------------------------------------------------


def request_of(prompt: PicturePrompt, sampling: Mapping[str, Any], with_pictures: bool) -> dict[str, Any]:
    """The body of a request to `PATH`.

    Args:
        prompt: the prompt.
        sampling: arguments of vLLM's SamplingParams.
        with_pictures: False: only their hashes are sent, for a server that may have them from an earlier request.
    """
    return {
        "token_ids": list(prompt),
        "expansions": [[start, _packed(expansion, with_pictures)] for start, expansion in prompt.expansions],
        "sampling": dict(sampling),
    }


def _packed(expansion: Expansion, with_pictures: bool) -> dict[str, Any]:
    packed: dict[str, Any] = {"key": _key_of(expansion), "length": len(expansion.token_ids)}
    if with_pictures:
        packed["unexpanded"] = expansion.unexpanded
        packed["pictures"] = [_packed_picture(picture.image) for picture in expansion.pictures]
    return packed


def _key_of(expansion: Expansion) -> str:
    digests = [picture.digest for picture in expansion.pictures]
    return xxh3_128_hexdigest(repr((expansion.unexpanded, digests)).encode())


def _packed_picture(image: Image.Image) -> dict[str, Any]:
    return {"size": image.size, "rgb": base64.b64encode(image.tobytes()).decode()}


# -- the server's side -------------------------------------------------------------------------------------------------

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class PicturePrompts:
    """Middleware of vLLM's server that answers requests to `PATH`, and passes all others on.

    Args:
        app: the server's application.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._known: KnownExpansions | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
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

    async def _answered(self, engine: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        if not request:  # a client that asks if there is such a path
            return {}
        if self._known is None:
            self._known = KnownExpansions(VLLMPictures(engine.renderer, {}))
        prompt, unknown = self._known.prompt_of(request)
        if unknown:
            return {UNKNOWN: unknown}
        rendered = await self._known.input_of(prompt)
        return await generated(engine, rendered, request["sampling"])


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


class KnownExpansions:
    """Texts with pictures that a server has processed, by their hashes, so that later requests need not bring them.

    Args:
        pictures: makes vLLM's inputs.
        most_bytes: bytes of processed pictures from which on the oldest are forgotten.
    """

    def __init__(self, pictures: VLLMPictures, most_bytes: int = MOST_BYTES) -> None:
        self._pictures, self._most_bytes = pictures, most_bytes
        self._expansions: OrderedDict[str, tuple[Expansion, int]] = OrderedDict()
        self._bytes = 0

    def prompt_of(self, request: Mapping[str, Any]) -> tuple[PicturePrompt, list[str]]:
        """The prompt of a request, and the hashes of texts with pictures that it does not bring and are not known."""
        token_ids, expansions, unknown = request["token_ids"], [], []
        for start, packed in request["expansions"]:
            if (known := self._expansions.get(packed["key"])) is not None:
                self._expansions.move_to_end(packed["key"])
                expansions.append((start, known[0]))
            elif "pictures" in packed:
                pictures = tuple(map(_unpacked_picture, packed["pictures"]))
                expanded = tuple(token_ids[start : start + packed["length"]])
                expansions.append((start, Expansion(tuple(packed["unexpanded"]), pictures, expanded, {})))
            else:
                unknown.append(packed["key"])
        return PicturePrompt(token_ids, expansions), unknown

    async def input_of(self, prompt: PicturePrompt) -> dict[str, Any]:
        """The prompt as vLLM's engine takes it; RolloutError: vLLM expands a picture to other tokens."""
        rendered = await self._pictures.awaited_input_of(prompt)
        for _, expansion in prompt.expansions:
            self._keep(expansion)
        return rendered

    def _keep(self, expansion: Expansion) -> None:
        if (key := _key_of(expansion)) in self._expansions:
            return
        size = bytes_of(self._pictures.rendered(expansion))
        self._expansions[key] = expansion, size
        self._bytes += size
        while self._bytes > self._most_bytes and len(self._expansions) > 1:
            self._bytes -= self._expansions.popitem(last=False)[1][1]


def _unpacked_picture(packed: Mapping[str, Any]) -> Picture:
    from PIL import Image

    return Picture(Image.frombytes("RGB", tuple(packed["size"]), base64.b64decode(packed["rgb"])))


async def generated(engine: Any, rendered: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of an engine: `choices`, or `logprobs` of the prompt's tokens but the first if `sampling` asks so."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
    output: Any = None
    async for output in engine.generate(rendered, params, f"picture-prompt-{uuid.uuid4().hex}"):  # noqa: B007
        pass
    if output.prompt_logprobs is not None:
        return {"logprobs": token_logprobs(output.prompt_logprobs[1:])}  # the first token has none
    return {"choices": [_choice(sample) for sample in output.outputs]}


def _choice(sample: Any) -> dict[str, Any]:
    return {
        "index": sample.index,
        "token_ids": list(sample.token_ids),
        "logprobs": token_logprobs(sample.logprobs),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }

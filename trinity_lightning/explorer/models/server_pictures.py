"""Prompts with pictures over HTTP, for vLLM servers: what the client sends, and the part of the server that answers.

vLLM's server takes exact token ids, or pictures with a text that it expands itself, but not both: in a later turn it
would expand the pictures of earlier turns anew, and take a token for pictures that the policy has sampled for a
picture's place. So the server is started with `--middleware` and the class `PicturePrompts`, which gives vLLM a prompt
in the same way as the engine in this process. Pictures are sent with the first prompt that has them.
"""

from __future__ import annotations

import asyncio
import base64
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128_hexdigest

from trinity_lightning.common.pictures.prompt import Expansion, PicturePrompt
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.models.server_path import ServerPath, generated
from trinity_lightning.explorer.models.vllm_pictures import bytes_of, check_same, joined_input, unexpanded_prompt

if TYPE_CHECKING:
    from PIL import Image

    from trinity_lightning.explorer.models.server import ServerClient

PATH = "/picture_prompts"
UNKNOWN = "unknown"  # key of the answer to a request with pictures that the server does not have
PICTURES = "pictures"  # key of a request's text that is sent with its pictures
MOST_BYTES = 1 << 30  # of processed pictures that a server keeps for later requests


class Shared:
    """Runs coroutines by a key: who asks for one that is running waits for it, and has its result or error.

    It goes on if those who wait for it are cancelled.
    """

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}

    async def result(self, key: Hashable, start: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The result of the coroutine of this key, which is started unless it is running."""
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(start())
            self._tasks[key].add_done_callback(partial(self._end, key))
        return await asyncio.shield(self._tasks[key])

    def _end(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # asyncio logs an error that nobody has looked at, as those who wait may be gone


# -- the client's side -------------------------------------------------------------------------------------------------


class PictureClient:
    """Asks a server about prompts with pictures, each of which is sent once, however many ask at the same time.

    Args:
        client: the connection to the server.
        processor_args: arguments of the model's processor, the same as the trainer's.
    """

    def __init__(self, client: ServerClient, processor_args: Mapping[str, Any]) -> None:
        self._client, self._processor_args = client, processor_args
        self._uploads = Shared()

    async def check(self) -> None:
        """Ask if the server takes pictures.

        Raises:
            ValueError: it does not.
            RolloutError: it does not answer.
        """
        await self._client.post(PATH, {})

    async def answer(
        self, prompt: PicturePrompt, sampling: Mapping[str, Any], request_id: str | None = None
    ) -> dict[str, Any]:
        """The server's answer for a prompt, see `generated`; its pictures are sent unless the server has them.

        Args:
            prompt: the prompt.
            sampling: arguments of vLLM's SamplingParams.
            request_id: the request's name in the server's engine; None: any.

        Raises:
            RolloutError: the server refused the prompt, or failed.
        """
        post = partial(self._post, prompt, sampling, request_id=request_id)
        answer = await post()
        if unknown := tuple(answer.get(UNKNOWN, ())):
            # In a request of its own, since other rollouts of the prompt wait for it, and not for what is generated.
            await self._uploads.result(unknown, partial(self._post, prompt, None, unknown))
            answer = await post()
        if UNKNOWN in answer:  # it has forgotten some already, as it keeps no more
            answer = await post(None)
        return answer

    async def _post(
        self,
        prompt: PicturePrompt,
        sampling: Mapping[str, Any] | None,
        shown: Collection[str] | None = (),
        request_id: str | None = None,
    ) -> dict[str, Any]:
        body = await asyncio.to_thread(request_of, prompt, sampling, self._processor_args, shown)
        if request_id is not None:
            body["id"] = request_id
        try:
            return await self._client.post(PATH, body)
        except ValueError as error:
            raise RolloutError(f"the vLLM server refuses a prompt with pictures: {error}") from error


def request_of(
    prompt: PicturePrompt,
    sampling: Mapping[str, Any] | None,
    processor_args: Mapping[str, Any],
    shown: Collection[str] | None = (),
) -> dict[str, Any]:
    """The body of a request to `PATH`.

    Args:
        prompt: the prompt.
        sampling: arguments of vLLM's SamplingParams; None: the server is to keep the pictures that are sent, no more.
        processor_args: arguments of the model's processor.
        shown: hashes of the texts whose pictures are sent, as an answer has them by `UNKNOWN`; None: those of all.
    """
    texts = [[start, _packed(expansion, processor_args, shown)] for start, expansion in prompt.expansions]
    if sampling is None:
        texts = [text for text in texts if PICTURES in text[1]]
    return {
        "token_ids": list(prompt),
        "texts": texts,
        "processor_args": dict(processor_args),
        "sampling": None if sampling is None else dict(sampling),
    }


def _packed(expansion: Expansion, processor_args: Mapping[str, Any], shown: Collection[str] | None) -> dict[str, Any]:
    digests = [picture.digest for picture in expansion.pictures]
    content = (expansion.unexpanded, digests, sorted(processor_args.items()))
    packed: dict[str, Any] = {"key": xxh3_128_hexdigest(repr(content).encode()), "length": len(expansion.token_ids)}
    if shown is None or packed["key"] in shown:
        packed["unexpanded"] = expansion.unexpanded
        packed[PICTURES] = [_packed_picture(picture.image) for picture in expansion.pictures]
    return packed


def _packed_picture(image: Image.Image) -> dict[str, Any]:
    return {"size": image.size, "rgb": base64.b64encode(image.tobytes()).decode()}


# -- the server's side -------------------------------------------------------------------------------------------------


class PicturePrompts(ServerPath):
    """Middleware of vLLM's server that answers requests to `PATH`, and passes all others on."""

    path = PATH
    _known: KnownPictures | None = None

    async def _answered(self, engine: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        if not request:  # a client that asks if there is such a path
            return {}
        if self._known is None:
            self._known = KnownPictures(engine.renderer)
        if unknown := self._known.unknown(request):
            return {UNKNOWN: unknown}
        prompt = await self._known.input_of(request)
        if request["sampling"] is None:
            return {}
        return await generated(engine, prompt, request["sampling"], request.get("id"))


class KnownPictures:
    """Keeps vLLM's inputs of texts with pictures by their hashes, so that later requests need not bring the pictures.

    The pictures themselves are not kept: they may take a hundred times as much memory.

    Args:
        renderer: vLLM's renderer of the engine.
        most_bytes: bytes of tensors from which on the oldest are forgotten.
    """

    def __init__(self, renderer: Any, most_bytes: int = MOST_BYTES) -> None:
        self._renderer, self._most_bytes = renderer, most_bytes
        self._texts: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._bytes = 0
        self._rendering = Shared()

    def unknown(self, request: Mapping[str, Any]) -> list[str]:
        """Hashes of the texts whose pictures a request does not bring, and that are not known."""
        return [text["key"] for _, text in request["texts"] if PICTURES not in text and text["key"] not in self._texts]

    async def input_of(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The prompt of a request without `unknown` texts as vLLM's engine takes it.

        Raises:
            RolloutError: vLLM expands a picture to other tokens.
        """
        token_ids, args, texts = request["token_ids"], request["processor_args"], request["texts"]
        rendered: dict[str, Mapping[str, Any]] = {}
        for key in (text["key"] for _, text in texts):
            if key in self._texts:  # taken now, as it may be forgotten while others are rendered
                self._texts.move_to_end(key)
                rendered[key] = self._texts[key]
        for start, text in texts:
            if (key := text["key"]) not in rendered:
                rendered[key] = await self._rendering.result(key, partial(self._render, text, args))
            check_same(token_ids[start : start + text["length"]], rendered[key]["prompt_token_ids"])
        return joined_input(token_ids, [(start, rendered[text["key"]]) for start, text in texts])

    async def _render(self, text: Mapping[str, Any], args: Mapping[str, Any]) -> Mapping[str, Any]:
        if (key := text["key"]) in self._texts:
            return self._texts[key]
        images = [_unpacked_picture(packed) for packed in text[PICTURES]]
        unexpanded = unexpanded_prompt(text["unexpanded"], images, args)
        # vLLM's own cache, which a server elsewhere may have, would give None for a picture that it has seen before.
        [rendered] = await self._renderer.render_cmpl_async([unexpanded], skip_mm_cache=True)
        self._texts[key] = rendered
        self._bytes += bytes_of(rendered)
        while self._bytes > self._most_bytes and len(self._texts) > 1:
            self._bytes -= bytes_of(self._texts.popitem(last=False)[1])
        return rendered


def _unpacked_picture(packed: Mapping[str, Any]) -> Image.Image:
    from PIL import Image

    return Image.frombytes("RGB", tuple(packed["size"]), base64.b64decode(packed["rgb"]))

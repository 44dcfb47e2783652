"""OpenAI's client over a model of this process: an ordinary `openai.AsyncOpenAI` whose requests never leave it.

A response carries, beside what OpenAI's API has, the exact tokens: `response.prompt_token_ids`, and for each choice
`choice.token_ids` and `choice.token_logprobs`.
"""

import asyncio
import importlib
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError, PromptTooLongError, RolloutError
from trinity_lightning.explorer.models.tool_calls import parse_tool_calls

# Path and body of a request -> HTTP status and body of the response.
Answer = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]
# Called for every call: messages, tools, sampling settings, completions.
Record = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any], list[Completion]], None]

ROOT = "/v1"  # of the paths of requests
MODEL_ID = "policy"  # there is one model: whatever `model=` says, it answers

# Passed to the engine by the same name, unless they have the value that changes nothing.
_SAMPLING: dict[str, Any] = {
    "temperature": None,
    "stop": None,
    "seed": None,
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}
_OWN = ("messages", "model", "tools", "n", "max_tokens", "max_completion_tokens", "logprobs")
# Understood, with these values only.
_FIXED: dict[str, tuple[Any, ...]] = {
    "stream": (False, None),
    "top_logprobs": (0, None),
    "tool_choice": ("auto", "none", None),
    "response_format": ({"type": "text"}, None),
    "logit_bias": ({}, None),
}
_IGNORED = ("user", "metadata", "store", "parallel_tool_calls", "return_token_ids", "safety_identifier")


class ChatCompletions:
    """Answers requests of OpenAI's chat completions API with a model.

    Args:
        model: what generates.
        sampling: settings of calls that do not give them themselves.
        record: called for every call that succeeded.
    """

    def __init__(
        self, model: InferenceModel, sampling: Mapping[str, Any] | None = None, record: Record | None = None
    ) -> None:
        self._model = model
        self._sampling = dict(sampling or {})
        self._record = record
        self._responses = itertools.count()
        self._tool_calls = itertools.count()

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of the response: what the model raises is an error of the API, with its message."""
        try:
            if path.endswith("/models"):
                return 200, {"object": "list", "data": [_model_card()]}
            if not path.endswith("/chat/completions"):
                message = f"there is no {path} here: only chat.completions.create and models.list."
                return 404, api_error(message, "unknown")
            return 200, await self._complete(body)
        except PromptTooLongError as error:
            return 400, api_error(str(error), "context_length_exceeded")
        except ValueError as error:  # ConfigError is one, and so is what engines refuse
            return 400, api_error(str(error), "invalid_request")
        except Exception as error:
            return 500, api_error(f"{type(error).__name__}: {error}", "engine_failed")

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        _check(body)
        messages, n = body["messages"], body.get("n") or 1
        tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
        prompt = await self._model.render(messages, tools)
        settings = {name: body[name] for name, neutral in _SAMPLING.items() if body.get(name) not in (None, neutral)}
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or self._sampling.get("max_tokens")
        # As in OpenAI's API: without a limit, up to the end of the context.
        settings["max_tokens"] = limit or max(self._model.max_model_len - len(prompt), 1)
        completions = await self._model.generate(prompt, n, **settings)
        if any(completion.finish_reason == "abort" for completion in completions):
            raise RolloutError("the engine aborted the request before its end")
        if self._record is not None:
            self._record(messages, tools, settings, completions)
        return self._response(body, completions, reads_tools=tools is not None)

    def _response(self, body: dict[str, Any], completions: Sequence[Completion], reads_tools: bool) -> dict[str, Any]:
        prompt = list(completions[0].prompt_token_ids)
        written = sum(len(completion.token_ids) for completion in completions)
        return {
            "id": f"chatcmpl-{next(self._responses)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or MODEL_ID,
            "choices": [
                self._choice(index, completion, reads_tools, bool(body.get("logprobs")))
                for index, completion in enumerate(completions)
            ],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": written,
                "total_tokens": len(prompt) + written,
            },
            "prompt_token_ids": prompt,
        }

    def _choice(self, index: int, completion: Completion, reads_tools: bool, with_logprobs: bool) -> dict[str, Any]:
        text, calls = parse_tool_calls(completion.text) if reads_tools else (completion.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call{next(self._tool_calls):05d}",  # nine characters: some templates insist on that
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for call in calls
            ]
        return {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls else completion.finish_reason,
            "logprobs": _logprobs(completion) if with_logprobs else None,
            "token_ids": list(completion.token_ids),
            "token_logprobs": list(completion.logprobs),
        }


def async_client(answer: Answer) -> Any:
    """An `openai.AsyncOpenAI` whose requests `answer` answers. It never retries unless asked to (`with_options`).

    Its `model_path` is what to give as `model=`.

    Raises:
        ConfigError: the package openai is not installed.
    """
    openai, http = _libraries()

    async def handle(request: Any) -> Any:
        limit = request.extensions.get("timeout", {}).get("read")
        try:
            async with asyncio.timeout(limit):
                status, body = await answer(request.url.path, _body_of(request))
        except TimeoutError as error:
            raise http.ReadTimeout(f"no response within {limit:g} s", request=request) from error
        return http.Response(status, json=body)

    own = openai.DefaultAsyncHttpxClient(transport=http.MockTransport(handle), trust_env=False)
    return _named(openai.AsyncOpenAI(**_ADDRESS, http_client=own))


def blocking_client(answer: Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]) -> Any:
    """An `openai.OpenAI` whose requests `answer` answers; see `async_client`. Its time-outs have no effect.

    Raises:
        ConfigError: the package openai is not installed.
    """
    openai, http = _libraries()

    def handle(request: Any) -> Any:
        status, body = answer(request.url.path, _body_of(request))
        return http.Response(status, json=body)

    own = openai.DefaultHttpxClient(transport=http.MockTransport(handle), trust_env=False)
    return _named(openai.OpenAI(**_ADDRESS, http_client=own))


def _named(client: Any) -> Any:
    client.model_path = MODEL_ID
    return client


# A run has a time-out of its own, and a retried call would draw another sample: both only where they are asked for.
_ADDRESS: dict[str, Any] = {
    "api_key": "none",
    "base_url": f"http://in-this-process{ROOT}",
    "timeout": None,
    "max_retries": 0,
}


def _libraries() -> tuple[Any, Any]:
    """openai, and the HTTP library that it is built on: httpx, or in later versions httpx2."""
    try:
        import openai
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the OpenAI client needs the package openai: `pip install 'trinity-lightning[openai]'`."
        ) from error
    parent = openai.DefaultAsyncHttpxClient.__mro__[1]
    return openai, importlib.import_module(parent.__module__.partition(".")[0])


def _body_of(request: Any) -> dict[str, Any]:
    return json.loads(request.content) if request.content else {}


def _check(body: Mapping[str, Any]) -> None:
    """Refuse what would silently be left out."""
    known = (*_OWN, *_SAMPLING, *_FIXED, *_IGNORED)
    for name, value in body.items():
        if name not in known:
            raise ConfigError(unknown_name("argument of chat.completions.create", name, known))
        if name in _FIXED and value not in _FIXED[name]:
            raise ConfigError(
                f"chat.completions.create({name}={value!r}) is not supported by a model in this process: leave it out."
            )
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise ConfigError("chat.completions.create needs messages: a list that is not empty.")


def _logprobs(completion: Completion) -> dict[str, Any]:
    """Tokens by their ids, which a piece of text need not tell apart."""
    content = [
        {"token": f"token_id:{token}", "bytes": None, "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _model_card() -> dict[str, Any]:
    return {"id": MODEL_ID, "object": "model", "created": 0, "owned_by": "trinity_lightning"}


def api_error(message: str, code: str) -> dict[str, Any]:
    """The body of a response of OpenAI's API that says what failed."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": code, "param": None}}

"""OpenAI's API on both sides: a client for a model of this process, and a model behind an endpoint."""

import asyncio
import importlib
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.common.messages import TEMPLATE_VARIABLES, Conversation
from trinity_lightning.common.pictures.parts import count_places, with_data_urls
from trinity_lightning.common.thoughts import answer_part
from trinity_lightning.config.chat_template import check_template_variables
from trinity_lightning.config.engines import Capabilities
from trinity_lightning.config.explorer import NEUTRAL_SAMPLING
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError, ModelLoadError, PromptTooLongError, RolloutError
from trinity_lightning.explorer.models.tool_calls import parse_tool_calls

logger = logging.getLogger(__name__)

# -- a model of this process: an ordinary `openai.AsyncOpenAI` whose requests never leave the process ------------------


# Answers a request: path and body -> HTTP status and body of the response.
Answer = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]

ROOT = "/v1"  # beginning of the paths of requests
MODEL_ID = "policy"  # name of the one model; requests may give any other name

# Arguments that are passed to the engine by the same name, unless they have the value that changes nothing.
_TEXT = ("skip_special_tokens", "include_stop_str_in_output")  # vLLM's names: how tokens become text
_SAMPLING: dict[str, Any] = {**dict.fromkeys(("temperature", "stop", "seed", *_TEXT)), **NEUTRAL_SAMPLING}
_READ_HERE = ("messages", "model", "tools", "n", "max_tokens", "max_completion_tokens", "logprobs", TEMPLATE_VARIABLES)
# Arguments that are accepted with these values only; and arguments that are accepted and ignored.
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

    Messages may have pictures, as data URLs. Like vLLM's server it takes variables of the chat template:
    `extra_body={"chat_template_kwargs": {...}}`. Unlike OpenAI's, a response has the exact tokens:
    `response.prompt_token_ids`, and for each choice `choice.token_ids` and `choice.token_logprobs`. Besides,
    `choice.answer` is the text behind the choice's thoughts; it is null if the response was cut off in them.

    Args:
        model: the model that generates.
        sampling: settings for calls that do not set them.
    """

    def __init__(self, model: InferenceModel, sampling: Mapping[str, Any] | None = None) -> None:
        self._model = model
        self._sampling = dict(sampling or {})
        self._responses = itertools.count()
        self._tool_calls = itertools.count()

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of the response; the model's errors become error responses of the API."""
        try:
            if path.endswith("/models"):
                model = {"id": MODEL_ID, "object": "model", "created": 0, "owned_by": "trinity_lightning"}
                return 200, {"object": "list", "data": [model]}
            # A server takes plain completions as they are (`VLLMServerEngine.complete`).
            if path == f"{ROOT}/completions" and (complete := getattr(self._model, "complete", None)):
                return 200, await complete(body)
            if not path.endswith("/chat/completions"):
                message = f"there is no {path} here: only chat.completions.create and models.list."
                return 404, api_error(message, "unknown")
            return 200, await self._complete(body)
        except PromptTooLongError as error:
            return 400, api_error(str(error), "context_length_exceeded")
        except ValueError as error:  # such as a ConfigError, or a request that the engine refuses
            return 400, api_error(str(error), "invalid_request")
        except Exception as error:
            return 500, api_error(f"{type(error).__name__}: {error}", "engine_failed")

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        _check(body)
        messages, n = body["messages"], body.get("n") or 1
        tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
        variables = check_template_variables(TEMPLATE_VARIABLES, body.get(TEMPLATE_VARIABLES) or {})
        conversation = Conversation(messages, tools, variables).with_pictures([])
        prompt = await self._render(conversation)
        settings = {name: body[name] for name, neutral in _SAMPLING.items() if body.get(name) not in (None, neutral)}
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or self._sampling.get("max_tokens")
        # As in OpenAI's API: without a limit, up to the end of the context.
        settings["max_tokens"] = limit or max(self._model.max_model_len - len(prompt), 1)
        completions = await self._model.generate(prompt, n, **settings)
        if any(completion.finish_reason == "abort" for completion in completions):
            raise RolloutError("the engine aborted the request before its end")
        self._record(list(conversation), tools, settings, completions)
        return self._response(body, completions, reads_tools=tools is not None)

    async def _render(self, conversation: Conversation) -> list[int]:
        """The prompt of a conversation."""
        return await self._model.render(conversation, conversation.tools or None)

    def _record(self, messages: Any, tools: Any, settings: Mapping[str, Any], completions: list[Completion]) -> None:
        """Note a call that succeeded, which `RecordedCalls` keeps."""

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
            "answer": answer_part(completion.text),
        }


def async_client(answer: Answer) -> Any:
    """An `openai.AsyncOpenAI` whose requests `answer` answers. It retries only if `with_options` asks for it.

    Its `model_path` is the value for `model=`.

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

    http_client = openai.DefaultAsyncHttpxClient(transport=http.MockTransport(handle), trust_env=False)
    return _with_model_path(openai.AsyncOpenAI(**_CLIENT_SETTINGS, http_client=http_client))


def blocking_client(answer: Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]) -> Any:
    """An `openai.OpenAI` whose requests `answer` answers; see `async_client`. Its time-outs have no effect."""
    openai, http = _libraries()

    def handle(request: Any) -> Any:
        status, body = answer(request.url.path, _body_of(request))
        return http.Response(status, json=body)

    http_client = openai.DefaultHttpxClient(transport=http.MockTransport(handle), trust_env=False)
    return _with_model_path(openai.OpenAI(**_CLIENT_SETTINGS, http_client=http_client))


def _with_model_path(client: Any) -> Any:
    client.model_path = MODEL_ID
    return client


# No time-out, because a run has its own; no retries, because a retried call would draw another sample.
_CLIENT_SETTINGS: dict[str, Any] = {
    "api_key": "none",
    "base_url": f"http://in-this-process{ROOT}",
    "timeout": None,
    "max_retries": 0,
}


def _openai() -> Any:
    try:
        import openai
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the OpenAI client needs the package openai: `pip install 'trinity-lightning[openai]'`."
        ) from error
    return openai


def _libraries() -> tuple[Any, Any]:
    """The package openai, and the HTTP library that it is built on: httpx, or in later versions httpx2."""
    openai = _openai()
    parent = openai.DefaultAsyncHttpxClient.__mro__[1]
    return openai, importlib.import_module(parent.__module__.partition(".")[0])


def _body_of(request: Any) -> dict[str, Any]:
    return json.loads(request.content) if request.content else {}


def _check(body: Mapping[str, Any]) -> None:
    """Refuse arguments that would silently be ignored."""
    known = (*_READ_HERE, *_SAMPLING, *_FIXED, *_IGNORED)
    for name, value in body.items():
        if name not in known:
            raise ConfigError(unknown_name("argument of chat.completions.create", name, known), key=name)
        if name in _FIXED and value not in _FIXED[name]:
            raise ConfigError(
                f"chat.completions.create({name}={value!r}) is not supported by a model in this process",
                key=name,
                fix="leave it out",
            )
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise ConfigError("chat.completions.create needs messages: a list that is not empty.", key="messages")


def _logprobs(completion: Completion) -> dict[str, Any]:
    """Log-probabilities in OpenAI's form. Tokens are named by their ids, because two tokens may have the same text."""
    content = [
        {"token": f"token_id:{token}", "bytes": None, "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def api_error(message: str, code: str) -> dict[str, Any]:
    """The body of an error response of OpenAI's API."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": code, "param": None}}


# -- a model behind an endpoint: a judge, a user, a teacher that only talks --------------------------------------------


LOAD_SECONDS = 10.0
# Sampling settings of vLLM that OpenAI's API lacks; servers that know them read them from the request's body.
_EXTRA = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", *_TEXT)


class OpenAIModel:
    """An auxiliary `InferenceModel` that only chats. An endpoint gives no tokens, so that nothing is trained on them.

    Args:
        url: the endpoint's address, such as https://api.openai.com/v1.
        model: the name that requests carry.
        api_key_env: environment variable that holds the key; None sends none, for your own servers. There is no
            default: a key goes only where it was meant for.

    Raises:
        ConfigError: the package openai is not installed, or the key is not set; or a call other than `chat` is made.
    """

    capabilities = Capabilities(overlaps_training=True, picklable=True, sync_methods=(), keys=())
    restarts: int | None = None
    model_version = 0
    max_model_len = sys.maxsize  # the endpoint knows

    def __init__(self, url: str, model: str, api_key_env: str | None = None) -> None:
        self._url = url
        self._model = model
        self._api_key_env = api_key_env
        # Made now, so that a missing package or key is reported at once; made anew by a request after a shutdown.
        self._client: Any = self.get_openai_async_client()

    async def load(self) -> None:
        """Check that the endpoint answers; it may refuse to list its models.

        Raises:
            ModelLoadError: the endpoint does not answer, or does not take the key.
        """
        from openai import APIConnectionError, AuthenticationError, NotFoundError, OpenAIError

        try:
            await self._opened().with_options(timeout=LOAD_SECONDS, max_retries=1).models.list()
        except (APIConnectionError, AuthenticationError) as error:
            cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
            raise ModelLoadError(
                f"the endpoint {self._url} (model '{self._model}') cannot be used: {str(error).rstrip('.')}{cause}. Is "
                "it started, and is the key its own (api_key_env)?"
            ) from error
        except NotFoundError:
            logger.debug("the endpoint %s has no list of models.", self._url)
        except (OpenAIError, ValueError) as error:
            logger.warning("the endpoint %s answers, but does not list its models: %s", self._url, error)

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, n: int = 1, **sampling: Any
    ) -> list[Completion]:
        """n answers to a conversation, without tokens.

        Raises:
            RolloutError: the endpoint does not answer, or answers something else; the message names it.
        """
        from openai import OpenAIError

        extra = {name: value for name, value in sampling.items() if name in _EXTRA}
        plain = {name: value for name, value in sampling.items() if name not in _EXTRA and value is not None}
        if tools:
            plain["tools"] = tools
        if count_places(messages):
            messages = await asyncio.to_thread(with_data_urls, messages)
        try:
            response = await self._opened().chat.completions.create(
                model=self._model, messages=messages, n=n, extra_body=extra or None, **plain
            )
        except (OpenAIError, ValueError) as error:  # a ValueError: the body is no JSON
            raise RolloutError(self._failure(error)) from error
        return [
            Completion((), (), (), choice.message.content or "", choice.finish_reason) for choice in response.choices
        ]

    def get_openai_async_client(self) -> Any:
        """An ordinary `openai.AsyncOpenAI` whose `endpoint` is its url, and `model_path` the model's name."""
        client = _openai().AsyncOpenAI(base_url=self._url, api_key=self._key())
        client.model_path, client.endpoint = self._model, self._url
        return client

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of the endpoint's response to a request; `model` in its body is replaced by this one."""
        from openai import APIStatusError, OpenAIError

        if body.get("stream"):
            return 400, api_error("stream=True is not supported here: leave it out.", "invalid_request")
        client, place = self._opened(), path.removeprefix(ROOT)
        try:
            if not body:
                return 200, await client.get(place, cast_to=object)
            return 200, await client.post(place, cast_to=object, body=body | {"model": self._model})
        except (OpenAIError, ValueError) as error:
            status = error.status_code if isinstance(error, APIStatusError) else 500
            return status, api_error(self._failure(error), "endpoint_failed")

    def _failure(self, error: Exception) -> str:
        return f"the endpoint {self._url} (model '{self._model}') failed: {type(error).__name__}: {error}"

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        raise self._only_chats("generate")

    async def render(self, *_: Any, **__: Any) -> NoReturn:
        raise self._only_chats("render")

    async def logprobs(self, *_: Any, **__: Any) -> NoReturn:
        raise self._only_chats("logprobs")

    async def sync_weights(self, *_: Any, **__: Any) -> NoReturn:
        raise self._only_chats("sync_weights")

    def _only_chats(self, call: str) -> ConfigError:
        return ConfigError(
            f"{call}: the endpoint {self._url} only chats",
            key="auxiliary_models",
            fix="leave out `url` of the auxiliary model: the run starts it",
        )

    async def shutdown(self) -> None:
        """Close the connections; twice is allowed, and the next request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _opened(self) -> Any:
        if self._client is None:
            self._client = self.get_openai_async_client()
        return self._client

    def _key(self) -> str:
        if self._api_key_env is None:
            return "none"  # openai would take OPENAI_API_KEY for a key that is missing
        if not (key := os.environ.get(self._api_key_env)):
            raise ConfigError(
                f"api_key_env: the environment variable {self._api_key_env} is not set", key="api_key_env", fix="set it"
            )
        return key

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy in another process with connections of its own."""
        return OpenAIModel, (self._url, self._model, self._api_key_env)

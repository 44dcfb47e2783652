"""A model behind an OpenAI-compatible endpoint: a judge, a user, a teacher that only talks."""

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from trinity_lightning.common.inference import Completion
from trinity_lightning.errors import ConfigError, ModelLoadError, RolloutError
from trinity_lightning.explorer.models.openai_client import ROOT, api_error

logger = logging.getLogger(__name__)

LOAD_SECONDS = 10.0
# What vLLM's sampling settings have and OpenAI's API has not: servers that know them read them from the request's body.
_EXTRA = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids")


class OpenAIModel:
    """An auxiliary `InferenceModel` that chats. The endpoint does not tell its tokens: nothing of it is trained on.

    Args:
        url: of the endpoint, such as https://api.openai.com/v1.
        model: the name that requests carry.
        api_key_env: environment variable that holds the key; None sends none, for servers of one's own. There is no
            default: a key goes only where it was meant for.

    Raises:
        ConfigError: the package openai is not installed, or the key is not set; or (by a call) what only an engine of
            the policy can do.
    """

    model_version = 0
    max_model_len = sys.maxsize  # the endpoint knows

    def __init__(self, url: str, model: str, api_key_env: str | None = None) -> None:
        self._url = url
        self._model = model
        self._api_key_env = api_key_env
        # Made at once, for what is missing to be reported at once; and again by the first request after a shutdown.
        self._client: Any = self.get_openai_async_client()

    async def load(self) -> None:
        """Ask whether anybody is there, before rollouts begin; that a list of models is refused tells nothing.

        Raises:
            ModelLoadError: the endpoint does not answer, or does not take the key.
        """
        from openai import APIConnectionError, AuthenticationError, NotFoundError, OpenAIError

        try:
            await self._opened().with_options(timeout=LOAD_SECONDS, max_retries=1).models.list()
        except (APIConnectionError, AuthenticationError) as error:
            told = f" ({error.__cause__})" if error.__cause__ is not None else ""
            raise ModelLoadError(
                f"the endpoint {self._url} (model '{self._model}') cannot be used: {str(error).rstrip('.')}{told}. Is "
                "it started, and is the key its own (api_key_env)?"
            ) from error
        except NotFoundError:
            logger.debug("the endpoint %s has no list of models.", self._url)
        except (OpenAIError, ValueError) as error:
            logger.warning("the endpoint %s answers, but does not list its models: %s", self._url, error)

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        n: int = 1,
        **sampling: Any,
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
        try:
            response = await self._opened().chat.completions.create(
                model=self._model, messages=messages, n=n, extra_body=extra or None, **plain
            )
        except (OpenAIError, ValueError) as error:  # a body that is no JSON comes as a ValueError
            raise RolloutError(self._failure(error)) from error
        return [
            Completion((), (), (), choice.message.content or "", choice.finish_reason) for choice in response.choices
        ]

    def get_openai_async_client(self) -> Any:
        """An ordinary `openai.AsyncOpenAI` of the endpoint; `model_path` is the model's name."""
        try:
            from openai import AsyncOpenAI
        except ModuleNotFoundError as error:
            raise ConfigError(
                "the OpenAI client needs the package openai: `pip install 'trinity-lightning[openai]'`."
            ) from error
        client = AsyncOpenAI(base_url=self._url, api_key=self._key())
        client.model_path = self._model  # type: ignore[attr-defined]
        return client

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of the endpoint's response to a request, which is for this model whatever it says."""
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

    async def generate(self, prompt: Sequence[int] | str, n: int = 1, **sampling: Any) -> NoReturn:
        """Refused: ConfigError."""
        self._refuse("generate")

    async def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, so_far: Sequence[int] = ()
    ) -> NoReturn:
        """Refused: ConfigError."""
        self._refuse("render")

    async def logprobs(self, token_ids: Sequence[int]) -> NoReturn:
        """Refused: ConfigError."""
        self._refuse("logprobs")

    async def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> NoReturn:
        """Refused: ConfigError."""
        self._refuse("sync_weights")

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
            raise ConfigError(f"api_key_env: the environment variable {self._api_key_env} is not set.")
        return key

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"{what}: the endpoint {self._url} only chats. Let the run start the model: leave out `url` of the "
            "auxiliary model."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process has connections of its own."""
        return OpenAIModel, (self._url, self._model, self._api_key_env)

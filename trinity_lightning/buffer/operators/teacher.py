"""A teacher reads the responses: the tokens that it finds likeliest at each place, for loss `teacher_kl`."""

import asyncio
import math
import statistics
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import torch

from trinity_lightning.buffer.operators.experience_operator import ExperienceOperatorV1
from trinity_lightning.common.experience import Experience
from trinity_lightning.config.values import unknown_name, whole_number
from trinity_lightning.errors import ConfigError, RolloutError

MAX_CONCURRENT = 64  # requests in flight at once


class TeacherTopK(ExperienceOperatorV1):
    """Sets `info["teacher_top_k"]`, {"ids": int32 [response, k], "logprobs": float32 [response, k]}, by a teacher.

    The teacher is a vLLM server that reads the policy's own token ids (`prompt_logprobs` of its completions API): an
    auxiliary model that the run starts, or a url. It must have the same vocabulary, and a context longer than the
    policy's by a token; its log-probabilities are those of temperature 1. Every token of a response is read, what the
    environment wrote too; experiences of which nothing is trained on are not.

    Args:
        model: key of the auxiliary models.
        k: how many tokens, at each place. The rest counts as one more: few are enough where the teacher is sure.
    """

    def __init__(self, model: str | int = "teacher", k: int = 16) -> None:
        self.model = model
        self.k = whole_number("k", k, least=1)

    async def prepare(self) -> None:
        """Ask the teacher about two tokens, if it is an endpoint: a server of the run's own can, and starts later.

        Raises:
            ConfigError: there is no teacher of that name, or it does not give its likeliest tokens.
        """
        clients = self.auxiliary_models.get(self.model)
        if not clients:
            known = [str(key) for key in self.auxiliary_models]
            raise ConfigError(f"teacher_top_k: {unknown_name('auxiliary model', str(self.model), known)}")
        for client in clients:
            if (url := getattr(client, "endpoint", None)) is not None:
                await self._check(client, url)

    async def _check(self, client: Any, url: str) -> None:
        from openai import OpenAIError

        try:
            said = await self._ask(client, [0, 0], start=1)
        except (OpenAIError, RolloutError) as error:
            raise ConfigError(
                f"teacher_top_k: {url} does not say its {self.k} likeliest tokens ({error}): it must be a vLLM server "
                f"of that model, started with --max-logprobs {self.k} or more."
            ) from error
        if said["ids"].shape != (1, self.k):
            raise ConfigError(f"teacher_top_k: {url} knows {said['ids'].shape[1]} tokens, fewer than k={self.k}.")

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """All experiences; the metric `mass/mean` is how much of the teacher's probability its top k have, on average.

        Raises:
            RolloutError: the teacher gave something else than it was asked for.
        """
        clients, slots = cycle(self.auxiliary_models[self.model]), asyncio.Semaphore(MAX_CONCURRENT)

        async def read(client: Any, experience: Experience) -> None:
            async with slots:
                said = await self._ask(client, experience.tokens.tolist(), experience.prompt_length)
            experience.info = experience.info | {"teacher_top_k": said}

        trained = [each for each in exps if each.action_mask is not None and each.action_mask.any()]
        tasks = [asyncio.ensure_future(read(*pair)) for pair in zip(clients, trained, strict=False)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # of which one may have failed
                task.cancel()
        mass = [float(each.info["teacher_top_k"]["logprobs"].exp().sum(-1).mean()) for each in trained]
        return exps, {"mass/mean": statistics.fmean(mass)} if mass else {}

    async def _ask(self, client: Any, tokens: list[int], start: int) -> dict[str, torch.Tensor]:
        # vLLM samples at least one token.
        response = await client.completions.create(
            model=client.model_path,
            prompt=tokens,
            max_tokens=1,
            temperature=1.0,
            extra_body={"prompt_logprobs": self.k},
        )
        entries = getattr(response.choices[0], "prompt_logprobs", None) if response.choices else None
        if entries is None or len(entries) != len(tokens):
            raise RolloutError(
                f"the teacher '{self.model}' gave no log-probabilities of the {len(tokens)} tokens that it was sent: "
                "it must be a server of vLLM."
            )
        ids, logprobs = zip(*(self._likeliest(entry) for entry in entries[start:]), strict=True)
        return {"ids": torch.tensor(ids, dtype=torch.int32), "logprobs": torch.tensor(logprobs)}

    def _likeliest(self, entry: Mapping[str, Any] | None) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities of the first k; vLLM adds the token itself if it is not among them."""
        if entry is None:  # of the first token of all, which is not trained
            return [0] * self.k, [-math.log(self.k)] * self.k
        first = sorted(entry.items(), key=lambda item: item[1]["rank"])[: self.k]
        return [int(token) for token, _ in first], [float(said["logprob"]) for _, said in first]

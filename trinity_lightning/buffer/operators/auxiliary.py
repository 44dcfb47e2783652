"""Operators that ask an auxiliary model: a judge for a score, a teacher for the tokens that it finds likeliest."""

import asyncio
import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trinity_lightning.buffer.operators.experience_operator import ExperienceOperatorV1
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.judge import VerdictError, check_prompt, filled, read_score
from trinity_lightning.config.values import number, unknown_name, whole_number
from trinity_lightning.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CONCURRENT = 64  # requests in flight at once
MAX_REASONS = 5  # reasons of failures that are logged for an explore step
BACKOFF_SECONDS = 0.5  # wait before the second attempt, doubled before each further one
# Errors of degenerate answers: numbers of thousands of digits, endless nesting, a body that is no answer.
_DEGENERATE = (ValueError, ArithmeticError, RecursionError, AttributeError)


class AskingOperator(ExperienceOperatorV1):
    """Base of the operators that ask an auxiliary model.

    Args:
        model: key of the auxiliary models.
        timeout: seconds one attempt may take, with the restart of a server of the run that has died.
        max_retries: further attempts after a failed one.
    """

    def __init__(self, model: str | int, timeout: float, max_retries: int) -> None:
        self.model = model
        self.timeout = number("timeout", timeout, above=0)
        self.max_retries = whole_number("max_retries", max_retries, least=0)

    def clients(self, operator: str) -> Sequence[Any]:
        """The clients of the auxiliary model. ConfigError: there is no model of that key."""
        if clients := self.auxiliary_models.get(self.model):
            return clients
        known = map(str, self.auxiliary_models)
        raise ConfigError(f"{operator}: {unknown_name('auxiliary model', str(self.model), known)}", key=".args.model")

    async def answer_to(self, ask: Callable[[], Coroutine[Any, Any, T]], slots: asyncio.Semaphore) -> T:
        """The result of `ask`, which is tried again if it fails or takes too long.

        Raises:
            RolloutError: all attempts failed; the message is the last one's reason.
        """
        from openai import OpenAIError

        reason = ""
        for attempt in range(1 + self.max_retries):
            if attempt:
                await asyncio.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))
            try:
                async with slots, asyncio.timeout(self.timeout):
                    return await ask()
            except TimeoutError:
                reason = f"no answer within {self.timeout:g} s"
            except RolloutError as error:
                reason = str(error)
            except (OpenAIError, *_DEGENERATE) as error:
                reason = f"{type(error).__name__}: {error}"
        raise RolloutError(reason)


async def _all_of(requests: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Make all requests; if one fails, cancel the others."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


# -- a judge -----------------------------------------------------------------------------------------------------------


class JudgeOperator(AskingOperator):
    """Asks a model for a score of each response, from 0 to 1, and adds weight * score to the reward.

    The model is to answer with JSON, {"score": <0..1>}, alone or within other text. `info["judge_score"]` is set; an
    experience without a reward gets weight * score as its reward. If all attempts fail (no answer in time, an error of
    the server, no valid score), the experience keeps its reward, and is counted and logged.

    Args:
        model, timeout, max_retries: see `AskingOperator`.
        prompt: template; {prompt}, {response} and {answer} (from `info["answer"]`) are filled in, other braces stay.
        weight: of the score in the reward.
        sampling: further arguments of the request; temperature 0 unless it says otherwise.
    """

    def __init__(
        self,
        model: str | int,
        prompt: str,
        weight: float = 1.0,
        timeout: float = 60,
        max_retries: int = 2,
        sampling: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(model, timeout, max_retries)
        check_prompt("prompt", prompt)
        self.prompt = prompt
        self.weight = number("weight", weight)
        if not isinstance(sampling, Mapping | None):
            raise ConfigError(f"sampling must be {{argument: value}}, not {sampling!r}.", key="sampling")
        self.sampling = {"temperature": 0.0, **(sampling or {})}
        self._names: dict[int, str] = {}

    async def prepare(self) -> None:
        """Find the judge, and its name on its servers.

        Raises:
            ConfigError: there is no auxiliary model of that key; or its server has several models, none of that name.
        """
        self._names = {id(client): await self._name_on(client) for client in self.clients("judge")}

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """All experiences; metrics: `score/mean` of the judged ones, and `failed_count`, the number of the others.

        Raises:
            ExperienceError: the template has a place for the answer or the response, and an experience has none.
            ConfigError: as `prepare`.
        """
        clients = self.auxiliary_models.get(self.model, [])
        if not clients or any(id(client) not in self._names for client in clients):
            await self.prepare()
        questions = [self._question(exp) for exp in exps]
        slots = asyncio.Semaphore(MAX_CONCURRENT)
        scores: list[float] = []
        failures: Counter[str] = Counter()

        async def judge(client: "AsyncOpenAI", question: str, exp: Experience) -> None:
            try:
                score = await self.answer_to(partial(self._ask, client, question), slots)
            except RolloutError as error:
                failures[str(error)] += 1
                return
            exp.info = exp.info | {"judge_score": score}  # a new dict: experiences may share one
            exp.reward = self.weight * score + (0.0 if exp.reward is None else exp.reward)
            scores.append(score)

        await _all_of(map(judge, cycle(clients), questions, exps))
        for reason, count in failures.most_common(MAX_REASONS):
            logger.warning("judge '%s': %d of %d items failed: %s", self.model, count, len(exps), reason)
        mean = {"score/mean": statistics.fmean(scores)} if scores else {}
        return exps, {**mean, "failed_count": failures.total()}

    async def _name_on(self, client: "AsyncOpenAI") -> str:
        """The name to send as `model`: the client's `model_path`, or else a name that the server lists."""
        if (path := getattr(client, "model_path", None)) is not None:
            return str(path)
        from openai import OpenAIError

        try:
            async with asyncio.timeout(self.timeout):
                names = [model.id async for model in client.models.list()]
        except (OpenAIError, *_DEGENERATE) as error:
            logger.info("judge '%s': its server lists no models (%s); asking for that name.", self.model, error)
            names = []
        if not names or str(self.model) in names:
            return str(self.model)
        if len(names) > 1:
            raise ConfigError(
                f"judge: {unknown_name('model of the server', str(self.model), names)}", key=".args.model"
            )
        return names[0]

    def _question(self, exp: Experience) -> str:
        values = {"prompt": exp.prompt_text, "response": exp.response_text, "answer": exp.info.get("answer")}
        for name, value in values.items():
            if value is None and f"{{{name}}}" in self.prompt:
                where = "info['answer']" if name == "answer" else f"{name}_text"
                raise ExperienceError(f"experience {exp.eid} has no {where}, which the judge's prompt asks for.")
        return filled(self.prompt, {name: str(value) for name, value in values.items()})

    async def _ask(self, client: "AsyncOpenAI", question: str) -> float:
        # Attempts are counted here: the client's own would multiply them.
        response = await client.with_options(max_retries=0).chat.completions.create(
            model=self._names[id(client)],
            messages=[{"role": "user", "content": question}],
            timeout=self.timeout,
            **self.sampling,
        )
        if not response.choices:
            raise VerdictError("the judge's answer has no choices")
        choice = response.choices[0]
        # A model of the run gives its answer apart: the text does not show that its prompt opened thoughts.
        if getattr(choice, "answer", "") is None:
            raise VerdictError("the judge was cut off in its thoughts: give it more max_tokens")
        return read_score(choice.message.content or "")


# -- a teacher ---------------------------------------------------------------------------------------------------------


class TeacherTopK(AskingOperator):
    """Sets `info["teacher_top_k"]`, {"ids": int32 [response, k], "logprobs": float32 [response, k]}, by a teacher.

    The teacher is a vLLM server that reads the policy's own token ids (`prompt_logprobs` of its completions API): an
    auxiliary model that the run starts, or a url. It must have the same vocabulary, and a context longer than the
    policy's by a token. Its log-probabilities are those of temperature 1. Every token of a response is read, also the
    environment's; experiences without a trained token are not read.

    Args:
        model, timeout, max_retries: see `AskingOperator`.
        k: number of tokens kept at each place. All others count as one more token: a small k is enough for a teacher
            that is sure.
    """

    advice = (
        "The loss needs the teacher, so on_error cannot be skip: mend its server, or give the operator a longer "
        "timeout or more max_retries, and go on with ckpt_path=last."
    )

    def __init__(self, model: str | int = "teacher", k: int = 16, timeout: float = 600, max_retries: int = 2) -> None:
        super().__init__(model, timeout, max_retries)
        self.k = whole_number("k", k, least=1)

    async def prepare(self) -> None:
        """Try a teacher that is an endpoint on two tokens; a teacher that the run starts is not up yet.

        Raises:
            ConfigError: there is no teacher of that name, or it does not give its likeliest tokens.
        """
        for client in self.clients("teacher_top_k"):
            if (url := getattr(client, "endpoint", None)) is not None:
                await self._check(client, url)

    async def _check(self, client: Any, url: str) -> None:
        try:
            likeliest = await self._likeliest_tokens(client, [0, 0], 1, asyncio.Semaphore())
        except RolloutError as error:
            raise ConfigError(
                f"teacher_top_k: {url} does not give the log-probabilities of its {self.k} likeliest tokens ({error}): "
                f"it must be a vLLM server of that model, started with --max-logprobs {self.k} or more.",
                key=f"auxiliary_models.{self.model}.url",
            ) from error
        if likeliest["ids"].shape != (1, self.k):
            raise ConfigError(
                f"teacher_top_k: {url} knows {likeliest['ids'].shape[1]} tokens, fewer than k={self.k}.", key=".args.k"
            )

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """All experiences; the metric `mass/mean` is the mean probability that the teacher gives to its top k tokens.

        Raises:
            RolloutError: the teacher did not answer, or gave something else than it was asked for.
        """
        clients, slots = cycle(self.auxiliary_models[self.model]), asyncio.Semaphore(MAX_CONCURRENT)

        async def read(client: Any, experience: Experience) -> None:
            tokens, start = experience.tokens.tolist(), experience.prompt_length
            likeliest = await self._likeliest_tokens(client, tokens, start, slots)
            experience.info = experience.info | {"teacher_top_k": likeliest}

        trained = [exp for exp in exps if exp.action_mask is not None and exp.action_mask.any()]
        await _all_of(read(*pair) for pair in zip(clients, trained, strict=False))
        mass = [float(exp.info["teacher_top_k"]["logprobs"].exp().sum(-1).mean()) for exp in trained]
        return exps, {"mass/mean": statistics.fmean(mass)} if mass else {}

    async def _likeliest_tokens(
        self, client: Any, tokens: list[int], start: int, slots: asyncio.Semaphore
    ) -> dict[str, torch.Tensor]:
        """The teacher's likeliest tokens at the places from `start` on, with their log-probabilities."""
        try:
            return await self.answer_to(lambda: self._ask(client, tokens, start), slots)
        except RolloutError as error:
            attempts = 1 + self.max_retries
            raise RolloutError(f"the teacher '{self.model}' failed (attempts: {attempts}): {error}") from error

    async def _ask(self, client: Any, tokens: list[int], start: int) -> dict[str, torch.Tensor]:
        # vLLM samples at least one token. Attempts are counted by `answer_to`.
        response = await client.with_options(max_retries=0).completions.create(
            model=client.model_path,
            prompt=tokens,
            max_tokens=1,
            temperature=1.0,
            timeout=self.timeout,
            extra_body={"prompt_logprobs": self.k},
        )
        entries = getattr(response.choices[0], "prompt_logprobs", None) if response.choices else None
        if entries is None or len(entries) != len(tokens):
            raise RolloutError(
                f"no log-probabilities of the {len(tokens)} tokens that it was sent: it must be a server of vLLM."
            )
        ids, logprobs = zip(*(self._likeliest(entry) for entry in entries[start:]), strict=True)
        return {"ids": torch.tensor(ids, dtype=torch.int32), "logprobs": torch.tensor(logprobs)}

    def _likeliest(self, entry: Mapping[str, Any] | None) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities of the first k; vLLM adds the token itself if it is not among them."""
        if entry is None:  # at the first token, which is not trained
            return [0] * self.k, [-math.log(self.k)] * self.k
        first = sorted(entry.items(), key=lambda item: item[1]["rank"])[: self.k]
        return [int(token) for token, _ in first], [float(values["logprob"]) for _, values in first]

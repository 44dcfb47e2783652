"""Calls of unfinished runs, so that a resumed run goes on with them instead of beginning anew.

A checkpoint holds, of every run that has begun and not ended, the answers that its model gave, and the tokens that are
written of the next ones. In a resumed run the workflow begins again and makes the same calls. They are answered from
the record as long as their prompts are the same, and a response that was not finished is continued where it was.
"""

import asyncio
import json
from array import array
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128

from trinity_lightning.common.inference import PROGRESS, Completion, Progress, joined_spans
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.explorer.models.rest import rest_of
from trinity_lightning.explorer.models.turns import encode_text

Samples = list[Completion]

# -- the calls of all runs ---------------------------------------------------------------------------------------------


class CallRecords:
    """Keeps the calls of unfinished runs to the policy, in this process.

    Calls of other processes (Ray's runners), of evaluations, and to auxiliary models are not kept. Of a response that
    is under way the written tokens are known if the engine shows them (see `Progress`); otherwise the call is made
    again.

    Attributes:
        diverged: number of runs whose calls differed from their record, the rest of which was then dropped. Who reads
            the number sets it to 0.
    """

    def __init__(self) -> None:
        self.diverged = 0
        self._earlier: dict[_Key, dict[int, Call]] = {}  # of runs that have not begun again yet
        self._runs: dict[_Key, RunRecord] = {}
        self._of_task: dict[tuple[str, str], set[_Key]] = {}  # keys of a task's runs, in either

    def begin(self, batch: int | str, task: int | str, run: int) -> "RunRecord":
        """The record of an attempt at a run. The first attempt is given an earlier process's calls, others none."""
        key = (str(batch), str(task), run)
        self._of_task.setdefault(key[:2], set()).add(key)
        record = self._runs[key] = RunRecord(self, self._earlier.pop(key, {}))
        return record

    def forget(self, batch: int | str, task: int | str) -> None:
        """Drop the calls of all runs of a task, which has ended."""
        for key in self._of_task.pop((str(batch), str(task)), ()):
            self._earlier.pop(key, None)
            self._runs.pop(key, None)

    def keep(self, tasks: Iterable[tuple[int | str, int | str]]) -> None:
        """Drop the calls of all tasks but these, (batch, task), which begin again in this process."""
        names = {(str(batch), str(task)) for batch, task in tasks}
        self._earlier = {key: calls for key, calls in self._earlier.items() if key[:2] in names}

    def state_dict(self) -> dict[str, Any]:
        """All calls as plain values and two tensors; called on the thread that drives the engines, while they rest."""
        calls, samples = [], []
        runs = dict(self._earlier) | {key: record.calls for key, record in list(self._runs.items())}
        for key, of_run in runs.items():
            for number, call in of_run.items():
                written = call.written()
                if any(sample.token_ids for sample in written):
                    calls.append([*key, number, call.digest, len(written)])
                    samples += written
        tokens, logprobs = array("i"), array("f")
        for sample in samples:
            tokens.extend(sample.token_ids)
            logprobs.extend(sample.logprobs)
        return {
            "calls": calls,
            "samples": [
                [len(sample.token_ids), sample.finish_reason, sample.stop_reason, [list(s) for s in sample.versions]]
                for sample in samples
            ],
            "tokens": torch.from_numpy(np.array(tokens)),
            "logprobs": torch.from_numpy(np.array(logprobs)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the calls of an earlier process, before the first run begins."""
        samples, start = [], 0
        for length, finish_reason, stop_reason, versions in state["samples"]:
            part = slice(start, start + length)
            tokens = array("i", state["tokens"][part].numpy().tobytes())
            logprobs = array("f", state["logprobs"][part].numpy().tobytes())
            spans = tuple((begin, version) for begin, version in versions)
            samples.append(Completion((), tokens, logprobs, "", finish_reason, stop_reason, spans))
            start += length
        remaining = iter(samples)
        self._earlier, self._runs, self._of_task = {}, {}, {}
        for batch, task, run, number, digest, count in state["calls"]:
            of_call = [next(remaining) for _ in range(count)]
            self._of_task.setdefault((batch, task), set()).add((batch, task, run))
            self._earlier.setdefault((batch, task, run), {})[number] = Call.of(digest, of_call)


_Key = tuple[str, str, int]  # batch, task, run


# -- the calls of a run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call to the model: ended, or under way.

    Attributes:
        digest: see `digest_of`.
        written: returns the samples so far, as in `Progress`, but none of them has its prompt or text.
    """

    digest: str
    written: Callable[[], Samples]

    @classmethod
    def of(cls, digest: str, samples: Samples) -> "Call":
        """A call with these samples, however often it is looked at; they take 8 bytes a token."""
        packed = [
            replace(
                sample,
                prompt_token_ids=(),
                token_ids=array("i", sample.token_ids),
                logprobs=array("f", sample.logprobs),
                text="",
            )
            for sample in samples
        ]
        return cls(digest, lambda: packed)


class RunRecord:
    """The calls of one attempt at a run, by their numbers.

    Args:
        records: where a run that diverges is counted.
        earlier: calls that an earlier process made in this run.
    """

    def __init__(self, records: CallRecords, earlier: dict[int, Call]) -> None:
        self._records, self._earlier = records, earlier
        self._made: dict[int, Call] = {}

    @property
    def calls(self) -> dict[int, Call]:
        """All calls that a resumed run can be given: those of this attempt, and earlier ones that it did not reach."""
        return {**self._earlier, **self._made}

    async def answer(
        self, number: int, model: Any, prompt: Sequence[int] | str, n: int, settings: dict[str, Any]
    ) -> Samples:
        """The samples of a call: from the record if it has them, else from the model, which also continues them.

        A sample is continued by a request of its own, whose prompt ends with the sample's tokens (see `rest_of`).

        Args:
            number: the call's number in its run.
            model: an `Engine`.
            prompt, n, settings: arguments of `Engine.generate`; the settings have a seed.
        """
        if isinstance(prompt, str):
            await model.load()
            prompt = encode_text(model.tokenizer, prompt)
        digest = digest_of(prompt, n, settings)
        earlier = self._take_earlier(number, digest)
        if "max_tokens" not in settings and not all(sample.finish_reason for sample in earlier):
            earlier = []  # the engine's own limit is unknown
        try:
            if earlier:
                completions = await self._go_on(number, digest, model, prompt, settings, earlier)
            else:
                progress = Progress()
                self._made[number] = Call(digest, lambda: progress.written())
                completions = await watched(progress, model.generate(prompt, n=n, **settings))
        except BaseException:
            self._made.pop(number, None)
            raise
        self._made[number] = Call.of(digest, completions)
        return completions

    def _take_earlier(self, number: int, digest: str) -> Samples:
        """Samples of an earlier process's call, if it is the same; if it is another one, the rest is dropped."""
        earlier = self._earlier.pop(number, None)
        if earlier is None:
            return []
        if earlier.digest != digest:
            self._earlier.clear()
            self._records.diverged += 1
            return []
        return earlier.written()

    async def _go_on(
        self,
        number: int,
        digest: str,
        model: Any,
        prompt: Sequence[int],
        settings: dict[str, Any],
        samples: Samples,
    ) -> Samples:
        """Ask for the rests of the samples that have not ended, and join them."""
        prompt = prompt if isinstance(prompt, PicturePrompt) else list(prompt)
        samples = [
            replace(sample, prompt_token_ids=prompt, token_ids=list(sample.token_ids), logprobs=list(sample.logprobs))
            for sample in samples
        ]
        rests = [Progress() for _ in samples]
        self._made[number] = Call(
            digest, lambda: [joined(sample, *rest.written()) for sample, rest in zip(samples, rests, strict=True)]
        )
        tasks = [
            asyncio.ensure_future(continued(model, sample, settings, index, rest))
            for index, (sample, rest) in enumerate(zip(samples, rests, strict=True))
        ]
        try:
            return [model.with_text(sample, settings) for sample in await asyncio.gather(*tasks)]
        finally:
            for task in tasks:
                task.cancel()


async def continued(
    model: Any, sample: Completion, settings: Mapping[str, Any], index: int, progress: Progress
) -> Completion:
    """The sample with its rest, which the model is asked for unless the sample has ended; without its text.

    Args:
        model: an `Engine`.
        sample: a sample, and the prompt that it answers.
        settings: those of its call.
        index: its place among the samples of the call.
        progress: shows the rest while it is written.
    """
    length, prompt = len(sample.token_ids), sample.prompt_token_ids
    if sample.finish_reason is not None:
        return sample
    if length and len(prompt) + length >= model.max_model_len:  # the context has become shorter
        return replace(sample, finish_reason="length")
    prompt, rest = rest_of(prompt, sample.token_ids, {**settings, "seed": settings["seed"] + index})
    return joined(sample, *await watched(progress, model.generate(prompt, n=1, **rest)))


def joined(sample: Completion, rest: Completion | None = None) -> Completion:
    """A sample and its rest, without a text; if there is no rest yet, the sample alone."""
    if rest is None:
        return sample
    parts = [(0, sample), (len(sample.token_ids), rest)]
    return replace(
        rest,
        prompt_token_ids=sample.prompt_token_ids,
        token_ids=[*sample.token_ids, *rest.token_ids],
        logprobs=[*sample.logprobs, *rest.logprobs],
        text="",
        versions=joined_spans((start, part.versions) for start, part in parts if part.token_ids),
    )


async def watched(progress: Progress, call: Coroutine[Any, Any, Samples]) -> Samples:
    """The result of a call of `generate`, whose request `progress` shows meanwhile."""
    token = PROGRESS.set(progress)
    try:
        return await call
    finally:
        PROGRESS.reset(token)


def digest_of(prompt: Sequence[int], n: int, settings: Mapping[str, Any]) -> str:
    """A text that is the same for calls with the same prompt, its pictures too, the same n and the same settings."""
    pictures = [picture.digest for picture in prompt.pictures] if isinstance(prompt, PicturePrompt) else []
    digest = xxh3_128(np.asarray(prompt, dtype=np.int64).tobytes())
    digest.update(json.dumps([pictures, n, settings], sort_keys=True, default=repr).encode())
    return digest.hexdigest()

"""Requests that are under way at a vLLM server while its weights change."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import psutil
import pytest

from trinity_lightning.common.inference import Completion
from trinity_lightning.explorer.models.server_requests import KNOWN, PATH
from trinity_lightning.explorer.models.unfinished import UnfinishedSample
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine

T = TypeVar("T")
MOST_LOOKS = 3000  # a minute


async def begun(engine: VLLMServerEngine, samples: int, *calls: Coroutine[Any, Any, T]) -> list[asyncio.Task[T]]:
    """The tasks of calls at a paused server that has all of their samples, however late they came: none has a token."""
    unfinished = engine._unfinished
    await unfinished._post("/pause?mode=keep&clear_cache=false", {})
    tasks = [asyncio.create_task(call) for call in calls]
    for _ in range(MOST_LOOKS):
        names = {sample.name: -1 for sample in unfinished.under_way()}
        if len(await unfinished._post(PATH, {KNOWN: names})) == samples:
            return tasks
        await asyncio.sleep(0.02)
    raise AssertionError(f"the server has not got the {samples} samples")


async def until_drawn(engine: VLLMServerEngine, samples: int, tokens: int = 4) -> None:
    """Let the server go on until each of so many samples has so many tokens more, and leave it paused, so none ends.

    However busy the machine is, it takes a step or two at a time: its worker stands still until the next pause waits.
    """
    known: dict[UnfinishedSample, int] = {}
    post, worker = engine._unfinished._post, worker_of(engine)
    while len(known) < samples or any(sample.drawn < first + tokens for sample, first in known.items()):
        assert len(engine._unfinished.under_way()) == samples, "a sample has ended"
        try:
            if worker.status() != psutil.STATUS_STOPPED:  # the server is paused; else it goes on, and has not got far
                worker.suspend()
                await post("/resume", {})
            pause = asyncio.ensure_future(post("/pause?mode=keep&clear_cache=false", {}))
            await asyncio.sleep(0.1)
        finally:
            worker.resume()
        await pause
        await engine._unfinished._look(post)
        for sample in engine._unfinished.under_way():
            known.setdefault(sample, sample.drawn)


def worker_of(engine: VLLMServerEngine) -> psutil.Process:
    """The process of a server that computes: the child of its engine core."""
    assert engine._process is not None
    server = psutil.Process(engine._process._process.pid)
    processes = [process for core in server.children() for process in core.children()]
    [worker] = [process for process in processes if not any("resource_tracker" in word for word in process.cmdline())]
    return worker


def check_spans(completion: Completion, logprobs: Callable[[int, list[int]], Sequence[float]]) -> None:
    """The tokens of each span have the log-probabilities of its version's weights.

    Args:
        completion: a response.
        logprobs: returns those of tokens, but the first one, by a version's weights.
    """
    prompt = list(completion.prompt_token_ids)
    ends = [start for start, _ in completion.versions[1:]] + [len(completion.token_ids)]
    for (start, version), end in zip(completion.versions, ends, strict=True):
        exact = logprobs(version, [*prompt, *completion.token_ids[:end]])[len(prompt) - 1 + start :]
        assert list(completion.logprobs[start:end]) == pytest.approx(list(exact), rel=0, abs=1e-5)

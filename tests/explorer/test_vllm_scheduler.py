"""The scheduler with a real vLLM under it: the tokens and weights of its results, and no request left in the engine.

All else is in `test_scheduler.py`. Nothing here depends on the speed of the machine: where one request must be slower
than another, the engine stands still at a step until the test lets it go on.
"""

import asyncio
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.fake_model import scripted
from support.tiny_model import tiny_model
from support.tiny_vllm import driven_engine, standing_still

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.explorer import Scheduler
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import Status
from trinity_lightning.explorer.workflows import Workflow
from trinity_lightning.sync.stream import weight_stream

CONTEXT = 320
HOLD = 5  # the step that the engine stands still at: requests for two tokens are through
Run = Callable[..., None]
Tokens = dict[tuple[int | str, int | str, int, int], list[int]]


@pytest.fixture(scope="module")
def driven(needs_vllm: Any) -> Iterator[tuple[VLLMEngine, Driver]]:
    with driven_engine(CONTEXT) as engine_and_host:
        yield engine_and_host


@pytest.fixture
def engine(driven: tuple[VLLMEngine, Driver]) -> Iterator[VLLMEngine]:
    engine, driver = driven
    yield engine
    assert driver.run(left_in(engine)) == (0, 0, 0.0)
    assert not engine._waiting


@pytest.fixture
def run(engine: VLLMEngine, driven: tuple[VLLMEngine, Driver], steps: "Steps") -> Run:
    """Has a started scheduler do something: 8 runners, no retries, unless told otherwise."""

    def run(body: Callable[[Scheduler], Coroutine[Any, Any, None]], engines: int = 1, **config: Any) -> None:
        settings: dict[str, Any] = {"max_retry_times": 0, "max_timeout": 60.0} | config

        async def main() -> None:
            scheduler = Scheduler(ExplorerConfig(**settings), [engine] * engines)
            await scheduler.start()
            try:
                async with asyncio.timeout(120):
                    await body(scheduler)
            finally:
                steps.go_on()
                await scheduler.stop()

        driven[1].run(main())

    return run


@pytest.fixture
def steps(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> "Steps":
    return Steps(engine, monkeypatch)


class Steps:
    """The engine's steps: when they begin, where they stand still or fail, and how many requests each serves."""

    def __init__(self, engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[int] = []
        self.hold_at = 0
        self.fail_at = 0
        self._engine = engine
        self._monkeypatch = monkeypatch
        self._held, self._go_on = threading.Event(), threading.Event()
        executor = engine._engine.model_executor
        execute = executor.execute_model

        def watched(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.requests.append(len(scheduled.num_scheduled_tokens))
            if len(self.requests) == self.hold_at:
                self._held.set()
                assert self._go_on.wait(60)
            if len(self.requests) == self.fail_at:
                raise RuntimeError("out of memory, say")
            return execute(scheduled, *args, **kwargs)

        monkeypatch.setattr(executor, "execute_model", watched)

    def begin_with(self, requests: int) -> None:
        """No step before that many requests have been posted."""
        all_posted, count, post = standing_still(self._engine), itertools.count(1), self._engine._post

        def counted(command: Callable[[], None]) -> None:
            post(command)
            if next(count) == requests:
                all_posted.set()

        self._monkeypatch.setattr(self._engine, "_post", counted)

    async def held(self) -> None:
        """Wait until the engine stands still."""
        assert await asyncio.to_thread(self._held.wait, 60)

    def go_on(self) -> None:
        self._go_on.set()


async def left_in(engine: VLLMEngine) -> tuple[int, int, float]:
    """Unfinished requests of the engine, those of its core, and the share of the cache that they hold."""
    core = engine._engine.engine_core.engine_core.scheduler

    def count() -> tuple[int, int, float]:
        return engine._engine.get_num_unfinished_requests(), len(core.requests), core.kv_cache_manager.usage

    return await engine._on_driver(count)


def question(text: str = "1+1=", repeat_times: int = 1, is_eval: bool = False, **sampling: Any) -> Task:
    sampling = {"max_tokens": 12} | sampling
    return Task("simple", {"prompt": text}, repeat_times=repeat_times, is_eval=is_eval, rollout_args=sampling)


def short() -> Task:
    return question(max_tokens=2)


def long() -> Task:
    return question(max_tokens=200, ignore_eos=True)


def experience_of(completion: Completion, step: int = 0) -> Experience:
    return Experience(
        eid=EID(step=step),
        tokens=[*completion.prompt_token_ids, *completion.token_ids],
        prompt_length=len(completion.prompt_token_ids),
        logprobs=list(completion.logprobs),
    )


async def ask_for_many(workflow: Any) -> list[Experience]:
    """A request for as many tokens as fit."""
    return [experience_of((await workflow.model.generate("1+1=", ignore_eos=True, max_tokens=300))[0])]


def tokens_of(experiences: Sequence[Experience]) -> Tokens:
    tokens = {(e.eid.batch, e.eid.task, e.eid.run, e.eid.step): e.tokens.tolist() for e in experiences}
    assert len(tokens) == len(experiences)
    return tokens


def tasks_of(experiences: Sequence[Experience]) -> list[int | str]:
    return [experience.eid.task for experience in experiences]


def oks(statuses: Sequence[Status]) -> list[bool]:
    return [status.ok for status in statuses]


async def works(scheduler: Scheduler, batch_id: int = 90) -> None:
    """More tasks than there are runners are done."""
    tasks = len(scheduler.runners) + 2
    scheduler.schedule([short()] * tasks, batch_id)
    statuses, experiences = await scheduler.get_results(batch_id)
    assert oks(statuses) == [True] * tasks
    assert len(experiences) == tasks


# -- chunks and seeds -------------------------------------------------------------------------------------------------


def test_chunks_give_the_tokens_of_the_whole_and_one_status_a_task(run: Run, engine: VLLMEngine) -> None:
    results: dict[int | None, tuple[list[Status], list[Experience]]] = {}
    requests: dict[int | None, int] = {}

    for size in (None, 1, 2, 5, 7):

        async def body(scheduler: Scheduler, size: int | None = size) -> None:
            before = engine._requests
            scheduler.schedule([question(f"{i}+1=", repeat_times=5) for i in range(3)], 1)
            results[size] = await scheduler.get_results(1)
            requests[size] = engine._requests - before

        run(body, max_repeat_times_per_runner=size)

    assert requests == {None: 3, 1: 15, 2: 9, 5: 3, 7: 3}
    whole = results[None][1]
    assert len({tuple(experience.tokens.tolist()) for experience in whole}) == 15
    for statuses, experiences in results.values():
        assert [(status.ok, status.num_runs) for status in statuses] == [(True, 5)] * 3
        assert [(e.eid.task, e.eid.run) for e in experiences] == [(i, r) for i in range(3) for r in range(5)]
        assert tokens_of(experiences) == tokens_of(whole)
        for one, other in zip(experiences, whole, strict=True):
            torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=0)


class Wanderer:
    """Asks twice, the second time with the first answer, and dawdles before, between and after."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def __call__(self, workflow: Any) -> list[Experience]:
        prompt: list[int] = [5 + workflow.task.task_id]
        experiences = []
        for step in range(2):
            await self._dawdle()
            [completion] = await workflow.model.generate(prompt, max_tokens=6 + workflow.task.task_id)
            prompt = [*completion.prompt_token_ids, *completion.token_ids, 9]
            experiences.append(experience_of(completion, step))
        await self._dawdle()
        return experiences

    async def _dawdle(self) -> None:
        await asyncio.sleep(self._random.choice([0.0, 0.0, 0.002, 0.01]))


@pytest.mark.parametrize("repeatable", [False, True])
def test_tokens_depend_on_neither_runners_nor_durations_nor_chunks_nor_other_batches(
    run: Run, repeatable: bool
) -> None:
    results: list[Tokens] = []
    orders: list[list[int | str]] = []
    settings = [(1, None, False), (4, 2, False), (16, 1, True), (16, None, True), (3, 3, True)]

    for number, (runners, size, others) in enumerate(settings):

        async def body(scheduler: Scheduler, number: int = number, others: bool = others) -> None:
            wanderer = Wanderer(number)
            done: list[int | str] = []

            async def noted(workflow: Any) -> list[Experience]:
                experiences = await wanderer(workflow)
                done.append(workflow.task.task_id)
                return experiences

            tasks = [scripted(noted, repeat_times=3)] * 8
            if repeatable:
                tasks = [question(f"{i}?", repeat_times=3, max_tokens=4 + i) for i in range(8)]
            if others:
                scheduler.schedule([question("before", repeat_times=2)] * 3, 0)
            scheduler.schedule(tasks[:5], 1)
            if others:
                scheduler.schedule([question("after", is_eval=True, max_tokens=9)] * 6, "1/eval")
            scheduler.schedule(tasks[5:], 1)
            statuses, experiences = await scheduler.get_results(1)
            assert oks(statuses) == [True] * 8
            results.append(tokens_of(experiences))
            orders.append(done)
            await scheduler.wait_all()

        run(body, runner_per_model=runners, max_repeat_times_per_runner=size)

    assert len(results[0]) == 24 * (1 if repeatable else 2)
    assert all(result == results[0] for result in results)
    assert repeatable or orders[0] != orders[2]


# -- requests that are given up ---------------------------------------------------------------------------------------


def test_a_time_out_returns_what_is_there_and_aborts_the_rest_in_the_engine(
    run: Run, steps: Steps, engine: VLLMEngine
) -> None:
    async def body(scheduler: Scheduler) -> None:
        three_done, count = asyncio.Event(), itertools.count(1)
        steps.begin_with(3 + 5)
        steps.hold_at = HOLD
        scheduler.schedule([*[short()] * 3, *[long()] * 5], 1, lambda: three_done.set() if next(count) == 3 else None)
        await steps.held()
        assert len(steps.requests) == HOLD
        assert (steps.requests[0], steps.requests[-1]) == (8, 5)
        await three_done.wait()
        statuses, experiences = await scheduler.get_results(1, timeout=0.01)
        assert oks(statuses) == [True] * 3
        assert tasks_of(experiences) == [0, 1, 2]
        assert not scheduler.has_step(1)
        steps.go_on()
        assert await left_in(engine) == (0, 0, 0.0)
        assert len(steps.requests) == HOLD
        await works(scheduler)

    run(body)


def test_a_time_out_aborts_all_samples_and_turns_of_a_task_and_drops_its_chunks_that_wait(
    run: Run, steps: Steps, engine: VLLMEngine
) -> None:
    async def body(scheduler: Scheduler) -> None:
        before = engine._requests
        steps.begin_with(2)
        steps.hold_at = HOLD
        scheduler.schedule([question(repeat_times=8, max_tokens=200, ignore_eos=True)], 1)  # 3 + 3 run, 2 wait
        await steps.held()
        assert steps.requests == [6] * HOLD
        assert await scheduler.get_results(1, timeout=0.01) == ([], [])
        steps.go_on()
        assert await left_in(engine) == (0, 0, 0.0)
        assert engine._requests == before + 2
        await works(scheduler)

    run(body, runner_per_model=2, max_repeat_times_per_runner=3)


def test_a_time_out_ends_a_workflow_in_a_thread_and_its_request(run: Run, steps: Steps, engine: VLLMEngine) -> None:
    errors: list[str] = []
    over = threading.Event()

    class Blocking(Workflow):
        def run(self) -> list[Experience]:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
            model: Any = self.model
            try:
                model.generate("1+1=", max_tokens=200, ignore_eos=True)
            except BaseException as error:
                errors.append(type(error).__name__)
            finally:
                over.set()
            return []

    async def body(scheduler: Scheduler) -> None:
        steps.begin_with(1)
        steps.hold_at = HOLD
        scheduler.schedule([Task(Blocking)], 1)
        await steps.held()
        assert await scheduler.get_results(1, timeout=0.01) == ([], [])
        assert await asyncio.to_thread(over.wait, 60)
        steps.go_on()
        assert await left_in(engine) == (0, 0, 0.0)
        assert errors == ["CancelledError"]
        await works(scheduler)

    run(body)


def test_a_batch_that_is_dropped_leaves_nothing_and_the_other_goes_on(
    run: Run, steps: Steps, engine: VLLMEngine
) -> None:
    async def body(scheduler: Scheduler) -> None:
        steps.begin_with(5)
        steps.hold_at = HOLD
        scheduler.schedule([long()] * 3, 1)
        scheduler.schedule([long()] * 2, 2)
        await steps.held()
        await scheduler.drop(1)
        assert not scheduler.has_step(1)
        steps.go_on()
        assert (await left_in(engine))[:2] == (2, 2)
        assert oks((await scheduler.get_results(2))[0]) == [True] * 2

    run(body)


# -- failures, retries, time-outs -------------------------------------------------------------------------------------


def test_a_retry_of_a_request_with_several_samples_repeats_those_whose_reward_failed(
    run: Run, engine: VLLMEngine
) -> None:
    results: list[Tokens] = []

    tried: Counter[str] = Counter()
    failing: set[str | None] = set()

    def reward(response: str, task: Task) -> float:
        tried[response] += 1
        if response in failing and tried[response] == 1:
            raise ConnectionError("the judge is away")
        return 1.0

    async def body(scheduler: Scheduler) -> None:
        before = engine._requests
        scheduler.schedule([replace(question(repeat_times=5), reward_fn=reward)], 1)
        (status,), experiences = await scheduler.get_results(1)
        assert status.ok
        assert [e.reward for e in experiences] == [1.0] * 5
        assert engine._requests == before + (3 if failing else 1)  # runs 1 and 2 are one request, 4 is another
        assert sorted(tried.values()) == ([1, 1, 2, 2, 2] if failing else [1] * 5)
        results.append(tokens_of(experiences))
        tried.clear()
        failing.update(experiences[run].response_text for run in (1, 2, 4))

    run(body, max_retry_times=1)
    run(body, max_retry_times=1)
    assert results[0] == results[1]


def test_a_task_that_takes_too_long_is_aborted_and_its_runner_is_free(
    run: Run, steps: Steps, engine: VLLMEngine
) -> None:
    async def body(scheduler: Scheduler) -> None:
        steps.begin_with(2)
        steps.hold_at = 1
        scheduler.schedule([scripted(ask_for_many, repeat_times=2)], 1)
        (status,), experiences = await scheduler.get_results(1, timeout=60)
        assert (status.ok, experiences) == (False, [])
        assert steps.requests == [2]
        steps.go_on()
        assert await left_in(engine) == (0, 0, 0.0)
        scheduler.config.max_timeout = 60.0
        await works(scheduler)

    run(body, runner_per_model=1, max_timeout=0.5)


def test_a_step_that_raises_once_costs_a_retry_and_changes_no_token(run: Run, steps: Steps) -> None:
    results: list[Tokens] = []

    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([question(f"{i}", repeat_times=2) for i in range(4)], 1)
        statuses, experiences = await scheduler.get_results(1)
        assert oks(statuses) == [True] * 4
        results.append(tokens_of(experiences))

    run(body)
    steps.begin_with(4)
    steps.fail_at = len(steps.requests) + 3
    run(body, max_retry_times=1)
    assert len(steps.requests) > steps.fail_at
    assert results[0] == results[1]


# -- weights ----------------------------------------------------------------------------------------------------------


def test_experiences_tell_the_version_of_the_weights_they_were_begun_with(
    run: Run, steps: Steps, engine: VLLMEngine, driven: tuple[VLLMEngine, Driver]
) -> None:
    model = tiny_model()

    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([question()] * 2, 1)
        versions = [e.info["model_version"] for e in (await scheduler.get_results(1))[1]]
        steps.begin_with(2)
        steps.hold_at = len(steps.requests) + HOLD
        scheduler.schedule([long()] * 2, 2)
        await steps.held()
        syncing = asyncio.create_task(engine.sync_weights(weight_stream(model), 7))
        await asyncio.sleep(0)
        steps.go_on()
        await syncing
        scheduler.schedule([question()] * 2, 3)
        for batch_id in (2, 3):
            statuses, experiences = await scheduler.get_results(batch_id)
            assert oks(statuses) == [True] * 2
            versions += [e.info["model_version"] for e in experiences]
        assert versions == [0, 0, 0, 0, 7, 7]

    try:
        run(body)
    finally:
        driven[1].run(engine.sync_weights(weight_stream(model), 0))

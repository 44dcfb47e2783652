import asyncio
import contextlib
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_model import FakeModel

from trinity_lightning.common.inference import Completion
from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import PromptTooLongError, RolloutError, WeightSyncError, WorkflowBlockedError
from trinity_lightning.explorer import WorkflowRunner
from trinity_lightning.explorer import driver as driver_module
from trinity_lightning.explorer.driver import Driver, blocker_of
from trinity_lightning.explorer.models.engine import InProcessEngine
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows.workflow import Workflow
from trinity_lightning.sync.stream import Shape, WeightStream


class Letters:
    """A tokenizer whose tokens are the numbers of letters, none of which ends a response."""

    eos_token_id = pad_token_id = bos_token_id = chat_template = None

    @staticmethod
    def encode(text: str, **_: Any) -> list[int]:
        return [ord(c) for c in text]

    @staticmethod
    def decode(tokens: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, tokens))

    @staticmethod
    def apply_chat_template(messages: Sequence[dict[str, str]], **_: Any) -> list[int]:
        return [ord(c) for c in messages[0]["content"]]


class CountingEngine(InProcessEngine):
    """Answers a request with its prompt after as many steps as `steps` says; notes on which thread it is driven."""

    def __init__(self) -> None:
        super().__init__(max_model_len=8)
        self.left: dict[str, int] = {}
        self.prompts: dict[str, list[int]] = {}
        self.aborted: list[str] = []
        self.threads: set[int] = set()
        self.steps = 0
        self.loads = 0
        self.frees = 0
        self.taken: dict[str, torch.Tensor] = {}
        self.before_step: Callable[[], None] = lambda: None

    @property
    def tokenizer(self) -> Any:
        return Letters

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {"w": (2,)}

    def _load(self) -> None:
        self.loads += 1

    def _add(self, request_id: str, token_ids: list[int], n: int, sampling: dict[str, Any]) -> None:
        if "refused" in sampling:
            raise ValueError("refused")
        self.left[request_id] = sampling.get("steps", 1)
        self.prompts[request_id] = token_ids

    def _add_scoring(self, request_id: str, token_ids: list[int]) -> None:
        self._add(request_id, token_ids, 1, {})

    def _abort(self, request_id: str) -> None:
        self.left.pop(request_id, None)
        self.aborted.append(request_id)

    def _abort_all(self) -> None:
        self.left.clear()

    def _has_work(self) -> bool:
        return bool(self.left)

    def _step(self) -> Iterable[tuple[str, Any]]:
        self.threads.add(threading.get_ident())
        self.steps += 1
        self.before_step()
        self.left = {key: steps - 1 for key, steps in self.left.items()}
        done = [key for key, steps in self.left.items() if steps <= 0]
        for key in done:
            del self.left[key]
        return [(key, [Completion([], self.prompts[key], [], "", "stop")]) for key in done]

    def _take_weights(self, stream: WeightStream) -> None:
        self.taken = dict(stream)

    def _free(self) -> None:
        self.frees += 1


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def driver(engine: CountingEngine) -> Iterator[Driver]:
    driver = Driver([engine])
    yield driver
    driver.close()


def tokens(completions: list[Completion]) -> list[int]:
    return list(completions[0].token_ids)


def raises_once(error: BaseException) -> Callable[[], None]:
    errors = [error]

    def raise_it() -> None:
        if errors:
            raise errors.pop()

    return raise_it


# -- results and errors -----------------------------------------------------------------------------------------------


def test_a_coroutine_runs_elsewhere_and_the_engine_here(driver: Driver, engine: CountingEngine) -> None:
    async def ask() -> tuple[int, list[int]]:
        return threading.get_ident(), tokens(await engine.generate("AB"))

    where, answer = driver.run(ask())
    assert answer == [65, 66]
    assert where != threading.get_ident()
    assert engine.threads == {threading.get_ident()}


def test_the_loop_takes_no_threads_of_openmp_and_others_keep_theirs() -> None:
    async def threads() -> int:
        return torch.get_num_threads()

    before, set_threads = torch.get_num_threads(), torch._C.set_num_threads  # vLLM replaces torch's own
    set_threads(3)
    driver = Driver()
    try:
        assert driver.run(threads()) == 1
        assert torch.get_num_threads() == 3
        assert driver.run(run_in_thread(torch.get_num_threads)) == 3
    finally:
        driver.close()
        set_threads(before)


def test_many_coroutines_share_the_steps(driver: Driver, engine: CountingEngine) -> None:
    async def ask() -> list[list[int]]:
        answers = await asyncio.gather(*[engine.generate([i], steps=1 + i % 5) for i in range(200)])
        return [tokens(answer) for answer in answers]

    engine.before_step = lambda: time.sleep(0.01)  # a step takes its time, in which others' requests are posted
    assert driver.run(ask()) == [[i] for i in range(200)]
    assert engine.steps < 20
    assert engine.loads == 1


def test_text_is_made_by_another_thread_while_the_engine_computes_other_requests(
    driver: Driver, engine: CountingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, decoding, is_made = Letters.decode, set[int](), threading.Event()
    in_time: list[bool] = []

    def noted(tokens: Sequence[int], **settings: Any) -> str:
        decoding.add(threading.get_ident())
        is_made.set()
        return decode(tokens, **settings)

    def wait_for_text() -> None:
        if engine.steps == 2:  # the first response has ended in the step before, the second goes on
            in_time.append(is_made.wait(10))

    async def both() -> tuple[list[Completion], list[Completion]]:
        return await asyncio.gather(engine.generate("short."), engine.generate("long.", steps=3))

    monkeypatch.setattr(Letters, "decode", staticmethod(noted))
    engine.before_step = wait_for_text
    assert [completion.text for [completion] in driver.run(both())] == ["short", "long"]
    assert in_time == [True]
    assert engine.threads.isdisjoint(decoding)


def test_requests_of_the_same_moment_share_the_first_step_whichever_thread_is_quicker(
    driver: Driver, engine: CountingEngine
) -> None:
    """Requests of one step round together: the same seed gives the same bits."""

    async def ask(after: int) -> None:
        for _ in range(after):
            await asyncio.sleep(0)
            time.sleep(0.002)  # noqa: ASYNC251  # holds the loop: the main thread may step meanwhile
        await engine.generate([after])

    async def all_of_them() -> None:
        await engine.load()
        await asyncio.gather(*map(ask, (0, 1, 2)))

    together: list[int] = []
    engine.before_step = lambda: together.append(len(engine.left))
    driver.run(all_of_them())
    assert together == [3]


def test_a_run_ends_as_soon_as_its_coroutine_does(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may wait for the clock: with a wake-up lost between two looks, this test would never end."""
    monkeypatch.setattr(driver_module, "SIGNAL_CHECK_SECONDS", 3600.0)

    async def nothing() -> None:
        pass

    for _ in range(300):
        driver.run(nothing())


def test_requests_of_suspended_engines_rest_while_commands_are_run(driver: Driver, engine: CountingEngine) -> None:
    request = driver.start(engine.generate([3], steps=3))
    while not engine.left:
        driver.pump(0.01)
    steps, driver.suspended = engine.steps, True
    driver.run(engine.sync_weights([("w", torch.ones(2))], 1))
    assert (engine.model_version, engine.steps) == (1, steps)
    driver.suspended = False
    assert tokens(driver.wait(request)) == [3]


def test_requests_rest_while_a_coroutine_is_about_to_send_weights(driver: Driver, engine: CountingEngine) -> None:
    request = driver.start(engine.generate([3], steps=3))
    while not engine.left:
        driver.pump(0.01)
    steps = engine.steps

    async def send() -> None:
        await asyncio.sleep(0.1)  # before anything is posted, the engine is pumped a few times
        await engine.sync_weights([("w", torch.ones(2))], 1)

    driver.run(send(), resting=True)
    assert (engine.model_version, engine.steps, driver.suspended) == (1, steps, False)
    assert tokens(driver.wait(request)) == [3]


def test_an_exception_of_the_coroutine_is_raised_here(driver: Driver) -> None:
    async def fail() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        driver.run(fail())


def test_a_refused_request_is_its_callers_and_the_engine_goes_on(driver: Driver, engine: CountingEngine) -> None:
    async def ask() -> tuple[Any, ...]:
        calls = [engine.generate([1], refused=True), engine.generate([2]), engine.generate([3] * 8)]
        return tuple(await asyncio.gather(*calls, return_exceptions=True))

    refused, answer, too_long = driver.run(ask())
    assert isinstance(refused, ValueError)
    assert tokens(answer) == [2]
    assert isinstance(too_long, PromptTooLongError)
    assert "8 tokens" in str(too_long)
    assert not engine._waiting


@pytest.mark.parametrize("driven", [True, False])
def test_a_step_that_raises_fails_all_waiters_and_the_engine_goes_on(engine: CountingEngine, driven: bool) -> None:
    engine.before_step = raises_once(ArithmeticError("no good"))

    all_posted = threading.Event()

    async def ask() -> tuple[list[Any], list[int]]:
        await engine.load()  # the first request of each would wait for it, and post itself when it likes
        if driven:  # the driver must not take its first step before all five wait
            engine._post(lambda: all_posted.wait(60))
        calls = [asyncio.create_task(engine.generate([i], steps=3)) for i in range(5)]
        await asyncio.sleep(0)
        all_posted.set()
        failed = await asyncio.gather(*calls, return_exceptions=True)
        return failed, tokens(await engine.generate([7]))

    if driven:
        driver = Driver([engine])
        failed, answer = driver.run(ask())
        driver.close()
    else:
        failed, answer = asyncio.run(ask())
    assert [type(error) for error in failed] == [RolloutError] * 5
    assert str(failed[0]) == "the engine failed while generating: ArithmeticError: no good"
    assert answer == [7]


def test_chat_and_scoring_come_through_the_same_door(driver: Driver, engine: CountingEngine) -> None:
    assert tokens(driver.run(engine.chat([{"role": "user", "content": "C"}]))) == [67]
    driver.run(engine.logprobs([1, 2]))
    with pytest.raises(PromptTooLongError):
        driver.run(engine.logprobs([1] * 9))


# -- cancelling and interrupting --------------------------------------------------------------------------------------


def test_cancelling_a_coroutine_aborts_its_request(driver: Driver, engine: CountingEngine) -> None:
    async def ask() -> list[int]:
        endless = asyncio.create_task(engine.generate([1], steps=10**9))
        other = asyncio.create_task(engine.generate([2], steps=50))
        while engine.steps < 3:  # noqa: ASYNC110 - the steps are another thread's
            await asyncio.sleep(0.001)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        return tokens(await other)

    assert driver.run(ask()) == [2]
    assert engine.aborted == ["1"]
    assert not engine.left


def test_an_abort_posted_by_the_last_breath_is_carried_out(driver: Driver, engine: CountingEngine) -> None:
    async def ask() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.generate([1], steps=10**9)

    driver.run(ask())
    assert engine.aborted == ["1"]
    assert not engine.left
    assert not engine._waiting


def test_a_request_cancelled_before_it_was_started_never_reaches_the_engine(engine: CountingEngine) -> None:
    async def ask() -> None:
        await engine.load()
        engine.attach(lambda: None)  # nobody pumps
        request = asyncio.create_task(engine.generate([1], steps=5))
        await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    asyncio.run(ask())
    engine.pump()
    assert engine.prompts == {}


def test_an_interruption_cancels_cleans_up_and_is_raised(engine: CountingEngine) -> None:
    reasons: list[BaseException] = []
    cleaned: list[str] = []
    driver = Driver([engine], lambda: reasons[0] if reasons else None)

    async def ask() -> None:
        try:
            await engine.generate([1], steps=10**9)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append("yes")

    def interrupt() -> None:
        if engine.steps == 5:
            reasons.append(SystemExit("enough"))

    engine.before_step = interrupt
    with pytest.raises(SystemExit, match="enough"):
        driver.run(ask())
    assert cleaned == ["yes"]
    assert engine.aborted == ["1"]
    reasons.clear()
    assert tokens(driver.run(engine.generate([4]))) == [4]
    driver.close()


def test_what_must_not_be_interrupted_is_not(engine: CountingEngine) -> None:
    driver = Driver([engine], lambda: KeyboardInterrupt())
    assert tokens(driver.run(engine.generate([4], steps=5), interruptible=False)) == [4]
    driver.close()


def test_ctrl_c_inside_a_step_is_raised_and_the_engine_goes_on(driver: Driver, engine: CountingEngine) -> None:
    engine.before_step = raises_once(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        driver.run(engine.generate([1], steps=5))
    assert not engine.left
    assert tokens(driver.run(engine.generate([4]))) == [4]


def test_what_fails_while_it_is_cancelled_is_logged(
    driver: Driver, engine: CountingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> None:
        try:
            await engine.generate([1], steps=5)
        finally:
            raise OSError("disk full")

    engine.before_step = raises_once(KeyboardInterrupt())
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        driver.run(ask())
    assert "OSError: disk full" in caplog.text


def test_a_coroutine_that_does_not_let_itself_be_cancelled_is_left(
    driver: Driver, engine: CountingEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver_module, "CANCEL_SECONDS", 0.1)
    monkeypatch.setattr(driver_module, "SIGNAL_CHECK_SECONDS", 0.02)
    released = threading.Event()

    async def stubborn() -> None:
        await engine.load()
        while not released.is_set():
            try:
                await engine.generate([1], steps=2)
                await asyncio.sleep(0.01)
            except (asyncio.CancelledError, RolloutError):  # the interrupted step's, if that comes first
                continue

    engine.before_step = raises_once(KeyboardInterrupt())
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        driver.run(stubborn())
    assert "did not end within 0.1 s" in caplog.text
    released.set()


@pytest.mark.slow
def test_a_wait_that_is_left_says_how_long_it_was(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver_module, "CANCEL_SECONDS", 30.0)
    now = iter([0.0, *[31.0] * 99])
    monkeypatch.setattr(driver_module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    begun, released = threading.Event(), threading.Event()

    async def stubborn() -> None:
        begun.set()
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    job = driver.start(stubborn())
    begun.wait()
    driver.cancel(job)
    released.set()
    assert "did not end within 31 s" in caplog.text


@pytest.mark.slow
def test_what_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(driver_module, "END_SECONDS", 0.2)
    cleaned: list[str] = []

    async def hanging() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("yes")

    driver = Driver()
    driver.end(hanging())
    driver.close()
    assert cleaned == ["yes"]
    assert "within 0.2 s" in caplog.text


# -- inline, life -----------------------------------------------------------------------------------------------------


def test_without_a_driver_awaiting_coroutines_step_the_engine(engine: CountingEngine) -> None:
    async def ask() -> list[list[int]]:
        answers = await asyncio.gather(*[engine.generate([i], steps=1 + i % 3) for i in range(20)])
        return [tokens(answer) for answer in answers]

    assert asyncio.run(ask()) == [[i] for i in range(20)]
    assert asyncio.run(ask()) == [[i] for i in range(20)]  # another loop, same engine


def test_after_close_an_engine_steps_itself_again(engine: CountingEngine) -> None:
    driver = Driver([engine])
    assert tokens(driver.run(engine.generate([1]))) == [1]
    driver.close()
    driver.close()
    assert tokens(asyncio.run(engine.generate([2]))) == [2]


def test_close_cancels_what_was_left_running(engine: CountingEngine) -> None:
    driver = Driver([engine])
    left: list[asyncio.Task[Any]] = []

    async def leave() -> None:
        left.append(asyncio.create_task(engine.generate([1], steps=10**9)))
        await asyncio.sleep(0.01)

    driver.run(leave())
    driver.close()
    assert left[0].cancelled()
    assert engine.aborted == ["1"]
    left.clear()
    gc.collect()


def test_shutdown_twice_and_load_again(driver: Driver, engine: CountingEngine) -> None:
    driver.run(engine.shutdown())
    assert engine.frees == 0  # nothing was loaded
    driver.run(engine.generate([1]))
    driver.run(engine.shutdown())
    driver.run(engine.shutdown())
    assert (engine.loads, engine.frees) == (1, 1)
    driver.run(engine.generate([1]))
    assert engine.loads == 2


def test_shutdown_fails_the_requests_under_way(driver: Driver, engine: CountingEngine) -> None:
    async def ask() -> None:
        request = asyncio.create_task(engine.generate([1], steps=10**9))
        while engine.steps < 2:  # noqa: ASYNC110 - the steps are another thread's
            await asyncio.sleep(0.001)
        await engine.shutdown()
        with pytest.raises(RolloutError, match="shut down"):
            await request

    driver.run(ask())


def test_a_failed_load_is_told_to_every_waiter(driver: Driver, engine: CountingEngine) -> None:
    def fail() -> None:
        raise LookupError("no such model")

    engine._load = fail

    async def ask() -> list[Any]:
        return await asyncio.gather(*[engine.generate([i]) for i in range(3)], return_exceptions=True)

    assert [str(error) for error in driver.run(ask())] == ["no such model"] * 3


# -- weights ----------------------------------------------------------------------------------------------------------


def test_weights_and_version_change_together(driver: Driver, engine: CountingEngine) -> None:
    assert engine.model_version == 0
    driver.run(engine.sync_weights([("w", torch.ones(2))], 3))
    assert engine.model_version == 3
    assert engine.taken["w"].tolist() == [1.0, 1.0]


def test_weights_that_do_not_fit_are_refused_before_the_engine_sees_them(
    driver: Driver, engine: CountingEngine
) -> None:
    with pytest.raises(WeightSyncError, match=r"'w' \(3,\)"):
        driver.run(engine.sync_weights([("w", torch.ones(3))], 1))
    with pytest.raises(WeightSyncError, match="missing: 'w'"):
        driver.run(engine.sync_weights([], 1))
    assert (engine.taken, engine.model_version) == ({}, 0)


def test_a_thread_that_computes_does_not_keep_the_interpreter_from_the_main_thread() -> None:
    before = sys.getswitchinterval()
    driver = Driver()
    within = sys.getswitchinterval()
    driver.close()
    assert within == pytest.approx(driver_module.SWITCH_SECONDS)
    assert within < before == sys.getswitchinterval()


# -- a loop that is blocked -------------------------------------------------------------------------------------------


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Event that a blocked loop waits for, set at the end of the test at the latest. The driver waits shortly."""
    monkeypatch.setattr(driver_module, "BLOCKED_SECONDS", 0.3)
    monkeypatch.setattr(driver_module, "SIGNAL_CHECK_SECONDS", 0.05)
    event = threading.Event()
    yield event
    event.set()


class Stubborn(Workflow):
    """Waits without `await`."""

    async def run(self) -> list[Any]:
        self.task.workflow_args["released"].wait(60)
        return []


async def stubborn(released: threading.Event) -> None:
    nobody: Any = None
    await Stubborn(task=Task(Stubborn, workflow_args={"released": released}), model=nobody).run()


@pytest.mark.slow
def test_a_workflow_that_blocks_the_loop_is_logged_and_then_refused_by_name(
    released: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    driver.limit_blocking(0.6, 0.2)
    with pytest.raises(WorkflowBlockedError, match=r"'Stubborn'\) has blocked .*asyncio\.to_thread.*`def run`"):
        driver.run(stubborn(released))
    assert not released.is_set()
    assert caplog.text.count("run' (workflow 'Stubborn') blocks all rollouts") == 1
    assert 'self.task.workflow_args["released"].wait(60)' in caplog.text
    released.set()
    driver.close()


async def helper(released: threading.Event) -> None:
    released.wait(60)


def test_a_task_of_its_own_that_blocks_the_loop_is_refused_by_its_line(released: threading.Event) -> None:
    async def gathering() -> None:
        await asyncio.gather(helper(released))

    driver = Driver()
    driver.limit_blocking(0.3, 0.2)
    with pytest.raises(WorkflowBlockedError, match=r"test_driver\.py:\d+ helper' has blocked .*asyncio\.to_thread"):
        driver.run(gathering())
    released.set()
    driver.close()


def test_a_reward_that_blocks_the_loop_is_refused_by_its_line_beside_the_workflow(released: threading.Event) -> None:
    async def reward(response: str, task: Task) -> float:
        released.wait(60)
        return 1.0

    task = Task("simple", {"prompt": "1 + 1?"}, reward_fn=reward)
    driver = Driver()
    driver.limit_blocking(0.3, 0.2)
    with pytest.raises(WorkflowBlockedError, match=r"test_driver\.py:\d+ reward' \(workflow 'SimpleWorkflow'\)"):
        driver.run(WorkflowRunner(ExplorerConfig(), FakeModel()).run_task(task, 1, 0))
    released.set()
    driver.close()


def test_a_run_that_ends_says_why_it_waits_no_longer(released: threading.Event) -> None:
    driver = Driver()
    driver.limit_blocking(60)
    driver.hurry()
    with pytest.raises(WorkflowBlockedError, match=r"has blocked all rollouts for .* s \(the run is ending\)"):
        driver.run(helper(released))
    released.set()
    driver.close()


def test_a_loop_with_nothing_to_run_is_not_blocked() -> None:
    driver = Driver()
    driver.limit_blocking(0.0)
    driver.run(asyncio.sleep(0.05))
    assert blocker_of(driver._thread) is None
    driver.close()


def test_what_blocks_shortly_is_waited_for(released: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    driver.limit_blocking(60.0, 30.0)
    threading.Timer(0.1, released.set).start()
    driver.run(stubborn(released))
    driver.close()
    assert "blocks" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [stubborn, helper])
def test_ctrl_c_does_not_wait_for_a_loop_that_is_blocked(
    blocking: Any, released: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    pressed = threading.Timer(0.1, lambda: None)
    pressed.start()
    driver = Driver((), lambda: None if pressed.is_alive() else KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        driver.run(blocking(released))
    driver.end(asyncio.sleep(0))
    driver.close()
    driver.close()
    assert "ends with the process" in caplog.text
    thread = next(thread for thread in threading.enumerate() if thread.name == "rollouts")
    assert thread.is_alive()  # it was not waited for
    released.set()
    thread.join()  # it ends by itself once it is free, and closes its loop


# -- calls that another thread leaves to the main one ------------------------------------------------------------------


def test_a_call_is_made_once_however_threads_take_turns(driver: Driver) -> None:
    """Another thread makes the calls that wait before every single instruction of `call_later`."""
    called: list[int] = []
    between: list[threading.Thread] = []

    def call_before_instructions(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not Driver.call_later.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            between.append(threading.Thread(target=driver._make_calls))
            between[-1].start()
            between[-1].join()
        return call_before_instructions

    def post() -> None:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 reports instructions only if some frame asks before
        sys.settrace(call_before_instructions)  # of this thread
        for number in range(3):
            driver.call_later(partial(called.append, number))

    posting = threading.Thread(target=post)
    posting.start()
    posting.join()
    assert len(between) > 3
    driver.run(asyncio.sleep(0))
    assert called == [0, 1, 2]


def test_a_call_that_comes_while_others_are_made_is_made_after_them(driver: Driver) -> None:
    called: list[int] = []

    def call(number: int) -> None:
        called.append(number)
        if number < 3:
            other = threading.Thread(target=driver.call_later, args=(partial(call, number + 1),))
            other.start()
            other.join()

    async def post() -> None:
        driver.call_later(partial(call, 0))

    driver.run(post())
    assert called == [0, 1, 2, 3]


def broken_call() -> None:
    raise OSError("no space left")


def test_a_call_that_fails_does_not_replace_the_error_that_ended_the_wait(driver: Driver) -> None:
    async def post_and_fail() -> None:
        driver.call_later(broken_call)
        raise ValueError("what ended it")

    with pytest.raises(ValueError, match="what ended it"):
        driver.run(post_and_fail())
    with pytest.raises(OSError, match="no space left"):
        driver.run(asyncio.sleep(0))


def test_calls_that_are_left_are_made_at_the_end(driver: Driver) -> None:
    driver.call_later(broken_call)
    with pytest.raises(OSError, match="no space left"):
        driver.close()
    driver.close()

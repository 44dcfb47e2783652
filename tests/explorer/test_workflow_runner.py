import asyncio
import copy
import inspect
import re
import threading
from collections.abc import Generator
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from support.fake_model import FakeModel, Scripted, ScriptedRepeatable, an_experience, hang, scripted, succeed
from support.places import without_places

from trinity_lightning.algorithm.add_strategy import DrGRPOAddStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import ListWriter
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion
from trinity_lightning.common.random_state import rollout_seed
from trinity_lightning.common.runs import UNTRAINED, Untrained
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.config.own_code import waits_at
from trinity_lightning.errors import ReadOnlyError
from trinity_lightning.explorer import Status, WorkflowRunner
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.tasks.task import Task, messages_of
from trinity_lightning.explorer.workflow_runner import failure_message
from trinity_lightning.explorer.workflows import PartialFailure, SimpleWorkflow, Workflow


def run_task(task: Task, repeat_times: int = 1, run_id_base: int = 0, model: FakeModel | None = None) -> Any:
    runner = WorkflowRunner(ExplorerConfig(seed=11), model or FakeModel())
    return asyncio.run(runner.run_task(task, repeat_times, run_id_base))


def test_status_needs_no_message() -> None:
    assert Status(True, {"a": 1.0}) == Status(ok=True, metric={"a": 1.0}, message=None)


def test_a_workflow_that_does_not_repeat_itself_is_run_n_times_concurrently() -> None:
    together = asyncio.Barrier(3)

    async def body(workflow: Any) -> list[Experience]:
        await together.wait()  # ends only if all three are under way
        return [an_experience(), Experience(eid=EID(step=1), tokens=[1, 2], metrics={"x": 1.0})]

    model = FakeModel()
    model.model_version = 6
    task = scripted(body, batch_id=4, task_id=2)
    status, experiences = run_task(task, 3, run_id_base=5, model=model)
    assert [(e.eid.batch, e.eid.task, e.eid.run, e.eid.step) for e in experiences] == [
        (4, 2, run, step) for run in (5, 6, 7) for step in (0, 1)
    ]
    assert all(e.info["model_version"] == 6 for e in experiences)
    assert status.ok
    assert status.message is None
    assert status.metric.keys() == {"x", "time_per_task"}


def test_a_workflow_that_repeats_itself_gets_the_n_at_once_and_numbers_its_runs() -> None:
    calls = []

    async def body(workflow: Any) -> list[Experience]:
        calls.append((workflow.repeat_times, workflow.run_id_base))
        return [an_experience(workflow.run_id_base + i) for i in range(workflow.repeat_times)]

    _, experiences = run_task(scripted(body, ScriptedRepeatable, batch_id="3/e"), 4, run_id_base=2)
    assert calls == [(4, 2)]
    assert [(e.eid.batch, e.eid.run) for e in experiences] == [("3/e", 2), ("3/e", 3), ("3/e", 4), ("3/e", 5)]


def test_the_calls_of_a_run_are_its_steps_where_the_workflow_does_not_number_them() -> None:
    """Each call weighed as a run of its own: the mean of rewards 0 and 1 was 1/6."""

    runs = iter([(5, 0.0), (1, 1.0)])

    async def body(workflow: Any) -> list[Experience]:
        calls, reward = next(runs)
        eid = EID()  # may be shared, too
        return [Experience(eid=eid, tokens=[1, 2], prompt_length=1, reward=reward) for _ in range(calls)]

    _, experiences = run_task(scripted(body), 2)
    assert [(e.eid.run, e.eid.step) for e in experiences] == [*((0, step) for step in range(5)), (1, 0)]
    _, metrics = asyncio.run(DrGRPOAddStrategy(ListWriter()).add(experiences, 1))
    assert metrics["group_advantages/reward_mean/mean"] == 0.5


def test_experiences_that_share_an_id_are_told_apart_by_why_they_are_not_trained_on() -> None:
    async def body(workflow: Any) -> list[Experience]:
        eid = EID()
        return [Experience(eid=eid, tokens=[1, 2], prompt_length=1, reward=1.0) for _ in range(3)]

    _, experiences = run_task(scripted(body, ScriptedRepeatable), 3)
    untrained = Untrained(all_rows=False)
    untrained.leave_out(experiences, experiences[:2], "filtered by a test")
    untrained.note(experiences)
    assert [UNTRAINED in experience.info for experience in experiences] == [False, False, True]


def test_several_experiences_of_a_run_of_a_repeatable_workflow_are_its_steps() -> None:
    async def twice_each(workflow: Any) -> list[Experience]:
        runs = range(workflow.run_id_base, workflow.run_id_base + workflow.repeat_times)
        return [an_experience(run) for run in runs for _ in range(2)]

    async def all_in_one(workflow: Any) -> list[Experience]:
        return [an_experience(workflow.run_id_base) for _ in range(workflow.repeat_times)]

    async def half(workflow: Any) -> list[Experience]:
        raise PartialFailure([an_experience(0), an_experience(0)], {1: ValueError()})

    def ids(body: Any, runs: int) -> list[tuple[int, int]]:
        return [(e.eid.run, e.eid.step) for e in run_task(scripted(body, ScriptedRepeatable), runs)[1]]

    assert ids(twice_each, 1) == [(0, 0), (0, 1)]
    assert ids(twice_each, 2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert ids(half, 2) == [(0, 0), (0, 1)]
    assert ids(all_in_one, 2) == [(0, 0), (0, 0)]  # whose they are is not said: a run each, as strategies take them


def test_repeatable_may_be_a_property() -> None:
    class Sometimes(Scripted):
        @property
        def repeatable(self) -> bool:  # type: ignore[override]
            return self.task.raw_task["together"]

    async def body(workflow: Any) -> list[Experience]:
        calls.append(workflow.repeat_times)
        return [an_experience(workflow.run_id_base + i) for i in range(workflow.repeat_times)]

    for together, expected in ((True, [3]), (False, [1, 1, 1])):
        calls: list[int] = []
        task = scripted(body, Sometimes, raw_task={"together": together})
        assert [e.eid.run for e in run_task(task, 3)[1]] == [0, 1, 2]
        assert calls == expected


def test_metrics_are_means_over_the_experiences_that_have_them() -> None:
    async def body(workflow: Any) -> list[Experience]:
        return [
            an_experience(0, metrics={"a": 1.0, "b": 2, "note": "text"}),
            an_experience(1, metrics={"a": 4.0}),
            an_experience(2),
        ]

    status, _ = run_task(scripted(body, ScriptedRepeatable), 3)
    assert status.metric.pop("time_per_task") >= 0
    assert status.metric == {"a": 2.5, "b": 2.0}


async def _nothing(workflow: Any) -> list[Experience]:
    return []


async def _raises(workflow: Any) -> list[Experience]:
    raise ValueError("the tool broke")


async def _wrong(workflow: Any) -> Any:
    return [1, "a"]


async def _none(workflow: Any) -> Any:
    return None


@pytest.mark.parametrize("workflow", [Scripted, ScriptedRepeatable])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_nothing, "run returned no experience"),
        (_raises, "2 of 2 runs failed: 2 x ValueError: the tool broke"),
        (_wrong, "run returned a list with int, str, expected a list of Experience"),
        (_none, "run returned NoneType, expected a list of Experience"),
    ],
)
def test_without_an_experience_the_task_failed(workflow: type[Workflow], body: Any, message: str) -> None:
    status, experiences = run_task(scripted(body, workflow), 2)
    assert not status.ok
    assert status.metric.keys() == {"time_per_task"}
    assert message in (status.message or "")
    assert experiences == []


def test_the_message_has_the_types_and_texts_of_all_exceptions() -> None:
    async def body(workflow: Any) -> list[Experience]:
        raise [ValueError("a"), KeyError("b")][workflow.model._run]

    status, _ = run_task(scripted(body), 2)
    assert without_places(status.message) == "2 of 2 runs failed: ValueError: a; KeyError: 'b'"


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        (["raised ValueError: 'a'", "raised ValueError: 'b'"], "2 x {}raised ValueError: 'a', and the like"),
        (["raised ValueError: a", "raised KeyError: a"], "{}raised ValueError: a; {}raised KeyError: a"),
        (["returned 'a', ...", "returned 'b', ..."], "2 x {}returned 'a', ..., and the like"),
    ],
)
def test_what_a_reward_function_says_of_each_answer_is_said_once(errors: list[str], message: str) -> None:
    prefix = "RewardError: reward function 'judge' "
    assert failure_message([prefix + error for error in errors], 2) == "2 of 2 runs failed: " + message.replace(
        "{}", prefix
    )


def test_a_run_that_fails_leaves_the_others() -> None:
    async def body(workflow: Any) -> list[Experience]:
        if workflow.model._run == 1:
            raise ValueError("one of them")
        return [an_experience()]

    status, experiences = run_task(scripted(body), 3)
    assert [e.eid.run for e in experiences] == [0, 2]
    assert re.fullmatch(r"1 of 3 runs failed: ValueError: one of them \(.*py:\d+ in body\)", str(status.message))


def test_a_partial_failure_keeps_the_runs_that_succeeded() -> None:
    async def body(workflow: Any) -> list[Experience]:
        raise PartialFailure([an_experience(2), an_experience(4)], {3: ValueError("unlucky")})

    status, experiences = run_task(scripted(body, ScriptedRepeatable, batch_id=1, task_id=9), 3, run_id_base=2)
    assert [(e.eid.batch, e.eid.task, e.eid.run) for e in experiences] == [(1, 9, 2), (1, 9, 4)]
    assert all(e.info["model_version"] == 0 for e in experiences)
    assert status.message == "1 of 3 runs failed: ValueError: unlucky"


class Numbered(SimpleWorkflow):
    """Numbers its runs from 0, as a built-in workflow does that is not told to begin elsewhere."""

    repeatable = False


def test_a_failure_is_that_of_the_run_whatever_number_it_has_there() -> None:
    def reward(response: str, task: Task) -> float:
        if int(response) == failing:
            raise ValueError("no judge")
        return 1.0

    failing = rollout_seed(11, "", "", 0, 2)
    task = Task(Numbered, {"prompt": "?"}, reward_fn=reward)
    attempt = asyncio.run(WorkflowRunner(ExplorerConfig(seed=11), FakeModel()).attempt(task, range(4)))
    assert [e.eid.run for e in attempt.experiences] == [0, 1, 3]
    assert {run: str(error).partition(" (")[0] for run, error in attempt.errors.items()} == {
        2: "reward function 'reward' raised ValueError: no judge"
    }


def test_errors_of_other_runs_than_those_asked_for_fail_all_of_these() -> None:
    async def body(workflow: Any) -> list[Experience]:
        raise PartialFailure([an_experience(0)], {1: ValueError("unlucky")})  # counted from 0

    runner = WorkflowRunner(ExplorerConfig(), FakeModel())
    attempt = asyncio.run(runner.attempt(scripted(body, ScriptedRepeatable), [2, 3]))
    assert attempt.experiences == []
    assert {run: str(error) for run, error in attempt.errors.items()} == {2: "unlucky", 3: "unlucky"}


@pytest.mark.parametrize("got", [[4], [3, 4, 3], [3, 3, 4, 4]])
def test_a_workflow_that_repeats_itself_may_leave_runs_out(got: list[int]) -> None:
    async def body(workflow: Any) -> list[Experience]:
        return [an_experience(run) for run in got]

    runner = WorkflowRunner(ExplorerConfig(), FakeModel())
    attempt = asyncio.run(runner.attempt(scripted(body, ScriptedRepeatable), [3, 4, 5]))
    assert [e.eid.run for e in attempt.experiences] == got
    assert attempt.errors == {}


def test_an_attempt_at_some_runs_asks_for_each_stretch_of_them_at_once() -> None:
    calls = []

    async def body(workflow: Any) -> list[Experience]:
        calls.append((workflow.run_id_base, workflow.repeat_times))
        await workflow.model.generate([1], n=workflow.repeat_times)
        return [an_experience(workflow.run_id_base + i) for i in range(workflow.repeat_times)]

    model = FakeModel()
    runner = WorkflowRunner(ExplorerConfig(seed=3), model)
    task = scripted(body, ScriptedRepeatable, batch_id=1, task_id=2)
    attempt = asyncio.run(runner.attempt(task, [1, 2, 5]))
    assert calls == [(1, 2), (5, 1)]
    assert [e.eid.run for e in attempt.experiences] == [1, 2, 5]
    assert [call["seed"] for call in model.calls] == [rollout_seed(3, 1, 2, 0, run) for run in (1, 5)]


def test_evaluation_experiences_stay_with_the_status() -> None:
    async def body(workflow: Any) -> list[Experience]:
        return [an_experience(metrics={"reward/x": 0.25})]

    status, experiences = run_task(scripted(body, is_eval=True), 2)
    assert experiences == []
    assert [e.eid.run for e in status.eval_experiences] == [0, 1]
    assert status.ok
    assert status.metric["reward/x"] == 0.25


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        ("simpel", "ConfigError: unknown workflow 'simpel'. Did you mean 'simple'?"),
        ("no_such_module.Flow", "there is no module 'no_such_module'"),
        ("collections.OrderedDict", "is no subclass of"),
        (dict, "is no subclass of"),
    ],
)
def test_an_unknown_workflow_is_a_failed_task_that_says_so(workflow: Any, message: str) -> None:
    status, _ = run_task(Task(workflow))
    assert message in (status.message or "")


def test_a_constructor_that_raises_fails_every_run() -> None:
    class Picky(Workflow):
        def __init__(self, **arguments: Any) -> None:
            raise OSError("no sandbox")

        async def run(self) -> list[Experience]:
            return []

    message = str(run_task(Task(Picky), 2)[0].message)
    assert re.fullmatch(r"2 of 2 runs failed: 2 x OSError: no sandbox \(.*py:\d+ in __init__\)", message)


def test_auxiliary_models_are_handed_on_with_seeds_and_without_the_tasks_sampling() -> None:
    async def body(workflow: Any) -> list[Experience]:
        (judge,) = workflow.auxiliary_models
        await workflow.model.generate([1])
        await judge.generate([1])
        return [an_experience()]

    model, judge = FakeModel(), FakeModel()
    runner = WorkflowRunner(ExplorerConfig(), model, [judge])
    asyncio.run(runner.run_task(scripted(body, rollout_args={"temperature": 0.5})))
    assert model.calls[0]["temperature"] == 0.5
    assert judge.calls[0].keys() == {"prompt", "n", "seed"}


def test_info_has_the_version_that_the_run_began_with() -> None:
    async def body(workflow: Any) -> list[Experience]:
        await workflow.model.generate([1])
        model.model_version = 4
        await workflow.model.generate([1])
        return [an_experience()]

    model = FakeModel()
    model.model_version = 3
    assert run_task(scripted(body), model=model)[1][0].info["model_version"] == 3


# -- workflows that block ---------------------------------------------------------------------------------------------


class Blocking(Workflow):
    """A plain `def run` that talks to the model, `turns` times."""

    def run(self) -> list[Experience]:  # type: ignore[override]
        turns = self.task.workflow_args.get("turns", 1)
        texts = [self.model.chat([{"role": "user", "content": "hi"}])[0].text for _ in range(turns)]  # type: ignore
        assert self.model.max_model_len == 100
        assert self.model.logprobs([1, 2, 3]) == [-1.0, -1.0]
        return [an_experience(info={"texts": texts, "thread": threading.get_ident()})]


def test_a_plain_run_works_in_a_thread_of_its_own_with_a_model_that_blocks() -> None:
    model = FakeModel(latency=0.01)
    status, experiences = run_task(Task(Blocking, workflow_args={"turns": 2}), 12, model=model)
    assert status.ok, status.message
    assert len({e.info["thread"] for e in experiences} - {threading.get_ident()}) > 1
    for run, experience in enumerate(experiences):
        assert experience.eid.run == run
        assert experience.info["texts"] == [str(rollout_seed(11, "", "", turn, run)) for turn in (0, 1)]


def test_a_plain_run_that_is_cut_off_aborts_its_request_and_gets_no_more() -> None:
    seen: list[BaseException] = []
    ended = threading.Event()

    class Stubborn(Workflow):
        def run(self) -> list[Experience]:  # type: ignore[override]
            model: Any = self.model
            for _ in range(2):
                try:
                    model.generate([1])
                except Exception as error:
                    seen.append(error)
            ended.set()
            return []

    async def main() -> None:
        model = FakeModel(latency=100)
        attempt = asyncio.create_task(WorkflowRunner(ExplorerConfig(), model).attempt(Task(Stubborn), [0]))
        while not model.calls:  # noqa: ASYNC110 - another thread calls it
            await asyncio.sleep(0.001)
        attempt.cancel()
        assert await asyncio.to_thread(ended.wait, 60)
        assert model.aborted == 1
        assert len(model.calls) == 1

    asyncio.run(main())
    assert [type(error).__name__ for error in seen] == ["CancelledError", "RolloutError"]
    assert "the run is over" in str(seen[1])


class Hanging(Workflow):
    """Awaits what never comes, in a method of its own."""

    async def run(self) -> list[Experience]:
        async with asyncio.timeout(1000):
            await self.ask()
        return []

    async def ask(self) -> None:
        await asyncio.Event().wait()


class HangingAwaitable(Workflow):
    """Awaits an object of the user's that never ends."""

    async def run(self) -> list[Experience]:
        await self
        return []

    def __await__(self) -> Generator[Any, None, None]:
        yield from asyncio.Event().wait().__await__()


@pytest.mark.parametrize(("workflow", "method"), [(Hanging, "ask"), (HangingAwaitable, "__await__")])
def test_a_workflow_that_hangs_is_named_with_the_line_where_it_waits(workflow: type[Workflow], method: str) -> None:
    """The innermost line of the user's, not the one of asyncio below it."""
    runner = WorkflowRunner(ExplorerConfig(), FakeModel())
    attempt = asyncio.run(runner.attempt(Task(workflow), [0, 1], 0.1))
    line = inspect.getsourcelines(getattr(workflow, method))[1] + 1
    place = f"tests/explorer/test_workflow_runner.py:{line} in {method}"
    expected = f"not done within 0.1 s: workflow '{workflow.__name__}' was waiting at {place}"
    assert [str(error) for error in attempt.errors.values()] == [expected] * 2


def test_where_none_of_the_users_code_waits_no_line_is_named() -> None:
    async def main() -> None:
        task = asyncio.create_task(asyncio.sleep(1000))
        await asyncio.sleep(0)
        assert waits_at(task.get_coro()) is None

    asyncio.run(main())


def test_a_plain_run_that_hangs_holds_nothing_up() -> None:
    release = threading.Event()

    class Hanging(Workflow):
        def run(self) -> list[Experience]:  # type: ignore[override]
            release.wait()
            return [an_experience()]

    async def main() -> Any:
        return await WorkflowRunner(ExplorerConfig(), FakeModel()).attempt(Task(Hanging), range(40), 0.05)

    try:
        assert len(asyncio.run(main()).errors) == 40
    finally:
        release.set()


@pytest.mark.parametrize("error", [ValueError("bad"), StopIteration("empty"), SystemExit(2)])
def test_what_a_plain_run_raises_fails_the_run(error: BaseException) -> None:
    class Raising(Workflow):
        def run(self) -> list[Experience]:  # type: ignore[override]
            raise error

    status, _ = run_task(Task(Raising))
    assert f"{type(error).__name__}: {error}" in (status.message or "")


def test_a_constructor_that_calls_a_blocking_model_is_told_not_to() -> None:
    class Eager(Blocking):
        def __init__(self, task: Task, model: Any, auxiliary_models: Any = None) -> None:
            super().__init__(task, model, auxiliary_models)
            model.generate([1])

    assert "call the model in run(), not in the constructor" in (run_task(Task(Eager))[0].message or "")


def test_cancelling_a_task_cancels_its_runs() -> None:
    async def main() -> int:
        model = FakeModel(latency=100)

        async def body(workflow: Any) -> list[Experience]:
            await workflow.model.generate([1])
            return await succeed(workflow)

        runner = WorkflowRunner(ExplorerConfig(), model)
        for task in (scripted(body), scripted(hang)):
            running = asyncio.create_task(runner.run_task(task, 3))
            await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return model.aborted

    assert asyncio.run(main()) == 3


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "info",
            None,
            r"Scripted(Repeatable)?\.run: info of an Experience was set to None: "
            r"it must be of type dict, at least info=\{\}",
        ),
        ("metrics", None, r"metrics of an Experience was set to None.*metrics=\{\}"),
        ("metrics", [0.5], r"metrics of an Experience was set to \[0.5\]"),
        ("eid", "1/2", r"eid of an Experience was set to '1/2': it must be of type EID"),
        ("reward", "good", "reward: expected a real number or None, got str"),
    ],
)
@pytest.mark.parametrize("partial", [False, True])
def test_what_a_workflow_assigned_is_refused_by_the_fields_name(
    field: str, value: Any, message: str, partial: bool
) -> None:
    async def body(workflow: Any) -> list[Experience]:
        experience = an_experience()
        setattr(experience, field, value)
        if partial:
            raise PartialFailure([experience], {1: ValueError("the other run")})
        return [experience]

    status, experiences = run_task(scripted(body, ScriptedRepeatable if partial else Scripted), 1 + partial)
    assert (status.ok, experiences) == (False, [])
    assert re.search(message, status.message)


def test_a_reward_assigned_as_a_tensor_becomes_a_number() -> None:
    async def body(workflow: Any) -> list[Experience]:
        experience = an_experience()
        experience.reward = torch.tensor(0.5)  # type: ignore[assignment]
        return [experience]

    _, (experience,) = run_task(scripted(body))
    assert type(experience.reward) is float


def test_a_completion_says_what_to_do_instead_of_writing_to_it() -> None:
    completion = Completion([1], [2], [-0.5], "x", "stop")
    with pytest.raises(ReadOnlyError, match=r"'text' of a Completion.*dataclasses\.replace\(completion, text=\.\.\.\)"):
        completion.text = "y"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(FrozenInstanceError, match=r"'reward' of a Completion.*goes into the Experience"):
        completion.reward = 1.0  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    assert (replace(completion, text="y").text, copy.deepcopy(completion)) == ("y", completion)


class Rendering(FakeModel):
    """Renders as an engine does, keeps its prompts as text, and answers in turn, then with the last."""

    def __init__(self, template: str, *answers: str) -> None:
        remaining = list(answers)
        super().__init__(lambda seed: remaining.pop(0) if len(remaining) > 1 else remaining[0], max_model_len=5000)
        self.tokenizer = load_tokenizer("tiny")
        self.tokenizer.chat_template = template + str(self.tokenizer.chat_template)
        self.prompts: list[str] = []

    async def generate(self, prompt: Any, n: int = 1, **sampling: Any) -> list[Completion]:
        self.prompts.append(self.tokenizer.decode(prompt))
        return await super().generate(prompt, n, **sampling)

    chat, render = Engine.chat, Engine.render


class ByClient(Workflow):
    """Asks through OpenAI's client, with variables of its own in its second call."""

    async def run(self) -> list[Experience]:
        client = self.model.get_openai_async_client()
        for extra in (None, {"chat_template_kwargs": {"mood": "loud"}}):
            messages: Any = messages_of(self.task)
            await client.chat.completions.create(model="policy", messages=messages, extra_body=extra)
        return []


LOOK = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "1+1"}}</tool_call>'
TOOLS = {"tools": ["trinity_lightning.explorer.workflows.tool_use.calculate"]}


@pytest.mark.parametrize(
    ("workflow", "arguments", "answers", "shown", "auxiliary"),
    [
        ("simple", {}, ["2"], ["lookcalm"], 0),
        ("math", {}, ["2"], ["lookcalm"], 0),
        ("evaluation", {}, ["2"], ["lookcalm"], 0),
        ("judge", {}, ["2"], ["lookcalm"], 1),
        ("on_policy_distill", {}, ["2"], ["lookcalm"], 0),
        ("multi_turn", {"environment": "retry", "max_turns": 2}, ["1", "2"], ["lookcalm", "lookcalm"], 0),
        ("tool_use", TOOLS, [CALL, "2"], ["calculatecalm", "calculatecalm"], 0),
        (ByClient, {}, ["2"], ["calm", "loud"], 0),
    ],
)
def test_tools_and_variables_of_a_task_reach_the_policys_template_and_no_judges(
    workflow: Any, arguments: dict[str, Any], answers: list[str], shown: list[str], auxiliary: int
) -> None:
    template = "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ mood }}"
    policy, judge = Rendering(template, *answers), Rendering(template, '{"score": 1}')
    raw = {"prompt": "1+1?", "answer": "2", "tools": [LOOK], "chat_template_kwargs": {"mood": "calm"}}
    run_variables = {"mood": "of the run"}
    task = Task(workflow, raw, 1, workflow == "evaluation", {}, arguments, chat_template_kwargs=run_variables)
    runner = WorkflowRunner(ExplorerConfig(), policy, [judge])
    status, _ = asyncio.run(runner.run_task(task))
    assert status.ok, status.message
    assert [prompt.partition("<|im_start|>")[0] for prompt in policy.prompts] == shown
    assert [prompt.partition("<|im_start|>")[0] for prompt in judge.prompts] == [""] * auxiliary


def test_variables_of_the_run_are_for_entries_that_have_none() -> None:
    policy = Rendering("{{ mood }}", "2")
    task = Task("simple", {"prompt": "1+1?"}, chat_template_kwargs={"mood": "calm"})
    asyncio.run(WorkflowRunner(ExplorerConfig(), policy).run_task(task))
    assert policy.prompts[0].startswith("calm<|im_start|>user")


def test_a_runner_needs_no_auxiliary_models() -> None:
    assert WorkflowRunner(ExplorerConfig(), FakeModel()).auxiliary_models == []
    assert WorkflowRunner(ExplorerConfig(), FakeModel(), None, 3).auxiliary_models == []

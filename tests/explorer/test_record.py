"""The record of a run's calls, with a model whose tokens a test writes one by one, and "processes" one after the other.

Its tokens are what a seed and a prompt give: a sample that goes on with its own noise is seen to.
"""

import asyncio
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.fake_model import FakeModel, ScriptedRepeatable, an_experience, scripted
from support.pictures import random_picture

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import PROGRESS, Completion
from trinity_lightning.common.pictures.prompt import Expansion, PicturePrompt
from trinity_lightning.common.random_state import rest_seed, rollout_seed
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.explorer.models.bound import BoundModel
from trinity_lightning.explorer.models.record import CallRecords, digest_of
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import WorkflowRunner

END = ord(".")
LIMIT = {"max_tokens": 6}


def token_of(seed: int, length: int) -> int:
    """The token that a sample has behind so many tokens."""
    return ord("a") + (seed + 7 * length) % 26


class Request:
    """A request of n samples."""

    def __init__(self, model: "Writer", prompt: Sequence[int], n: int, sampling: Mapping[str, Any]) -> None:
        self.model, self.prompt, self.sampling = model, prompt, sampling
        self.samples = [Completion(prompt, [], [], "", None) for _ in range(n)]
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def write(self, end: bool = False) -> None:
        """Another token for each sample that goes on; the end token if `end`."""
        for i, sample in enumerate(self.samples):
            if sample.finish_reason is None:
                length = len(self.prompt) + len(sample.token_ids)
                token = END if end else token_of(self.sampling["seed"] + i, length)
                tokens = [*sample.token_ids, token]
                reason = "stop" if end else "length" if len(tokens) == self.sampling["max_tokens"] else None
                span = (len(sample.token_ids), self.model.model_version)
                same = sample.versions and sample.versions[-1][1] == span[1]
                self.samples[i] = replace(
                    sample,
                    token_ids=tokens,
                    logprobs=[*sample.logprobs, -0.25 * len(tokens)],
                    finish_reason=reason,
                    versions=sample.versions if same else (*sample.versions, span),
                )
        if all(sample.finish_reason for sample in self.samples) and not self.ended.done():
            self.ended.set_result(None)


class Writer(FakeModel):
    """Writes when a test says so, and shows what it has written, as an engine of this process does."""

    def __init__(self, version: int = 0, **settings: Any) -> None:
        super().__init__(**settings)
        self.model_version = version
        self.open: list[Request] = []

    async def generate(self, prompt: Any, n: int = 1, **sampling: Any) -> list[Completion]:
        self.calls.append({"prompt": list(prompt), "n": n, **sampling})
        request = Request(self, prompt, n, sampling)
        self.open.append(request)
        if (progress := PROGRESS.get()) is not None:
            progress.written = lambda: request.samples
        try:
            await request.ended
        finally:
            self.open.remove(request)
        return [self.with_text(sample, sampling) for sample in request.samples]

    def with_text(self, completion: Completion, sampling: Mapping[str, Any]) -> Completion:
        return replace(completion, text="".join(map(chr, completion.token_ids)))

    async def write(self, tokens: int, requests: int = 1) -> None:
        """So many steps of all requests, each once there are so many of them."""
        for _ in range(tokens):
            async with asyncio.timeout(10):
                await settled()
                while len(self.open) < requests:  # noqa: ASYNC110 - OpenAI's client starts threads
                    await asyncio.sleep(0.001)
            for request in list(self.open):
                request.write()
        await settled()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def view(model: Writer, records: CallRecords, run: int = 0) -> BoundModel:
    record = records.begin(3, 1, run)
    return BoundModel(model, run_seed=5, batch=3, task=1, run=run, sampling=LIMIT, record=record)


def resumed(records: CallRecords) -> CallRecords:
    """The records in the next process, as a checkpoint brings them there."""
    torch.save(records.state_dict(), file := io.BytesIO())
    file.seek(0)
    later = CallRecords()
    later.load_state_dict(torch.load(file, weights_only=True))
    return later


def in_processes(*parts: Callable[[Writer, CallRecords], Awaitable[object]]) -> CallRecords:
    """Each part in a process of its own, with weights of a higher version: each is killed at its end."""
    records = CallRecords()
    for number, part in enumerate(parts):

        async def process(part: Any = part, number: int = number, records: CallRecords = records) -> CallRecords:
            await part(Writer(version=number, max_model_len=40), records)
            state = resumed(records)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            return state

        records = asyncio.run(process())
    return records


def asked(prompt: str) -> list[int]:
    return [ord(c) for c in prompt]


# -- calls -------------------------------------------------------------------------------------------------------------


def test_an_ended_call_is_answered_again_without_the_model() -> None:
    answers: list[list[Completion]] = []

    async def first(model: Writer, records: CallRecords) -> None:
        call = asyncio.ensure_future(view(model, records).generate(asked("hi"), n=2))
        await model.write(3)
        model.model_version = 4
        await model.write(3)
        answers.append(await call)

    async def second(model: Writer, records: CallRecords) -> None:
        model.model_version = 9
        bound = view(model, records)
        answers.append(await bound.generate(asked("hi"), n=2))
        assert (model.calls, bound.used_version) == ([], 0)

    in_processes(first, second)
    assert answers[0] == answers[1]
    assert [sample.versions for sample in answers[0]] == [((0, 0), (3, 4))] * 2


def test_a_response_is_continued_where_it_was_sample_by_sample() -> None:
    answers: list[list[Completion]] = []

    async def first(model: Writer, records: CallRecords) -> None:
        asyncio.ensure_future(view(model, records).generate(asked("hi"), n=3, min_tokens=4))  # noqa: RUF006
        await model.write(2)
        model.open[0].samples[1] = replace(model.open[0].samples[1], finish_reason="stop", stop_reason="!")
        await model.write(2)

    async def second(model: Writer, records: CallRecords) -> None:
        bound = view(model, records)
        call = asyncio.ensure_future(bound.generate(asked("hi"), n=3, min_tokens=4))
        await model.write(2)
        answers.append(await call)
        seed = rollout_seed(5, 3, 1, turn=0, run=0)
        kept = [[token_of(seed + i, 2 + k) for k in range(4)] for i in range(3)]
        assert model.calls == [
            {
                "prompt": [*asked("hi"), *kept[i]],
                "n": 1,
                "seed": rest_seed(seed + i, 4),
                "max_tokens": 2,
                "min_tokens": 0,
            }
            for i in (0, 2)
        ]
        for i, sample in enumerate(answers[0]):
            rest = [token_of(rest_seed(seed + i, 4), 6 + k) for k in range(2)]
            assert list(sample.token_ids) == (kept[1][:2] if i == 1 else [*kept[i], *rest])
            assert sample.text == "".join(map(chr, sample.token_ids))
            assert list(sample.prompt_token_ids) == asked("hi")
        assert bound.used_version == 0

    in_processes(first, second)
    went_on, ended, _ = answers[0]
    assert (went_on.versions, went_on.finish_reason) == (((0, 0), (4, 1)), "length")
    assert list(went_on.logprobs) == [-0.25, -0.5, -0.75, -1.0, -0.25, -0.5]
    assert (ended.versions, ended.finish_reason, ended.stop_reason) == (((0, 0),), "stop", "!")


def test_a_response_is_continued_in_each_of_several_processes() -> None:
    """One sample ends in the second process: the third is given it whole."""
    answers: list[list[Completion]] = []

    async def first(model: Writer, records: CallRecords) -> None:
        asyncio.ensure_future(view(model, records).generate(asked("hi"), n=2))  # noqa: RUF006
        await model.write(2)

    async def second(model: Writer, records: CallRecords) -> None:
        asyncio.ensure_future(view(model, records).generate(asked("hi"), n=2))  # noqa: RUF006
        await model.write(1)
        model.open[0].write(end=True)
        await settled()
        assert len(model.open) == 1

    async def third(model: Writer, records: CallRecords) -> None:
        call = asyncio.ensure_future(view(model, records).generate(asked("hi"), n=2))
        await model.write(3)
        answers.append(await call)
        [request] = model.calls
        assert (request["max_tokens"], len(request["prompt"])) == (3, 5)

    in_processes(first, second, third)
    one, other = answers[0]
    assert (len(one.token_ids), one.finish_reason, one.versions) == (4, "stop", ((0, 0), (2, 1)))
    assert (len(other.token_ids), other.finish_reason) == (6, "length")
    assert other.versions == ((0, 0), (2, 1), (3, 2))


def test_a_call_of_which_nothing_is_written_is_made_as_it_was() -> None:
    async def first(model: Writer, records: CallRecords) -> None:
        asyncio.ensure_future(view(model, records).generate(asked("hi"), n=2))  # noqa: RUF006
        await settled()
        assert len(model.open) == 1

    async def second(model: Writer, records: CallRecords) -> None:
        asyncio.ensure_future(view(model, records).generate(asked("hi"), n=2))  # noqa: RUF006
        await settled()
        assert (model.calls[0]["n"], model.calls[0]["seed"]) == (2, rollout_seed(5, 3, 1, turn=0, run=0))

    in_processes(first, second)


@pytest.mark.parametrize(
    "change", [{"prompt": asked("ho")}, {"n": 1}, {"temperature": 0.5}], ids=["prompt", "n", "settings"]
)
def test_from_another_call_on_nothing_is_answered_from_the_record(change: dict[str, Any]) -> None:
    calls: list[dict[str, Any]] = [{"prompt": asked(text), "n": 2} for text in ("a", "b", "c")]

    async def play(model: Writer, records: CallRecords, calls: list[dict[str, Any]]) -> None:
        bound = view(model, records)
        for call in calls:
            task = asyncio.ensure_future(bound.generate(**call))
            await model.write(6, requests=0)
            await task

    async def second(model: Writer, records: CallRecords) -> None:
        await play(model, records, [calls[0], calls[1] | change, calls[2]])
        assert len(model.calls) == 2
        assert records.diverged == 1

    async def third(model: Writer, records: CallRecords) -> None:
        """It has the answers of the second one."""
        await play(model, records, [calls[0], calls[1] | change, calls[2]])
        assert (model.calls, records.diverged) == ([], 0)

    in_processes(lambda model, records: play(model, records, calls), second, third)


def test_calls_that_a_resumed_run_did_not_reach_yet_are_kept() -> None:
    async def first(model: Writer, records: CallRecords) -> None:
        bound = view(model, records)
        for text in "abc":
            task = asyncio.ensure_future(bound.generate(asked(text)))
            await model.write(6)
            await task

    async def second(model: Writer, records: CallRecords) -> None:
        await view(model, records).generate(asked("a"))
        records.begin(3, 2, 0)  # another task's run

    async def third(model: Writer, records: CallRecords) -> None:
        """Its workflow waits for a tool; another task has ended."""
        records.keep([(3, 1), (3, 2)])

    async def last(model: Writer, records: CallRecords) -> None:
        bound = view(model, records)
        for text in "abc":
            await bound.generate(asked(text))
        assert model.calls == []
        records.keep([(1, 3)])  # those of calls that a resumed run was not given yet
        assert len(records.state_dict()["calls"]) == 3
        records.forget(3, 1)

    assert in_processes(first, second, third, last).state_dict()["calls"] == []


def test_a_second_attempt_is_not_given_the_calls_of_the_first() -> None:
    """Not those of a failed attempt in this process, nor those that it was given."""

    async def first(model: Writer, records: CallRecords) -> None:
        for _ in range(2):
            task = asyncio.ensure_future(view(model, records).generate(asked("a")))
            await model.write(6)
            await task
        assert len(model.calls) == 2

    async def second(model: Writer, records: CallRecords) -> None:
        await view(model, records).generate(asked("a"))
        assert model.calls == []
        asyncio.ensure_future(view(model, records).generate(asked("a")))  # noqa: RUF006
        await settled()
        assert len(model.calls) == 1

    in_processes(first, second)


def test_a_sample_without_room_has_ended() -> None:
    """The engine's context has become shorter."""

    async def first(model: Writer, records: CallRecords) -> None:
        asyncio.ensure_future(view(model, records).generate(asked("hi")))  # noqa: RUF006
        await model.write(4)

    async def second(model: Writer, records: CallRecords) -> None:
        model.max_model_len = 6
        [sample] = await view(model, records).generate(asked("hi"))
        assert (len(sample.token_ids), sample.finish_reason, model.calls) == (4, "length", [])

    in_processes(first, second)


def test_a_failing_or_cancelled_call_leaves_nothing_and_its_other_samples_are_given_up() -> None:
    async def first(model: Writer, records: CallRecords) -> None:
        asyncio.ensure_future(view(model, records).generate(asked("hi"), n=2))  # noqa: RUF006
        await model.write(2)

    async def second(model: Writer, records: CallRecords) -> None:
        call = asyncio.ensure_future(view(model, records).generate(asked("hi"), n=2))
        await model.write(1)
        model.open[0].ended.set_exception(RuntimeError("out of memory, say"))
        with pytest.raises(RuntimeError, match="out of memory"):
            await call
        await settled()
        assert model.open == []
        call = asyncio.ensure_future(view(model, records, run=1).generate(asked("hi"), n=2))
        await model.write(1)
        call.cancel()
        await settled()
        assert model.open == []

    assert in_processes(first, second).state_dict()["calls"] == []


def test_a_call_is_known_by_its_pictures_too() -> None:

    def prompt_of(seed: int) -> PicturePrompt:
        picture = random_picture(seed, (20, 20))
        return PicturePrompt.joined([7], Expansion((9,), (picture,), (9, 9), {}))

    one, other = prompt_of(1), prompt_of(2)
    assert one == other == [7, 9, 9]
    assert digest_of(one, 1, LIMIT) == digest_of(prompt_of(1), 1, LIMIT)
    assert len({digest_of(prompt, 1, LIMIT) for prompt in (one, other, list(one))}) == 3


# -- workflows ---------------------------------------------------------------------------------------------------------


async def by_chat(workflow: Any) -> list[Experience]:
    one = await workflow.model.chat([{"role": "user", "content": "hi"}], n=workflow.repeat_times)
    await workflow.model.generate([*one[0].prompt_token_ids, *one[0].token_ids])
    return [an_experience(workflow.run_id_base + i) for i in range(workflow.repeat_times)]


async def by_openai(workflow: Any) -> None:
    client = workflow.model.get_openai_async_client()
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(2):
        answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=6)
        messages += [answer.choices[0].message.model_dump(include={"role", "content"}), messages[0]]
    workflow.model.set_reward(1.0)


@pytest.mark.parametrize(
    ("task", "requests"),
    [(scripted(by_chat, ScriptedRepeatable), 1), (scripted(by_openai), 2)],
    ids=["chat and generate", "openai"],
)
def test_runs_of_workflows_go_on(task: Task, requests: int) -> None:
    """Their second call is under way when the process is killed; the first one is not made again."""
    task = replace(task, batch_id=3, task_id=1, rollout_args=LIMIT)

    def start(model: Writer, records: CallRecords) -> Any:
        runner = WorkflowRunner(ExplorerConfig(), model, records=records)
        return asyncio.ensure_future(runner.run_task(task, repeat_times=2, run_id_base=4))

    async def first(model: Writer, records: CallRecords) -> None:
        start(model, records)
        await model.write(6 + 2, requests)

    async def second(model: Writer, records: CallRecords) -> None:
        run = start(model, records)
        await model.write(4, requests)
        status, experiences = await run
        assert status.ok, status.message
        assert {experience.eid.run for experience in experiences} == {4, 5}
        assert {experience.info["model_version"] for experience in experiences} == {0}
        assert {call["max_tokens"] for call in model.calls} == {4}
        if task.workflow is not ScriptedRepeatable:
            assert [e.info["versions"] for e in experiences] == [[[0, 0]], [[0, 0], [2, 1]]] * 2

    in_processes(first, second)


@pytest.mark.parametrize("reason", ["not replayable", "evaluation"])
def test_other_runs_are_begun_anew(reason: str) -> None:
    class WithEffects(ScriptedRepeatable):
        replayable = reason != "not replayable"

    task = replace(scripted(by_chat, WithEffects), is_eval=reason == "evaluation", rollout_args=LIMIT)

    async def run(model: Writer, records: CallRecords) -> None:
        asyncio.ensure_future(WorkflowRunner(ExplorerConfig(), model, records=records).run_task(task))  # noqa: RUF006
        await model.write(6 + 2)
        assert len(model.calls) == 2

    assert in_processes(run, run).state_dict()["calls"] == []

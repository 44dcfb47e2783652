import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from support.errors import refuses
from support.fake_model import FakeModel
from support.places import without_places

from trinity_lightning.common.inference import Completion, Spans, joined_spans
from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.runs import spans_of
from trinity_lightning.common.thoughts import Response
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.explorer import workflow_runner
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.sources import ReasoningGymEntries
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.tasks.taskset import Taskset
from trinity_lightning.explorer.workflow_runner import WorkflowRunner
from trinity_lightning.explorer.workflows.multi_turn import (
    GuessNumber,
    MultiTurnWorkflow,
    Retry,
    as_messages,
    state_of,
)

RED = Image.new("RGB", (4, 4), "red")


class Countdown:
    """Counts down from 3; a response "stop" ends it."""

    closed = 0

    def __init__(self, reward: float = 1.0, state: bool = False) -> None:
        self.reward = reward
        self.state = state
        self.left = 3

    def reset(self, task: Task) -> str:
        return task.raw_task["prompt"]

    def step(self, response: str) -> Any:
        self.left -= 1
        info = {"metrics": {"left": self.left}} | ({"state": self.left} if self.state else {})
        return f"{self.left} left", self.reward, response == "stop" or self.left == 0, info

    def close(self) -> None:
        Countdown.closed += 1


def answering(*answers: str, version: int = 0, **settings: Any) -> FakeModel:
    remaining = list(answers)
    model = FakeModel(lambda seed: remaining.pop(0), **settings)
    model.model_version = version
    return model


def played(model: FakeModel, task: Task | None = None, repeat_times: int = 1, **arguments: Any) -> Any:
    arguments = {"environment": Countdown} | arguments
    task = task or Task("multi_turn", {"prompt": "go"}, workflow_args=arguments, batch_id=2, task_id=5)
    return asyncio.run(WorkflowRunner(ExplorerConfig(), model).run_task(task, repeat_times))


def codes(text: str) -> list[int]:
    return [ord(c) for c in text]


# -- experiences ------------------------------------------------------------------------------------------------------


def test_an_environment_is_given_what_is_known_of_the_thoughts_and_a_record_is_plain_text() -> None:
    """The prompt opened the thoughts, in which the number is named: no guess, whose answer would be higher or lower."""
    model = FakeModel(lambda seed: Response("7", opened=True), max_model_len=500)
    task = Task("multi_turn", {"secret": 7}, workflow_args={"environment": GuessNumber, "max_turns": 2})
    _, (one,) = played(model, task)
    assert [message["content"] for message in one.messages[1:]] == ["7", "Reply with a whole number.", "7"]
    assert {type(message["content"]) for message in one.messages} == {str}
    assert (one.reward, type(one.response_text)) == (0.0, str)
    assert one.action_mask.sum() == 2


@pytest.mark.parametrize(
    ("response", "reply"), [("<think>7?</think>8", "Lower."), ("<think>8?</think>7", "Right."), ("<think>7", "Reply")]
)
def test_a_guess_is_what_stands_behind_the_thoughts(response: str, reply: str) -> None:
    game = GuessNumber()
    game.reset(Task("multi_turn", {"secret": 7}))
    assert str(game.step(response)[0]).startswith(reply)


def test_an_episode_is_one_experience_in_which_the_policys_tokens_are_trained() -> None:
    status, (one,) = played(answering("ab", "c", "d"))
    assert status.ok
    assert one.experience_type == "multi_turn"
    assert one.tokens.tolist() == codes("goab\n2 leftc\n1 leftd")
    assert one.prompt_length == 2
    mask = [True] * 2 + [False] * 7 + [True] + [False] * 7 + [True]
    assert one.action_mask.tolist() == mask
    assert one.logprobs.tolist() == [-0.5 if trained else 0.0 for trained in mask]
    assert one.reward == 3.0
    assert one.metrics == {
        "turns": 3.0,
        "completed": 1.0,
        "context_overflow": 0.0,
        "left": 0.0,
        "reward/environment": 3.0,
    }
    assert one.prompt_text == "go"
    assert one.response_text == "assistant: ab\nuser: 2 left\nassistant: c\nuser: 1 left\nassistant: d"
    assert [message["role"] for message in one.messages] == ["user", "assistant"] * 3
    assert (one.eid.batch, one.eid.task, one.eid.run, one.truncate_status) == (2, 5, 0, None)


def test_versions_of_the_turns_are_those_of_the_episode_at_their_places() -> None:
    """The second turn went on with new weights; the third with the same."""
    spans: list[Spans] = [((0, 4),), ((0, 4), (1, 6)), ((0, 6),)]
    model = answering("ab", "cd", "e")
    complete, called = model._completion, iter(spans)
    model._completion = lambda *call: replace(complete(*call), versions=next(called))  # type: ignore[method-assign]
    _, (one,) = played(model)
    assert one.tokens.tolist() == codes("goab\n2 leftcd\n1 lefte")
    assert one.info["versions"] == [[0, 4], [10, 6]]
    assert spans_of(one) == ((0, 4), (10, 6))
    called = iter(spans)
    model.answer = lambda seed: "ab"
    _, steps = played(model, mode="step_wise")
    assert [step.info["versions"] for step in steps] == [[[0, 4]], [[0, 4], [1, 6]], [[0, 6]]]


def test_an_episode_with_a_turn_of_unknown_versions_has_the_oldest_of_its_run() -> None:
    _, (one,) = played(answering("ab", "c", "d", version=5))
    assert "versions" not in one.info
    assert spans_of(one) == ((0, 5),)


@pytest.mark.parametrize(
    ("parts", "spans"),
    [
        ([], ()),
        ([(0, ((0, 3),)), (7, ())], ()),
        ([(0, ((0, 3), (2, 4))), (2, ((0, 5),)), (9, ((0, 5), (1, 6)))], ((0, 3), (2, 5), (10, 6))),
        ([(0, ((0, 3),)), (4, ((0, 4),)), (4, ((0, 3),))], ((0, 3),)),
    ],
)
def test_spans_of_parts_are_joined(parts: list[tuple[int, Spans]], spans: Spans) -> None:
    """A part without tokens leaves no span, and equal versions in a row are one span."""
    assert joined_spans(parts) == spans


def test_an_episode_is_an_experience_a_turn() -> None:
    model = answering("ab", "c", "d")
    _, experiences = played(model, mode="step_wise")
    assert [e.eid.step for e in experiences] == [0, 1, 2]
    assert [e.experience_type for e in experiences] == ["single_turn"] * 3
    assert [e.tokens.tolist() for e in experiences] == [
        codes("goab"),
        codes("goab\n2 leftc"),
        codes("goab\n2 leftc\n1 leftd"),
    ]
    assert [e.prompt_length for e in experiences] == [2, 11, 19]
    assert [e.logprobs.tolist() for e in experiences] == [[-0.5] * 2, [-0.5], [-0.5]]
    assert [e.reward for e in experiences] == [3.0] * 3
    assert [e.metrics.get("turns") for e in experiences] == [None, None, 3.0]
    assert [e.info["state"] for e in experiences] == ["go", "2 left", "1 left"]
    assert [call["prompt"] for call in model.calls] == [e.tokens.tolist()[: e.prompt_length] for e in experiences]


def test_steps_may_have_their_own_rewards_and_states() -> None:
    countdown = {"name": Countdown, "args": {"reward": 0.5, "state": True}}
    _, experiences = played(answering("a", "b", "c"), mode="step_wise", step_reward="own", environment=countdown)
    assert [e.reward for e in experiences] == [0.5] * 3
    assert [e.info["state"] for e in experiences] == ["go", 2, 1]


@pytest.mark.parametrize(
    ("arguments", "rewards"),
    [({}, [3.5]), ({"mode": "step_wise"}, [3.5] * 3), ({"mode": "step_wise", "step_reward": "own"}, [1.0, 1.0, 1.5])],
)
def test_reward_functions_judge_the_last_response(arguments: dict[str, Any], rewards: list[float]) -> None:
    def judge(response: str, task: Task) -> float:
        assert response == "c"
        return 0.5

    task = Task("multi_turn", {"prompt": "go"}, workflow_args={"environment": Countdown, **arguments}, reward_fn=judge)
    _, experiences = played(answering("a", "b", "c"), task)
    assert [e.reward for e in experiences] == rewards
    assert experiences[-1].metrics["reward/judge"] == 0.5
    assert experiences[-1].metrics["reward/environment"] == 3.0


def test_runs_are_numbered_and_know_their_task() -> None:
    task = Task(
        "multi_turn",
        {"prompt": "go", "task_index": {"taskset_id": "t", "index": 3}},
        workflow_args={"environment": Countdown},
    )
    _, experiences = played(FakeModel(lambda seed: "stop"), task, repeat_times=3)
    assert sorted(e.eid.run for e in experiences) == [0, 1, 2]
    assert all(e.info["task_index"]["index"] == 3 for e in experiences)


# -- how an episode ends ----------------------------------------------------------------------------------------------


def test_the_environment_ends_it() -> None:
    model = answering("a", "stop")
    _, (one,) = played(model)
    assert (one.metrics["turns"], one.metrics["completed"]) == (2.0, 1.0)
    assert one.tokens.tolist() == codes("goa\n2 leftstop")


def test_it_ends_after_max_turns() -> None:
    _, (one,) = played(answering("a", "b"), max_turns=2)
    assert (one.metrics["turns"], one.metrics["completed"], one.reward) == (2.0, 0.0, 2.0)
    assert one.tokens.tolist() == codes("goa\n2 leftb")


@pytest.mark.parametrize("mode", ["single", "step_wise"])
def test_a_full_context_ends_it_and_keeps_what_was_gained(mode: str) -> None:
    status, experiences = played(answering("ab", "c", "d", max_model_len=19), mode=mode)
    last = experiences[-1]
    assert status.ok
    assert last.tokens.tolist() == codes("goab\n2 leftc")
    assert last.reward == 2.0
    assert last.truncate_status == "response_truncated"
    assert (last.metrics["context_overflow"], last.metrics["turns"], last.metrics["completed"]) == (1.0, 2.0, 0.0)
    assert all(e.truncate_status is None for e in experiences[:-1])


def test_an_opening_that_is_too_long_fails_the_run() -> None:
    status, experiences = played(answering("a", max_model_len=2))
    assert experiences == []
    assert "PromptTooLongError: prompt_truncated: the prompt has 2 tokens" in status.message


def test_a_response_cut_off_is_marked_and_the_episode_goes_on() -> None:
    model = answering("a", "b", "stop")
    model.finish_reason = "length"
    _, experiences = played(model, mode="step_wise")
    assert [e.truncate_status for e in experiences] == ["response_truncated"] * 3


def test_an_aborted_request_fails_the_run() -> None:
    model = answering("a")
    model.finish_reason = "abort"
    status, _ = played(model)
    assert "aborted the request" in status.message


def test_an_engine_that_changes_the_prompt_is_told_on() -> None:
    class Other(FakeModel):
        def _completion(self, prompt: list[int], text: str) -> Completion:
            return super()._completion([prompt[0] + len(self.calls), *prompt[1:]], text)

    status, _ = played(Other(lambda seed: "a"))
    assert "changed the prompt's tokens" in status.message


def test_the_environment_is_closed_however_it_ends() -> None:
    before = Countdown.closed
    played(answering("stop"))
    played(FakeModel(max_model_len=1))
    assert Countdown.closed == before + 2


# -- environments -----------------------------------------------------------------------------------------------------


def test_plain_methods_run_in_a_thread_and_async_ones_on_the_loop() -> None:
    threads: list[threading.Thread] = []

    class Mixed:
        def reset(self, task: Task) -> dict[str, str]:
            threads.append(threading.current_thread())
            return {"role": "user", "content": "?"}

        async def step(self, response: str) -> Any:
            threads.append(threading.current_thread())
            return [], 1, True, None

    _, (one,) = played(answering("a"), environment=Mixed)
    assert one.reward == 1.0
    assert threads[0] is not threading.main_thread()
    assert threads[1] is threading.main_thread()


def test_an_episode_that_is_cut_off_is_closed_once_its_step_has_ended() -> None:
    log, begun, goes_on, closed = [], threading.Event(), threading.Event(), threading.Event()

    class Slow(Countdown):
        def step(self, response: str) -> Any:
            log.append("step begins")
            begun.set()
            goes_on.wait(60)
            log.append("step ends")
            return super().step(response)

        def close(self) -> None:
            log.append("close")
            closed.set()

    async def main() -> None:
        task = Task("multi_turn", {"prompt": "go"}, workflow_args={"environment": Slow})
        attempt = asyncio.create_task(WorkflowRunner(ExplorerConfig(), FakeModel()).attempt(task, [0]))
        await asyncio.to_thread(begun.wait, 60)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workflow_runner, "CANCEL_GRACE_SECONDS", 0.05)
        asyncio.run(main())
    goes_on.set()
    assert closed.wait(60)
    assert log == ["step begins", "step ends", "close"]


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_judged_of_the_last_response_may_be_plain_or_async(is_async: bool) -> None:
    threads: list[threading.Thread] = []

    class Loud(Countdown):
        def final_text(self, text: str) -> str:
            threads.append(threading.current_thread())
            return text.upper()

    class AsyncLoud(Loud):
        async def final_text(self, text: str) -> str:  # type: ignore[override]
            return super().final_text(text)

    task = Task(
        "multi_turn",
        {"prompt": "go"},
        workflow_args={"environment": AsyncLoud if is_async else Loud},
        reward_fn=lambda response, task: float(response == "STOP"),
    )
    _, (one,) = played(answering("stop"), task)
    assert one.reward == 2.0  # the environment's, and the function's
    assert (threads[0] is threading.main_thread()) is is_async


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (None, "step returned None: expected (observation, reward, done, info)"),
        (("a", 1.0, False), "expected (observation, reward, done, info)"),
        (("a", None, False, {}), "step returned reward None: expected a number."),
        (
            ("a", 1.0, False, {"metrics": {"verdict": "good"}}),
            "step returned metric 'verdict' 'good': expected a number.",
        ),
        ((5, 1.0, False, {}), "observation is int: expected text, pictures or messages"),
        (([{"content": "a"}], 1.0, False, {}), "observation is list"),
        (([{"type": "image", "path": "nosuch.png"}], 1.0, False, {}), "observation: picture 'nosuch.png'"),
        (([{"role": "user", "content": [RED, {"type": "image"}]}], 1.0, False, {}), "observation: the messages have"),
    ],
)
def test_an_environment_that_returns_something_else_fails_the_run(result: Any, told: str) -> None:
    class Wrong(Countdown):
        def step(self, response: str) -> Any:
            return result

    status, experiences = played(FakeModel(), environment=Wrong)
    assert experiences == []
    assert told in status.message


def test_states_differ_by_their_pictures() -> None:
    """Add strategies that compare states go by text, in which every picture is the same word."""
    red, again, blue = (as_messages(["Here", picture]) for picture in (RED, RED.copy(), Image.new("RGB", (4, 4))))
    assert state_of(red) == state_of(again) != state_of(blue)
    assert state_of(as_messages("Here")) == "Here"


def test_texts_in_a_list_are_one_message_as_they_are_beside_pictures() -> None:
    assert as_messages(["The board is now ", "full."]) == [{"role": "user", "content": "The board is now full."}]
    (beside,) = as_messages(["The board is now ", "full.", RED])
    assert beside["content"][0]["text"] == "The board is now full."
    assert as_messages([]) == []


def test_observations_keep_tools_and_variables() -> None:
    given = Conversation([{"role": "user", "content": ["Here", RED]}], [{"name": "f"}], {"mood": "calm"})
    shown = as_messages(given)
    assert isinstance(shown, Conversation)
    assert (shown.tools, shown.template_variables, len(shown.pictures)) == (given.tools, {"mood": "calm"}, 1)


def test_an_environment_that_raises_fails_its_run() -> None:
    class Failing(Countdown):
        def step(self, response: str) -> Any:
            raise OSError("no disk")

    status, _ = played(FakeModel(), environment=Failing)
    assert without_places(status.message) == "1 of 1 runs failed: OSError: no disk"


def test_guess_number() -> None:
    game = GuessNumber(0, 10)
    (rules,) = game.reset(Task("multi_turn", {"secret": 7}))
    assert "from 0 to 10" in rules["content"]
    assert game.step("hm") == ("Reply with a whole number.", 0.0, False, {"state": [0, 10]})
    assert game.step("2.5") == ("Reply with a whole number.", 0.0, False, {"state": [0, 10]})
    assert game.step("It is 5") == ("Higher.", 0.0, False, {"state": [6, 10]})
    assert game.step("9") == ("Lower.", 0.0, False, {"state": [6, 8]})
    assert game.step("7") == ("Right.", pytest.approx(0.9**4), True, {"state": [6, 8]})


def test_the_number_is_the_same_for_all_runs_of_a_task() -> None:
    def secret(index: int, seed: int = 0) -> int:
        game = GuessNumber(0, 1000, seed=seed)
        game.reset(Task("multi_turn", {"task_index": {"taskset_id": "t", "index": index}}))
        low, high = 0, 1000
        while (reply := game.step(str(guess := (low + high) // 2))[0]) != "Right.":
            low, high = (guess + 1, high) if reply == "Higher." else (low, guess - 1)
        return guess

    assert secret(1) == secret(1)
    assert len({secret(index) for index in range(20)}) > 15
    assert secret(1, seed=1) != secret(1)
    with refuses("workflow.args.environment.args.low"):
        GuessNumber(3, 3)


def tried(task: Task, *answers: str, **arguments: Any) -> list[Any]:
    async def steps() -> list[Any]:
        game = Retry(**arguments)
        game.reset(task)
        return [(await game.step(answer))[1:3] for answer in answers]

    return asyncio.run(steps())


def test_retry_pays_less_for_later_answers() -> None:
    task = Task("multi_turn", {"prompt": "2 + 2?", "answer": "4"})
    assert tried(task, "4") == [(1.0, True)]
    assert tried(task, "5", "3", "4") == [(0.0, False), (0.0, False), (0.25, True)]
    assert tried(task, "5", "4", decay=0.8) == [(0.0, False), (0.8, True)]


def test_retry_pays_for_the_best_answer_in_all() -> None:
    task = Task("multi_turn", {"prompt": "?"})

    def verifier(response: str, task: Task) -> float:
        return float(response)

    steps = tried(task, "0.5", "0.2", "1", verifier=verifier, decay=0.9)
    assert [reward for reward, _ in steps] == [0.5, 0.0, pytest.approx(0.81 - 0.5)]
    assert [done for _, done in steps] == [False, False, True]
    assert tried(task, "0.5", verifier=verifier, pass_at=0.5) == [(0.5, True)]


def test_retry_asks_reasoning_gyms_own_verifier() -> None:
    raw_task = Taskset(ReasoningGymEntries("chain_sum", 3, 1, {}))[0]
    model = answering("wrong", f"<answer>{raw_task['answer']}</answer>", max_model_len=1000)
    task = Task("multi_turn", raw_task, workflow_args={"environment": "retry"})
    _, (one,) = played(model, task)
    assert one.metrics["completed"] == 1.0
    assert 0.5 <= one.reward < 1.0
    assert one.metrics["first_answer_score"] < 1.0
    assert "That is wrong. Try again." in one.response_text


# -- arguments --------------------------------------------------------------------------------------------------------


class NoEnvironment:
    def reset(self, task: Task) -> str:
        return "go"


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({}, "environment"),
        ({"environment": 3}, "environment.name"),
        ({"environment": {"name": "retry", "args": {"deca": 1}}}, "environment.args.deca"),
        ({"environment": "math.pi"}, "environment"),
        ({"environment": NoEnvironment}, "environment"),
        ({"environment": "retry", "max_turn": 1}, "max_turn"),
        ({"environment": "retry", "max_turns": 0}, "max_turns"),
        ({"environment": "retry", "mode": "stepwise"}, "mode"),
        ({"environment": "retry", "step_reward": "each"}, "step_reward"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_tried(arguments: dict[str, Any], key: str) -> None:
    with refuses(f"workflow.args.{key}"):
        TaskSource(Taskset.addition(), "multi_turn", workflow_args=arguments)
    with refuses(f"workflow.args.{key}"):
        MultiTurnWorkflow(Task("multi_turn", {"prompt": "go"}, workflow_args=arguments), FakeModel())


def test_an_environment_goes_by_its_path() -> None:
    path = f"{GuessNumber.__module__}.GuessNumber"
    task = Task("multi_turn", {"secret": 4}, workflow_args={"environment": {"name": path, "args": {"high": 9}}})
    _, (one,) = played(answering("4", max_model_len=200), task)
    assert (one.reward, one.metrics["completed"]) == (1.0, 1.0)

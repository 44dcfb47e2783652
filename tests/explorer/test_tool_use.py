import asyncio
import json
import threading
from typing import Any

import pytest
from PIL import Image
from support.errors import refuses
from support.fake_model import FakeModel

from trinity_lightning.common.thoughts import Response
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.explorer.models.tool_calls import ToolCall
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.tasks.taskset import Taskset
from trinity_lightning.explorer.workflow_runner import WorkflowRunner
from trinity_lightning.explorer.workflows.tool_use import (
    ToolEnvironment,
    ToolError,
    ToolUseArguments,
    ToolUseWorkflow,
    calculate,
    make_tool,
    make_tools,
)

PATH = "trinity_lightning.explorer.workflows.tool_use.calculate"


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class ToolModel(FakeModel):
    """Gives its answers in turn, and keeps the tools it was told of."""

    def __init__(self, *answers: str) -> None:
        remaining = list(answers)
        super().__init__(lambda seed: remaining.pop(0), max_model_len=5000)
        self.told: list[Any] = []

    async def render(self, messages: Any, tools: Any = None, so_far: Any = ()) -> list[int]:
        self.told.append((messages, tools))
        return await super().render(messages, tools, so_far)


def used(model: FakeModel, answer: str = "5", reward_fn: Any = None, **arguments: Any) -> Any:
    task = Task("tool_use", {"prompt": "2+3?", "answer": answer}, workflow_args=arguments, reward_fn=reward_fn)
    return asyncio.run(WorkflowRunner(ExplorerConfig(), model).run_task(task))


def shout(text: str, times: int = 1) -> str:
    """Says it louder.

    Args:
        text: what to say
        times: how often
    """
    return text.upper() * times


async def slow() -> str:
    """Takes its time."""
    await asyncio.sleep(60)
    return ""


def stuck() -> str:
    """Takes its time, in a thread."""
    threading.Event().wait(60)
    return ""


def failing() -> str:
    """Fails."""
    raise KeyError("nothing here")


def leaving() -> str:
    """Leaves."""
    raise SystemExit(3)


def numbers() -> dict[str, list[int]]:
    """Gives numbers."""
    return {"ü": [1, 2]}


def long() -> str:
    """Says much."""
    return "x" * 50


def test_the_model_calls_reads_and_answers() -> None:
    model = ToolModel(f"So: {call_of('calculate', expression='2+3')}", "It is 5")
    status, (one,) = used(model, tools=[PATH])
    assert status.ok, status.message
    call = f"So: {call_of('calculate', expression='2+3')}"
    assert "".join(map(chr, one.tokens.tolist())) == f"2+3?{call}\n5It is 5"
    assert one.prompt_length == len("2+3?")
    assert one.action_mask.tolist() == [True] * len(call) + [False] * 2 + [True] * len("It is 5")
    assert (one.reward, one.metrics["reward/math"]) == (1.0, 1.0)
    assert (one.metrics["tool_calls"], one.metrics["tool_errors"]) == (1.0, 0.0)
    assert (one.metrics["turns"], one.metrics["completed"]) == (2.0, 1.0)
    assert one.tools[0]["function"]["name"] == "calculate"
    assert one.messages[2] == {"role": "tool", "name": "calculate", "content": "5", "tool_call_id": "call00000"}
    assert [tools for _, tools in model.told] == [one.tools, one.tools]


def test_several_calls_in_a_response_are_made_in_order() -> None:
    model = ToolModel(call_of("shout", text="a") + call_of("shout", text="b", times=2), "5")
    _, (one,) = used(model, tools=[shout])
    results = [message["content"] for message in one.messages if message["role"] == "tool"]
    assert results == ["A", "BB"]
    assert one.metrics["tool_calls"] == 2.0


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (call_of("calculat"), "error: unknown tool 'calculat'. Did you mean 'calculate'?"),
        (call_of("calculate", expresion="1"), "error: calculate: missing a required argument: 'expression'"),
        (call_of("calculate", expression="1/0"), "error: calculate: ZeroDivisionError: division by zero"),
        (call_of("calculate", expression="open('x')"), "error: calculate: ValueError: cannot work out 'open('x')'"),
        (call_of("failing"), "error: failing: KeyError: 'nothing here'"),
        (call_of("leaving"), "error: leaving: SystemExit: 3"),
        (call_of("slow"), "error: slow: no result within 0.05 s"),
        (call_of("stuck"), "error: stuck: no result within 0.05 s"),
        ("<tool_call>calculate</tool_call>", "error: this is no valid tool call, its JSON cannot be read"),
    ],
)
def test_errors_are_told_to_the_model_and_counted(call: str, told: str) -> None:
    tools = [calculate, failing, leaving, slow, stuck]
    timeout = 0.05 if "no result within" in told else 60.0
    status, (one,) = used(ToolModel(call, "5"), tools=tools, tool_timeout=timeout)
    assert status.ok
    assert one.messages[2]["content"].startswith(told)
    assert (one.metrics["tool_calls"], one.metrics["tool_errors"]) == (1.0, 1.0)
    assert one.reward == 1.0


def test_plain_tools_run_beside_the_loop() -> None:
    begun, woken = threading.Event(), threading.Event()

    def nap() -> str:
        """Sleeps until it is woken."""
        begun.set()
        return str(woken.wait(60))

    async def wake() -> Any:
        napping = asyncio.create_task(make_tool(nap).call({}, 60.0))
        await asyncio.to_thread(begun.wait, 60)
        woken.set()  # the loop is free
        return await napping

    assert asyncio.run(wake()) == "True"


def test_results_are_text_or_json_and_cut_to_a_length() -> None:
    assert asyncio.run(make_tool(numbers).call({}, 5.0)) == '{"ü": [1, 2]}'
    _, (one,) = used(ToolModel(call_of("long"), "5"), tools=[long], max_result_length=10)
    assert one.messages[2]["content"] == "x" * 10 + "... (cut)"


def test_pictures_stay_and_the_text_beside_them_is_cut() -> None:
    def look() -> Any:
        """Looks."""
        return ["abc", Image.new("RGB", (4, 4)), "defg"]

    environment = ToolEnvironment(make_tools([look]), 5.0, 5, lambda text: ("", [ToolCall("look", {})]))
    environment.reset(Task("tool_use", {"prompt": "?"}))
    messages, *_ = asyncio.run(environment.step(""))
    content = messages[0]["content"]
    assert [part.get("text", "picture") for part in content] == ["abc", "picture", "de... (cut)"]


def test_a_picture_that_cannot_be_read_is_the_tools_error() -> None:
    def look() -> Any:
        """Looks."""
        return [{"type": "image", "path": "nosuch.png"}]

    with pytest.raises(ToolError, match=r"look: .*nosuch\.png"):
        asyncio.run(make_tool(look).call({}, 5.0))


def test_what_a_plain_tool_returns_is_awaited_if_it_can_be() -> None:
    async def later(text: str) -> str:
        return text.upper()

    def decorated(text: str) -> Any:
        """Says it louder, a moment later.

        Args:
            text: what to say
        """
        return later(text)

    assert asyncio.run(make_tool(decorated).call({"text": "a"}, 5.0)) == "A"


def test_a_run_that_never_answers_ends_after_max_turns_and_its_call_is_no_answer() -> None:
    model = ToolModel(*[call_of("calculate", expression="5")] * 2)
    _, (one,) = used(model, tools=[PATH], max_turns=2)
    assert (one.metrics["turns"], one.metrics["completed"], one.metrics["tool_calls"]) == (2.0, 0.0, 2.0)
    assert one.reward == 0.0


def test_step_wise() -> None:
    model = ToolModel(call_of("calculate", expression="2+3"), "5")
    _, experiences = used(model, tools=[PATH], mode="step_wise")
    assert [(e.eid.step, e.reward, e.experience_type) for e in experiences] == [
        (0, 1.0, "single_turn"),
        (1, 1.0, "single_turn"),
    ]
    assert experiences[1].prompt_text == "5"


@pytest.mark.parametrize(
    ("response", "results"),
    [
        (f"<think>{call_of('shout', text='a')}? No.</think>None.", []),
        (f"<think>First <tool_call>, then?</think>{call_of('shout', text='b')}", ["B"]),
        (f"[THINK]{call_of('shout', text='a')}[/THINK]{call_of('shout', text='b')}", ["B"]),
        (f"<think>{call_of('shout', text='a')}", []),
        (Response(call_of("shout", text="a"), opened=True), []),
        ("<think>I write <tool_call>, no?</think>5", []),
    ],
)
def test_calls_in_thoughts_are_not_made(response: str, results: list[str]) -> None:
    arguments = ToolUseArguments(tools=[shout])
    environment = ToolEnvironment(make_tools([shout]), 5.0, 500, arguments.parser())
    environment.reset(Task("tool_use", {"prompt": "?"}))
    messages, _, done, _ = asyncio.run(environment.step(response))
    assert isinstance(messages, list)
    assert [message["content"] for message in messages] == results
    assert done is not bool(results)


def test_rewards_see_the_thoughts_and_not_the_calls() -> None:
    thoughts = f"<think>{call_of('shout', text='a')}?</think>"
    parse = ToolUseArguments(tools=[shout]).parser()
    assert parse(f"{thoughts}So {call_of('shout', text='b')}")[0] == f"{thoughts}So"


def test_a_parser_of_ones_own() -> None:
    def parse(text: str) -> tuple[str, list[ToolCall]]:
        return ("", [ToolCall("calculate", {"expression": text[1:]})]) if text.startswith("=") else (text, [])

    _, (one,) = used(ToolModel("=2*4", "8"), answer="8", tools=[PATH], tool_parser=parse)
    assert one.messages[2]["content"] == "8"
    assert one.reward == 1.0


def test_a_reward_of_ones_own() -> None:
    _, (one,) = used(ToolModel("55x"), reward_fn="contains_digits", tools=[PATH])
    assert one.metrics["reward/contains_digits"] == one.reward == pytest.approx(2 / 3)


def test_the_schema_comes_from_signature_and_docstring() -> None:
    assert make_tool(PATH) is make_tool(PATH)
    function = make_tool(shout).schema["function"]
    assert function["description"] == "Says it louder."
    assert function["parameters"]["required"] == ["text"]
    assert function["parameters"]["properties"]["times"] == {"type": "integer", "description": "how often"}


def without_hints(x):  # type: ignore[no-untyped-def]
    """Something.

    Args:
        x: a thing
    """


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({}, "tools"),
        ({"tools": []}, "tools"),
        ({"tools": PATH}, "tools"),
        ({"tools": ["my_tools.search"]}, "tools"),
        ({"tools": [f"{PATH.rpartition('.')[0]}.calculat"]}, "tools"),
        ({"tools": ["math.pi"]}, "tools"),
        ({"tools": [{"name": PATH}]}, "tools"),
        ({"tools": [without_hints]}, "tools"),
        ({"tools": [PATH, calculate]}, "tools"),
        ({"tools": [PATH], "tool_timeout": 0}, "tool_timeout"),
        ({"tools": [PATH], "max_result_length": 0}, "max_result_length"),
        ({"tools": [PATH], "tool_parser": "qwen"}, "tool_parser"),
        ({"tools": [PATH], "timeout": 3}, "timeout"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], key: str) -> None:
    with refuses(f"workflow.args.{key}"):
        ToolUseWorkflow.check_args(arguments)


def test_tools_of_a_task_are_by_name() -> None:
    assert list(make_tools([PATH, shout])) == ["calculate", "shout"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(1 - 3) / 4", "-0.5"),
        ("6 / 3", "2"),
        ("-7 // 2 + +1", "-3"),
        (" 7 % 4", "3"),
        ("0.5*4", "2"),
    ],
)
def test_the_calculator(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "2 **9", "x", "1 < 2", "'a' * 3", "True", "1+" * 200 + "1", "__import__('os')"]
)
def test_the_calculator_refuses_all_else(expression: str) -> None:
    with pytest.raises(ToolError, match="calculate: "):
        asyncio.run(make_tool(calculate).call({"expression": expression}, 5.0))


def test_entries_with_tools_of_their_own_are_refused_before_a_run() -> None:
    """They would be described to nobody, and could not be called."""
    entries = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "answer": "4", "tools": [make_tool(PATH).schema]}]
    with refuses("taskset.path") as refused:
        taskset = Taskset(entries, name="sums", data_key="taskset.path")
        TaskSource(taskset, "tool_use", workflow_args={"tools": [PATH]})
    assert "taskset 'sums', entry 1" in str(refused.value)
    TaskSource(Taskset(entries, name="sums"), "math")

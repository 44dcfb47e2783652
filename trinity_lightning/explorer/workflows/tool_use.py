"""Lets the policy call Python functions until it answers."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from trinity_lightning.common.messages import read_tools
from trinity_lightning.common.pictures.parts import json_text, parts_of
from trinity_lightning.common.thoughts import split_thoughts
from trinity_lightning.common.threads import call
from trinity_lightning.config.registry import import_object
from trinity_lightning.config.values import unknown_name, whole_number
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.tool_calls import (
    OPENING,
    Parser,
    ToolCall,
    behind_thoughts,
    parse_tool_calls,
)
from trinity_lightning.explorer.rewards.puzzles import evaluate
from trinity_lightning.explorer.tasks.task import Task, messages_of
from trinity_lightning.explorer.workflows.multi_turn import Environment, EpisodeArguments, EpisodeWorkflow, StepResult
from trinity_lightning.explorer.workflows.workflow import ARGS

TOOLS = f"{ARGS}.tools"  # a key

# -- tools ------------------------------------------------------------------------------------------------------------


class ToolError(Exception):
    """The error of a call without a result; its text is shown to the model."""


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes:
        function: plain or `async def`; a plain one runs in a thread.
        schema: the function's description in the form of OpenAI's API.
    """

    function: Callable[..., Any]
    schema: dict[str, Any]

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> str | list[dict[str, Any]]:
        """Call the function, and return its result: a text as it is, pictures as parts, any other value as JSON.

        A result has pictures if it is one of Pillow's, or a list that has some; the list may have texts, too.

        A plain function cannot be stopped: if it takes longer than `seconds`, it goes on in its thread.

        Raises:
            ToolError: wrong arguments, an exception of the function, or no result in time.
        """
        try:
            inspect.signature(self.function).bind(**arguments)
        except TypeError as error:
            raise ToolError(f"{self.name}: {error}") from error
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                result = await call(partial(self.function, **arguments))
            return result if isinstance(result, str) else parts_of(result) or json_text(result)
        except (Exception, SystemExit) as error:  # a tool that executes code may meet exit()
            if limit.expired():
                raise ToolError(f"{self.name}: no result within {seconds:g} s") from error
            raise ToolError(f"{self.name}: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=256)
def make_tool(entry: str | Callable[..., Any]) -> Tool:
    """The tool of a function or its dotted path; it is described by the function's signature and docstring.

    Raises:
        ConfigError: nothing is at that path, or the function's arguments are not described.
    """
    try:
        function = import_object(entry) if isinstance(entry, str) else entry
    except ValueError as error:
        raise ConfigError(f"tool '{entry}': {error}", key=TOOLS) from error
    if not callable(function):
        message = f"tool {entry!r} cannot be called"
        raise ConfigError(message, key=TOOLS, fix="give a function, or the dotted path of one")
    from transformers.utils.chat_template_utils import get_json_schema  # takes seconds: only if needed

    try:
        schema = get_json_schema(function)
    except Exception as error:  # its exceptions have no common base of their own
        raise ConfigError(
            f"tool {entry!r} needs type hints and a docstring with a line for each argument under 'Args:': {error}",
            key=TOOLS,
        ) from error
    schema["function"].pop("return", None)  # OpenAI's API has no place for it
    return Tool(function, schema)


def make_tools(entries: Sequence[str | Callable[..., Any]]) -> dict[str, Tool]:
    """Tools by name; ConfigError: no tool at all, two of one name, or as in `make_tool`."""
    if isinstance(entries, str) or not entries:
        raise ConfigError("tools must be a list of functions or of their dotted paths, at least one.", key=TOOLS)
    for entry in entries:
        if not isinstance(entry, str) and not callable(entry):
            raise ConfigError(
                f"{TOOLS} has the entry {entry!r}",
                key=TOOLS,
                fix="give a function, or the dotted path of one alone",
            )
    tools = [make_tool(entry) for entry in entries]
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        message = f"two tools are called {', '.join(twice)}: the model could not say which it means."
        raise ConfigError(message, key=TOOLS)
    return dict(zip(names, tools, strict=True))


@dataclass
class ToolEnvironment:
    """Runs the calls of a response and reports their results; a response without a call ends the episode.

    The model is told the error of a call that fails. Metrics: `tool_calls` and, of these, `tool_errors`.

    Attributes:
        tools: the tools by name.
        timeout: seconds that a call may take.
        max_result_length: results are cut to this many characters.
        parse: finds the calls of a response.
    """

    tools: Mapping[str, Tool]
    timeout: float
    max_result_length: int
    parse: Parser

    def reset(self, task: Task) -> list[dict[str, Any]]:
        self._metrics = {"tool_calls": 0.0, "tool_errors": 0.0}
        return messages_of(task)

    def final_text(self, response: str) -> str:
        """The response without its calls."""
        return self.parse(response)[0]

    async def step(self, response: str) -> StepResult:
        """Make the calls of a response, one after the other, and return their results in this order."""
        rest, calls = self.parse(response)
        if not calls and OPENING in (split_thoughts(rest)[1] or ""):
            results = [self._message("unknown", "error: this is no valid tool call, its JSON cannot be read", True)]
        else:
            results = [await self._result(call) for call in calls]
        messages = [{**result, "tool_call_id": f"call{i:05d}"} for i, result in enumerate(results)]
        return messages, 0.0, not results, {"metrics": dict(self._metrics)}

    async def _result(self, call: ToolCall) -> dict[str, Any]:
        try:
            if call.name not in self.tools:
                raise ToolError(unknown_name("tool", call.name, self.tools))
            return self._message(call.name, await self.tools[call.name].call(call.arguments, self.timeout))
        except ToolError as error:
            return self._message(call.name, f"error: {error}", failed=True)

    def _message(self, name: str, result: str | list[dict[str, Any]], failed: bool = False) -> dict[str, Any]:
        self._metrics["tool_calls"] += 1
        self._metrics["tool_errors"] += failed
        return {"role": "tool", "name": name, "content": _cut(result, self.max_result_length)}


def _cut(result: str | list[dict[str, Any]], length: int) -> str | list[dict[str, Any]]:
    """The result with its text cut to a length; its pictures stay."""
    if isinstance(result, str):
        return result if len(result) <= length else f"{result[:length]}... (cut)"
    cut = []
    for part in result:
        if "text" in part:
            part = part | {"text": _cut(part["text"], length)}
            length = max(length - len(part["text"]), 0)
        cut.append(part)
    return cut


# The tool of conf/workflow/tool_use.yaml; its docstring is for the model.
def calculate(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: numbers with + - * / // % and brackets
    """
    value, _ = evaluate(expression)
    return str(value.numerator if value.denominator == 1 else float(value))


# -- the workflow -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ToolUseArguments(EpisodeArguments):
    """Settings of the workflow `tool_use`.

    Attributes:
        tools: functions, or their dotted paths; type hints and a docstring with `Args:` describe them to the model. A
            function may return pictures of Pillow's, alone or in a list with texts, to a model that reads pictures.
        tool_timeout: seconds that a call may take.
        max_result_length: the text of results is cut to this many characters.
        tool_parser: `hermes` (`<tool_call>` and JSON), or a function of your own, or its dotted path, from a response's
            text to (text around the calls, list of ToolCall). It is given the text after the response's thoughts.
    """

    tools: Sequence[str | Callable[..., Any]]
    tool_timeout: float = 10.0
    max_result_length: int = 2000
    tool_parser: str | Parser = "hermes"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(f"{ARGS}.max_result_length", self.max_result_length, least=1)
        if not self.tool_timeout > 0:
            key = f"{ARGS}.tool_timeout"
            raise ConfigError(f"{key} is {self.tool_timeout}", key=key, fix="give seconds, more than 0")
        make_tools(self.tools)
        self.parser()

    def parser(self) -> Parser:
        """The parser of the calls that follow a response's thoughts; ConfigError: nothing is at that path."""
        if self.tool_parser == "hermes":
            return parse_tool_calls
        try:
            parser: Any = import_object(self.tool_parser) if isinstance(self.tool_parser, str) else self.tool_parser
            return behind_thoughts(parser)
        except ValueError as error:
            message = f"tool_parser: {error} It is 'hermes', or the path of a function."
            raise ConfigError(message, key=f"{ARGS}.tool_parser") from error


class ToolUseWorkflow(EpisodeWorkflow):
    """An agent loop: makes the model's calls and reports their results, until the model answers without a call.

    The task's reward functions (`math` if the task names none) judge the last response without its calls. Errors of
    tools are reported to the model, and counted. Settings: `ToolUseArguments`; further metrics: `tool_calls`,
    `tool_errors`.
    """

    name = "tool_use"
    arguments_class = ToolUseArguments
    default_reward = "math"

    @classmethod
    def check_task(cls, raw_task: Mapping[str, Any]) -> None:
        """Refuse an entry with tools of its own: they could not be called."""
        if read_tools(raw_task):
            raise ConfigError(
                "column 'tools' is not shown by workflow tool_use, which offers those of workflow.args.tools",
                fix="leave the column out, or rename it",
            )

    def reset(self, task: Task) -> None:
        super().reset(task)
        self._tools = make_tools(self.arguments.tools)
        self.tools = [tool.schema for tool in self._tools.values()]

    def make_environment(self) -> Environment:
        arguments: ToolUseArguments = self.arguments
        return ToolEnvironment(self._tools, arguments.tool_timeout, arguments.max_result_length, arguments.parser())

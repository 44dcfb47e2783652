"""An agent that calls Python functions until it answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_lightning.config.registry import import_object
from trinity_lightning.config.values import whole_number
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.tool_calls import parse_tool_calls
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows.arguments import read_arguments
from trinity_lightning.explorer.workflows.environments import Environment, ToolEnvironment
from trinity_lightning.explorer.workflows.environments.tools import Parser, Tool, make_tools
from trinity_lightning.explorer.workflows.multi_turn import EpisodeArguments, EpisodeWorkflow


@dataclass(frozen=True, kw_only=True)
class ToolUseArguments(EpisodeArguments):
    """Settings of the workflow `tool_use`.

    Attributes:
        tools: functions, or their dotted paths; type hints and a docstring with `Args:` tell the model about them.
        tool_timeout: seconds a call may take.
        max_result_length: results are cut to this many characters.
        tool_parser: `hermes` (`<tool_call>` and JSON), or a function of your own, or its dotted path, from a response's
            text to (text beside the calls, list of ToolCall).
    """

    tools: Sequence[str | Callable[..., Any]]
    tool_timeout: float = 10.0
    max_result_length: int = 2000
    tool_parser: str | Parser = "hermes"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("max_result_length", self.max_result_length, least=1)
        if not self.tool_timeout > 0:
            raise ConfigError(f"tool_timeout is {self.tool_timeout}; give seconds, more than 0.")

    def made_tools(self) -> dict[str, Tool]:
        """The tools by name."""
        return make_tools(self.tools)

    def parser(self) -> Parser:
        """What reads the calls of a response.

        Raises:
            ConfigError: nothing at that path.
        """
        if self.tool_parser == "hermes":
            return parse_tool_calls
        try:
            return import_object(self.tool_parser) if isinstance(self.tool_parser, str) else self.tool_parser  # type: ignore[return-value]
        except ValueError as error:
            raise ConfigError(f"tool_parser: {error} It is 'hermes', or the path of a function.") from error


class ToolUseWorkflow(EpisodeWorkflow):
    """An agent loop: the model's calls are made and their results given to it, until it answers without a call.

    The task's reward functions (`math` where it names none) judge the last response, its calls left out. Errors of
    tools are reported to the model, and counted. Settings: `ToolUseArguments`; metrics besides those of every episode:
    `tool_calls`, `tool_errors`.
    """

    name = "tool_use"
    arguments_class = ToolUseArguments
    default_reward = "math"

    @classmethod
    def check_args(cls, workflow_args: Mapping[str, Any]) -> None:
        """Refuse wrong arguments, and functions that are no tools: ConfigError."""
        arguments = read_arguments(ToolUseArguments, workflow_args, cls.name)
        arguments.made_tools()
        arguments.parser()

    def reset(self, task: Task) -> None:
        """Take another task and its tools."""
        super().reset(task)
        self._tools = self.arguments.made_tools()
        self.tools = [tool.schema for tool in self._tools.values()]

    def make_environment(self) -> Environment:
        """What runs the tools."""
        arguments: ToolUseArguments = self.arguments
        return ToolEnvironment(
            self._tools, arguments.tool_timeout, arguments.max_result_length, parser=arguments.parser()
        )

"""Add strategies by name: made with their arguments, alone or several in a row."""

import inspect
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from trinity_lightning.algorithm.add_strategy.add_strategy import (
    ADD_STRATEGY,
    WRITER,
    AddStrategy,
    BufferWriter,
    Groups,
    ListWriter,
    Metrics,
    check_returned,
)
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.experience.experience import check_weighed
from trinity_lightning.config.own_code import raised_by
from trinity_lightning.config.signatures import check_arguments, is_of_the_library, made_at_start
from trinity_lightning.config.values import numbered
from trinity_lightning.errors import ConfigError, configured_at


def create_add_strategy(specs: Sequence[tuple[str, Mapping[str, Any]]], writer: BufferWriter) -> AddStrategy:
    """The add strategy that `specs` describes: `create_add_strategy([("reward_variance", {}), ("grpo", {})], writer)`.

    Args:
        specs: registry name (or dotted path of a class) and arguments of each strategy, in order. One entry gives that
            strategy itself, several a `ComposedAddStrategy`.
        writer: takes what the last strategy writes.

    Raises:
        ConfigError: no entry, one of another form, an argument's value that is out of range, or an unfinished class.
        ValueError: an unknown name; the message lists the known ones.
        TypeError: an unknown argument (the message lists the valid ones), or a path that is no AddStrategy class.
    """
    _check_specs(specs)
    if len(specs) > 1:
        return ComposedAddStrategy(specs, writer)
    [(name, args)] = specs
    return _create(name, args, writer, _name(name))


class ComposedAddStrategy(AddStrategy):
    """Several strategies in a row: each gets the whole step that the one before it let through.

    Only the last writes to the buffer, and its count is returned. Metrics are merged; a key that an earlier strategy
    has reported already gets the later strategy's name as prefix: `grpo/filtered_count` (a second strategy of the same
    name is called `grpo_2`).

    Arguments and errors are those of `create_add_strategy`.

    Args:
        labels: names of the strategies in the configuration, for the keys of errors; None: the names in `specs`.

    Attributes:
        stages: the experiences that each strategy let through in the last step, by the strategy's name, in order.
    """

    def __init__(
        self,
        specs: Sequence[tuple[str, Mapping[str, Any]]],
        writer: BufferWriter,
        labels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(writer)
        _check_specs(specs)
        self.stages: dict[str, list[Experience]] = {}
        self._writers = [ListWriter() for _ in specs]
        self._labels = numbered([name for name, _ in specs])
        labels = labels or [_name(name) for name, _ in specs]
        self.strategies = [
            _create(name, args, list_writer, label)
            for (name, args), list_writer, label in zip(specs, self._writers, labels, strict=True)
        ]
        self.refills = self.strategies[0].refills

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Empty: `specs` has no default."""
        return {}

    @property
    def first(self) -> str:
        """The name of the first strategy, which alone may ask for further tasks."""
        return self._labels[0]

    def survivors(self, experiences: list[Experience]) -> Groups:
        return self.strategies[0].survivors(experiences)

    async def add(self, experiences: list[Experience], step: int) -> tuple[int, Metrics]:
        self.stages = {}
        count, metrics = 0, {}
        for label, strategy, writer in zip(self._labels, self.strategies, self._writers, strict=True):
            writer.calls = []
            with raised_by(f"add strategy '{label}'"):
                returned: Any = await strategy.add(experiences, step)
            check_returned(strategy, "add", returned, Integral, "number of experiences written, metrics by name")
            count, added = returned
            self.stages[label] = experiences = writer.experiences
            metrics |= {f"{label}/{key}" if key in metrics else key: value for key, value in added.items()}
        if not is_of_the_library(type(self.strategies[-1])):
            check_weighed(experiences, f"add strategy {self._labels[-1]}")
        for call in self._writers[-1].calls:
            await self.writer.write_async(call)
        return count, metrics


def check_strategy(name: str, args: Mapping[str, Any], key: str = "args") -> type[AddStrategy]:
    """The class of a strategy; arguments that it does not take are refused.

    Args:
        name: registry name, or dotted path of a class.
        args: the strategy's arguments.
        key: the dotted key that they stand under, for messages.

    Raises:
        ConfigError: as `create_add_strategy`, but for values that are out of range.
    """
    strategy = ADD_STRATEGY.resolve(name)
    if not (isinstance(strategy, type) and issubclass(strategy, AddStrategy)):
        raise TypeError(f"'{name}' is no AddStrategy class, but {strategy!r}.")
    if not isinstance(args, Mapping):
        raise ConfigError(f"the arguments of add strategy '{name}' must be {{name: value}}, not {args!r}.", key=key)
    check_arguments(_title(name), strategy, args, key, [_writer_parameter(strategy, args)])
    return strategy


def _check_specs(specs: Any) -> None:
    """Refuse specs that are not at least one strategy with its arguments; a ConfigError."""
    if not specs:
        raise ConfigError(
            "add_strategy names no strategy",
            key="add_strategy",
            fix=f"give at least one of {', '.join(sorted(ADD_STRATEGY))}",
        )
    pairs = specs if isinstance(specs, list | tuple) else [specs]
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ConfigError(
            f"add_strategy is {specs!r}: give a name, or in order [(name, {{argument: value}}), ...].",
            key="add_strategy",
        )


def _create(name: str, args: Mapping[str, Any], writer: BufferWriter, label: str) -> AddStrategy:
    with configured_at(f"add_strategy.{label}", names=("args",)):
        strategy = check_strategy(name, args)
        return made_at_start(_title(name), strategy, args, given={_writer_parameter(strategy, args): writer})


def _name(name: Any) -> str:
    """The name of a strategy that is given by its name or as a class."""
    return name if isinstance(name, str) else getattr(name, "__name__", str(name))


def _title(name: Any) -> str:
    return f"add strategy '{_name(name)}'"


def _writer_parameter(strategy: type[AddStrategy], args: Mapping[str, Any]) -> str:
    """The name of the parameter for the writer: `writer`.

    Classes that define `default_args`, as all had to in earlier versions, may have another name for their first one.
    """
    parameters = inspect.signature(strategy).parameters
    first = next(iter(parameters.values()), None)
    if first is None or WRITER in parameters or first.kind is not first.POSITIONAL_OR_KEYWORD:
        return WRITER
    is_argument = first.default is not first.empty or first.name in (*args, *strategy.default_args())
    defines_defaults = any("default_args" in vars(cls) for cls in strategy.__mro__ if cls is not AddStrategy)
    return first.name if defines_defaults and not is_argument else WRITER

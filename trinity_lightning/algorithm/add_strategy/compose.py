"""Add strategies by name, alone or one after the other."""

from collections.abc import Mapping, Sequence
from typing import Any

from trinity_lightning.algorithm.add_strategy.add_strategy import ADD_STRATEGY, AddStrategy
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.writer import BufferWriter
from trinity_lightning.errors import ConfigError


class _Recorder(BufferWriter):
    """Holds what a strategy wrote until it is taken; and passes it on if it has a writer."""

    def __init__(self, writer: BufferWriter | None) -> None:
        self._writer = writer
        self._held: list[Experience] = []

    def write(self, experiences: list[Experience]) -> None:
        if self._writer is not None:
            self._writer.write(experiences)
        self._held += experiences

    async def write_async(self, experiences: list[Experience]) -> None:
        if self._writer is not None:
            await self._writer.write_async(experiences)
        self._held += experiences

    def take(self) -> list[Experience]:
        held, self._held = self._held, []
        return held


class ComposedAddStrategy(AddStrategy):
    """Several strategies in a row: each gets the whole step that the one before it let through.

    Only the last writes to the buffer, and its count is the count. Metrics are merged; a key that an earlier strategy
    has reported already gets the later strategy's name as prefix: `grpo/filtered_count` (a second strategy of the same
    name is called `grpo_2`).

    Args:
        specs: registry name (or dotted path) and arguments of each strategy, in order; at least one.
        writer: where the last one writes.

    Attributes:
        stages: of the last step, by the name of each strategy what it let through, in order.

    Raises:
        ConfigError: no entry, or an argument's value is out of range.
    """

    def __init__(self, specs: Sequence[tuple[str, Mapping[str, Any]]], writer: BufferWriter) -> None:
        super().__init__(writer)
        if not specs:
            raise ConfigError(
                f"add_strategy names no strategy: give at least one of {', '.join(sorted(ADD_STRATEGY))}."
            )
        self.stages: dict[str, list[Experience]] = {}
        self._recorders = [*(_Recorder(None) for _ in specs[1:]), _Recorder(writer)]
        self.strategies = [_create(name, args, w) for (name, args), w in zip(specs, self._recorders, strict=True)]
        names = [name for name, _ in specs]
        repeats = [names[: i + 1].count(name) for i, name in enumerate(names)]
        self._labels = [name if n == 1 else f"{name}_{n}" for name, n in zip(names, repeats, strict=True)]
        self.refills = self.strategies[0].refills

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """None: `specs` has no default."""
        return {}

    def survivors(self, experiences: list[Experience]) -> dict[str, list[Experience]]:
        """What the first strategy lets through; see `AddStrategy.survivors`."""
        return self.strategies[0].survivors(experiences)

    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, float]]:
        """Run the step through all strategies; see `AddStrategy.add`."""
        for recorder in self._recorders:
            recorder.take()  # left behind by a step that failed half-way
        self.stages = {}
        count, metrics = 0, {}
        for label, strategy, recorder in zip(self._labels, self.strategies, self._recorders, strict=True):
            count, added = await strategy.add(experiences, step)
            self.stages[label] = experiences = recorder.take()
            metrics |= {f"{label}/{key}" if key in metrics else key: value for key, value in added.items()}
        return count, metrics


def create_add_strategy(specs: Sequence[tuple[str, Mapping[str, Any]]], writer: BufferWriter) -> AddStrategy:
    """The add strategy that `specs` describes: `create_add_strategy([("reward_variance", {}), ("grpo", {})], writer)`.

    Args:
        specs: registry name (or dotted path of a class) and arguments of each strategy, in order. One entry gives that
            strategy itself, several a `ComposedAddStrategy`.
        writer: where the experiences go in the end.

    Raises:
        ConfigError: no entry, or an argument's value is out of range.
        ValueError: an unknown name; the message lists the known ones.
        TypeError: an unknown argument (the message lists the valid ones), or a path that is no AddStrategy class.
    """
    if len(specs) == 1:
        return _create(*specs[0], writer)
    return ComposedAddStrategy(specs, writer)


def _create(name: str, args: Mapping[str, Any], writer: BufferWriter) -> AddStrategy:
    strategy = ADD_STRATEGY.resolve(name)
    if not (isinstance(strategy, type) and issubclass(strategy, AddStrategy)):
        raise TypeError(f"'{name}' is no AddStrategy class, but {strategy!r}.")
    if not isinstance(args, Mapping):
        raise ConfigError(f"the arguments of add strategy '{name}' must be {{name: value}}, not {args!r}.")
    return strategy(writer, **args)

"""What an experience is worth: the base classes of the add strategies, GRPO, and several in a row."""

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.add_strategy.functional import STD_LEVELS, group_stats, grpo_advantages
from trinity_lightning.common.experience import Experience, ExperienceError, group_by
from trinity_lightning.common.runs import (
    Run,
    is_valid_reward,
    last_step,
    mark_untrained,
    raw_reward,
    run_reward,
    runs_of,
    spread_of_each,
)
from trinity_lightning.config.own_code import raised_by
from trinity_lightning.config.registry import PARTS, Registry, import_object
from trinity_lightning.config.signatures import check_arguments, made_at_start, parameters_beside
from trinity_lightning.config.values import number, numbered, one_of, unknown_name
from trinity_lightning.errors import ArgumentError, ConfigError

logger = logging.getLogger(__name__)

Groups = dict[str, list[Experience]]
Metrics = dict[str, float]
INVALID_GROUP_COUNT = "group_advantages/invalid_group_count"

# -- Groups: validate, filter, set advantages, gather metrics ----------------------------------------------------------


def reject_dpo(exps: Sequence[Experience]) -> None:
    """Refuse preference pairs, which have no response to weigh. ExperienceError: naming the first of them."""
    if pairs := [exp.eid for exp in exps if exp.experience_type == "dpo"]:
        why = "is a DPO pair, which has no advantages: train on it without an add strategy."
        raise ExperienceError(f"experience {pairs[0]} {why}")


def have_valid_rewards(exps: Sequence[Experience]) -> bool:
    """Whether all rewards are finite numbers."""
    return all(is_valid_reward(exp.reward) for exp in exps)


def split_valid(
    groups: Groups, is_valid: Callable[[list[Experience]], bool] = have_valid_rewards, numbers: str = "reward"
) -> tuple[Groups, int]:
    """The valid groups, and the number of the others, which are logged and marked as untrained.

    `numbers` says in words what `is_valid` looks at.
    """
    valid = {id_: exps for id_, exps in groups.items() if is_valid(exps)}
    invalid = [id_ for id_ in groups if id_ not in valid]
    for exp in (exp for id_ in invalid for exp in groups[id_]):
        mark_untrained(exp, f"invalid {numbers}")
    if invalid:
        what = "left out %d groups with a %s that is no finite number: %s"
        logger.warning(what, len(invalid), numbers, ", ".join(invalid))
    return valid, len(invalid)


def action_mask(exp: Experience) -> Tensor:
    """The experience's action mask [response]. ExperienceError: it has none."""
    if exp.action_mask is None:
        raise ExperienceError(f"experience {exp.eid} has no action_mask: there is no response to weigh.")
    return exp.action_mask


def response_values(exp: Experience, name: str, use: str) -> Tensor:
    """The experience's `logprobs` or `teacher_logprobs`, as `name` says, [response].

    Raises:
        ExperienceError: it has none, and what their use is; or another number of them than response tokens.
    """
    values = getattr(exp, name)
    if values is None:
        raise ExperienceError(f"experience {exp.eid} has no {name}, {use}.")
    length = len(action_mask(exp))
    if values.shape != (length,):
        raise ExperienceError(f"experience {exp.eid}: {name} has {len(values)} values for {length} response tokens.")
    return values


def set_advantages(exps: Sequence[Experience], scores: Sequence[float]) -> None:
    """Give each experience its score on its trained tokens: `advantages` and a copy, `returns`, float32 [response]."""
    if not exps:
        return
    masks = [action_mask(exp) for exp in exps]
    lengths = [len(mask) for mask in masks]
    # All experiences at once: three small operations for each would take most of a strategy's time.
    per_token = torch.tensor(scores, dtype=torch.float32).repeat_interleave(torch.tensor(lengths))
    rows = (torch.cat(masks).float() * per_token).split(lengths)
    for exp, row in zip(exps, rows, strict=True):
        # Copies: a row as it is would keep the whole step's memory alive.
        exp.advantages, exp.returns = row.clone(), row.clone()


def reward_metrics(rewards: Tensor, groups: Tensor) -> dict[str, Tensor]:
    """reward_mean and reward_std of each group, [G]: 0 and 1 for a group of one."""
    stats = group_stats(rewards, groups)
    lone = stats.size == 1
    return {"reward_mean": stats.mean.masked_fill(lone, 0.0), "reward_std": stats.std.masked_fill(lone, 1.0)}


def index_of(groups: Iterable[Sized]) -> Tensor:
    """Position of the group of each member, all groups in a row, int64 [B]."""
    return torch.repeat_interleave(torch.tensor([len(group) for group in groups]))


def by_group(metrics: Mapping[str, Tensor], count: int) -> list[Metrics]:
    """The metrics of each of `count` groups, from a tensor [G] a metric."""
    columns = {name: values.tolist() for name, values in metrics.items()}
    return [{name: values[group] for name, values in columns.items()} for group in range(count)]


# -- The strategies ----------------------------------------------------------------------------------------------------

GIVEN = ("writer",)  # what a strategy is given beside its arguments
ADD_STRATEGY: Registry[type["AddStrategy"]] = Registry("add strategy")


class BufferWriter(ABC):
    """Takes finished experiences; what holds them is its own affair."""

    @abstractmethod
    def write(self, experiences: list[Experience]) -> None:
        """Store the experiences, in order, all or none."""

    async def write_async(self, experiences: list[Experience]) -> None:
        """Awaitable `write`, for storages that wait for a disk or a network."""
        self.write(experiences)


class ListWriter(BufferWriter):
    """Holds what is written.

    Attributes:
        calls: what each write was given, in order.
    """

    def __init__(self) -> None:
        self.calls: list[list[Experience]] = []

    def write(self, experiences: list[Experience]) -> None:
        self.calls.append(list(experiences))

    @property
    def experiences(self) -> list[Experience]:
        """All that was written."""
        return [experience for call in self.calls for experience in call]


class AddStrategy(ABC):
    """Sets the advantages of an explore step's experiences (its groups are complete), and writes what is to be trained.

    The mathematics is in `group_advantages.py` and `functional.py`; experiences go to the `writer`. The constructor of
    a subclass takes its arguments, and the writer if it wants: it has that already.

    Raises:
        ArgumentError: an argument the strategy does not have; the message lists those it has.
    """

    writer: BufferWriter

    def __init__(self, writer: BufferWriter | None = None, **unknown: Any) -> None:
        self._refuse(unknown)
        if writer is not None:
            self.writer = writer

    def _refuse(self, unknown: dict[str, Any]) -> None:
        if unknown:
            known = parameters_beside(type(self), GIVEN)
            raise ArgumentError(unknown_name(f"argument of {type(self).__name__}", next(iter(unknown)), known))

    @abstractmethod
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, Metrics]:
        """Weigh and write the experiences of explore step `step`: the number written, and metrics.

        Raises:
            ExperienceError: an experience the strategy cannot weigh.
        """

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """The strategy's arguments that have a default, and these: by its constructor, unless a subclass says."""
        parameters = inspect.signature(cls).parameters
        return {
            name: parameters[name].default
            for name in parameters_beside(cls, GIVEN)
            if parameters[name].default is not inspect.Parameter.empty
        }

    # Whether a step that `survivors` leaves short is to be filled up with new tasks.
    refills = False
    # Groups whose rewards have a standard deviation not above this are not written; None: all are.
    std_threshold: float | None = None

    def kept_groups(self, groups: Sequence[Sequence[Run]]) -> list[bool]:
        """Which of the groups, each of its runs, to write: those above `std_threshold`, by rewards before operators."""
        if self.std_threshold is None or not groups:
            return [True] * len(groups)
        rewards = torch.tensor([raw_reward(last_step(run)) for runs in groups for run in runs], dtype=torch.float64)
        stats = group_stats(rewards, index_of(groups))
        return ((stats.size > 1) & (stats.std > self.std_threshold)).tolist()

    async def write_groups(self, groups: Iterable[list[Experience]], given: int, invalid: int) -> tuple[int, Metrics]:
        """One write a group: how many experiences these are; and of the given ones, what was left out, in metrics."""
        written = 0
        for group in filter(None, groups):
            await self.writer.write_async(group)
            written += len(group)
        filtered = {} if self.std_threshold is None else {"filtered_count": float(given - written)}
        return written, {INVALID_GROUP_COUNT: float(invalid), **filtered}

    def survivors(self, experiences: list[Experience]) -> Groups:
        """The groups of these experiences that would be written, by task; for strategies with `refills`."""
        return group_by(experiences, "task")


def check_returned(strategy: AddStrategy, method: str, returned: Any, first: type, meant: str) -> None:
    """Refuse what a method of a strategy, of somebody's own perhaps, returned, unless it is such a pair.

    Raises:
        ConfigError: names the strategy, and says what the method must return.
    """
    pair = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
    if not (isinstance(pair[0], first) and isinstance(pair[1], Mapping)):
        found = type(returned).__name__ if pair == (None, None) else ", ".join(type(each).__name__ for each in pair)
        raise ConfigError(f"{type(strategy).__name__}.{method} must return ({meant}), not {found}.")


class GroupAdvantageStrategy(AddStrategy):
    """An add strategy that compares the experiences of a group with each other.

    `add` writes one group at a time, in the order of their first experience, and reports every metric of the groups as
    `group_advantages/<name>/{mean,max,min}`. A group with a reward that is no finite number is left out, logged, and
    counted in `group_advantages/invalid_group_count`.
    """

    @abstractmethod
    def group_experiences(self, exps: list[Experience]) -> Groups:
        """The groups, by id."""

    @abstractmethod
    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> tuple[list[Experience], Metrics]:
        """Set `advantages` and `returns` [response] of one group: the experiences to write, and the group's metrics."""

    def split_valid(self, groups: Groups) -> tuple[Groups, int]:
        """The groups that can be weighed, and the number of the others: a reward is missing or no finite number."""
        return split_valid(groups)

    def weigh_groups(self, groups: Groups) -> tuple[list[list[Experience]], list[Metrics]]:
        """`calculate_group_advantage` of every group: what to write of each, and their metrics."""
        weighed = [self.calculate_group_advantage(group_id, exps) for group_id, exps in groups.items()]
        for each in weighed:
            check_returned(self, "calculate_group_advantage", each, list, "list of experiences, metrics by name")
        return [exps for exps, _ in weighed], [metrics for _, metrics in weighed]

    async def add(  # pyright: ignore[reportIncompatibleMethodOverride]  # `exps` is the name its users know
        self, exps: list[Experience], step: int
    ) -> tuple[int, Metrics]:
        if not exps:
            return 0, {}
        reject_dpo(exps)
        groups, invalid = self.split_valid(self.group_experiences(exps))
        weighed, group_metrics = self.weigh_groups(groups)
        written, counts = await self.write_groups(weighed, len(exps), invalid)
        return written, spread_of_each(group_metrics, "group_advantages") | counts


class TaskAdvantageStrategy(GroupAdvantageStrategy):
    """Groups by task, and gives every run one score, a function of the rewards of the explore step.

    A run of several steps has one reward, that of each of its experiences, and counts once; its score goes to all of
    them. Where the rewards of its steps differ it is refused: those are for `step_wise_grpo` and `gigpo`. All groups
    are scored in one tensor operation, unless a subclass defines `calculate_group_advantage` itself.
    """

    def group_experiences(self, exps: list[Experience]) -> Groups:
        return group_by(exps, "task")

    @abstractmethod
    def score(self, rewards: Tensor, groups: Tensor, runs: Sequence[Run]) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores [B] of B runs and, by metric name, a value for each of the G groups [G].

        Args:
            rewards: float64 [B].
            groups: position of each run's group, int64 [B], ascending.
            runs: the experiences of each, for strategies that need more than their rewards.
        """

    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> tuple[list[Experience], Metrics]:
        """Weigh one group as if it were the whole explore step.

        Raises:
            ExperienceError: a reward is no finite number, or the rewards of a run's steps differ.
        """
        weighed, metrics = self._weigh({group_id: exps})
        return weighed[0], metrics[0]

    def weigh_groups(self, groups: Groups) -> tuple[list[list[Experience]], list[Metrics]]:
        if type(self).calculate_group_advantage is not TaskAdvantageStrategy.calculate_group_advantage:
            return super().weigh_groups(groups)
        return self._weigh(groups)

    def _weigh(self, groups: Groups) -> tuple[list[list[Experience]], list[Metrics]]:
        runs_by_group = [runs_of(group) for group in groups.values()]
        runs = [run for group in runs_by_group for run in group]
        if not runs:
            return [], []
        rewards = torch.tensor([run_reward(run) for run in runs], dtype=torch.float64)
        returned = self.score(rewards, index_of(runs_by_group), runs)
        check_returned(self, "score", returned, Tensor, "tensor of scores, metrics by name")
        scores, group_metrics = returned
        of_groups = [(name, each, len(groups)) for name, each in group_metrics.items()]
        for name, each, count in [("scores", scores, len(runs)), *of_groups]:
            if not isinstance(each, Tensor) or each.shape != (count,):
                what = f"shape {list(each.shape)}" if isinstance(each, Tensor) else repr(each)
                raise ConfigError(f"{type(self).__name__}.score must return {name} as a tensor [{count}], not {what}.")
        per_step = [score for run, score in zip(runs, scores.tolist(), strict=True) for _ in run]
        set_advantages([exp for run in runs for exp in run], per_step)
        kept = self.kept_groups(runs_by_group)
        weighed = [group if keep else [] for group, keep in zip(groups.values(), kept, strict=True)]
        return weighed, by_group(group_metrics, len(groups))


class GRPOAddStrategy(TaskAdvantageStrategy):
    """GRPO: (r - mean) / (std + epsilon) within a task (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The standard deviation is unbiased; a group of one has mean 0 and standard deviation 1, equal rewards advantage 0.

    Args:
        epsilon: added to the standard deviation.
        std_level: "group", or "batch": divide by the standard deviation of all valid rewards of the step.
        std_threshold: leave out groups whose rewards have a standard deviation not above this, and groups of one, which
            have none; what was not written is then counted, in experiences, in `filtered_count`. It judges the rewards
            as they were before operators: where operators make up the reward, put `reward_variance` with its `metric`
            in front instead. None: write all groups.
    """

    def __init__(
        self,
        writer: BufferWriter | None = None,
        epsilon: float = 1e-6,
        std_level: str = "group",
        std_threshold: float | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__(writer, **unknown)
        self.epsilon = number("epsilon", epsilon, least=0)
        self.std_level = one_of("std_level", std_level, STD_LEVELS)
        self.std_threshold = number("std_threshold", std_threshold, least=0, optional=True)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"epsilon": 1e-6}

    def score(self, rewards: Tensor, groups: Tensor, runs: Sequence[Run]) -> tuple[Tensor, dict[str, Tensor]]:
        return grpo_advantages(rewards, groups, self.epsilon, self.std_level), reward_metrics(rewards, groups)


# -- By name, alone or one after the other -----------------------------------------------------------------------------


class ComposedAddStrategy(AddStrategy):
    """Several strategies in a row: each gets the whole step that the one before it let through.

    Only the last writes to the buffer, and its count is the count. Metrics are merged; a key that an earlier strategy
    has reported already gets the later strategy's name as prefix: `grpo/filtered_count` (a second strategy of the same
    name is called `grpo_2`).

    Arguments and errors are those of `create_add_strategy`.

    Attributes:
        stages: of the last step, by the name of each strategy what it let through, in order.
    """

    def __init__(self, specs: Sequence[tuple[str, Mapping[str, Any]]], writer: BufferWriter) -> None:
        super().__init__(writer)
        _check_specs(specs)
        self.stages: dict[str, list[Experience]] = {}
        self._writers = [ListWriter() for _ in specs]
        self.strategies = [_create(name, args, w) for (name, args), w in zip(specs, self._writers, strict=True)]
        self._labels = numbered([name for name, _ in specs])
        self.refills = self.strategies[0].refills
        self._is_own = specs[-1][0] not in PARTS["add strategy"]

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """None: `specs` has no default."""
        return {}

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
        if self._is_own:
            from trinity_lightning.common.experience.experience import check_weighed

            check_weighed(experiences, f"add strategy {self._labels[-1]}")
        for call in self._writers[-1].calls:
            await self.writer.write_async(call)
        return count, metrics


def create_add_strategy(specs: Sequence[tuple[str, Mapping[str, Any]]], writer: BufferWriter) -> AddStrategy:
    """The add strategy that `specs` describes: `create_add_strategy([("reward_variance", {}), ("grpo", {})], writer)`.

    Args:
        specs: registry name (or dotted path of a class) and arguments of each strategy, in order. One entry gives that
            strategy itself, several a `ComposedAddStrategy`.
        writer: where the last one writes.

    Raises:
        ConfigError: no entry, one of another form, an argument's value that is out of range, or an unfinished class.
        ValueError: an unknown name; the message lists the known ones.
        TypeError: an unknown argument (the message lists the valid ones), or a path that is no AddStrategy class.
    """
    _check_specs(specs)
    return _create(*specs[0], writer) if len(specs) == 1 else ComposedAddStrategy(specs, writer)


def _check_specs(specs: Any) -> None:
    """ConfigError unless these are strategies with their arguments, at least one."""
    if not specs:
        raise ConfigError(
            "add_strategy names no strategy",
            key="add_strategy",
            fix=f"give at least one of {', '.join(sorted(ADD_STRATEGY))}",
        )
    pairs = specs if isinstance(specs, list | tuple) else [specs]
    if not all(isinstance(each, list | tuple) and len(each) == 2 for each in pairs):
        raise ConfigError(
            f"add_strategy is {specs!r}: give a name, or in order [(name, {{argument: value}}), ...].",
            key="add_strategy",
        )


def check_strategy(name: str, args: Mapping[str, Any], key: str = "args") -> type[AddStrategy]:
    """The class of the strategy of that name, which takes these arguments; `key` is where they stand.

    Raises:
        ConfigError: as `create_add_strategy`, but for values that are out of range.
    """
    strategy = ADD_STRATEGY.resolve(name)
    if not (isinstance(strategy, type) and issubclass(strategy, AddStrategy)):
        raise TypeError(f"'{name}' is no AddStrategy class, but {strategy!r}.")
    if not isinstance(args, Mapping):
        raise ConfigError(f"the arguments of add strategy '{name}' must be {{name: value}}, not {args!r}.")
    check_arguments(_title(name), strategy, args, key, [_writer_parameter(strategy, args)])
    return strategy


def _writer_parameter(strategy: type[AddStrategy], args: Mapping[str, Any]) -> str:
    """The name of the parameter for the writer, `writer`.

    Classes that define `default_args`, as all had to in earlier versions, may have another name for their first one.
    """
    parameters = inspect.signature(strategy).parameters
    first = next(iter(parameters.values()), None)
    if first is None or GIVEN[0] in parameters or first.kind is not first.POSITIONAL_OR_KEYWORD:
        return GIVEN[0]
    is_argument = first.default is not first.empty or first.name in (*args, *strategy.default_args())
    defines = any("default_args" in vars(each) for each in strategy.__mro__ if each is not AddStrategy)
    return first.name if defines and not is_argument else GIVEN[0]


def _title(name: Any) -> str:
    return f"add strategy '{name if isinstance(name, str) else name.__name__}'"


def _create(name: str, args: Mapping[str, Any], writer: BufferWriter) -> AddStrategy:
    strategy = check_strategy(name, args)
    return made_at_start(_title(name), strategy, args, given={_writer_parameter(strategy, args): writer})


def __getattr__(name: str) -> Any:
    """Strategies that may be imported from here too, and are when they are asked for."""
    for path in (PARTS["add strategy"]["opmd"], PARTS["add strategy"]["reward_variance"]):
        if path.endswith(f".{name}"):
            return import_object(path)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Groups of rollouts that are under way across steps (explorer.max_staleness above 0)."""

import asyncio
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.runs import raw_copies, spans_of, written_tokens
from trinity_lightning.common.tidied import TidiedGroup
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.metrics import rollout_metrics
from trinity_lightning.explorer.models.record import CallRecords
from trinity_lightning.explorer.reports import report_tasks
from trinity_lightning.explorer.staleness import Group, StalenessController, check_resumed_groups
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import Status

logger = logging.getLogger(__name__)

TRAINED_STEP = "trained_step"  # in an experience's info: the explore step that takes it, which its EID does not say
SHORTEST_SECONDS = 1e-3  # a step whose groups were complete already was rolled out in no time
IDLE_STEPS = 4  # a warning follows after the groups of so many steps were left out in a row


@dataclass(frozen=True)
class GroupBuffer:
    """The buffer of groups.

    Attributes:
        tidy: runs operators and filter on the experiences of a group, given the number of its batch.
        fill: takes in the groups of a step, with those that were left out since the step before, and the step's
            number; returns metrics.
    """

    tidy: Callable[[list[Experience], int], Awaitable[TidiedGroup]]
    fill: Callable[[Sequence[TidiedGroup], Sequence[TidiedGroup], int], Awaitable[dict[str, float]]]


@dataclass(eq=False)
class EndedGroup:
    """A group whose runs have ended: how they ended, and its experiences."""

    status: Status
    tidied: TidiedGroup

    def state_dict(self) -> dict[str, Any]:
        status = {name: value for name, value in vars(self.status).items() if name != "eval_experiences"}
        payloads = {name: Experience.serialize_many(getattr(self.tidied, name)) for name in ("kept", "left_out")}
        return {"status": status, "metrics": self.tidied.metrics, **payloads}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "EndedGroup":
        kept, left_out = (Experience.deserialize_many(state[name]) for name in ("kept", "left_out"))
        return cls(Status(**state["status"]), TidiedGroup(kept, left_out, state["metrics"]))


@dataclass
class StepOfGroups:
    """The experiences of a step as its groups gave them, with those left out since the last step, and its metrics."""

    experiences: list[Experience]
    metrics: dict[str, float]


@dataclass(eq=False)
class GroupRollouts:
    """Runs every group in an asyncio task of its own, as the controller admits them, and hands over steps of them.

    Group g is task g % batch_size of batch g // batch_size + 1, whenever it is trained: its seeds follow from that, and
    its task is the g-th of the taskset. All methods run on the event loop of the rollouts.

    Attributes:
        config: the explorer's configuration.
        source: gives the tasks.
        run: runs the task of a group.
        controller: admits groups, and chooses those of a step.
        overlaps: True if engines generate while the trainer trains; groups may begin then.
        records: the calls of runs under way; None: a resumed run begins these runs anew.
        buffer: tidies groups and takes steps in; set before the first group begins.
        on_progress: called with the numbers of complete groups, and of those that a step needs.
        on_experiences: called with the experiences of a group whose runs have ended.
    """

    config: ExplorerConfig
    source: TaskSource
    run: Callable[[Task], Awaitable[tuple[Status, list[Experience]]]]
    controller: StalenessController
    overlaps: bool
    records: CallRecords | None = None
    buffer: GroupBuffer | None = None
    on_progress: Callable[[int, int], None] = lambda done, total: None
    on_experiences: Callable[[list[Experience]], None] = lambda experiences: None
    _admits: bool = field(default=False, init=False)
    # Tasks of groups under way, and the asyncio tasks that run them: none after a resume, or once they were cancelled.
    _tasks: dict[int, Task] = field(default_factory=dict, init=False)
    _running: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _ended: dict[int, EndedGroup] = field(default_factory=dict, init=False)  # complete, and waiting for their step
    _given_up: list[EndedGroup] = field(default_factory=list, init=False)  # failed or filtered since the last step
    _cursors: dict[int, dict[str, Any]] = field(default_factory=dict, init=False)  # of the taskset before each batch
    _failed: dict[int, list[Status]] = field(default_factory=dict, init=False)  # of groups that failed, by batch
    _all_failed: list[Status] = field(default_factory=list, init=False)  # of a batch, if all of its groups did
    _left_out: int = field(default=0, init=False)  # groups that filters left out in a row
    _error: Exception | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    # Tokens and seconds of the last steps. A step may find its rollouts complete, for which the one before it waited.
    _speeds: deque[tuple[float, float]] = field(init=False)
    _taken_at: float | None = field(default=None, init=False)  # when the last step was taken, or groups first began

    def __post_init__(self) -> None:
        self._speeds = deque(maxlen=self.config.steps_ahead + 1)

    @property
    def waits(self) -> bool:
        """True if a weight sync waits for rollouts under way."""
        return self.config.in_flight == "wait"

    @property
    def _buffer(self) -> GroupBuffer:
        if self.buffer is None:
            raise RuntimeError("prepare() the explorer with a GroupBuffer before it explores.")
        return self.buffer

    # -- beginning -----------------------------------------------------------------------------------------------------

    def synced(self) -> None:
        """Begin groups, restored ones first: the engines have the weights of all steps taken."""
        self.controller.sync()
        self._admits = self._admits or self.overlaps or not self.controller.ready()
        self._taken_at = self._taken_at or time.perf_counter()
        for number in sorted(self._tasks.keys() - self._running.keys()) if self._error is None else ():
            self._begin(number, self._tasks[number])
        self._admit()

    def _may_begin(self) -> bool:
        """True if the next group may begin now.

        It begins later if the next step is complete already and the engine will rest while it is trained: the prompt
        would be computed for nothing, and the group would be a step older. If syncs wait for groups under way, all
        groups that have room begin between two of them, so that nothing depends on the time that any of them takes.
        """
        if not self._admits or self._error is not None or not self.controller.may_begin():
            return False
        return self.overlaps or self.waits or not self.controller.ready()

    def _admit(self) -> None:
        """Begin groups while there is room. An error is kept for `next_step`: nobody awaits the task of a group."""
        while self._may_begin():
            try:
                task = self._next_task()
            except Exception as error:
                self._error = error
                self._notify()
                return
            if task is None:
                self.controller.exhaust()
                self._notify()
                return
            self._begin(self.controller.begin().number, task)

    def _next_task(self) -> Task | None:
        number, size = self.controller.next_group, self.config.batch_size
        if number % size == 0 or not self._cursors:
            self._cursors[number] = self.source.taskset.state_dict()
        tasks = self.source.next_tasks(1, self.config.repeat_times)
        return replace(tasks[0], batch_id=number // size + 1, task_id=number % size) if tasks else None

    def _begin(self, number: int, task: Task) -> None:
        self._tasks[number] = task
        self._running[number] = asyncio.create_task(self._run(number, task))

    async def _run(self, number: int, task: Task) -> None:
        try:
            status, experiences = await self.run(task)
            status = replace(status, task_id=f"{task.batch_id}/{task.task_id}")  # for messages: of several batches
            tidied = TidiedGroup([])
            if experiences:
                self.on_experiences(experiences)
                tidied = await self._buffer.tidy(experiences, number // self.config.batch_size + 1)
            self._end(number, task, EndedGroup(status, tidied))
            del self._tasks[number]
        except Exception as error:
            self._error = self._error or error
        finally:
            del self._running[number]
            self._notify()
        self._admit()

    def _end(self, number: int, task: Task, ended: EndedGroup) -> None:
        """Keep a group for its step, or free its place."""
        if self.records is not None:
            self.records.forget(task.batch_id, task.task_id)
        self.source.forget_failed([task], ended.tidied.experiences)
        if not ended.tidied.experiences:
            self._note_failure(number, ended.status)
        if ended.tidied.kept:
            self._left_out = 0
            self._ended[number] = ended
            self.controller.complete(number)
            return
        self.controller.give_up(number)
        self._given_up.append(ended)
        self._left_out += 1
        if self._left_out % (often := IDLE_STEPS * self.config.batch_size) == 0:
            self._note_left_out(self._left_out // often)

    def _note_left_out(self, times: int) -> None:
        """Warn that no group was kept for long, each time that it is twice as long, and free memory."""
        if times.bit_count() == 1:
            logger.warning(
                "%d groups in a row failed or were left out by filters, and others take their places until one is "
                "kept: take tasks that are neither too easy nor too hard, or loosen the filter.",
                self._left_out,
            )
        for earlier in self._given_up[: -self.config.batch_size]:
            earlier.tidied = TidiedGroup([])  # a step may never come: they must not fill the memory

    def _note_failure(self, number: int, status: Status) -> None:
        """Note a group without an experience, which ends the run if all others of its batch have none either.

        Those that failed one after the other say less: groups that fail at once end before all others.
        """
        failed = self._failed.setdefault(number // self.config.batch_size + 1, [])
        failed.append(status)
        if len(failed) == self.config.batch_size:
            self._all_failed = failed

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def next_step(self, step: int) -> StepOfGroups | None:
        """Wait for the groups of a step, and hand them to the buffer; None: there are no more tasks.

        The step counts as taken only once the buffer has its experiences.

        Raises:
            RolloutError: all groups of a batch failed.
            RewardError: so they did, in their reward functions.
            OperatorError, StorageError: as the buffer.
        """
        start = time.perf_counter()
        while (chosen := self._choice()) is None:
            self.on_progress(self._complete(), self.config.batch_size)
            await self._changed.wait()
        if not chosen:
            return None
        self.on_progress(self.config.batch_size, self.config.batch_size)
        groups = [self._ended[group.number] for group in chosen]
        experiences = _experiences_of(groups)
        for experience in experiences:
            experience.info = {**experience.info, TRAINED_STEP: step}
        given_up = list(self._given_up)
        report_tasks(f"explore step {step}", [group.status for group in (*groups, *given_up)], len(groups + given_up))
        filtered = [group.tidied for group in given_up if group.tidied.experiences]
        piped = await self._buffer.fill([group.tidied for group in groups], filtered, step)
        del self._given_up[: len(given_up)]
        metrics = self._metrics(chosen, groups, given_up, start) | piped
        self._take(chosen)
        return StepOfGroups([*experiences, *_experiences_of(given_up)], metrics)

    def _choice(self) -> list[Group] | None:
        self.check()
        if self.waits and not self.overlaps and self.controller.running:
            return None  # the engine rests during training, so that nothing is lost; and nothing depends on timing
        return self.controller.choice()

    def _complete(self) -> int:
        return min(len(self._ended), self.config.batch_size)

    def check(self) -> None:
        """Raise the error of a group, or of a batch whose groups all failed."""
        if self._error is not None:
            raise self._error
        if statuses := self._all_failed:
            report_tasks("a batch of groups", statuses, len(statuses), nothing=True)

    def _take(self, chosen: Sequence[Group]) -> None:
        self.controller.take(chosen)
        for group in chosen:
            del self._ended[group.number]
        self._taken_at = time.perf_counter()
        oldest = min(self.controller.outstanding, default=self.controller.next_group)
        of_oldest = oldest // self.config.batch_size + 1
        self._failed = {batch: statuses for batch, statuses in self._failed.items() if batch >= of_oldest}
        before = max((number for number in self._cursors if number <= oldest), default=0)
        self._cursors = {number: cursor for number, cursor in self._cursors.items() if number >= before}
        self._admits = self._admits and self.overlaps
        self._admit()

    def _metrics(
        self, chosen: Sequence[Group], groups: Sequence[EndedGroup], given_up: Sequence[EndedGroup], start: float
    ) -> dict[str, float]:
        """Metrics of a step, before it is taken. `start`: when it began to be waited for."""
        controller, now = self.controller, time.perf_counter()
        ages = [float(controller.staleness(group)) for group in chosen]
        experiences = _experiences_of(groups)
        statuses = [group.status for group in (*groups, *given_up)]
        seconds = max(now - (self._taken_at or start if self.overlaps else start), SHORTEST_SECONDS)
        rolled_out = raw_copies([*experiences, *_experiences_of(given_up)])
        metrics = rollout_metrics(statuses, rolled_out, len(statuses), seconds)
        self._speeds.append((metrics["rollout/tokens_per_second"] * seconds, seconds))
        return metrics | {
            "rollout/tokens_per_second": sum(tokens for tokens, _ in self._speeds) / sum(s for _, s in self._speeds),
            "sample/staleness/mean": statistics.fmean(ages),
            "sample/staleness/max": max(ages),
            "sample/versions_per_rollout": statistics.fmean(len(spans_of(experience)) for experience in experiences),
            "rollout/suspended": float(controller.running * self.config.repeat_times),
            "rollout/outstanding_groups": float(len(controller.outstanding) - len(chosen)),
            **_lengths(ages, groups),
        }

    async def drain(self) -> None:
        """Wait until no group is under way. Errors as `next_step`.

        At servers no group begins meanwhile. In process all begin that have room: see `_may_begin`.
        """
        self._admits = self._admits and not self.overlaps
        self.check()
        while self._running:
            await self._changed.wait()
            self.check()

    async def close(self) -> None:
        """Cancel the groups under way, and wait for their end; `synced` begins them again, also after an error."""
        self._admits = False
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        self._running.clear()  # those that were cancelled before their first step
        self._failed, self._all_failed, self._error, self._taken_at = {}, [], None, None
        self._notify()  # the next loop needs an event of its own

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The controller, the complete groups, and the taskset's cursor before the oldest group under way.

        The calls of its runs are in `calls`, to be added under that name.
        """
        number = min((n for n, group in self.controller.outstanding.items() if not group.complete), default=None)
        first = self.controller.next_group if number is None else max(n for n in self._cursors if n <= number)
        cursor = self.source.taskset.state_dict() if number is None else self._cursors[first]
        return {
            "controller": self.controller.state_dict(),
            "batch_size": self.config.batch_size,
            "max_staleness": self.config.max_staleness,
            "admits": self._admits,
            "ended": {number: group.state_dict() for number, group in self._ended.items()},
            "given_up": [group.state_dict() for group in self._given_up],
            "cursor": cursor,
            "first": first,
        }

    def calls(self) -> dict[str, Any] | None:
        """The calls of runs under way; asked for by the thread that drives the engines, before `state_dict`."""
        return None if self.records is None else self.records.state_dict()

    def state_after(self, step: int) -> dict[str, Any]:
        """The state of a run that took so many steps with `max_staleness=0`, and goes on with groups."""
        number = step * self.config.batch_size
        counts = {"taken": step, "synced": step, "next_group": number, "exhausted": False, "outstanding": []}
        state = self.state_dict()
        return state | {"controller": counts, "cursor": self.source.taskset.state_dict(), "first": number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; groups that were under way begin again with `synced`.

        Raises:
            ConfigError: see `check_resumed_groups`; or the tasks are not those of the checkpoint.
        """
        check_resumed_groups(self.config, state)
        self.controller.load_state_dict(state["controller"])
        if state["batch_size"] != self.config.batch_size:  # no number of a task in a batch comes twice
            batches = math.ceil(self.controller.next_group / state["batch_size"])
            self.controller.next_group = batches * self.config.batch_size
        self.controller.exhausted = False  # the taskset says so again, unless it has more epochs now
        self._ended = {number: EndedGroup.of(group) for number, group in state["ended"].items()}
        self._given_up = [EndedGroup.of(group) for group in state["given_up"]]
        self._admits = state["admits"]
        if self.records is not None and state.get("calls"):
            self.records.load_state_dict(state["calls"])
        self.source.taskset.load_state_dict(state["cursor"])
        self._draw_again(state["first"] if self.controller.outstanding else self.controller.next_group)
        if self.records is not None:  # a group that ended while the checkpoint was written has calls in it
            self.records.keep((task.batch_id, task.task_id) for task in self._tasks.values())

    def _draw_again(self, first: int) -> None:
        """Draw the tasks from number `first` on again, up to the next group; keep those of groups under way."""
        next_group, self._cursors, self._tasks = self.controller.next_group, {}, {}
        self.controller.next_group = first
        for number in range(first, next_group):
            task = self._next_task()
            if task is None:
                raise ConfigError(
                    f"the taskset ends before task {number}, and the checkpoint has later ones",
                    key="taskset",
                    fix="resume with the tasks that the run had",
                )
            self.controller.next_group = number + 1
            if number in self.controller.outstanding and not self.controller.outstanding[number].complete:
                self._tasks[number] = task
        self.controller.next_group = next_group


def _experiences_of(groups: Iterable[EndedGroup]) -> list[Experience]:
    return [experience for group in groups for experience in group.tidied.experiences]


def _lengths(ages: Sequence[float], groups: Sequence[EndedGroup]) -> dict[str, float]:
    """Mean length of the responses of groups that began so many steps before, as metrics: long ones come later."""
    lengths: dict[float, list[float]] = {}
    for age, group in zip(ages, groups, strict=True):
        lengths.setdefault(age, []).extend(float(written_tokens(experience)) for experience in group.tidied.experiences)
    return {f"response_length/staleness_{age:.0f}/mean": statistics.fmean(values) for age, values in lengths.items()}

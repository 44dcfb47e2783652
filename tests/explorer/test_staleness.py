"""Groups begin and are trained in time, once, in full steps, whatever ends when, and whatever fails."""

import heapq
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import examples

from trinity_lightning.explorer.staleness import Group, StalenessController

EVENTS = ("end", "end", "end", "fail", "step", "sync", "begin")
any_timing = settings(deadline=None, max_examples=examples(60))


@dataclass
class Timeline:
    """A run's calls of its controller; the rules are checked after each of them.

    Attributes:
        controller: the controller.
        tasks: groups that the taskset has; None: it has no end.
        separate: True if engines roll out while the trainer trains: the sync is an event of its own.
        trained: numbers of the groups of each step.
        staleness: staleness of each trained group, by number.
        failed: groups given up.
    """

    controller: StalenessController
    tasks: int | None = None
    separate: bool = False
    trained: list[list[int]] = field(default_factory=list)
    staleness: dict[int, int] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)

    def happen(self, event: str, which: int = 0) -> None:
        """Let something happen, if it can; `which` chooses among the groups under way."""
        running = [number for number, group in self.controller.outstanding.items() if not group.complete]
        if event == "begin":
            self.begin()
        elif event == "step":
            self.step()
        elif event == "sync":
            self.controller.sync()
        elif running:
            self.end(running[which % len(running)], fails=event == "fail")
        self.check()

    def begin(self) -> None:
        """Begin all groups that may begin."""
        while self.controller.may_begin():
            if self.controller.next_group == self.tasks:
                self.controller.exhaust()
            else:
                self.controller.begin()

    def end(self, number: int, fails: bool = False) -> None:
        if fails:
            self.controller.give_up(number)
            self.failed.append(number)
        else:
            self.controller.complete(number)

    def step(self) -> bool:
        """Take a step if there is one to take now; True if so."""
        controller = self.controller
        chosen = controller.choice() if controller.synced == controller.taken and not self.is_over else None
        if not chosen:
            return False
        assert len(chosen) == controller.batch_size or (
            controller.exhausted and len(controller.outstanding) < 2 * len(chosen)
        )
        assert all(group.complete for group in chosen)
        self.staleness |= {group.number: controller.staleness(group) for group in chosen}
        assert max(self.staleness[group.number] for group in chosen) <= controller.max_staleness
        self.trained.append([group.number for group in chosen])
        controller.take(chosen)
        if not self.separate:
            controller.sync()
        return True

    @property
    def is_over(self) -> bool:
        controller = self.controller
        return controller.taken == controller.last or (controller.exhausted and not controller.outstanding)

    def check(self) -> None:
        controller = self.controller
        outstanding = controller.outstanding.values()
        oldest = min((group.began for group in outstanding), default=controller.taken)
        assert controller.taken - oldest <= controller.max_staleness
        assert len(outstanding) <= (controller.run_ahead + 1) * controller.batch_size
        assert controller.running == sum(not group.complete for group in outstanding)
        if controller.max_concurrent is not None:
            assert controller.running <= max(1, controller.max_concurrent // controller.rollouts)
        if not controller.running and not controller.may_begin() and controller.synced == controller.taken:
            assert self.is_over or controller.choice(), "nothing is under way, and nothing can follow"

    def check_numbers(self) -> None:
        """Check that every group was trained once, was given up, or is outstanding."""
        numbers = [*itertools.chain(*self.trained), *self.failed, *self.controller.outstanding]
        assert sorted(numbers) == list(range(self.controller.next_group))

    def finish(self) -> None:
        """Let all groups end, until the run is over or, if it has no end, until some more steps are taken."""
        for _ in range(200):
            for event in ("sync", "begin", "end", "step"):
                self.happen(event)
        assert self.is_over or self.tasks is self.controller.last is None
        self.check_numbers()


@st.composite
def controllers(draw: st.DrawFn, most: int = 4) -> StalenessController:
    max_staleness = draw(st.integers(0, most))
    return StalenessController(
        batch_size=draw(st.integers(1, most)),
        max_staleness=max_staleness,
        run_ahead=draw(st.integers(0, max_staleness)),
        rollouts=draw(st.integers(1, 3)),
        max_concurrent=draw(st.none() | st.integers(1, 12)),
        last=draw(st.none() | st.integers(1, 12)),
    )


events = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 50)), max_size=120)


# -- any timing and any failures ---------------------------------------------------------------------------------------


@any_timing
@given(controllers(), st.none() | st.integers(0, 30), st.booleans(), events)
def test_every_group_is_trained_in_time_or_given_up(
    controller: StalenessController, tasks: int | None, separate: bool, happened: list[tuple[str, int]]
) -> None:
    timeline = Timeline(controller, tasks, separate)
    for event, which in happened:
        timeline.happen(event, which)
    timeline.finish()
    if controller.exhausted and not controller.outstanding:
        assert controller.next_group == tasks
        assert sum(map(len, timeline.trained)) + len(timeline.failed) == tasks
    elif controller.taken == controller.last:
        assert not controller.outstanding, "groups began that no step trains"


def test_ten_thousand_steps_at_random() -> None:
    draw = random.Random(0)
    steps = overtaken = 0
    while steps < 10_000:
        max_staleness = draw.randint(0, 4)
        controller = StalenessController(
            batch_size=draw.randint(1, 3),
            max_staleness=max_staleness,
            run_ahead=draw.randint(0, max_staleness),
            rollouts=draw.randint(1, 4),
            max_concurrent=draw.choice([None, draw.randint(1, 40)]),
            last=draw.choice([None, 250]),
        )
        timeline = Timeline(controller, tasks=draw.choice([None, 1_000]), separate=draw.random() < 0.5)
        failures = draw.choice([0, 0.1, 0.3])
        now, ends = 0.0, list[tuple[float, int]]()
        while controller.taken < 250 and not timeline.is_over:
            first = controller.next_group
            timeline.begin()
            for number in range(first, controller.next_group):
                heapq.heappush(ends, (now + draw.lognormvariate(1, 1.5), number))  # a few last 20 times the median
            if ends:
                now, number = heapq.heappop(ends)
                timeline.end(number, fails=draw.random() < failures)
            timeline.step()
            timeline.check()
            if draw.random() < 0.5 or not ends:
                controller.sync()
            if draw.random() < 0.02:
                timeline.controller = controller = loaded(controller)
        timeline.check_numbers()
        steps += len(timeline.trained)
        order = [*itertools.chain(*timeline.trained)]
        overtaken += sum(later < earlier for earlier, later in itertools.pairwise(order))
    assert overtaken > 500


# -- the choice --------------------------------------------------------------------------------------------------------


def can_be_trained(groups: Sequence[Group], controller: StalenessController) -> bool:
    """True if some order of the steps after the next one trains all groups in time; tries every order."""
    steps = [range(controller.taken + 1, group.began + controller.max_staleness + 1) for group in groups]
    return any(all(plan.count(step) <= controller.batch_size for step in plan) for plan in itertools.product(*steps))


@any_timing
@given(controllers(most=2), st.integers(0, 8), st.booleans(), events)
def test_a_step_waits_only_if_no_choice_is_safe(
    controller: StalenessController, tasks: int, separate: bool, happened: list[tuple[str, int]]
) -> None:
    timeline = Timeline(controller, tasks, separate)
    for event, which in happened:
        timeline.happen(event, which)
        outstanding = list(controller.outstanding.values())
        complete = [group for group in outstanding if group.complete]
        size = min(controller.batch_size, len(outstanding)) if controller.exhausted else controller.batch_size
        left_by = [
            [group for group in outstanding if group not in chosen] for chosen in itertools.combinations(complete, size)
        ]
        assert controller.ready() == any(can_be_trained(left, controller) for left in left_by)
        assert controller.choice() == (complete[:size] if controller.ready() else None)


def test_groups_overtake_a_slow_one_until_it_is_due() -> None:
    controller = StalenessController(batch_size=2, max_staleness=4, run_ahead=1)
    timeline = Timeline(controller)
    while controller.taken < 4:
        timeline.begin()
        for number in list(controller.outstanding):
            if number:  # group 0 is slow
                timeline.end(number)
        assert timeline.step()
    timeline.begin()
    assert [group.complete for group in controller.outstanding.values()] == [False, True, False, False]
    for number in (9, 10):
        timeline.end(number)
        assert controller.choice() is None  # there are groups enough, but group 0 would be too old after this step
    timeline.end(0)
    assert timeline.step()
    assert timeline.trained == [[1, 2], [3, 4], [5, 6], [7, 8], [0, 9]]
    assert (timeline.staleness[0], timeline.staleness[9]) == (4, 1)


@any_timing
@given(st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_with_run_ahead_at_the_limit_versions_are_first_in_first_out(
    batch_size: int, max_staleness: int, draw: random.Random
) -> None:
    controller = StalenessController(batch_size, max_staleness, run_ahead=max_staleness)
    timeline, versions = Timeline(controller), list[int]()
    while controller.taken < 8:
        timeline.begin()
        began = {number: group.began for number, group in controller.outstanding.items()}
        timeline.happen("end", draw.randrange(50))
        if timeline.step():
            versions += sorted(began[number] for number in timeline.trained[-1])
    assert versions == sorted(versions)


def test_engines_that_lag_leave_room_for_fewer_groups() -> None:
    controller = StalenessController(batch_size=2, max_staleness=1, run_ahead=1)
    timeline = Timeline(controller, separate=True)
    timeline.begin()
    for number in range(4):
        timeline.end(number)
    assert timeline.step()
    timeline.begin()  # while the step is trained, with the weights before it: a third step would train them too late
    assert list(controller.outstanding) == [2, 3]
    timeline.happen("sync")
    timeline.begin()
    assert list(controller.outstanding) == [2, 3, 4, 5]
    assert {group.began for group in controller.outstanding.values()} == {0, 1}


# -- limits of what begins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "running"), [(None, 6), (24, 6), (17, 4), (4, 1), (3, 1)])
def test_groups_begin_whole_within_the_limit_and_a_larger_one_alone(most: int | None, running: int) -> None:
    controller = StalenessController(batch_size=3, max_staleness=1, run_ahead=1, rollouts=4, max_concurrent=most)
    Timeline(controller).begin()
    assert controller.running == running


def test_the_end_of_the_tasks_makes_a_short_step() -> None:
    timeline = Timeline(StalenessController(batch_size=4, max_staleness=1, run_ahead=1), tasks=7)
    timeline.begin()
    for number in range(6):
        timeline.end(number, fails=number == 0)
    assert timeline.step()
    assert not timeline.step()  # group 6 is under way
    timeline.end(6)
    assert timeline.step()
    assert timeline.trained == [[1, 2, 3, 4], [5, 6]]
    assert timeline.controller.choice() == []


def test_no_group_begins_that_no_step_would_train() -> None:
    timeline = Timeline(StalenessController(batch_size=2, max_staleness=2, run_ahead=2, last=4))
    for _ in range(3):
        timeline.begin()
        timeline.happen("end")
        timeline.happen("fail")  # another one follows
        timeline.happen("end")
        timeline.step()
    timeline.finish()
    assert [len(step) for step in timeline.trained] == [2, 2, 2, 2]
    assert timeline.controller.next_group == 8 + len(timeline.failed)


# -- checkpoints, and large runs ---------------------------------------------------------------------------------------


def loaded(controller: StalenessController, **changes: Any) -> StalenessController:
    """A new controller with the state of another one, which a file held in between."""
    settings = {name: getattr(controller, name) for name in ("batch_size", "max_staleness", "run_ahead", "rollouts")}
    limits = {name: getattr(controller, name) for name in ("max_concurrent", "last")}
    new = StalenessController(**settings | limits | changes)
    new.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    return new


@any_timing
@given(controllers(), st.none() | st.integers(0, 30), st.booleans(), events, events)
def test_a_resumed_controller_goes_on_as_if_nothing_had_happened(
    controller: StalenessController,
    tasks: int | None,
    separate: bool,
    before: list[tuple[str, int]],
    after: list[tuple[str, int]],
) -> None:
    timeline = Timeline(controller, tasks, separate)
    for event, which in before:
        timeline.happen(event, which)
    resumed = replace(
        timeline, controller=loaded(controller), trained=list(timeline.trained), failed=list(timeline.failed)
    )
    for event, which in after:
        timeline.happen(event, which)
        resumed.happen(event, which)
        assert resumed.controller == controller
        timeline.check_numbers()
    assert (resumed.trained, resumed.failed) == (timeline.trained, timeline.failed)


def test_a_lower_limit_is_feasible_if_all_groups_can_still_be_trained_in_time() -> None:
    timeline = Timeline(StalenessController(batch_size=2, max_staleness=4, run_ahead=4))
    timeline.begin()
    for number in range(2):
        timeline.end(number)
    timeline.step()
    timeline.begin()  # 8 groups of version 0, and 2 of version 1, after one step
    feasible = {limit: loaded(timeline.controller, max_staleness=limit).is_feasible for limit in range(6)}
    assert feasible == {0: False, 1: False, 2: False, 3: False, 4: True, 5: True}
    for number in range(2, 8):
        timeline.end(number)
    for _ in range(3):
        timeline.step()  # no group begins; 2 of version 0, and 2 of version 1, after four steps
    assert not loaded(timeline.controller, max_staleness=3).is_feasible
    timeline.end(8)
    timeline.end(9)
    timeline.step()
    assert [group.began for group in timeline.controller.outstanding.values()] == [1, 1]
    feasible = {limit: loaded(timeline.controller, max_staleness=limit).is_feasible for limit in range(3, 6)}
    assert feasible == {3: False, 4: True, 5: True}


@any_timing
@given(controllers(), st.booleans(), events)
def test_the_controller_stays_feasible(
    controller: StalenessController, separate: bool, happened: list[tuple[str, int]]
) -> None:
    timeline = Timeline(controller, separate=separate)
    for event, which in happened:
        timeline.happen(event, which)
        assert controller.is_feasible


def test_large_steps_cost_no_more_for_each_group() -> None:
    controller = StalenessController(batch_size=4096, max_staleness=4, run_ahead=1, rollouts=8, max_concurrent=10**6)
    draw, start = random.Random(0), time.perf_counter()
    for _ in range(2):
        while controller.may_begin():
            controller.begin()
        running = [number for number, group in controller.outstanding.items() if not group.complete]
        draw.shuffle(running)
        for number in running:
            controller.complete(number)
            controller.ready()
        controller.take(controller.choice() or [])
        controller.sync()
    assert controller.taken == 2
    assert time.perf_counter() - start < 5  # a tenth of a second here; sorting all groups each time: minutes

"""When groups of rollouts begin, and which of them a step takes, so that none is older than allowed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Group:
    """A group that has begun and was not trained on: it is running, suspended, or complete.

    Attributes:
        number: position in the order of tasks, from 0.
        began: steps that the engines' weights were trained for when it began.
        complete: True once all of its runs have ended, and the filters have kept it.
    """

    number: int
    began: int
    complete: bool = False


@dataclass
class StalenessController:
    """Admits groups and chooses those of a step by counts alone; time, tasks and weights are its caller's.

    The staleness of a group is the number of steps taken between its first weights and its training. It never exceeds
    `max_staleness`, because two rules keep it possible to train every group in time, `batch_size` of them a step:

    - A step takes the oldest `batch_size` complete groups. It waits as long as that choice would leave more than
      j * batch_size groups with j or fewer steps to go, for any j.
    - A group begins only if all outstanding groups can be trained before it becomes too old itself. While the engines
      still have the weights of the step before (they roll out during training), that leaves room for fewer.

    Nothing is dropped because of its age: that would be biased against long rollouts.

    Attributes:
        batch_size: groups of a step.
        max_staleness: most steps from the beginning of a group to its training.
        run_ahead: steps, beyond the next one, whose groups may be outstanding; at most `max_staleness`.
        rollouts: rollouts of a group.
        max_concurrent: most rollouts under way; a larger group runs alone.
        last: number of the run's last step, for which the last groups begin; None: there is none.
        taken: steps taken.
        synced: steps that the engines' weights were trained for.
        next_group: number of the group that begins next.
        exhausted: True once there are no more tasks.
        outstanding: groups that have begun and were not trained on, by number.
    """

    batch_size: int
    max_staleness: int
    run_ahead: int
    rollouts: int = 1
    max_concurrent: int | None = None
    last: int | None = None
    taken: int = 0
    synced: int = 0
    next_group: int = 0
    exhausted: bool = False
    outstanding: dict[int, Group] = field(default_factory=dict)

    # -- beginning -----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Number of groups under way, suspended ones included."""
        return sum(not group.complete for group in self.outstanding.values())

    def may_begin(self) -> bool:
        """True if the next group may begin now."""
        if self.exhausted or len(self.outstanding) >= self._room():
            return False
        running = self.running
        return not running or self.max_concurrent is None or (running + 1) * self.rollouts <= self.max_concurrent

    def _room(self) -> int:
        """Most groups that may be outstanding."""
        steps_in_time = self.synced + self.max_staleness - self.taken + 1  # in which a group that begins now is trained
        steps = min(self.run_ahead + 1, steps_in_time)
        return self.batch_size * (steps if self.last is None else min(steps, self.last - self.taken))

    def begin(self) -> Group:
        """Begin the next group, which `may_begin` allows."""
        group = Group(self.next_group, self.synced)
        self.outstanding[group.number] = group
        self.next_group += 1
        return group

    def exhaust(self) -> None:
        """Begin no more groups: there are no more tasks."""
        self.exhausted = True

    # -- ending --------------------------------------------------------------------------------------------------------

    def complete(self, number: int) -> None:
        """Let a group wait for its step: its runs have ended, and the filters have kept it."""
        self.outstanding[number].complete = True

    def give_up(self, number: int) -> None:
        """Free the place of a group that failed, or that a filter left out."""
        del self.outstanding[number]

    def choice(self) -> list[Group] | None:
        """The groups that the next step takes; None: it has to wait. Empty: there are no more groups.

        A step is short only at the end of the tasks.
        """
        groups = sorted(self.outstanding.values(), key=lambda group: (group.began, group.number))
        size = min(self.batch_size, len(groups)) if self.exhausted else self.batch_size
        chosen = [group for group in groups if group.complete][:size]
        if len(chosen) < size:
            return None
        numbers = {group.number for group in chosen}
        left = [group.began for group in groups if group.number not in numbers]
        for steps in range(self.max_staleness + 1):  # that can still train a group after this one
            oldest = self.taken - self.max_staleness + steps
            if sum(began <= oldest for began in left) > steps * self.batch_size:
                return None
        return chosen

    def take(self, chosen: Iterable[Group]) -> None:
        """Take a step of these groups, which `choice` returned."""
        for group in chosen:
            del self.outstanding[group.number]
        self.taken += 1

    def sync(self) -> None:
        """Note that the engines were given the weights of all steps taken."""
        self.synced = self.taken

    def staleness(self, group: Group) -> int:
        """Steps taken since the weights that the group began with."""
        return self.taken - group.began

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The counts and the outstanding groups; settings are the configuration's."""
        return {
            **{name: getattr(self, name) for name in ("taken", "synced", "next_group", "exhausted")},
            "outstanding": [asdict(group) for group in self.outstanding.values()],
        }

    @property
    def is_feasible(self) -> bool:
        """True if every outstanding group can be trained in time, which another `max_staleness` may prevent."""
        steps = range(self.max_staleness + 1)
        oldest = self.taken - self.max_staleness
        begun = [group.began for group in self.outstanding.values()]
        return all(sum(began <= oldest + j for began in begun) <= (j + 1) * self.batch_size for j in steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.taken, self.synced = state["taken"], state["synced"]
        self.next_group, self.exhausted = state["next_group"], state["exhausted"]
        groups: Sequence[Mapping[str, Any]] = state["outstanding"]
        self.outstanding = {group["number"]: Group(**group) for group in groups}

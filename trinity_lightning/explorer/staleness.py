"""When groups of rollouts begin, and which of them a step takes, so that none is older than allowed."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import ConfigError


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
      j * batch_size groups with at most j steps to go, for any j.
    - A group begins only if all outstanding groups can be trained before it becomes too old itself. While the engines
      still have the weights of the step before (they roll out during training), that leaves room for fewer.

    Nothing is dropped because of its age: that would be biased against long rollouts.

    Groups are counted by `began`, which has few values: what a completed group costs does not depend on their number.

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
        outstanding: groups that have begun and were not trained on, by number; in the order in which they began.
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
    _outstanding: Counter[int] = field(default_factory=Counter, init=False, repr=False)  # number of them, by `began`
    _complete: Counter[int] = field(default_factory=Counter, init=False, repr=False)  # of those complete

    # -- beginning -----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Number of groups under way, suspended ones included."""
        return len(self.outstanding) - self._complete.total()

    def may_begin(self) -> bool:
        """True if the next group may begin now."""
        if self.exhausted or len(self.outstanding) >= self._room():
            return False
        running = self.running
        return not running or self.max_concurrent is None or (running + 1) * self.rollouts <= self.max_concurrent

    def _room(self) -> int:
        """Most groups that may be outstanding."""
        steps = min(self.run_ahead + 1, self._steps_to_go(self.synced, self.taken))
        return self.batch_size * (steps if self.last is None else min(steps, self.last - self.taken))

    def begin(self) -> Group:
        """Begin the next group, which `may_begin` allows."""
        group = Group(self.next_group, self.synced)
        self.outstanding[group.number] = group
        self._outstanding[group.began] += 1
        self.next_group += 1
        return group

    def exhaust(self) -> None:
        """Begin no more groups: there are no more tasks."""
        self.exhausted = True

    # -- ending --------------------------------------------------------------------------------------------------------

    def complete(self, number: int) -> None:
        """Let a group wait for its step: its runs have ended, and the filters have kept it."""
        group = self.outstanding[number]
        self._complete[group.began] += not group.complete
        group.complete = True

    def give_up(self, number: int) -> None:
        """Free the place of a group that failed, or that a filter left out."""
        self._remove([self.outstanding[number]])

    def ready(self) -> bool:
        """True if the next step need not wait: `choice` has groups for it, or says that there are none left."""
        wanted = self._step_size()
        if self._complete.total() < wanted:
            return False
        left = 0  # groups that this step would leave of those that began so early
        for began in sorted(self._outstanding):
            taken = min(wanted, self._complete[began])
            wanted -= taken
            left += self._outstanding[began] - taken
            if left > self._steps_to_go(began, self.taken + 1) * self.batch_size:
                return False
        return True

    def choice(self) -> list[Group] | None:
        """The groups that the next step takes; None: it has to wait. Empty: there are no more groups.

        A step is short only at the end of the tasks.
        """
        if not self.ready():
            return None
        return list(islice((group for group in self.outstanding.values() if group.complete), self._step_size()))

    def take(self, chosen: Iterable[Group]) -> None:
        """Take a step of these groups, which `choice` returned."""
        self._remove(list(chosen))
        self.taken += 1

    def _steps_to_go(self, began: int, taken: int) -> int:
        """Number of steps, after so many, that may train a group that began then."""
        return began + self.max_staleness - taken + 1

    def _step_size(self) -> int:
        return min(self.batch_size, len(self.outstanding)) if self.exhausted else self.batch_size

    def _remove(self, groups: Sequence[Group]) -> None:
        for group in groups:
            del self.outstanding[group.number]
        self._outstanding -= Counter(group.began for group in groups)  # leaves no zeros
        self._complete -= Counter(group.began for group in groups if group.complete)

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
            "outstanding": [dict(vars(group)) for group in self.outstanding.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; with other settings, see `is_feasible`."""
        self.taken, self.synced = state["taken"], state["synced"]
        self.next_group, self.exhausted = state["next_group"], state["exhausted"]
        groups = [Group(**group) for group in state["outstanding"]]
        self.outstanding = {group.number: group for group in groups}
        self._outstanding = Counter(group.began for group in groups)
        self._complete = Counter(group.began for group in groups if group.complete)

    @property
    def is_feasible(self) -> bool:
        """True if every outstanding group can be trained in time, which a lower `max_staleness` may prevent."""
        began = sorted(self._outstanding)
        counts = accumulate(self._outstanding[number] for number in began)
        steps = [self._steps_to_go(number, self.taken) for number in began]
        return all(count <= left * self.batch_size for count, left in zip(counts, steps, strict=True))


def check_resumed_groups(config: ExplorerConfig, groups: Mapping[str, Any]) -> None:
    """Refuse settings with which the groups of a checkpoint, `GroupRollouts.state_dict()`, cannot be trained.

    Raises:
        ConfigError: groups are under way in it, or complete and not trained on, and `explorer.batch_size` differs, or
            `explorer.max_staleness` is too low for them.
    """
    controller = StalenessController(groups["batch_size"], config.max_staleness, config.steps_ahead)
    controller.load_state_dict(groups["controller"])
    for key, is_possible in (
        ("batch_size", config.max_staleness == 0 or groups["batch_size"] == config.batch_size),
        ("max_staleness", config.max_staleness > 0 and controller.is_feasible),
    ):
        if controller.outstanding and not is_possible:
            raise ConfigError(
                f"explorer.{key} is {getattr(config, key)}, and the checkpoint, of a run with {groups[key]}, has groups"
                " under way or not trained on yet, which need that",
                key=f"explorer.{key}",
                fix=f"resume with explorer.{key}={groups[key]}",
            )

"""A run in virtual time: groups, controller and scheduler are those of a run; engines and trainer are modelled."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from _modelled import Lengths, ModelledEngine, Speed, run_virtually

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.tidied import TidiedGroup
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.explorer.groups import GroupBuffer, GroupRollouts
from trinity_lightning.explorer.scheduler import Scheduler
from trinity_lightning.explorer.staleness import StalenessController
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows.workflow import Workflow

NEVER = 1e12  # virtual seconds: no time-out


# -- what is simulated -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """GPUs and their speed; see `Speed` for the engines.

    Attributes:
        speed: speed of an engine.
        train_token: seconds of one GPU to train on a token: 64 GFLOP at 40% of 990 TFLOP/s.
        train_step: seconds of a training step beside its tokens.
        sync: seconds in which the engines are given the weights.
        gpus_per_engine: GPUs of an engine.
    """

    speed: Speed = field(default_factory=Speed)
    train_token: float = 0.00016
    train_step: float = 1.0
    sync: float = 2.0
    gpus_per_engine: int = 1


@dataclass(frozen=True)
class Setting:
    """A run to simulate.

    Attributes:
        gpus: all GPUs.
        servers: GPUs that roll out while the others train; None: all GPUs do both in turns.
        max_staleness, run_ahead, in_flight, max_concurrent, batch_size, repeat_times: as in `explorer`.
        lengths: lengths of responses.
        prompt_tokens: length of a prompt.
        steps: steps to take.
        warm_up: steps that are left out of means: all groups of the first ones begin at once.
        machine: speeds.
    """

    gpus: int = 8
    servers: int | None = None
    max_staleness: int = 0
    run_ahead: int | None = None
    in_flight: str = "continue"
    max_concurrent: int | None = None
    batch_size: int = 64
    repeat_times: int = 8
    lengths: Lengths = field(default_factory=Lengths)
    prompt_tokens: int = 500
    steps: int = 24
    warm_up: int = 4
    machine: Machine = field(default_factory=Machine)

    @property
    def name(self) -> str:
        """The setting in words."""
        where = "in turns" if self.servers is None else f"servers {self.servers}/{self.gpus}"
        if not self.max_staleness:
            return f"{where}, synchronous"
        config = self.explorer()
        return f"{where}, {self.in_flight}, k={self.max_staleness}, d={config.steps_ahead}"

    @property
    def engines(self) -> int:
        """Number of engines."""
        return max((self.gpus if self.servers is None else self.servers) // self.machine.gpus_per_engine, 1)

    def explorer(self) -> ExplorerConfig:
        """The explorer's configuration."""
        config = ExplorerConfig(
            batch_size=self.batch_size,
            repeat_times=self.repeat_times,
            max_staleness=self.max_staleness,
            run_ahead=self.run_ahead if self.max_staleness else None,
            in_flight=self.in_flight,
            max_timeout=NEVER,
        )
        outstanding = (config.steps_ahead + 1) * self.batch_size
        return replace(config, runner_per_model=-(-outstanding // self.engines) + 1)

    def train_seconds(self, tokens: int) -> float:
        """Seconds of a training step on so many tokens."""
        gpus = self.gpus if self.servers is None else self.gpus - self.servers
        return self.machine.train_step + tokens * self.machine.train_token / gpus


@dataclass(frozen=True)
class Outcome:
    """The result of a simulated run.

    Attributes:
        seconds: of each step, from the end of one training to the end of the next; without those of the warm-up.
        tokens_per_second: tokens trained on.
        generating: share of the time in which an engine generated; mean over engines.
        training: share of the time in which the trainer trained.
        staleness: mean and largest staleness of a group.
        computed_again: tokens of prompts and responses that syncs made engines compute again, as a share of the tokens
            trained on.
        again_seconds: seconds a step that this took each engine.
        rollouts: number of them.
        own_microseconds: real CPU time of controller, scheduler and runners for a rollout.
        load: this time as a share of the run's: at 1, one process is too slow to keep the engines busy.
        cpu_seconds: real CPU time of the simulation.
    """

    seconds: Sequence[float]
    tokens_per_second: float
    generating: float
    training: float
    staleness: tuple[float, float]
    computed_again: float
    again_seconds: float
    rollouts: int
    own_microseconds: float
    load: float
    cpu_seconds: float

    @property
    def step(self) -> float:
        """Mean seconds of a step."""
        return statistics.fmean(self.seconds)


class Answer(Workflow):
    """Asks for all responses of a group at once, as the built-in workflows do."""

    repeatable = True

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self.runs = range(run_id_base, run_id_base + repeat_times)

    async def run(self) -> list[Experience]:
        completions = await self.model.generate([self.task.raw_task["number"]], n=len(self.runs))
        return [
            Experience(
                eid=EID(run=run),
                tokens=[0, *completion.token_ids],  # the one "token" is the length
                logprobs=completion.logprobs,
                reward=float(run % 2),
            )
            for run, completion in zip(self.runs, completions, strict=True)
        ]


class Tasks:
    """Hands out tasks without an end; the part of a TaskSource that groups need."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.taskset = SimpleNamespace(state_dict=dict)

    def next_tasks(self, count: int, repeat_times: int) -> list[Task]:
        return [Task(Answer, {"number": next(self.numbers)}, repeat_times=repeat_times) for _ in range(count)]

    def forget_failed(self, tasks: Sequence[Task], experiences: Sequence[Experience]) -> None:
        """Nothing is learned of failures."""


# -- a run in virtual time ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Simulation:
    """A run's loop with modelled engines and a modelled trainer."""

    setting: Setting

    async def run(self) -> Outcome:
        """Take the steps, and measure them."""
        setting, loop = self.setting, asyncio.get_running_loop()
        table = setting.lengths.table((setting.steps + 8) * setting.batch_size, setting.repeat_times)
        speed, prompt = setting.machine.speed, setting.prompt_tokens
        self.engines = [ModelledEngine(speed, table, prompt) for _ in range(setting.engines)]
        groups = self._groups(scheduler := Scheduler(setting.explorer(), self.engines))  # type: ignore[arg-type]
        await scheduler.start()
        cpu = time.process_time()
        ends, tokens, trained, ages = [loop.time()], [], 0.0, list[dict[str, float]]()
        for step in range(1, setting.steps + 1):
            await self._sync(groups, step - 1)
            result = await groups.next_step(step)
            assert result is not None
            tokens.append(sum(int(experience.tokens[-1]) for experience in result.experiences))
            ages.append(result.metrics)
            seconds = setting.train_seconds(tokens[-1] + prompt * len(result.experiences))
            await self._train(seconds)
            trained += seconds
            ends.append(loop.time())
        cpu = time.process_time() - cpu
        await groups.close()
        await scheduler.stop()
        again = sum(engine.computed_again for engine in self.engines)
        rollouts = setting.steps * setting.batch_size * setting.repeat_times
        own = cpu - sum(engine.own_seconds for engine in self.engines)
        first = min(setting.warm_up, setting.steps // 2)
        return Outcome(
            seconds=[end - start for start, end in itertools.pairwise(ends)][first:],
            tokens_per_second=sum(tokens[first:]) / (ends[-1] - ends[first]),
            generating=statistics.fmean(engine.generating for engine in self.engines) / ends[-1],
            training=trained / ends[-1],
            staleness=(
                statistics.fmean(metrics["sample/staleness/mean"] for metrics in ages),
                max(metrics["sample/staleness/max"] for metrics in ages),
            ),
            computed_again=again / sum(tokens),
            again_seconds=again * speed.prompt_token / len(self.engines) / setting.steps,
            rollouts=rollouts,
            own_microseconds=own / rollouts * 1e6,
            load=own / ends[-1],
            cpu_seconds=cpu,
        )

    def _groups(self, scheduler: Scheduler) -> GroupRollouts:
        setting, config = self.setting, self.setting.explorer()
        all_at_once = setting.engines * setting.machine.speed.most_requests
        controller = StalenessController(
            config.batch_size,
            config.max_staleness,
            config.steps_ahead,
            rollouts=config.repeat_times,
            max_concurrent=(setting.max_concurrent or all_at_once) if setting.max_staleness else None,
        )

        async def tidy(experiences: list[Experience], batch: int) -> TidiedGroup:
            return TidiedGroup(experiences)

        async def fill(*_: object) -> dict[str, float]:
            return {}

        buffer, overlaps = GroupBuffer(tidy, fill), setting.servers is not None
        return GroupRollouts(config, Tasks(), scheduler.run_group, controller, overlaps, buffer=buffer)  # type: ignore[arg-type]

    async def _sync(self, groups: GroupRollouts, version: int) -> None:
        """Give the engines the weights; with `wait` once all rollouts under way have ended."""
        if version:
            if groups.waits:
                await groups.drain()
            for engine in self.engines:
                engine.rest()
            await asyncio.sleep(self.setting.machine.sync)
            for engine in self.engines:
                engine.sync(version)
                engine.go_on()
        groups.synced()

    async def _train(self, seconds: float) -> None:
        takes_turns = self.setting.servers is None
        for engine in self.engines if takes_turns else ():
            engine.rest()
        await asyncio.sleep(seconds)
        for engine in self.engines if takes_turns else ():
            engine.go_on()


def simulate(setting: Setting) -> Outcome:
    """The outcome of a setting."""
    return run_virtually(Simulation(setting).run())

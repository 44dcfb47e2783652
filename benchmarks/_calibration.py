"""Fits a machine's speeds to the steps of a run, and predicts other steps."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from _modelled import Lengths, ModelledEngine, Speed, run_virtually
from _simulated import Machine, Setting, simulate

from trinity_lightning.buffer.step_files import FOLDER, read_experiences
from trinity_lightning.common.runs import written_tokens
from trinity_lightning.monitor.rows import read_rows
from trinity_lightning.monitor.run_files import settings_in, text_of

TOLERANCE = 0.15  # largest error of a prediction, as a share
SKIPPED = 1  # steps at the start of a run: compilations, and the first allocation of memory
LEAST_STEPS = 6
CPU_REQUESTS = 64  # requests of a forward pass if engine.max_num_seqs is null, on a CPU


@dataclass(frozen=True)
class Measured:
    """A run.

    Attributes:
        setting: its settings, and the lengths of its responses by group.
        step, rollout, sync: seconds of every step, of its rollouts, and of its weight sync.
        most_requests: requests of a forward pass.
    """

    setting: Setting
    step: Sequence[float]
    rollout: Sequence[float]
    sync: Sequence[float]
    most_requests: int

    def groups_of(self, step: int) -> Sequence[Sequence[int]]:
        """Lengths of the groups of a step (from 0) of a synchronous run."""
        size = self.setting.batch_size
        return self.setting.lengths.seen[step * size : (step + 1) * size]

    def tokens(self, step: int) -> int:
        """Tokens of prompts and responses of a step of a synchronous run."""
        groups = self.groups_of(step)
        return sum(map(sum, groups)) + sum(map(len, groups)) * self.setting.prompt_tokens


def calibrated(folders: Sequence[Path]) -> tuple[Machine, dict[str, tuple[float, float]]]:
    """The fitted speeds, and the mean seconds of the steps of each run, measured and predicted.

    The speeds are fitted to every other step of the first run; of this run only the other steps are predicted.

    Raises:
        SystemExit: a folder lacks what this needs; the message says what.
    """
    runs = {str(folder): measured(folder) for folder in folders}
    first = next(iter(runs.values()))
    if first.setting.max_staleness:
        raise SystemExit(f"{folders[0]}: the first run must have explorer.max_staleness=0.")
    machine, predictions = fitted(first), {}
    for name, run in runs.items():
        predicted = simulate(replace(run.setting, machine=machine)).seconds
        steps = range(SKIPPED + (run is first), len(run.step), 1 + (run is first))
        predictions[name] = (
            statistics.fmean(run.step[step] for step in steps),
            statistics.fmean(predicted[step - SKIPPED] for step in steps),
        )
    return machine, predictions


def fitted(run: Measured) -> Machine:
    """The speeds that explain every other step of a synchronous run best."""
    steps = range(SKIPPED, len(run.step), 2)
    prompts = run.setting.batch_size * run.setting.prompt_tokens
    work = [[passes(run, step), sum(map(sum, run.groups_of(step))), prompts] for step in steps]
    step, request, prompt_token = least_squares(work, [run.rollout[step] for step in steps])
    rest = [run.step[step] - run.rollout[step] - run.sync[step] for step in steps]
    train_step, train_token = least_squares([[1, run.tokens(step)] for step in steps], rest)
    return Machine(
        Speed(step, request, prompt_token, run.most_requests),
        train_token,
        train_step,
        sync=statistics.fmean(run.sync[step] for step in steps),
    )


def passes(run: Measured, step: int) -> float:
    """Forward passes of an engine for the responses of a step."""

    async def count() -> float:
        groups = run.groups_of(step)
        engine = ModelledEngine(Speed(1, 0, 0, run.most_requests), groups, 0)
        await engine.generate_all(range(len(groups)))
        return engine.work

    return run_virtually(count())


def least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The factors of the columns that explain the values best and are not negative."""
    table, factors = np.asarray(columns, float), np.zeros(len(columns[0]))
    used = list(range(len(factors)))
    while used:
        scale = table[:, used].max(axis=0).clip(1e-12)
        solved = np.linalg.lstsq(table[:, used] / scale, np.asarray(values), rcond=None)[0] / scale
        if (solved >= 0).all():
            factors[used] = solved
            break
        used = [column for column, factor in zip(used, solved, strict=True) if factor > 0]
    return factors.tolist()


def measured(folder: Path) -> Measured:
    """Read a run's folder."""
    settings = settings_in(text_of(folder / "config.yaml"))
    if not settings or not (folder / FOLDER).is_dir():
        raise SystemExit(f"{folder}: a run's folder with {FOLDER}/ is needed, train with buffer.keep=true.")
    _, rows = read_rows(folder / "metrics.csv")
    rows = [row for row in rows if "time/step" in row and "time/rollout" in row]
    explorer, experiences = settings["explorer"], read_experiences(folder / FOLDER)
    size, repeats = explorer["batch_size"], explorer["repeat_times"]
    groups: dict[int, list[int]] = {}
    for experience in experiences:
        number = (int(experience.eid.batch) - 1) * size + int(experience.eid.task)
        groups.setdefault(number, []).append(written_tokens(experience))
    if len(rows) < LEAST_STEPS or len(experiences) != len(rows) * size * repeats:
        raise SystemExit(
            f"{folder}: {len(rows)} steps and {len(experiences)} rollouts; at least {LEAST_STEPS} steps are needed, "
            f"each of {size * repeats} rollouts, of one turn each, none filtered."
        )
    known = list(groups.values())  # stand for groups that were under way when the run ended
    seen = [groups.get(number, known[number % len(known)]) for number in range(max(groups) + 1)]
    setting = Setting(
        gpus=1,
        max_staleness=explorer.get("max_staleness", 0),
        run_ahead=explorer.get("run_ahead"),
        in_flight=explorer.get("in_flight", "continue"),
        max_concurrent=explorer.get("max_concurrent"),
        batch_size=size,
        repeat_times=repeats,
        lengths=Lengths("seen", seen=seen),
        prompt_tokens=round(statistics.fmean(experience.prompt_length for experience in experiences)),
        steps=len(rows),
        warm_up=SKIPPED,
    )
    step, rollout, sync = (
        [float(row.get(name, 0)) for row in rows] for name in ("time/step", "time/rollout", "time/sync_weight")
    )
    return Measured(setting, step, rollout, sync, settings["engine"]["max_num_seqs"] or CPU_REQUESTS)

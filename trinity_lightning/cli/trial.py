"""The half of `check` that imports torch: the run's own parts roll out and weigh its first tasks."""

import logging
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import lightning as L
import torch
from omegaconf import DictConfig

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.buffer.pipeline import MoreRollouts
from trinity_lightning.build import explorer_callback, online_data, quiet_libraries
from trinity_lightning.common.criterion import REWARD, components, criterion_of, why_no_criterion
from trinity_lightning.common.experience import Experience, group_by
from trinity_lightning.common.runs import (
    UNTRAINED,
    Run,
    equal_rewards,
    is_valid_reward,
    last_step,
    raw_reward,
    runs_of,
    what_helps,
    written_tokens,
)
from trinity_lightning.common.solved import metrics_of
from trinity_lightning.config.engines import TRAINER_GPU
from trinity_lightning.config.explorer import SYNCHRONOUS
from trinity_lightning.config.run import TrainConfig, typed_config
from trinity_lightning.engines import auxiliary_models_of, settle_dtypes
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.reports import report_tasks
from trinity_lightning.monitor.run_monitor import RunMonitor
from trinity_lightning.plan.command import table
from trinity_lightning.plan.gpu import with_memory_plan
from trinity_lightning.trainer.objective import Objective
from trinity_lightning.trainer.policy import PolicyModule

SHOWN_TASKS = 5
SHOWN_CHARACTERS = 1200  # of a prompt or a completion; the rest is in the file
MANY = 0.25  # share of completions that are cut off, and of groups without signal, from which on there is advice


@dataclass
class Trial:
    """The outcome of some tasks that the untrained model tried, as the run itself would have taken it.

    Attributes:
        experiences: of all completions, with the reasons for those that would not be trained on.
        failed: number of completions without an experience.
        objective: what the run trains by.
        config: the run's configuration.
        folder: the folder that has all completions.
    """

    experiences: list[Experience]
    failed: int
    objective: Objective
    config: TrainConfig
    folder: Path

    @property
    def groups(self) -> list[list[Run]]:
        """The completions of each task."""
        return [runs_of(group) for group in group_by(self.experiences, "task").values()]

    @property
    def rewards(self) -> list[float]:
        """The reward of each completion, before operators shaped it."""
        return [reward for group in self.groups for run in group if is_valid_reward(reward := _reward(run))]

    def has_signal(self, group: Sequence[Run]) -> bool:
        """True if the run would learn from a task's completions: by their rewards, or by a teacher."""
        if self.objective.needs_all_rows and not self.objective.teacher:
            rewards = self.rewards if self.config.algorithm.critic is not None else [_reward(run) for run in group]
            return not equal_rewards([reward for reward in rewards if is_valid_reward(reward)])
        return any(UNTRAINED not in experience.info for run in group for experience in run)


def build_trial(config: DictConfig, tasks: int) -> Trial:
    """Roll out the run's first tasks with its engine, and weigh them with its operators and add strategies.

    Raises:
        ConfigError, ValueError, TypeError: as `build.build`.
        RewardError: a reward function failed for every completion.
        RolloutError: no completion came of the tasks, for other reasons.
    """
    folder = Path(config.output_dir)
    quiet_libraries()
    settle_dtypes(config, None)
    typed, _ = with_memory_plan(replace(typed_config(config), trainer=config.trainer))
    typed = replace(
        typed,
        explorer=replace(typed.explorer, batch_size=tasks, **SYNCHRONOUS),
        engine=replace(typed.engine, per_rank=False),
        synchronizer=replace(typed.synchronizer, method="auto", lora="merged"),
        buffer=replace(typed.buffer, keep=False),
    )
    L.seed_everything(typed.seed, verbose=False)
    auxiliary_models = auxiliary_models_of(typed, folder)
    monitor = RunMonitor(folder, total_steps=0)
    explorer = explorer_callback(typed, folder, auxiliary_models, monitor, offload=False).explorer
    data = online_data(typed, folder, auxiliary_models)
    _bind(explorer, config)
    objective = Objective(typed.algorithm)
    experiences = _first_step(explorer, data, monitor, objective.needs_all_rows)
    tried = int(explorer.metrics["rollout/tasks"])  # fewer than asked for if the taskset has no more
    failed = tried * typed.explorer.repeat_times - len(runs_of(experiences))
    return Trial(experiences, failed, objective, typed_config(config), folder)


def _bind(explorer: Explorer, config: DictConfig) -> None:
    """Give engines that compute with the trainer's own weights a policy."""
    sharing = [engine for engine in explorer.engines.models if engine.capabilities.shares_weights]
    if not sharing:
        return
    policy = PolicyModule(config.model.name, dtype=typed_config(config).model.dtype)
    policy.configure_model()
    if (config.trainer or {}).get("accelerator", "auto") != "cpu" and torch.cuda.is_available():
        policy.to(torch.device("cuda", TRAINER_GPU))  # in a run Lightning's Trainer does so
    for engine in sharing:
        engine.bind(policy.policy)


def _first_step(
    explorer: Explorer, data: ExperienceDataModule, monitor: RunMonitor, all_rows: bool
) -> list[Experience]:
    """All experiences of one explore step, after operators and add strategies, which ask for no further tasks."""
    received: list[Experience] = []

    async def take(experiences: list[Experience], step: int, more: MoreRollouts) -> dict[str, float]:
        received.extend(experiences)
        return await data.fill(experiences, step, None, all_rows=all_rows)

    driver = Driver(explorer.engines.models)
    try:
        driver.run(explorer.prepare(take, watcher=monitor))
        driver.limit_blocking(explorer.config.max_timeout)
        with warnings_after_it():
            driver.run(explorer.explore_step())
    finally:
        driver.end(explorer.shutdown())
        data.teardown("fit")
        driver.close()
    return received


@contextmanager
def warnings_after_it() -> Iterator[None]:
    """Hold back what the explorer says of failed tasks; a RolloutError, by which all have failed, says it itself."""
    log, records = logging.getLogger(report_tasks.__module__), list[logging.LogRecord]()

    def hold(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    log.addFilter(hold)
    try:
        yield
    except RolloutError:
        records.clear()
        raise
    finally:
        log.removeFilter(hold)
        for record in records:
            log.handle(record)


# -- what people see ---------------------------------------------------------------------------------------------------


def lines_of(trial: Trial) -> list[str]:
    """The first completions with their rewards, and a table of all."""
    shown = [group[0] for group in trial.groups[:SHOWN_TASKS]]
    best = max((run for group in trial.groups for run in group), key=lambda run: _number(_reward(run)))
    lines = [line for number, run in enumerate(shown, 1) for line in _completion(f"{number} of {len(shown)}", run)]
    if _number(_reward(best)) > max(map(_number, map(_reward, shown))):
        lines += _completion("the highest reward of all", best)
    return [*lines, *_numbers(trial), ""]


def _completion(title: str, run: Run) -> Iterator[str]:
    """The lines of a completion: its reward by part, its length, the prompt and the text."""
    first, last = min(run, key=lambda experience: experience.eid.step), last_step(run)
    parts = ", ".join(f"{name.removeprefix(REWARD)} {last.metrics[name]:.4g}" for name in components(last.metrics))
    cut = f", cut off ({last.truncate_status})" if last.truncate_status is not None else ""
    tokens = sum(map(written_tokens, run))
    yield f"{title}: reward {_number(_reward(run)):.4g}{parts and f' ({parts})'}, {tokens} tokens{cut}"
    for label, text in (("prompt", first.prompt_text), ("completion", last.response_text)):
        yield f"  {label}"
        yield from (f"    | {line}" for line in shortened(text or "").split("\n"))
    yield ""


def shortened(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """The text without its middle if it is long, with characters that a terminal would act on as escapes."""
    if len(text) > most:
        text = f"{text[: most // 2]}\n... ({len(text) - most:,} characters are left out here) ...\n{text[-most // 2 :]}"
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def _numbers(trial: Trial) -> list[str]:
    """The table of all completions, and the groups that have signal."""
    runs = [run for group in trial.groups for run in group]
    rows = [("reward", trial.rewards)]
    rows += [(f"  {name.removeprefix(REWARD)}", values) for name, values in parts_of(runs).items()]
    rows += [("tokens of a completion", [float(sum(map(written_tokens, run))) for run in runs])]
    rows += [("tokens of a prompt", [float(run[0].prompt_length) for run in runs])]
    cells = [
        [name, f"{statistics.fmean(values):.4g}", f"{min(values):.4g}", f"{max(values):.4g}"]
        for name, values in rows
        if values
    ]
    title = f"{len(trial.groups)} tasks, {len(runs)} completions"
    cut, limit = cut_off(runs), trial.config.sampling.max_tokens
    return [
        *table([title, "mean", "least", "most"], cells),
        f"cut off: {cut} of {len(runs)} (sampling.max_tokens={limit})",
        *_signal(trial),
        *_reasons(trial),
    ]


def parts_of(runs: Sequence[Run]) -> dict[str, list[float]]:
    """The values of each part of the reward, by the part's name among metrics."""
    values: dict[str, list[float]] = {}
    for run in runs:
        metrics = last_step(run).metrics
        for name in components(metrics):
            values.setdefault(name, []).append(float(metrics[name]))
    return values


def cut_off(runs: Sequence[Run]) -> int:
    """Number of completions that reached a limit of tokens."""
    return sum(any(experience.truncate_status is not None for experience in run) for run in runs)


def _signal(trial: Trial) -> list[str]:
    groups, size = trial.groups, trial.config.explorer.batch_size
    count = sum(map(trial.has_signal, groups))
    low, high = (round(share * size) for share in wilson(count, len(groups)))
    expected = round(size * count / len(groups))
    estimate = f"in a step of {size} tasks about {expected} ({low} to {high})"
    return [f"groups with signal: {count} of {len(groups)}; {estimate}"]


def _reasons(trial: Trial) -> list[str]:
    """The line about completions that would not be trained on; none if all would be."""
    reasons = reasons_of(trial)
    if not reasons:
        return []
    causes = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    return [f"not trained on: {reasons.total()} of {len(trial.experiences)}: {causes}"]


def reasons_of(trial: Trial) -> Counter[str]:
    """Numbers of experiences that would not be trained on, by reason."""
    return Counter(exp.info[UNTRAINED] for exp in trial.experiences if UNTRAINED in exp.info)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's interval of a share, with 95 % confidence."""
    z = 1.96
    share, scale = successes / trials, 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * (share * (1 - share) / trials + z * z / (4 * trials * trials)) ** 0.5
    return max(centre - half, 0.0), min(centre + half, 1.0)


# -- advice ------------------------------------------------------------------------------------------------------------


def problems(trial: Trial) -> list[str]:
    """Sentences about what would make the run useless, with what to do; none if it can learn."""
    sentences = []
    if trial.failed > 0:
        total = trial.failed + sum(map(len, trial.groups))
        sentences.append(f"{trial.failed} of {total} completions failed, as the warnings above say: mend this first.")
    if not any(map(trial.has_signal, trial.groups)):
        sentences.append(_no_signal(trial))
    return sentences


def _no_signal(trial: Trial) -> str:
    """The sentence for a trial from which nothing would be learned."""
    runs = [run for group in trial.groups for run in group]
    rewards = trial.rewards
    if len({last_step(run).response_text for run in runs}) == len(trial.groups) < len(runs):
        return "All completions of a task are the same text, so nothing would be learned: raise sampling.temperature."
    if equal_rewards(rewards) and rewards:
        cut = "They are all cut off: raise sampling.max_tokens first. " if cut_off(runs) == len(runs) else ""
        return (
            f"All {len(rewards)} rewards are {rewards[0]:.4g}, so nothing would be learned. {cut}"
            "If that is too little: give the reward a part that some of the completions above earn, or take easier "
            "tasks or a stronger model. If it is the most that a completion can get: take harder tasks."
        )
    [(reason, _)] = reasons_of(trial).most_common(1) or [("equal rewards", 0)]
    return f"Nothing would be learned from these tasks ({reason}). {what_helps(reason)}"


def hints(trial: Trial) -> list[str]:
    """Sentences about what would make the run slow to learn."""
    runs = [run for group in trial.groups for run in group]
    sentences = []
    if cut_off(runs) >= MANY * len(runs):
        cut = f"{cut_off(runs)} of {len(runs)} completions are cut off"
        sentences.append(f"{cut}: raise sampling.max_tokens, or ask for shorter ones.")
    idle = [group for group in trial.groups if not trial.has_signal(group)]
    if MANY * len(trial.groups) <= len(idle) < len(trial.groups):
        sentences.append(f"{len(idle)} of {len(trial.groups)} groups have no signal. {what_helps('equal rewards')}")
    for name, values in parts_of(runs).items():
        if equal_rewards(values) and not equal_rewards(trial.rewards):
            part = name.removeprefix(REWARD)
            sentences.append(f"{part} is {values[0]:.4g} for every completion: by this part nothing is learned yet.")
    metrics, solved = metrics_of(trial.experiences), trial.config.reward_solved
    if trial.config.eval_tasksets and criterion_of(metrics, solved) is None:
        sentences.append(f"Evaluations of this run have {why_no_criterion(metrics, solved)}")
    return sentences


def _reward(run: Run) -> float | None:
    return raw_reward(last_step(run))


def _number(reward: float | None) -> float:
    return reward if is_valid_reward(reward) else float("nan")

"""Runs that an error ends, wherever it comes: what is whole is saved, and the resumed run equals a whole one."""

import asyncio
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.runs import only, rows, same_metrics
from support.trainer import quiet_trainer

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.common.inference import Completion
from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.config.engines import Capabilities, SynchronizerConfig
from trinity_lightning.config.explorer import ExplorerConfig, SamplingConfig
from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.config.models import load_tokenizer, resolve_model
from trinity_lightning.errors import WorkflowBlockedError
from trinity_lightning.explorer import driver, rollouts
from trinity_lightning.explorer.callback import ExplorerCallback
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.rollouts import TrainingRollouts
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.taskset import Taskset
from trinity_lightning.monitor.csv_logger import MetricsCSVLogger
from trinity_lightning.monitor.run_monitor import RunMonitor
from trinity_lightning.sync.stream import WeightStream, parameter_shapes
from trinity_lightning.trainer.policy import PolicyModule

pytestmark = [
    pytest.mark.slow,  # whole runs, in this process
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own use of torch
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),  # of the run that is resumed
]

STEPS, ITEMS, TASKS, REPEATS = 3, 2, 4, 4
HELDOUT = [{"prompt": f"{number} + 1 ="} for number in range(4)]
COMMAND = "trinity-lightning +recipe=grpo ckpt_path=last"


def even(response: str, task: Any) -> float:
    return float(sum(map(ord, response)) % 2 == 0)


class TornError(OSError):
    """Ends a run in these tests."""


class Elsewhere(Engine):
    """A model of its own beside the trainer's; its answers are drawn from what it was given, without a forward pass."""

    capabilities = Capabilities(overlaps_training=True)

    def __init__(self) -> None:
        super().__init__(max_model_len=320)
        self._model: Any = None

    async def load(self) -> None:
        if self._model is None:
            from transformers import AutoModelForCausalLM

            path = str(resolve_model("tiny"))
            self._tokenizer, self._shapes = load_tokenizer("tiny"), parameter_shapes(path)
            self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    async def shutdown(self) -> None:
        self._model = None

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    async def _logprobs(self, token_ids: list[int]) -> list[float]:
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([token_ids])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()

    async def _completions(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[Completion]:
        weights = float(self._model.model.embed_tokens.weight.detach().double().sum())
        made = []
        for index in range(n):
            drawn = random.Random(f"{token_ids} {sampling['seed'] + index} {weights}")
            tokens = [drawn.randrange(self._model.config.vocab_size) for _ in range(6)]
            made.append(Completion(token_ids, tokens, [-5.0] * 6, str(self._tokenizer.decode(tokens)), "stop"))
        return made

    async def _take(self, stream: WeightStream, version: int) -> None:
        with torch.no_grad():
            parameters = dict(self._model.named_parameters(remove_duplicate=False))
            for name, tensor in stream:
                parameters[name].copy_(tensor)
        self._model_version = version


class Run:
    """A run of three steps with two optimizer steps each, evaluated at its end; `break_it` makes it fail."""

    def __init__(self, folder: Path, offset: int = 0, **explorer: int) -> None:
        lightning.seed_everything(1, verbose=False)
        self.folder, self.steps = folder, STEPS
        sampling = SamplingConfig(max_tokens=8)
        source = TaskSource(Taskset.addition(), "simple", even, sampling)
        heldout = TaskSource(Taskset(HELDOUT, name="heldout"), "simple", even, sampling)
        settings: dict[str, Any] = {"eval_interval": 2, "sync_offset": offset} | explorer
        config = ExplorerConfig(batch_size=TASKS, repeat_times=REPEATS, eval_on_startup=False, **settings)
        config.max_retry_times = 0
        self.explorer = Explorer(config, [Elsewhere()], source, [heldout])
        self.monitor = RunMonitor(folder, STEPS)
        synchronizer = SynchronizerConfig(check_interval=1000, drill=False)
        self.callback = ExplorerCallback(
            self.explorer, synchronizer, folder=folder / "checkpoints", command=lambda: COMMAND
        )
        self.data = ExperienceDataModule("grpo", optimizer_steps=ITEMS)
        self.policy = PolicyModule(
            "tiny", AlgorithmConfig(optimizer_steps=ITEMS), OptimizerConfig(lr=1e-2), dtype="fp32"
        )
        self.checkpoint = folder / "checkpoints" / "interrupted.ckpt"
        self.logger = MetricsCSVLogger(folder)

    def fit(self, resumed: bool | Path = False, *callbacks: lightning.Callback) -> "Run":
        callbacks = (self.monitor, self.callback, *callbacks, ModelCheckpoint(self.folder / "checkpoints"))
        settings = {"logger": self.logger, "log_every_n_steps": 1, "enable_checkpointing": True}
        trainer = quiet_trainer(self.folder, *callbacks, max_epochs=self.steps, **settings)
        checkpoint = resumed if isinstance(resumed, Path) else self.checkpoint if resumed else None
        trainer.fit(self.policy, datamodule=self.data, ckpt_path=checkpoint, weights_only=True)
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return self.policy.policy.state_dict()


def equal(a: Run, b: Run, metrics: bool = True) -> None:
    left, right = a.weights(), b.weights()
    assert all(torch.equal(left[name], right[name]) for name in left)
    if metrics:
        same_metrics(a.folder, b.folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("whole")).fit()
    trained = [row for row in rows(run.folder) if row["actor/grad_norm"]]
    assert len(trained) == STEPS * ITEMS
    assert len(trained) == len({row["actor/grad_norm"] for row in trained})
    return run


def nth(number: int, function: Callable[..., Any], at_its_end: bool = False) -> Callable[..., Any]:
    """The function, whose call of that number (from 1) raises instead, or at its end."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            if at_its_end:
                function(*args, **kwargs)
            raise TornError("torn")
        return function(*args, **kwargs)

    return wrapped


def sigterm(run: Run) -> None:
    run.policy.trainer._signal_connector.received_sigterm = True


def hangs_in_step_2(run: Run) -> None:
    """Let the rollouts of the second step never end."""
    roll_out = run.explorer._run

    async def second_hangs(*args: Any) -> Any:
        return await (roll_out(*args) if run.explorer.step == 0 else asyncio.Event().wait())

    run.explorer._run = second_hangs  # type: ignore[method-assign]


class SaveInStep(lightning.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "within.ckpt")


def breaks(where: Any, name: str, number: int, at_its_end: bool = False) -> None:
    setattr(where, name, nth(number, getattr(where, name), at_its_end))


WAYS: dict[str, Callable[[Run], None]] = {
    "rollouts": lambda run: breaks(run.explorer, "_run", 2),
    "operators": lambda run: breaks(run.data.pipeline, "process", 2),
    "once the buffer has a step": lambda run: breaks(run.explorer, "_restarted", 2),
    "sync": lambda run: breaks(run.explorer, "sync_weight", 2),
    "columns": lambda run: breaks(run.policy, "prepare_step", 2),
    "columns of the first step, which is rolled out": lambda run: breaks(run.policy, "prepare_step", 1),
    "first item of the run": lambda run: breaks(run.policy, "accumulate", 1),
    "first item of a step": lambda run: breaks(run.policy, "accumulate", 3),
    "last item of a step": lambda run: breaks(run.policy, "accumulate", 4, at_its_end=True),
    "rows of a step": lambda run: breaks(run.logger, "log_metrics", 6),
    "end of a step": lambda run: breaks(run.monitor, "on_train_epoch_end", 2),
    "evaluation": lambda run: breaks(run.explorer, "eval", 1),
    "last evaluation": lambda run: breaks(run.explorer, "eval", 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_an_error_ended_goes_on_as_if_it_had_not(
    way: str, whole: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    WAYS[way](run)
    with pytest.raises(TornError):
        run.fit()
    assert f"Resume with: {COMMAND}" in caplog.text
    resumed = Run(tmp_path).fit(resumed=True)
    equal(whole, resumed)
    for row, other in zip(rows(resumed.folder), rows(whole.folder), strict=True):
        assert bool(row["time/sync_weight"]) == bool(other["time/sync_weight"])


@pytest.mark.parametrize("offset", [0, 1])
def test_an_error_before_there_are_rollouts_leaves_no_checkpoint(offset: int, tmp_path: Path) -> None:
    run = Run(tmp_path, offset=offset)
    breaks(run.explorer, "_run", 1)
    with pytest.raises(TornError):
        run.fit()
    assert not run.checkpoint.exists()


@pytest.mark.parametrize("item", [1, ITEMS + 1, STEPS * ITEMS])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_an_error_beside_an_item_neither_skips_it_nor_trains_it_twice(
    hook: str, item: int, whole: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    breaks(run.monitor, hook, item)
    with pytest.raises(TornError):
        run.fit()
    # What is logged of an item is logged after its hooks: that alone is lost where one of them fails.
    equal(whole, Run(tmp_path).fit(resumed=True), metrics=hook == "on_train_batch_start")


AGAIN: dict[str, Callable[[Run], None]] = {
    "rollouts at once": lambda run: breaks(run.explorer, "_run", 1),
    "second item": lambda run: breaks(run.policy, "accumulate", 2),
}


@pytest.mark.parametrize(
    "ways",
    [("last item of a step", "evaluation"), ("rollouts", "rollouts at once", "second item")],
)
def test_it_goes_on_where_it_ended_several_times(ways: tuple[str, ...], whole: Run, tmp_path: Path) -> None:
    for way in ways:
        run = Run(tmp_path)
        (WAYS | AGAIN)[way](run)
        with pytest.raises(TornError):
            run.fit(resumed=run.checkpoint.exists())
    equal(whole, Run(tmp_path).fit(resumed=True))


def test_a_resumed_run_that_is_killed_goes_on_from_the_last_step_that_it_saved(whole: Run, tmp_path: Path) -> None:
    for resumed, number in ((False, 2), (True, 3)):  # in the rollouts of the second step; evaluated, and of the third
        run = Run(tmp_path)
        breaks(run.explorer, "_run", number)
        with pytest.raises(TornError):
            run.fit(resumed)
    equal(whole, Run(tmp_path).fit(resumed=only(tmp_path, "checkpoints/epoch=1-*.ckpt")))


def test_rollouts_begun_ahead_that_failed_are_done_again_with_the_weights_that_they_had(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", offset=1).fit()
    assert [row["sample/lag/mean"] for row in rows(whole.folder) if row["reward/mean"]] == ["0.0", "1.0", "1.0"]
    for number in (2, 3):  # both begun while a step before is trained on
        folder = tmp_path / str(number)
        run = Run(folder, offset=1)
        breaks(run.explorer, "_run", number)
        with pytest.raises(TornError):
            run.fit()
        equal(whole, Run(folder, offset=1).fit(resumed=True))


def test_evaluations_between_rare_syncs_do_not_change_what_a_resumed_run_rolls_out_with(tmp_path: Path) -> None:
    def rarely(folder: Path) -> Run:
        return Run(folder, sync_interval=3, eval_interval=1)

    whole = rarely(tmp_path / "whole").fit()
    versions = [row["sample/model_version/mean"] for row in rows(whole.folder) if row["reward/mean"]]
    assert versions == ["0.0", "1.0", "2.0"]
    for where, name in ((lambda run: run.policy, "accumulate"), (lambda run: run.explorer, "_run")):
        run = rarely(tmp_path)
        breaks(where(run), name, 2)  # the second item; then, after an evaluation, the rollouts of the second step
        with pytest.raises(TornError):
            run.fit(resumed=run.checkpoint.exists())
    equal(whole, rarely(tmp_path).fit(resumed=True))


def test_sigterm_in_an_evaluation_ends_it_and_a_resumed_run_does_it_again(whole: Run, tmp_path: Path) -> None:
    run = Run(tmp_path)

    async def endless(step: int) -> dict[str, float]:
        sigterm(run)
        await asyncio.Event().wait()
        return {}

    run.explorer.eval = endless  # type: ignore[method-assign]
    with pytest.raises(SIGTERMException):
        run.fit()
    equal(whole, Run(tmp_path).fit(resumed=True))


@pytest.mark.parametrize("where", ["wait", "checkpoint"])
def test_sigterm_while_rollouts_begun_ahead_are_waited_for_ends_the_wait(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Run(tmp_path / "whole", offset=1).fit()
    run = Run(tmp_path, offset=1)
    settle = TrainingRollouts.settle

    def terminated(rollouts: TrainingRollouts) -> None:
        if rollouts.under_way:
            sigterm(run)
        settle(rollouts)

    hangs_in_step_2(run)
    monkeypatch.setattr(TrainingRollouts, "settle", terminated)
    callbacks = [SaveInStep()] if where == "checkpoint" else []
    with pytest.raises(SIGTERMException):
        run.fit(False, *callbacks)
    monkeypatch.undo()
    equal(whole, Run(tmp_path, offset=1).fit(resumed=True))


def test_after_an_error_rollouts_in_flight_are_waited_for_shortly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "STOP_SECONDS", 0.3)
    whole = Run(tmp_path / "whole", offset=1).fit()
    run = Run(tmp_path, offset=1)
    hangs_in_step_2(run)
    breaks(run.policy, "accumulate", 2)
    with pytest.raises(TornError):
        run.fit()
    equal(whole, Run(tmp_path, offset=1).fit(resumed=True))


@pytest.mark.parametrize("steps", [1, STEPS])
def test_a_second_fit_is_rolled_out_and_evaluated_as_the_first_one(steps: int, tmp_path: Path) -> None:
    """With one step the buffer holds, from the first fit, a step of the number that the second one begins with."""
    run, evaluated = Run(tmp_path), []
    run.steps, run.explorer.config.eval_on_startup = steps, True
    evaluate = run.explorer.eval

    async def counting(step: int) -> dict[str, float]:
        evaluated.append(step)
        return await evaluate(step)

    run.explorer.eval = counting  # type: ignore[method-assign]
    run.fit()
    first = run.data.storage.experiences
    run.logger = MetricsCSVLogger(tmp_path / "second")
    run.fit()
    assert evaluated == 2 * ([0, 1] if steps == 1 else [0, 2, 3])
    assert [exp.prompt_text for exp in run.data.storage.experiences] != [exp.prompt_text for exp in first]
    assert [float(row["sample/lag/mean"]) for row in rows(tmp_path / "second") if row["sample/lag/mean"]] == [0] * steps


def test_half_an_optimizer_step_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)

    class Tearing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            raise TornError("torn")

    run.policy = PolicyModule("tiny", dtype="fp32", optimizer_factory=lambda groups: Tearing(groups, 0.1))
    with pytest.raises(TornError):
        run.fit()
    assert "stopped within an optimizer step" in caplog.text
    assert not run.checkpoint.exists()


def test_an_error_while_saving_leaves_the_one_that_ended_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    breaks(run.policy, "accumulate", 2)
    run.policy.on_save_checkpoint = lambda checkpoint: 1 / 0  # type: ignore[method-assign]
    run.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    (run.checkpoint.parent / "epoch=1.ckpt").touch()
    with pytest.raises(TornError):
        run.fit()
    assert "the checkpoint could not be written: ZeroDivisionError" in caplog.text
    assert "The previous checkpoint is intact. Resume with" in caplog.text
    assert not run.checkpoint.exists()


def test_a_second_ctrl_c_saves_nothing(tmp_path: Path) -> None:
    class Impatient(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            signal.raise_signal(signal.SIGINT)

    run = Run(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        run.fit(False, Impatient(), Impatient())
    assert not run.checkpoint.exists()
    signal.signal(signal.SIGINT, before)  # Lightning ignores it from then on


def test_ctrl_c_between_two_items_is_resumed(whole: Run, tmp_path: Path) -> None:
    class Stopping(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == ITEMS + 1:
                signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        Run(tmp_path).fit(False, Stopping())
    signal.signal(signal.SIGINT, before)
    equal(whole, Run(tmp_path).fit(resumed=True))


def test_a_workflow_that_blocks_everything_ends_the_run_with_a_checkpoint(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.explorer.config.max_timeout = 1.0  # of every attempt, too
    monkeypatch.setattr(driver, "BLOCKED_SECONDS", 0.5)
    loading, rendering = Elsewhere.load, Elsewhere._completions
    asked, released = itertools.count(), threading.Event()

    async def slowly(self: Elsewhere) -> None:
        if self._model is None:
            time.sleep(1.5)  # noqa: ASYNC251 - an engine may take its time to load
        await loading(self)

    async def blocking(self: Elsewhere, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[Completion]:
        if next(asked) == TASKS * REPEATS:
            released.wait(60)
        return await rendering(self, token_ids, n, sampling)

    monkeypatch.setattr(Elsewhere, "load", slowly)
    monkeypatch.setattr(Elsewhere, "_completions", blocking)
    with pytest.raises(WorkflowBlockedError):
        run.fit()
    released.set()
    assert f"Resume with: {COMMAND}" in caplog.text
    monkeypatch.undo()
    equal(whole, Run(tmp_path).fit(resumed=True))

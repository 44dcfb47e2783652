"""Rollouts of a training run: their begin, their state in checkpoints, and those that go on beside the main thread."""

import asyncio
import ctypes
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from support.errors import refuses
from support.fake_model import FakeModel
from support.picture_models import family_model
from support.pictures import processor
from support.policy import make_policy
from support.rollouts import training_rollouts

from trinity_lightning.common.experience import Experience
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.config.models import resolve_model
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer import rollouts as rollouts_module
from trinity_lightning.explorer.callback import ExplorerCallback
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.interruption import CtrlC
from trinity_lightning.explorer.rollouts import PendingSteps, SyncPolicy, overlap
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.taskset import Taskset
from trinity_lightning.sync.stream import WeightStream


@pytest.mark.parametrize(("part", "key"), [("the explorer", "ahead"), ("weight syncs", "counted_at")])
def test_a_checkpoint_of_an_earlier_version_is_refused_by_what_it_lacks(part: str, key: str) -> None:
    def explorer_callback() -> ExplorerCallback:
        source = TaskSource(Taskset.addition(), "simple", "math")
        return ExplorerCallback(Explorer(ExplorerConfig(), [FakeModel()], source))

    state: dict[str, Any] = explorer_callback().state_dict()
    explorer_callback().load_state_dict(state)
    (state if key in state else state["sync"]).pop(key)
    with refuses("ckpt_path") as refused:
        explorer_callback().load_state_dict(state)
    assert f"{part} lacks '{key}'" in str(refused.value)


class TakesSigterm(FakeModel):
    """Ignores SIGTERM from its loading on, behind Python's back: so does Ray put a handler of its own in its place."""

    async def load(self) -> None:
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_IGN))


def test_sigterm_is_heard_while_engines_and_trainer_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    explorer = Explorer(ExplorerConfig(), [TakesSigterm()], TaskSource(Taskset.addition(), "simple", "math"))
    rollouts = training_rollouts(explorer, PendingSteps())
    monkeypatch.setattr(SyncPolicy, "join", lambda _: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
    try:
        rollouts.prepare(None)  # type: ignore[arg-type]
    finally:
        rollouts.close()
        signal.signal(signal.SIGTERM, before)
    assert heard == ["SIGTERM"]


class Hangs(FakeModel):
    async def shutdown(self) -> None:
        raise OSError("the server hangs on")


@pytest.mark.parametrize(("hook", "argument"), [("on_exception", ValueError()), ("teardown", "fit")])
def test_an_engine_that_does_not_end_leaves_the_trained_model_or_the_error_of_the_run(
    hook: str, argument: Any, caplog: pytest.LogCaptureFixture
) -> None:
    explorer = Explorer(ExplorerConfig(), [Hangs()], TaskSource(Taskset.addition(), "simple", "math"))
    callback: Any = ExplorerCallback(explorer)
    callback._running = training_rollouts(explorer, PendingSteps())
    getattr(callback, hook)(None, None, argument)
    assert "the engines did not end as they should: OSError: the server hangs on" in caplog.text


SUMS = [{"prompt": f"{number} + 1 ="} for number in range(4)]


async def taken(*_: Any) -> dict[str, float]:
    return {}


def evaluated(monkeypatch: pytest.MonkeyPatch, state: Any, pending: PendingSteps, global_step: int) -> Explorer:
    """An explorer that syncs every third step, resumed and then evaluated after `global_step` optimizer steps."""
    monkeypatch.setattr(SyncPolicy, "weights", lambda _: WeightStream.of([("w", torch.full((1,), global_step))]))
    config = ExplorerConfig(batch_size=1, repeat_times=1, sync_interval=3, eval_interval=1)
    source, heldout = (
        TaskSource(Taskset(SUMS, name=name), "simple", "contains_digits") for name in ("sums", "heldout")
    )
    explorer = Explorer(config, [FakeModel()], source, [heldout])
    if state is not None:
        explorer.load_state_dict(state)
    rollouts = training_rollouts(explorer, pending)
    sync: Any = rollouts.sync
    sync.policy = SimpleNamespace(policy=None)
    sync._synchronizer = SimpleNamespace(
        sync=lambda: rollouts.driver.run(explorer.sync_weight(sync._sending)) or {}, drill_scale=None
    )
    try:
        rollouts.prepare(taken)
        rollouts.evaluate(explorer.step, global_step)
    finally:
        rollouts.close()
    return explorer


@pytest.mark.parametrize(("target", "version"), [(1, 1), (2, 0)], ids=["done", "to be done again"])
def test_after_an_evaluation_a_checkpoint_has_the_weights_of_the_next_rollouts(
    target: int, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = evaluated(monkeypatch, None, PendingSteps(), 0).state_dict()
    state["step"] = 1  # which is trained on when the run is resumed
    explorer = evaluated(monkeypatch, state, PendingSteps(target=target), 1)
    assert explorer.engines.models[0].model_version == 1
    engines = explorer.state_dict()["engines"]
    assert (engines["version"], engines["weights"]["w"].tolist()) == (version, [version])


def test_a_step_that_the_buffer_holds_without_its_metrics_is_rolled_out_again() -> None:
    source = TaskSource(Taskset(SUMS), "simple", "contains_digits")
    explorer = Explorer(ExplorerConfig(batch_size=1, repeat_times=1), [FakeModel()], source)
    pending = PendingSteps()
    rollouts = training_rollouts(explorer, pending)
    rollouts.sync.sync_if_due = lambda global_step: {}  # type: ignore[method-assign]
    held: set[int] = set()

    async def sink(experiences: Any, step: int, more: Any) -> dict[str, float]:
        held.add(step)
        return {}

    explorer._restarted = lambda: {}[0]  # type: ignore[method-assign]  # fails once the buffer has the step
    try:
        rollouts.prepare(sink)
        with pytest.raises(KeyError):
            rollouts.obtain(1, 0, held.__contains__)
        assert held == {1}
        explorer._restarted = dict  # type: ignore[method-assign,assignment]
        rollouts.obtain(1, 0, held.__contains__)
    finally:
        rollouts.close()
    assert pending.metrics[1]["rollout/tasks"] == 1


# -- begun ahead: waited for, failed, given up -------------------------------------------------------------------------


class Gated(FakeModel):
    """Answers two requests, and any other once `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asked = 0

    async def chat(self, messages: Any, tools: Any = None, n: int = 1, images: Any = (), **sampling: Any) -> Any:
        self.asked += 1
        if self.asked > 2:
            await self.gate.wait()
        return await super().chat(messages, tools, n, images, **sampling)


class Ahead:
    """Rollouts ahead of four tasks a step, and what their sink was given."""

    def __init__(self, model: FakeModel, reward: Any = None) -> None:
        self.taken: list[int] = []
        self.reasons: list[BaseException] = []  # to end what is waited for
        source = TaskSource(Taskset([{"prompt": str(i)} for i in range(4)]), "simple", reward or (lambda *_: 1.0))
        config = ExplorerConfig(batch_size=4, repeat_times=1, max_retry_times=0, sync_offset=1)
        self.explorer = Explorer(config, [model], source)
        self.pending = PendingSteps()
        self.rollouts = training_rollouts(
            self.explorer, self.pending, lambda: self.reasons[0] if self.reasons else None
        )
        self.rollouts.sync.sync_if_due = lambda global_step: {}  # type: ignore[method-assign]
        self.rollouts.prepare(self.sink)

    def begin(self, step: int = 1) -> None:
        """Begin the rollouts of a step; those of the steps before are waited for."""
        self.rollouts.limit_steps(step)
        self.rollouts.explore_ahead(step - 1, 0)

    async def sink(self, experiences: list[Experience], step: int, more: Any) -> dict[str, float]:
        self.taken.append(len(experiences))
        return {"taken": 1.0}


def test_what_was_begun_is_waited_for_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Ahead(FakeModel())
    start = made.rollouts.driver.start

    def start_and_fall_behind(coroutine: Any) -> Any:
        begun = start(coroutine)
        made.rollouts.driver.wait(start(until(lambda: begun.done)))
        return begun

    monkeypatch.setattr(made.rollouts.driver, "start", start_and_fall_behind)
    made.begin(2)
    monkeypatch.undo()
    assert made.rollouts.under_way
    made.rollouts.wait()
    assert made.taken == [4, 4]
    assert not made.rollouts.under_way
    assert made.pending.metrics[1]["taken"] == 1
    assert made.pending.metrics[2]["rollout/overlap"] == pytest.approx(1.0)
    made.rollouts.close()


def test_tasks_ahead_are_counted_for_other_processes_and_not_drawn() -> None:
    """On the terminal, the main thread draws its own bar meanwhile."""
    model = Gated()
    made = Ahead(model)
    made.rollouts.watcher = watcher = Mock()
    made.begin()
    made.rollouts.driver.run(until(lambda: model.asked == 4 and watcher.count_tasks.call_count == 3))
    assert watcher.count_tasks.call_args_list == [call(1, done, 4) for done in range(3)]
    assert call(1, 2, 4) not in watcher.show_tasks.call_args_list
    made.rollouts.close()


def test_what_is_given_up_leaves_no_part_of_a_step() -> None:
    model = Gated()
    made = Ahead(model)
    made.begin()
    made.rollouts.driver.run(until(lambda: model.asked == 4))
    made.rollouts.close()
    assert made.taken == []
    assert made.explorer.step == 0
    assert made.pending == PendingSteps(target=1)


@pytest.mark.slow
def test_waiting_may_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts_module, "STOP_SECONDS", 0.2)
    made, ctrl_c = Ahead(Gated()), CtrlC()
    made.begin()
    made.rollouts.settle_shortly(ctrl_c)
    ctrl_c.restore()
    assert ctrl_c.count == 1  # the next one ends the run at once
    with pytest.raises(TimeoutError):
        made.rollouts.wait()
    assert (made.taken, made.explorer.step, made.pending.target) == ([], 0, 1)
    made.rollouts.close()


def broken(response: str, task: Any) -> float:
    raise OSError("no reward today")


def test_a_failure_waits_until_the_step_is_needed() -> None:
    made = Ahead(FakeModel(), broken)
    made.begin()
    made.rollouts.settle()  # a checkpoint of the step before
    assert made.explorer.state_dict()["step"] == 0
    with pytest.raises(RolloutError, match="no reward today"):
        made.rollouts.wait()
    made.rollouts.close()


def test_a_failure_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    made = Ahead(FakeModel(), broken)
    made.begin()
    made.rollouts.settle()
    made.rollouts.close()
    assert "begun ahead failed: RewardError: explore step 1" in caplog.text
    assert "no reward today" in caplog.text


def test_a_failure_that_came_before_it_was_given_up_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, begun = Ahead(FakeModel(), broken), []
    start = made.rollouts.driver.start
    monkeypatch.setattr(made.rollouts.driver, "start", lambda coroutine: begun.append(start(coroutine)) or begun[-1])
    made.begin()
    monkeypatch.undo()
    made.rollouts.driver.run(until(lambda: begun[-1].done))
    made.rollouts.close()
    assert "no reward today" in caplog.text


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_rollouts_at_once() -> None:
    model = Gated()
    made = Ahead(model)
    for wait in (made.rollouts.wait, made.rollouts.settle):
        model.asked = 0
        made.begin()
        made.rollouts.driver.run(until(lambda: model.asked == 4))
        made.reasons.append(SystemExit("enough"))
        with pytest.raises(SystemExit, match="enough"):
            wait()
        made.reasons.clear()
        assert (made.taken, made.explorer.step, made.pending.target) == ([], 0, 1)
    made.rollouts.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the model of a test tells nobody
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        ((0, 10), (2, 4), 1.0),
        ((0, 10), (8, 12), 0.5),
        ((0, 10), (10, 20), 0.0),
        ((5, 50), (0, 10), 0.5),
        ((0, 0), (0, 10), 0.0),
    ],
)
def test_overlap_is_a_share_of_the_shorter(one: tuple[float, float], other: tuple[float, float], share: float) -> None:
    assert overlap(one, other) == overlap(other, one) == share


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_the_probe_has_a_picture_unless_the_policys_family_is_refused(family: str, tmp_path: Path) -> None:
    shutil.copytree(resolve_model("tiny_vision"), tmp_path, dirs_exist_ok=True)
    family_model(family).save_pretrained(tmp_path)
    policy, model = make_policy(name=str(tmp_path)), FakeModel()
    policy.configure_model()
    model.tokenizer, model.processor = policy.tokenizer, processor()
    model.logprobs = lambda token_ids: asyncio.sleep(0, policy.sequence_logprobs(token_ids))  # type: ignore
    explorer = Explorer(ExplorerConfig(), [model], TaskSource(Taskset.addition(), "simple", "math"))
    rollouts = training_rollouts(explorer, PendingSteps())
    rollouts.sync.policy = policy
    try:
        probe = rollouts.sync._synchronizer
        assert probe.has_pictures == (family == "smolvlm")
        assert probe.trainer_logprobs() == probe.engine_logprobs()[0]
    finally:
        rollouts.close()

"""Rollouts of a training run: how they begin, and their state in checkpoints."""

import ctypes
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_model import FakeModel
from support.rollouts import training_rollouts

from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.callback import ExplorerCallback
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.rollouts import PendingSteps, SyncPolicy
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
    with pytest.raises(ConfigError, match=f"of an earlier version .its state of {part} lacks '{key}'"):
        explorer_callback().load_state_dict(state)


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

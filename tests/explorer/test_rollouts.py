"""Rollouts of a training run: how they begin, and their state in checkpoints."""

import ctypes
import signal
from typing import Any

import pytest
from support.fake_model import FakeModel
from support.rollouts import training_rollouts

from trinity_lightning.config.schema import ExplorerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.callback import ExplorerCallback
from trinity_lightning.explorer.explorer import Explorer, TaskSource
from trinity_lightning.explorer.rollouts import PendingSteps, SyncPolicy, TrainingRollouts
from trinity_lightning.explorer.tasks.taskset import Taskset


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
    rollouts = training_rollouts(TrainingRollouts, explorer, PendingSteps())
    monkeypatch.setattr(SyncPolicy, "join", lambda _: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
    try:
        rollouts.prepare(None)  # type: ignore[arg-type]
    finally:
        rollouts.close()
        signal.signal(signal.SIGTERM, before)
    assert heard == ["SIGTERM"]

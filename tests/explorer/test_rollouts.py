"""The state of rollouts and weight syncs in checkpoints."""

from typing import Any

import pytest
from support.fake_model import FakeModel

from trinity_lightning.config.schema import ExplorerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.callback import ExplorerCallback
from trinity_lightning.explorer.explorer import Explorer, TaskSource
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

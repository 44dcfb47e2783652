"""Distributes tasks to runners, whose workflows turn them into experiences.

The names below are imported at their first use, because two users of this package do without torch: the checks of a
configuration (`explorer.rewards`, `explorer.tasks`), and the processes of `explorer.reward_workers`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_lightning.explorer.callback import ExplorerCallback as ExplorerCallback
    from trinity_lightning.explorer.explorer import Explorer as Explorer
    from trinity_lightning.explorer.scheduler import RunnerWrapper as RunnerWrapper
    from trinity_lightning.explorer.scheduler import Scheduler as Scheduler
    from trinity_lightning.explorer.scheduler import TaskWrapper as TaskWrapper
    from trinity_lightning.explorer.task_source import TaskSource as TaskSource
    from trinity_lightning.explorer.workflow_runner import Status as Status
    from trinity_lightning.explorer.workflow_runner import WorkflowRunner as WorkflowRunner

_NAMES = {
    "callback": ["ExplorerCallback"],
    "explorer": ["Explorer"],
    "scheduler": ["RunnerWrapper", "Scheduler", "TaskWrapper"],
    "task_source": ["TaskSource"],
    "workflow_runner": ["Status", "WorkflowRunner"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

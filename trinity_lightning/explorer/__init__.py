"""TRY IT: tasks are distributed to runners, whose workflows turn them into experiences."""

from trinity_lightning.explorer.scheduler import RunnerWrapper as RunnerWrapper
from trinity_lightning.explorer.scheduler import Scheduler as Scheduler
from trinity_lightning.explorer.scheduler import TaskWrapper as TaskWrapper
from trinity_lightning.explorer.workflow_runner import Status as Status
from trinity_lightning.explorer.workflow_runner import WorkflowRunner as WorkflowRunner

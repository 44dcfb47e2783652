"""Tasks, and the tasksets that they come from."""

from trinity_lightning.explorer.tasks.task import Task as Task
from trinity_lightning.explorer.tasks.taskset import Taskset as Taskset

"""Workflows turn a task and a model into experiences."""

from trinity_lightning.explorer.workflows.workflow import WORKFLOWS as WORKFLOWS
from trinity_lightning.explorer.workflows.workflow import MathWorkflow as MathWorkflow
from trinity_lightning.explorer.workflows.workflow import PartialFailure as PartialFailure
from trinity_lightning.explorer.workflows.workflow import SimpleWorkflow as SimpleWorkflow
from trinity_lightning.explorer.workflows.workflow import Workflow as Workflow
from trinity_lightning.explorer.workflows.workflow import resolve_workflow as resolve_workflow

"""How to try it: workflows turn a task and a model into experiences."""

from trinity_lightning.explorer.workflows.environments import ENVIRONMENTS as ENVIRONMENTS
from trinity_lightning.explorer.workflows.environments import Environment as Environment
from trinity_lightning.explorer.workflows.evaluation import EvaluationWorkflow as EvaluationWorkflow
from trinity_lightning.explorer.workflows.judge import JudgeWorkflow as JudgeWorkflow
from trinity_lightning.explorer.workflows.math import MathWorkflow as MathWorkflow
from trinity_lightning.explorer.workflows.multi_turn import MultiTurnWorkflow as MultiTurnWorkflow
from trinity_lightning.explorer.workflows.on_policy_distill import OnPolicyDistillWorkflow as OnPolicyDistillWorkflow
from trinity_lightning.explorer.workflows.simple import SimpleWorkflow as SimpleWorkflow
from trinity_lightning.explorer.workflows.tool_use import ToolUseWorkflow as ToolUseWorkflow
from trinity_lightning.explorer.workflows.workflow import WORKFLOWS as WORKFLOWS
from trinity_lightning.explorer.workflows.workflow import PartialFailure as PartialFailure
from trinity_lightning.explorer.workflows.workflow import Workflow as Workflow
from trinity_lightning.explorer.workflows.workflow import resolve_workflow as resolve_workflow

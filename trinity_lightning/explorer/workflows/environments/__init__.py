"""What a multi-turn workflow plays against."""

from trinity_lightning.explorer.workflows.environments.environment import ENVIRONMENTS as ENVIRONMENTS
from trinity_lightning.explorer.workflows.environments.environment import Environment as Environment
from trinity_lightning.explorer.workflows.environments.environment import StepResult as StepResult
from trinity_lightning.explorer.workflows.environments.environment import resolve_environment as resolve_environment
from trinity_lightning.explorer.workflows.environments.guess_number import GuessNumber as GuessNumber
from trinity_lightning.explorer.workflows.environments.retry import Retry as Retry
from trinity_lightning.explorer.workflows.environments.tools import ToolEnvironment as ToolEnvironment

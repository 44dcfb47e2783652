"""The package's errors where they were before `trinity_lightning.errors`."""

from trinity_lightning.errors import ConfigError as ConfigError
from trinity_lightning.errors import ModelLoadError as ModelLoadError
from trinity_lightning.errors import OperatorError as OperatorError
from trinity_lightning.errors import PromptTooLongError as PromptTooLongError
from trinity_lightning.errors import ReadOnlyError as ReadOnlyError
from trinity_lightning.errors import RolloutError as RolloutError
from trinity_lightning.errors import TrinityError as TrinityError
from trinity_lightning.errors import WeightSyncError as WeightSyncError
from trinity_lightning.errors import WorkerDiedError as WorkerDiedError
from trinity_lightning.errors import WorkflowBlockedError as WorkflowBlockedError

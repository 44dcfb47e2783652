"""The sections of the configuration under the name that Trinity-RFT's users look for; they are in `config/`."""

from trinity_lightning.config.auxiliary_models import AuxiliaryConfig as AuxiliaryConfig
from trinity_lightning.config.engines import EngineConfig as EngineConfig
from trinity_lightning.config.engines import EngineDtype as EngineDtype
from trinity_lightning.config.engines import EngineSleep as EngineSleep
from trinity_lightning.config.engines import SynchronizerConfig as SynchronizerConfig
from trinity_lightning.config.schema import BufferConfig as BufferConfig
from trinity_lightning.config.schema import DynamicTimeoutConfig as DynamicTimeoutConfig
from trinity_lightning.config.schema import ExpertConfig as ExpertConfig
from trinity_lightning.config.schema import ExplorerConfig as ExplorerConfig
from trinity_lightning.config.schema import OverRolloutConfig as OverRolloutConfig
from trinity_lightning.config.schema import SamplingConfig as SamplingConfig
from trinity_lightning.config.schema import TasksetConfig as TasksetConfig
from trinity_lightning.config.schema import TrainConfig as TrainConfig
from trinity_lightning.config.schema import WorkflowConfig as WorkflowConfig
from trinity_lightning.config.training import AlgorithmConfig as AlgorithmConfig
from trinity_lightning.config.training import Dropout as Dropout
from trinity_lightning.config.training import KLConfig as KLConfig
from trinity_lightning.config.training import Layout as Layout
from trinity_lightning.config.training import LoRAConfig as LoRAConfig
from trinity_lightning.config.training import ModelConfig as ModelConfig
from trinity_lightning.config.training import OptimizerConfig as OptimizerConfig
from trinity_lightning.config.training import RolloutCorrectionConfig as RolloutCorrectionConfig
from trinity_lightning.config.training import WeightDtype as WeightDtype

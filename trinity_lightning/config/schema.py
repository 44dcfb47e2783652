"""Keeps the sections importable by this module's name, for scripts of earlier versions."""

from trinity_lightning.config.algorithm import AlgorithmConfig as AlgorithmConfig
from trinity_lightning.config.buffer import BufferConfig as BufferConfig
from trinity_lightning.config.engines import EngineConfig as EngineConfig
from trinity_lightning.config.explorer import ExplorerConfig as ExplorerConfig
from trinity_lightning.config.explorer import SamplingConfig as SamplingConfig
from trinity_lightning.config.explorer import WorkflowConfig as WorkflowConfig
from trinity_lightning.config.model import ModelConfig as ModelConfig
from trinity_lightning.config.model import OptimizerConfig as OptimizerConfig
from trinity_lightning.config.run import TrainConfig as TrainConfig
from trinity_lightning.config.taskset import TasksetConfig as TasksetConfig

"""HOLD IT: from the explorer's experiences to the trainer's optimizer batches."""

from trinity_lightning.buffer.loader import ExperienceLoader as ExperienceLoader
from trinity_lightning.buffer.pipeline import ExperiencePipeline as ExperiencePipeline

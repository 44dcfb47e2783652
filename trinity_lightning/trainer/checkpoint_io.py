"""The checkpoint callback under its earlier path, which recipes and records of runs name as `_target_`."""

from trinity_lightning.trainer.checkpoint import StepCheckpoint as StepCheckpoint

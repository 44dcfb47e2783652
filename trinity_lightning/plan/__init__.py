"""The memory and time that a run needs, before anything is loaded: `python -m trinity_lightning.plan`."""

from trinity_lightning.plan.command import main as main

"""The sections of the configuration under the name that Trinity-RFT's users look for; they are in `config/`."""

from trinity_lightning.config.algorithm import *  # noqa: F403
from trinity_lightning.config.buffer import *  # noqa: F403
from trinity_lightning.config.engines import *  # noqa: F403
from trinity_lightning.config.explorer import *  # noqa: F403
from trinity_lightning.config.model import *  # noqa: F403
from trinity_lightning.config.run import *  # noqa: F403
from trinity_lightning.config.taskset import *  # noqa: F403
from trinity_lightning.config.trainer import *  # noqa: F403

"""The sections of the configuration under the name that Trinity-RFT's users look for; they are in `config/`."""

from trinity_lightning.config.auxiliary_models import *  # noqa: F403
from trinity_lightning.config.engines import *  # noqa: F403
from trinity_lightning.config.schema import *  # noqa: F403
from trinity_lightning.config.training import *  # noqa: F403

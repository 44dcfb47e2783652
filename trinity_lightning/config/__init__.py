"""What a run is configured by: light, without torch, so that a misspelt key is refused within a second.

Modules that not every run needs are imported when they are first asked for, as attributes of this package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_lightning.config import auxiliary_models as auxiliary_models
    from trinity_lightning.config import built_in_models as built_in_models
    from trinity_lightning.config import checkpoints as checkpoints
    from trinity_lightning.config import explain as explain
    from trinity_lightning.config import objectives as objectives
    from trinity_lightning.config import optimization as optimization
    from trinity_lightning.config import own_models as own_models
    from trinity_lightning.config import parts as parts
    from trinity_lightning.config import servers as servers
    from trinity_lightning.config import signatures as signatures
    from trinity_lightning.config import stored as stored
    from trinity_lightning.config import trainer as trainer

_LATE = (
    *("auxiliary_models", "built_in_models", "checkpoints", "explain", "objectives", "optimization", "own_models"),
    *("parts", "servers", "signatures", "stored", "trainer"),
)


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")

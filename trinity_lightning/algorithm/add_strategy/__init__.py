"""What an experience is worth: strategies that weigh the experiences of an explore step and write them to a buffer.

Every strategy of the table of parts is a name of this package too, imported when it is asked for.
"""

from typing import Any

from trinity_lightning.algorithm.add_strategy.add_strategy import ADD_STRATEGY as ADD_STRATEGY
from trinity_lightning.algorithm.add_strategy.add_strategy import AddStrategy as AddStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import ComposedAddStrategy as ComposedAddStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import GroupAdvantageStrategy as GroupAdvantageStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import GRPOAddStrategy as GRPOAddStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import TaskAdvantageStrategy as TaskAdvantageStrategy
from trinity_lightning.algorithm.add_strategy.add_strategy import create_add_strategy as create_add_strategy
from trinity_lightning.algorithm.add_strategy.add_strategy import group_by as group_by
from trinity_lightning.config.registry import PARTS, import_object

_LATER = {path.rpartition(".")[2]: path for path in PARTS["add strategy"].values()}
_LATER["RunAdvantageStrategy"] = f"{__name__}.step_wise_add_strategy.RunAdvantageStrategy"

# For `import *`, the names that are imported on use too.
__all__ = [*(n for n in globals() if n[0] != "_"), *_LATER]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_object(_LATER[name])

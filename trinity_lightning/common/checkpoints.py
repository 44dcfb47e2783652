"""What a checkpoint holds: a file, or a folder of shards."""

from pathlib import Path
from typing import Any

import torch

from trinity_lightning.config.checkpoints import REST


def contents(path: str | Path) -> dict[str, Any]:
    """All of a checkpoint, nothing of which is run as code; its tensors stay on disk until they are used.

    Those of a file are mapped into memory. Those that are in shards are on the meta device: `filled` reads them.
    """
    path = Path(path)
    file = path / REST if path.is_dir() else path
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def whole(path: str | Path, part: dict[str, Any]) -> dict[str, Any]:
    """A part of the contents of that checkpoint, such as {"state_dict": ...}, with all of its tensors.

    Raises:
        ConfigError: its shards are damaged.
    """
    if Path(path).is_file():
        return part
    from trinity_lightning.common.shard_files import filled  # torch.distributed.checkpoint: few runs need it

    return filled(Path(path), part)

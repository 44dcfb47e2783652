"""Which files and folders are checkpoints."""

from pathlib import Path

# In a checkpoint that is a folder: all but the tensors that are in shards. It is written last, by Lightning's name.
REST = "meta.pt"


def is_checkpoint(path: Path) -> bool:
    """Whether it is a file, or a folder that was written to its end."""
    return path.is_file() or (path / REST).is_file()


def checkpoints_in(folder: Path, pattern: str = "*.ckpt") -> list[Path]:
    """Those of that pattern in a folder, the one that was written last at the end."""
    return sorted(filter(is_checkpoint, folder.glob(pattern)), key=lambda path: path.stat().st_mtime)

"""Finds the thumbnails of a run's folder, without torch: for its report."""

import re
from pathlib import Path

COLUMN = "pictures"  # the column of completions with the names of files
FOLDER = "images"  # beside the completions
MOST_SHOWN = 8  # pictures of a prompt, the first ones
_NAME = re.compile(r"[0-9a-f]{32}\.jpg")


def files_of(folder: Path, names: object) -> list[Path]:
    """The files of thumbnails with these names; without those that are missing, and names of anything else."""
    listed = names if isinstance(names, list) else []
    files = [folder / name for name in listed if isinstance(name, str) and _NAME.fullmatch(name)]
    return [file for file in files[:MOST_SHOWN] if file.is_file()]

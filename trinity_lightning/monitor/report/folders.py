"""Finds the runs that a command names. It imports little: a wrong command is refused at once."""

import os
from collections.abc import Sequence
from pathlib import Path

from trinity_lightning.errors import ConfigError
from trinity_lightning.monitor.folders import is_run, runs_in


def named_runs(folders: Sequence[str | Path]) -> dict[Path, str]:
    """The runs that these folders are or hold, each once, in their order, with the names that were chosen for them.

    A folder that does not exist may be NAME=FOLDER. A run without such a name has an empty one.

    Raises:
        ConfigError: a folder is no run's and holds none, or two runs have one name.
    """
    runs: dict[Path, str] = {}
    for text in folders:
        name, folder = _named(Path(text))
        members = [folder] if is_run(folder) else runs_in(folder)
        if not members:
            raise ConfigError(
                f"'{folder}' is no run's folder, and holds none: it has neither metrics.csv nor config.yaml",
                fix="give one like outputs/grpo/2026-01-31_12-00-00, or the folder of a sweep",
            )
        seen = {run.resolve() for run in runs}
        for run in members:
            if run.resolve() not in seen:
                inside = "" if run == folder else f"/{run.name}"
                runs[run.absolute()] = f"{name}{inside}" if name else ""
    chosen = [name for name in runs.values() if name]
    if len({*chosen}) < len(chosen):
        twice = next(name for name in chosen if chosen.count(name) > 1)
        raise ConfigError(f"two runs are to be named '{twice}'", fix="give them different names")
    return runs


def _named(folder: Path) -> tuple[str, Path]:
    name, _, path = str(folder).partition("=")
    return (name, Path(path)) if name and path and not folder.exists() and "/" not in name else ("", folder)


def common_folder(runs: Sequence[Path]) -> Path:
    """The innermost folder that holds all of these runs. It is one of them only if others lie in it."""
    return Path(os.path.commonpath([run.parent for run in runs]))


def as_typed(folder: Path, folders: Sequence[str | Path]) -> Path:
    """A folder as a person who named these folders would write it: relative, unless one of them is absolute."""
    relative = not any(_named(Path(text))[1].is_absolute() for text in folders)
    return Path(os.path.relpath(folder)) if relative else folder

"""`trinity-lightning new FOLDER`: write a small project, with a task, a reward and a recipe to change."""

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trinity_lightning.config.output import end_unread
from trinity_lightning.errors import ConfigError, TrinityError

FILES = Path(__file__).with_name("project")
NAME = "PROJECT_NAME"  # stands for the project's name in the files
ARGUMENTS = "--config-dir conf +recipe=mine"


def write_project(folder: str | Path) -> list[Path]:
    """Write the project's files into a new or empty folder, and return them. If one cannot be written, none is left.

    Raises:
        ConfigError: the folder is not empty or cannot be made, or its name is not one for a project.
    """
    folder = Path(folder)
    name = _name_of(folder)
    made: list[Path] = []
    written: list[Path] = []
    try:
        if folder.is_file():
            raise ConfigError(f"'{folder}' is a file", fix="give the name of a new folder")
        made += [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"'{folder}' is not empty", fix="give the name of a new folder")
        for source in sorted(path for path in FILES.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            path = folder / source.relative_to(FILES)
            path.parent.mkdir(parents=True, exist_ok=True)
            written.append(path)
            path.write_text(source.read_text(encoding="utf-8").replace(NAME, name), encoding="utf-8")
    except OSError as error:
        _remove(written, folder, made)
        raise ConfigError(f"cannot write '{folder}': {error.strerror}", fix="give another folder") from error
    return written


def _name_of(folder: Path) -> str:
    """The project's name: that of its folder, in which other characters than those of a run's name become '_'."""
    name = folder.resolve().name
    if "=" in str(folder) or not re.search(r"[^\W_]", name) or not name.isprintable():
        raise ConfigError(f"'{folder}' is no name for a folder", fix="give one such as my_project")
    return re.sub(r"[^\w.-]", "_", name)


def _remove(files: Sequence[Path], folder: Path, made: Sequence[Path]) -> None:
    """Remove what was written of a project, and the folders that were made for it."""
    for path in files:
        path.unlink(missing_ok=True)
    inside = {parent for path in files for parent in path.parents if folder in parent.parents}
    for parent in [*sorted(inside, reverse=True), *made]:
        with suppress(OSError):  # it was not made, or others have written to it
            parent.rmdir()


def next_steps(folder: Path) -> list[str]:
    """The commands that check the project, train, and evaluate what was trained; each can be copied as it is."""
    command = "trinity-lightning"
    if shutil.which(command) is None:
        command = f"{shlex.quote(sys.executable)} -m trinity_lightning.train"
    place = f"./{folder}" if str(folder).startswith("-") else str(folder)  # `cd` would take it for an option
    change = [] if folder.resolve() == Path.cwd() else [f"cd {shlex.quote(place)}"]
    return [
        *change,
        f"{command} check {ARGUMENTS}",
        f"{command} {ARGUMENTS}",
        f"{command} evaluate {ARGUMENTS} ckpt_path=last eval_repeat_times=8",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry point. A folder that cannot be a project's is one message and exit code 2."""
    if arguments is None:
        end_unread()
    parser = argparse.ArgumentParser(
        prog="trinity-lightning new",
        description="Write a small project: ten tasks, a reward with two parts, a recipe, and what to do next.",
    )
    parser.add_argument("folder", help="a new or empty folder, such as my_project")
    name = parser.parse_args(arguments).folder
    folder = Path(name)
    try:
        if not name:
            raise ConfigError("the name of the folder is empty", fix="give one such as my_project")
        written = write_project(folder)
    except TrinityError as error:
        print(f"trinity-lightning new: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{folder}{os.sep} has", *(path.relative_to(folder) for path in written), sep="\n    ")
    print(
        "next: check, train, evaluate (README.md says what they show, and what to change)",
        *next_steps(folder),
        sep="\n    ",
    )


if __name__ == "__main__":
    main()

"""`trinity-lightning-report FOLDER`: write a run's `report.html`, one page that opens from disk."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.files import write_atomically
from trinity_lightning.common.optimizer_batch import is_expert, trained_mask
from trinity_lightning.errors import ConfigError, TrinityError
from trinity_lightning.monitor.record import KeptStep, read_run
from trinity_lightning.monitor.report import report_page

FILE = "report.html"

# Kept experiences are read whole, only to be counted: of long runs some of the steps.
_MOST_KEPT = 24


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run's folder, in place of an earlier one; its path.

    Raises:
        StorageError: a file of kept experiences is damaged.
    """
    folder = Path(folder)
    run = read_run(folder.resolve())
    if next(folder.glob("*/step_*.trxp"), None):
        from trinity_lightning.buffer.step_files import FOLDER, read_experiences, step_files

        files = step_files(folder / FOLDER)
        run.kept_steps = len(files)
        run.kept = [_kept(step, files[step], read_experiences(files[step])) for step in _some(list(files))]
    path = folder / FILE
    # Lone surrogates, which JSON allows and UTF-8 does not, become question marks.
    write_atomically(path, report_page(run).encode(errors="replace"))
    return path


def check_run(folder: Path) -> None:
    """Refuse a folder without anything of a run in it with a ConfigError."""
    if not (folder / "metrics.csv").is_file() and not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"'{folder}' is no run's folder: it has neither metrics.csv nor config.yaml. Give one like "
            "outputs/grpo/2026-01-31_12-00-00."
        )


def _some(steps: list[int]) -> list[int]:
    """At most so many of the steps, evenly spread, the first and the last among them."""
    if len(steps) <= _MOST_KEPT:
        return steps
    return [steps[round(index * (len(steps) - 1) / (_MOST_KEPT - 1))] for index in range(_MOST_KEPT)]


def _kept(step: int, file: Path, experiences: Sequence[Experience]) -> KeptStep:
    rewards = [experience.reward for experience in experiences if experience.reward is not None]
    return KeptStep(
        step=step,
        experiences=len(experiences),
        experts=sum(map(is_expert, experiences)),
        trained_tokens=sum(int(trained_mask(experience).sum()) for experience in experiences),
        reward=sum(rewards) / len(rewards) if rewards else None,
        megabytes=file.stat().st_size / 1e6,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry point: a folder that is none is one message and exit code 2."""
    parser = argparse.ArgumentParser(prog="trinity-lightning-report", description="Write report.html for runs.")
    parser.add_argument("folder", nargs="+", type=Path, help="a run's folder, such as outputs/grpo/TIME")
    for folder in parser.parse_args(arguments).folder:
        try:
            check_run(folder)
            print(write_report(folder))
        except (TrinityError, OSError) as error:
            print(f"trinity-lightning-report: {error}", file=sys.stderr)
            sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()

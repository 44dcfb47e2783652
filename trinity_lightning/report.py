"""`trinity-lightning-report FOLDER`: write a run's `report.html`, one page that opens from disk."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity_lightning.common.files import write_atomically
from trinity_lightning.errors import ConfigError, TrinityError
from trinity_lightning.monitor.record import read_run
from trinity_lightning.monitor.report import report_page

FILE = "report.html"


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run's folder, in place of an earlier one; its path.

    Raises:
        StorageError: a file of kept experiences is damaged.
    """
    folder = Path(folder)
    run = read_run(folder.resolve())
    if next(folder.glob("*/step_*.trxp"), None):
        from trinity_lightning.buffer.step_files import FOLDER, counted, step_files

        files = step_files(folder / FOLDER)
        run.kept, run.kept_steps = counted(files), len(files)
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

"""`trinity-lightning-report FOLDER`: write the report of a sweep, or of a run, which need not have ended."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity_lightning.config.output import end_unread
from trinity_lightning.errors import ConfigError, TrinityError

FILE = "report.html"


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run's folder, and return its path. The page needs no server.

    An earlier report is replaced.

    Raises:
        StorageError: a file of kept experiences is damaged.
    """
    from trinity_lightning.common.files import write_atomically
    from trinity_lightning.monitor.report import read_run, report_page  # imports Lightning

    folder = Path(folder)
    run = read_run(folder.resolve())
    if (experiences := folder / "experiences").is_dir():
        from trinity_lightning.buffer.step_files import counted, step_files

        files = step_files(experiences)
        run.kept, run.kept_steps = counted(files), len(files)
    # Lone surrogates, which JSON allows and UTF-8 does not, become question marks.
    write_atomically(folder / FILE, report_page(run).encode(errors="replace"))
    return folder / FILE


def write_comparison(folder: str | Path) -> Path:
    """Write `report.html` for a folder of runs, such as a sweep's, print its table, and return the page's path.

    Raises:
        ConfigError: the folder holds no runs.
        StorageError: a run's metrics are damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise _no_runs(folder)
    from trinity_lightning.common.files import write_atomically
    from trinity_lightning.monitor.report.comparison import compare, comparison_page, comparison_table, jobs_of

    jobs = jobs_of(folder)
    if not jobs:
        raise _no_runs(folder)
    comparison = compare(jobs)
    print(comparison_table(comparison))
    write_atomically(folder / FILE, comparison_page(folder.resolve(), comparison).encode(errors="replace"))
    return folder / FILE


def _no_runs(folder: Path) -> ConfigError:
    """The error about a folder that is no run's and holds no runs."""
    return ConfigError(
        f"'{folder}' is no run's folder, and holds none: it has neither metrics.csv nor config.yaml",
        fix="give one like outputs/grpo/2026-01-31_12-00-00, or the folder of a sweep",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry point. A folder without a run is one message and exit code 2."""
    if arguments is None:
        end_unread()
    parser = argparse.ArgumentParser(prog="trinity-lightning-report", description="Write report.html for runs.")
    parser.add_argument("folder", nargs="+", type=Path, help="folder of a run or of a sweep, such as outputs/grpo/TIME")
    for folder in parser.parse_args(arguments).folder:
        try:
            is_run = (folder / "metrics.csv").is_file() or (folder / "config.yaml").is_file()
            print(write_report(folder) if is_run else write_comparison(folder))
        except (TrinityError, OSError) as error:
            print(f"trinity-lightning-report: {error}", file=sys.stderr)
            sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()

"""`trinity-lightning report FOLDER ...`: write the page of a run, which need not have ended, or of several runs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity_lightning.config.output import end_unread
from trinity_lightning.errors import ConfigError, TrinityError
from trinity_lightning.monitor.folders import is_run
from trinity_lightning.monitor.report.folders import as_typed, common_folder, named_runs

FILE = "report.html"
PROGRAM = "trinity-lightning report"


def write_report(folder: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of a run, by default `report.html` in its folder, and return its path. It needs no server.

    An earlier page is replaced.

    Raises:
        StorageError: a file of kept experiences is damaged.
    """
    from trinity_lightning.common.files import write_atomically
    from trinity_lightning.monitor.report.page import report_page  # imports Lightning
    from trinity_lightning.monitor.report.record import read_run

    folder = Path(folder)
    run = read_run(folder.resolve())
    if (experiences := folder / "experiences").is_dir():
        from trinity_lightning.buffer.step_files import counted, step_files

        files = step_files(experiences)
        run.kept, run.kept_steps = counted(files), len(files)
    file = folder / FILE if output is None else Path(output)
    # Lone surrogates, which JSON allows and UTF-8 does not, become question marks.
    write_atomically(file, report_page(run).encode(errors="replace"))
    return file


def write_comparison(*folders: str | Path, output: str | Path | None = None) -> Path:
    """Write one page for several runs, print their table, and return the page's path.

    Args:
        folders: folders of runs, or of several, such as a sweep's; or NAME=FOLDER to name a run on the page.
        output: the page; by default `report.html` in the innermost folder that holds all of the runs.

    Raises:
        ConfigError: a folder holds no runs, or one run lies in the folder of another and `output` is not given.
        StorageError: a run's metrics are damaged.
    """
    runs = named_runs(folders)
    holder = common_folder(list(runs))
    if output is None and is_run(holder):
        raise ConfigError(
            f"'{holder}' holds all of these runs and is a run's folder itself: their page would replace its report",
            fix="say where the page goes with --output FILE",
        )
    from trinity_lightning.common.files import write_atomically
    from trinity_lightning.monitor.report.comparison import compare, comparison_table, jobs_in
    from trinity_lightning.monitor.report.comparison_page import comparison_page

    file = as_typed(holder, folders) / FILE if output is None else Path(output)
    comparison = compare(jobs_in(runs))
    print(comparison_table(comparison))
    page = comparison_page(file.resolve().parent, comparison, title=f"{holder.parent.name} {holder.name}".strip())
    write_atomically(file, page.encode(errors="replace"))
    return file


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry point. A folder without a run is one message and exit code 2."""
    if arguments is None:
        end_unread()
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Write a page about a run, or one page that compares several.",
        epilog="Without --output the page is report.html in the run's folder; of several runs, in the innermost folder "
        "that holds all of them.",
    )
    parser.add_argument(
        "folder",
        nargs="+",
        type=Path,
        help="folder of a run or of a sweep, such as outputs/grpo/TIME; NAME=FOLDER names a run on the page",
    )
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="the page to write")
    given = parser.parse_args(arguments)
    folders: list[Path] = given.folder
    try:
        alone = len(folders) == 1 and is_run(folders[0])
        page = write_report(folders[0], given.output) if alone else write_comparison(*folders, output=given.output)
        print(page)
    except (TrinityError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()

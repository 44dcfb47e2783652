"""A run's `report.html`, one page that opens from disk."""

from pathlib import Path

from trinity_lightning.common.files import write_atomically
from trinity_lightning.monitor.report import read_run, report_page

FILE = "report.html"


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run's folder, in place of an earlier one; its path.

    Raises:
        StorageError: a file of kept experiences is damaged.
    """
    folder = Path(folder)
    run = read_run(folder.resolve())
    if (kept := folder / "experiences").is_dir():
        from trinity_lightning.buffer.step_files import counted, step_files

        files = step_files(kept)
        run.kept, run.kept_steps = counted(files), len(files)
    path = folder / FILE
    # Lone surrogates, which JSON allows and UTF-8 does not, become question marks.
    write_atomically(path, report_page(run).encode(errors="replace"))
    return path

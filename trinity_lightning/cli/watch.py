"""`trinity-lightning watch [RUN]`: a run in the terminal while it goes on, from the files in its folder alone."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_lightning.config.output import end_unread
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, Group

    from trinity_lightning.monitor.live import RunFolder, View

LOOK_SECONDS = 1.0  # time between two looks at the files
OUTPUTS = Path("outputs")


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry point. A folder without a run is one message and exit code 2; Ctrl-C ends the view silently."""
    if arguments is None:
        end_unread()
    parser = argparse.ArgumentParser(
        prog="trinity-lightning watch",
        description="Show a run while it goes on: curves, times, tasks in flight, completions, warnings.",
        epilog="The view reads the files in the run's folder alone, also from another machine. Ctrl-C ends it.",
    )
    parser.add_argument(
        "run", nargs="?", type=Path, help=f"folder of a run or of a sweep; without it, the newest under {OUTPUTS}/"
    )
    parser.add_argument("--once", action="store_true", help="print one picture and end, as outside a terminal")
    options = parser.parse_args(arguments)
    try:
        watch(options.run, options.once)
    except KeyboardInterrupt:
        pass
    except (ConfigError, OSError) as error:
        print(f"trinity-lightning watch: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def watch(run: Path | None, once: bool) -> None:
    """Show a run until it ends, or once.

    Args:
        run: folder of a run, or of several; None: the newest.
        once: True: print one picture, also in a terminal.

    Raises:
        ConfigError: there is no run.
    """
    picture = _picture_of(_folder(run))
    from trinity_lightning.monitor.terminal import console_of_stdout

    console = console_of_stdout()
    if not once and console.is_terminal and picture.look():
        _follow(console, picture)
    console.print(picture.draw(console.width, None))  # stays in the terminal


def _follow(console: "Console", picture: "_OneRun | _SeveralRuns") -> None:
    """Draw the picture again and again, on a screen of its own, until the run has ended."""
    from rich.live import Live

    # A handler of the signal would run within any line of this thread, where it must not take a lock.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    try:
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while picture.look():
                live.update(picture.draw(*console.size), refresh=True)
                signal.sigtimedwait({signal.SIGWINCH}, LOOK_SECONDS)  # a new size is drawn at once
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _folder(run: Path | None) -> Path:
    """The folder to show; a ConfigError if there is none."""
    if run is not None:
        if not run.is_dir():
            raise ConfigError(f"'{run}' is no folder", fix="give a run's, such as outputs/grpo/2026-01-31_12-00-00")
        return run
    from trinity_lightning.monitor.live import newest_run

    newest = newest_run(OUTPUTS)
    if newest is None:
        raise ConfigError(f"there is no run under '{OUTPUTS}'", fix="give its folder, or start one")
    return newest


class _OneRun:
    """The picture of a run."""

    def __init__(self, folder: Path) -> None:
        from trinity_lightning.monitor.live import RunFolder

        self._run = RunFolder(folder)
        self._view = self._run.look()

    def look(self) -> bool:
        """Read what is new; True if the run goes on."""
        self._view = self._run.look()
        return self._view.state.goes_on

    def draw(self, width: int, height: int | None) -> "Group":
        """The picture for a terminal of this size."""
        from trinity_lightning.monitor.terminal import frame

        return frame(self._view, width, height)


class _SeveralRuns:
    """The picture of the runs of a folder, such as a sweep's, where another run may always begin."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[Path, RunFolder] = {}
        self._views: list[View] = []
        self.look()

    def look(self) -> bool:
        """Read what is new, and find new runs."""
        from trinity_lightning.monitor.folders import runs_in
        from trinity_lightning.monitor.live import RunFolder

        runs = [self._runs.setdefault(path, RunFolder(path)) for path in runs_in(self._folder)]
        self._views = [run.look(completions=False) for run in runs]
        return True

    def draw(self, width: int, height: int | None) -> "Group":
        """The picture for a terminal of this size."""
        from trinity_lightning.monitor.terminal import frame_of_runs

        return frame_of_runs(self._views, width, height)


def _picture_of(folder: Path) -> _OneRun | _SeveralRuns:
    """The picture of a folder; a ConfigError if it holds no run."""
    from trinity_lightning.monitor.folders import is_run, runs_in

    if is_run(folder):
        return _OneRun(folder)
    if runs_in(folder):
        return _SeveralRuns(folder)
    raise ConfigError(
        f"'{folder}' is no run's folder, and holds none",
        fix="give one like outputs/grpo/2026-01-31_12-00-00, or the folder of a sweep",
    )


if __name__ == "__main__":
    main()

"""`trinity-lightning-report FOLDER`: write the page of runs that have ended, or go on."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity_lightning.errors import ConfigError, TrinityError


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
            from trinity_lightning.page import write_report  # which imports Lightning

            print(write_report(folder))
        except (TrinityError, OSError) as error:
            print(f"trinity-lightning-report: {error}", file=sys.stderr)
            sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()

"""Make the failures of docs/troubleshooting.md happen, and check that the metrics that the page names show them.

    python scripts/troubleshooting.py [WORD ...]     sections whose titles have a word; all of them by default

A section of the page has a command, and tables whose second column says what a metric then is. A condition holds if any
row of metrics.csv meets it. Prints one line a section, and ends with 1 if one is not as the page says.
"""

import csv
import operator
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
COMPARE = {"=": operator.eq, ">": operator.gt, "<": operator.lt}
CONDITION = re.compile(r"^\| `([^`]+)` \| `([=<>]) ([\d.]+)` \|", re.MULTILINE)
MESSAGE = re.compile(r"^\| message \|\n\|---\|\n\| `(.+)` \|", re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """A section of the page: the command that makes the failure happen, and what then shows it.

    Attributes:
        title: the section's heading.
        command: the words of the command, without Python.
        conditions: metric, comparison and number, as in ("reward/mean", "=", 0.0).
        messages: texts that the output has.
    """

    title: str
    command: tuple[str, ...]
    conditions: tuple[tuple[str, str, float], ...]
    messages: tuple[str, ...]

    def unseen(self, rows: list[dict[str, str]], output: str) -> list[str]:
        """Return the conditions that no row meets, and the messages that the output lacks."""
        failed = [
            f"{metric} {sign} {number:g}"
            for metric, sign, number in self.conditions
            if not any(COMPARE[sign](float(row[metric]), number) for row in rows if row.get(metric))
        ]
        return failed + [message for message in self.messages if message not in output]


def failures(text: str) -> Iterator[Failure]:
    """The failures of the page that a training run shows."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        commands = re.findall(r"^python -m (trinity_lightning\.train (?:.*\\\n)*.*)$", body, re.MULTILINE)
        if commands:
            words = shlex.split(commands[-1].replace("\\\n", " "))
            conditions = tuple((metric, sign, float(number)) for metric, sign, number in CONDITION.findall(body))
            yield Failure(title, tuple(words), conditions, tuple(MESSAGE.findall(body)))


def faults(text: str) -> str:
    """The faulty parts that the commands use."""
    [code] = re.findall(r"```python\n# my_faults\.py\n(.*?)```", text, re.DOTALL)
    return code


def see(failure: Failure, folder: Path) -> list[str]:
    """Run a failure's command in the folder, and return what did not show."""
    (folder / "my_faults.py").write_text(faults(PAGE.read_text()))
    shutil.copy(ROOT / "docs" / "examples" / "my_engine.py", folder)
    command = [sys.executable, "-m", *failure.command, f"output_dir={folder / 'run'}", "save_model=false"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    rows = rows_of(folder / "run")
    if not rows and failure.conditions:
        return [f"no metrics: {done.stdout.strip().splitlines()[-1]}"]
    return failure.unseen(rows, done.stdout)


def rows_of(run: Path) -> list[dict[str, str]]:
    """The rows of a run's metrics.csv; none if it has not begun."""
    metrics = run / "metrics.csv"
    return list(csv.DictReader(metrics.read_text().splitlines())) if metrics.exists() else []


def main() -> int:
    wrong = 0
    for failure in failures(PAGE.read_text()):
        if sys.argv[1:] and not any(word.lower() in failure.title.lower() for word in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            unseen = see(failure, Path(folder))
        wrong += bool(unseen)
        print(f"{failure.title}: {'not as said: ' + '; '.join(unseen) if unseen else 'seen'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

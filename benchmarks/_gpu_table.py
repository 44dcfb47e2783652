"""The measured part of docs/gpu.md, from the lines of JSON that gpu.py has printed."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from _gpu import BENCHMARK

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- written by benchmarks/gpu.py -->\n", "<!-- until here -->\n"
NOTHING = "Nothing has been measured by this command yet.\n"
TITLES = {
    "a": "Tests",
    "b": "The engine in the trainer's process",
    "c": "The training phase",
    "d": "The training phase against TRL",
    "e": "A whole step",
    "f": "Servers on the trainer's GPU",
    "g": "Masters and moments on the host",
    "h": "bfloat16 and float16",
}
HEAD = ("benchmark", "stage", "on", "torch", "vllm")
APART = ("share", "products", "log")  # `share` has a table of its own


def write(results: Path) -> None:
    """Write the measured part of the page from the lines of a file.

    Raises:
        SystemExit: the file cannot be read, or has no result, so that the page stays as it is.
    """
    try:
        lines = results_of(results.read_text())
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"gpu.py: --table {results} cannot be read: {error}")
    if not any("on" in line for line in lines):
        sys.exit(f"gpu.py: --table {results} has no result of this command; docs/gpu.md stays as it is.")
    PAGE.write_text(with_measured(PAGE.read_text(), lines))


def results_of(text: str) -> list[dict[str, Any]]:
    """The lines that the benchmark has printed. A last one may be cut off where the benchmark was ended."""
    lines = []
    for line in text.splitlines():
        with suppress(json.JSONDecodeError):
            if line.startswith("{") and (result := json.loads(line)).get("benchmark") == BENCHMARK:
                lines.append(result)
    return lines


def with_measured(page: str, lines: Sequence[dict[str, Any]]) -> str:
    """The page with what these lines say between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} lacks the marks {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + measured(lines) + END + after


def measured(lines: Sequence[dict[str, Any]]) -> str:
    """The lines as text: of each device and its versions a section for each stage."""
    devices = dict.fromkeys(heading(line) for line in lines if "on" in line)
    stages = {line["stage"]: line for line in lines if line["what"] == "stage"}
    written = "\n".join(text for device in devices for text in sections(device, lines))
    missing = [f"- {letter}: {reason(line)}" for letter, line in stages.items() if reason(line)]
    if missing:
        written += "\nStages without a result, or without all of them:\n\n" + "\n".join(missing) + "\n"
    return written or NOTHING


def heading(line: dict[str, Any]) -> str:
    """The device and the versions of a line."""
    vllm = f"vLLM {line['vllm']}" if line["vllm"] else "no vLLM"
    return f"{line['on']}, torch {line['torch']}, {vllm}"


def sections(device: str, lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The sections of a device, stage by stage."""
    yield f"### {device}\n"
    for letter, title in TITLES.items():
        mine = [line for line in lines if line["stage"] == letter and "on" in line and heading(line) == device]
        if not mine:
            continue
        yield f"#### {title} (stage {letter})\n"
        for what in dict.fromkeys(line["what"] for line in mine):
            yield table(what, [line for line in mine if line["what"] == what])
        for line in mine:
            if "share" in line:
                yield share(line)


def reason(line: dict[str, Any]) -> str:
    """The reason why a stage has no result, or not all of them; empty if it has."""
    return line.get("failed") or line.get("left_out") or ""


def table(what: str, lines: Sequence[dict[str, Any]]) -> str:
    """A table of the results of one kind: a row a line."""
    rows = [{name: value for name, value in line.items() if name not in (*HEAD, *APART, "what")} for line in lines]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[cell(row.get(name)) for name in columns] for row in rows]
    header = [name.replace("_", " ") for name in columns]
    return "\n".join([f"{what}:\n", row_of(header), row_of(["---"] * len(header)), *map(row_of, cells), ""])


def share(line: dict[str, Any]) -> str:
    """The kinds of work of a profiled step, largest first."""
    kinds = [row_of([kind, cell(value)]) for kind, value in line["share"].items() if value]
    return "\n".join([row_of(["kind of work", "share of the step"]), row_of(["---", "---"]), *kinds, ""])


def row_of(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def cell(value: Any) -> str:
    """A value as a cell; a median with the least and the largest value in brackets."""
    if value is None:
        return ""
    if isinstance(value, dict) and value.keys() == {"median", "min", "max"}:
        return f"{value['median']:g} ({value['min']:g}..{value['max']:g})"
    if isinstance(value, dict):
        return "; ".join(f"{name} {cell(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(cell, value))
    return f"{value:g}" if isinstance(value, float) else str(value).replace("|", "/")

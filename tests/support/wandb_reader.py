"""Reads back what an offline W&B run wrote: its `.wandb` file and the tables beside it.

The file is a log in LevelDB's format (https://github.com/google/leveldb/blob/main/doc/log_format.md: blocks of 32 KiB,
fragments with checksum, length and type) after a header of 7 bytes; each record is one protocol buffer.
"""

import json
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

FILE_HEADER = 7
BLOCK = 32768
FRAGMENT_HEADER = struct.Struct("<IHB")  # checksum, length, type
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class WandbTable:
    """One table as it was logged."""

    columns: list[str]
    data: list[list[Any]]


@dataclass
class WandbRun:
    """A run: each history row as logged, the last values, the configuration, and the tables by name, one a logging.

    `images` holds the files of a table's images, by the table's name, one list a logging; W&B uploads them with it.
    `axes` holds the step metric of each defined metric or glob, `alerts` titles and texts; `finished` tells whether the
    run came to its end, and `exit_code` which end.
    """

    id: str = ""
    entity: str = ""
    project: str = ""
    group: str = ""
    name: str = ""
    notes: str = ""
    tags: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[WandbTable]] = field(default_factory=dict)
    images: dict[str, list[list[Path]]] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    alerts: list[tuple[str, str]] = field(default_factory=list)
    exit_code: int | None = None

    @property
    def finished(self) -> bool:
        return self.exit_code is not None


def read_wandb_run(folder: str | Path, timeout: float = 30.0) -> WandbRun:
    """The run in `folder`, which holds exactly one `.wandb` file, at any depth.

    `wandb.finish()` may return before the file is written, hence the wait, at most `timeout` seconds.

    Raises:
        ValueError: there is no such file, or more than one; with what W&B logged, which says why it made none.
    """
    deadline = time.monotonic() + timeout
    while not (files := list(Path(folder).rglob("*.wandb"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    if len(files) != 1:
        logs = "\n".join(path.read_text() for path in sorted(Path(folder).rglob("debug*.log")))
        raise ValueError(f"{folder} holds {len(files)} .wandb files instead of one: {files}\n{logs}")
    while not (run := _parse(files[0].read_bytes())).finished and time.monotonic() < deadline:
        time.sleep(0.05)
    _read_tables(run, files[0].parent / "files")
    return run


def _parse(content: bytes) -> WandbRun:
    run = WandbRun()
    for payload in _payloads(content):
        record = Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.id, run.tags = record.run.run_id, list(record.run.tags)
            run.group, run.name = record.run.run_group, record.run.display_name
            run.entity, run.project, run.notes = record.run.entity, record.run.project, record.run.notes
            _assign(run.config, record.run.config.update)
        elif kind == "config":
            _assign(run.config, record.config.update)
        elif kind == "summary":
            _assign(run.summary, record.summary.update)
        elif kind == "history":
            run.history.append({})
            _assign(run.history[-1], record.history.item)
        elif kind == "metric":
            run.axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
        elif kind == "artifact" and record.artifact.type == "run_table":
            name = record.artifact.name.removeprefix(f"run-{run.id}-")
            contents = [content for content in record.artifact.manifest.contents if "images/" in content.path]
            run.images.setdefault(name, []).append([Path(content.local_path) for content in contents])
        elif kind == "alert":
            run.alerts.append((record.alert.title, record.alert.text))
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _assign(values: dict[str, Any], items: Iterable[Any]) -> None:
    for item in items:
        *outer, last = item.nested_key or [item.key]
        inner = values
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(item.value_json)


def _read_tables(run: WandbRun, files: Path) -> None:
    for row in run.history:
        for name, value in row.items():
            if isinstance(value, dict) and value.get("_type") == "table-file":
                content = json.loads((files / value["path"]).read_text())
                run.tables.setdefault(name, []).append(WandbTable(content["columns"], content["data"]))


def _payloads(content: bytes) -> Iterator[bytes]:
    if content and content[:4] != b":W&B":
        raise ValueError("no W&B log: it does not begin with ':W&B'")
    position, parts = FILE_HEADER, []
    while position + FRAGMENT_HEADER.size <= len(content):
        left_in_block = BLOCK - position % BLOCK
        if left_in_block < FRAGMENT_HEADER.size:
            position += left_in_block  # too short for a header: padding
            continue
        _, length, kind = FRAGMENT_HEADER.unpack_from(content, position)
        position += FRAGMENT_HEADER.size
        if kind in (FULL, FIRST):
            parts = []
        parts.append(content[position : position + length])
        position += length
        if kind in (FULL, LAST):
            yield b"".join(parts)

"""Rows of JSON lines, JSON and CSV files: every value as the file has it, and each row parsed when it is used."""

import copy
import csv
import io
import itertools
import json
import sys
import zlib
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trinity_lightning.common.rows import MOST_NAMED
from trinity_lightning.errors import ConfigError

SUFFIXES = (".jsonl", ".json", ".csv")

HELD_BYTES = 64 * 1024**2  # of files that are held in memory
# A row of a file: where it begins, in bytes; its bytes; and its first line, from 1.
_Found = tuple[int, bytes, int]


class FileEntries:
    """The rows of files as entries, of which only the places are kept; a column that a row does not have is None.

    JSON has its types. CSV has none: a column is read as numbers, or as True and False, if each of its cells is written
    as Python writes that value ("7", "0.5"), so that nothing is lost ("007" and "1.50" stay text); an empty cell is
    None.

    Args:
        files: of one format, in order; all are parsed once, to find what is wrong before anything expensive starts.
        as_text: leave every cell of CSV text.

    Raises:
        ConfigError: rows that cannot be read, the first five by line, file and reason.
    """

    def __init__(self, files: Sequence[Path], as_text: bool = False) -> None:
        self._files = files
        # If they are small together they are held: a change of theirs during a run does no harm then.
        small = sum(file.stat().st_size for file in files) <= HELD_BYTES
        self._held = [file.read_bytes() if small else None for file in files]
        self._headers = [_header(file) if file.suffix == ".csv" else None for file in files]
        self._columns: dict[str, None] = {}
        self._text: set[str] = set()  # columns of CSV that are text
        places, errors = array("q"), list[ConfigError]()
        for number, file in enumerate(files):
            for start, content, line in _rows(file):
                try:
                    self._note_columns(self._parsed(content, number, line), number, as_text)
                except ConfigError as error:
                    errors.append(error)
                places.extend((number, start, len(content), line, zlib.crc32(content)))
        if errors:
            raise _refused(errors, len(places) // 5)
        self._places = np.array(places, np.int64).reshape(-1, 5)
        self.counts: list[int] = np.bincount(self._places[:, 0], minlength=len(files)).tolist()  # rows of each file

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        number, start, size, line, checksum = map(int, self._places[index])
        if (held := self._held[number]) is not None:
            content = held[start : start + size]
        else:
            with self._files[number].open("rb") as file:
                file.seek(start)
                content = file.read(size)
        if zlib.crc32(content) != checksum:
            raise ConfigError(f"{self.place(index)} has changed since the run read it: restore it, or start a new run.")
        row = self._parsed(content, number, line)
        if self._headers[number] is not None:
            row = {name: cell if name in self._text else _value(cell) for name, cell in row.items()}
        return dict.fromkeys(self._columns) | row

    def place(self, index: int) -> str:
        """Where a row is, for messages."""
        number, _, _, line, _ = map(int, self._places[index])
        return _place(self._files[number], line)

    def chosen(self, slices: Sequence[slice]) -> "FileEntries":
        """A copy with the rows of these slices only."""
        entries = copy.copy(self)
        entries._places = np.concatenate([self._places[rows] for rows in slices])
        return entries

    def _note_columns(self, row: Mapping[str, Any], number: int, as_text: bool) -> None:
        """Keep the row's columns, and which of CSV are text."""
        self._columns |= dict.fromkeys(row)
        if self._headers[number] is not None:
            self._text |= {name for name, cell in row.items() if as_text or isinstance(_value(cell), str)}

    def _parsed(self, content: bytes, number: int, line: int) -> dict[str, Any]:
        header, where = self._headers[number], _place(self._files[number], line)
        text = _decoded(content, where)
        return _json_row(text, where) if header is None else _csv_row(text, header, where)


def _refused(errors: Sequence[ConfigError], rows: int) -> ConfigError:
    if len(errors) == 1:
        return errors[0]
    named = " ".join(map(str, errors[:MOST_NAMED]))
    more = f" And {len(errors) - MOST_NAMED} more." if len(errors) > MOST_NAMED else ""
    return ConfigError(f"{len(errors)} of {rows} rows cannot be read. {named}{more}")


def _place(file: Path, line: int) -> str:
    return f"line {line} of {file}"


def _rows(file: Path) -> Iterator[_Found]:
    """The rows of a file, of CSV without the header."""
    if file.suffix == ".csv":
        return itertools.islice(_records(file), 1, None)
    with file.open("rb") as opened:
        start = opened.read(4096).removeprefix(BOM_UTF8).lstrip()
    return _elements(file) if start.startswith(b"[") and file.suffix == ".json" else _lines(file)


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is no UTF-8 ({error.reason}): save the file as UTF-8, such as by `iconv -f LATIN1 -t UTF-8`."
        ) from error


# -- JSON --------------------------------------------------------------------------------------------------------------


class _TwiceError(ValueError):
    """A key that an object has twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(f"has the key '{max(keys, key=keys.count)}' twice in one object: leave one of them out")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_NO_OBJECT = "is no JSON object, which every entry has to be"


def _json_row(text: str, where: str) -> dict[str, Any]:
    try:
        row = _DECODER.decode(text.rstrip())  # a column of this line, where it ends too early
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} {_NO_OBJECT}: {error.msg} at column {error.colno}.") from error
    except _TwiceError as error:
        raise ConfigError(f"{where} {error}.") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} {_NO_OBJECT}.")
    return row


def _lines(file: Path) -> Iterator[_Found]:
    start = 0
    with file.open("rb") as lines:
        for line, content in enumerate(lines, start=1):
            if content.strip():
                yield start, content, line
            start += len(content)


def _elements(file: Path) -> Iterator[_Found]:
    """The elements of an array; the text of the file is in memory while they are looked for."""
    content = file.read_bytes()
    text = _decoded(content, str(file))
    at, start, line = 0, len(content) - len(text.encode()), 1  # after a byte order mark
    del content
    try:
        for begin, end in _spans(text):
            before, element = text[at:begin], text[begin:end].encode()
            start, line = start + len(before.encode()), line + before.count("\n")
            yield start, element, line
            at, start, line = end, start + len(element), line + element.count(b"\n")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{_place(file, error.lineno)} is no JSON: {error.msg} at column {error.colno}.") from error


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Where the elements of an array in JSON begin and end."""
    decoder = json.JSONDecoder()
    end = _skip(text, _skip(text, 0) + 1)
    more = text[end : end + 1] != "]"
    while more:
        begin = end
        end = decoder.raw_decode(text, begin)[1]
        yield begin, end
        end = _skip(text, end)
        if more := text[end : end + 1] == ",":
            end = _skip(text, end + 1)
    if text[end:].strip() != "]":
        raise json.JSONDecodeError("Expecting ',' or the array's end", text, end)


def _skip(text: str, at: int) -> int:
    """The next place that is no white space."""
    while text[at : at + 1].isspace():
        at += 1
    return at


# -- CSV ---------------------------------------------------------------------------------------------------------------


def _header(file: Path) -> list[str]:
    _, content, line = next(_records(file), (0, b"\n", 1))
    names = _cells(_decoded(content, _place(file, line)))
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{_place(file, line)}: there are two columns '{twice[0]}': rename one of them.")
    return names


def _records(file: Path) -> Iterator[_Found]:
    """The records, of which blank lines are none."""
    csv.field_size_limit(sys.maxsize)  # a text may be long
    taken: list[bytes] = []

    def lines() -> Iterator[str]:
        with file.open("rb") as opened:
            for line, content in enumerate(opened, start=1):
                taken.append(content)
                yield _decoded(content, _place(file, line))

    start, first, reader = 0, 1, csv.reader(lines(), strict=True)
    try:
        for cells in reader:
            content = b"".join(taken)
            if cells:
                yield start, content, first
            start, first = start + len(content), reader.line_num + 1
            taken.clear()
    except csv.Error as error:
        raise ConfigError(f"{_place(file, first)} is no CSV: {error}.") from error


def _cells(record: str) -> list[str]:
    return next(csv.reader(io.StringIO(record, newline="")))


def _csv_row(text: str, header: Sequence[str], where: str) -> dict[str, Any]:
    cells = _cells(text)
    if len(cells) != len(header):
        raise ConfigError(
            f"{where} has {len(cells)} cells, and the header {len(header)}",
            fix="put cells that contain commas in quotes",
        )
    return {name: cell or None for name, cell in zip(header, cells, strict=True)}


def _value(cell: str | None) -> Any:
    """The number or truth value that Python writes as the cell is written; the cell if there is none."""
    if cell in ("True", "False"):
        return cell == "True"
    for kind in (int, float):
        try:
            if cell is not None and str(value := kind(cell)) == cell and cell not in ("nan", "inf", "-inf"):
                return value
        except ValueError:
            continue
    return cell

"""Rows of files of JSON lines, JSON and CSV, with exactly the values that are written there."""

import copy
import csv
import json
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trinity_lightning.common.rows import MOST_NAMED
from trinity_lightning.errors import ConfigError

SUFFIXES = (".jsonl", ".json", ".csv")


class Row(NamedTuple):
    """A row of a file."""

    file: Path
    line: int  # the line in which the row begins, counted from 1
    content: Any  # the text of a JSON object, or the cells of CSV by column


class FileEntries:
    """The rows of files as entries; a column that a row lacks is None.

    The files are read once and held in memory, so that they may change during a run. JSON is parsed anew for each use,
    so that no use of an entry changes it for the next one.

    Values of JSON keep their types. Cells of CSV have no types, and an empty cell is None. A column is read as numbers,
    or as True and False, if each of its cells is written as Python writes the value ("7", "0.5"). So nothing is lost:
    "007" and "1.50" stay text.

    Args:
        files: files of one format, in order.
        as_text: True: every cell of CSV stays text.

    Attributes:
        counts: number of rows of each file.

    Raises:
        ConfigError: rows cannot be read; the message has line, file and reason of the first five.
    """

    def __init__(self, files: Sequence[Path], as_text: bool = False) -> None:
        self._rows: list[Row] = []
        self._columns: dict[str, None] = {}
        self.counts: list[int] = []
        errors: list[ConfigError] = []
        for file in files:
            before = len(self._rows)
            is_table = file.suffix == ".csv"
            content: Any
            for line, content in _records(file) if is_table else _objects(file):
                try:
                    columns = _cells(*content) if is_table else _json_object(content)
                except ValueError as error:
                    errors.append(ConfigError(f"{_place(file, line)} {error}."))
                    columns = {}
                self._columns |= dict.fromkeys(columns)
                self._rows.append(Row(file, line, columns if is_table else content))
            self.counts.append(len(self._rows) - before)
        if errors:
            raise _refused(errors, len(self._rows))
        if not as_text and any(file.suffix == ".csv" for file in files):
            _read_values([row.content for row in self._rows], self._columns)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        content = self._rows[index].content
        return dict.fromkeys(self._columns) | (content if isinstance(content, dict) else json.loads(content))

    def place(self, index: int) -> str:
        """The line and the file of a row, for messages."""
        return _place(self._rows[index].file, self._rows[index].line)

    def folder(self, index: int) -> Path:
        """The folder of a row's file, in which relative paths begin."""
        return self._rows[index].file.parent

    def chosen(self, slices: Sequence[slice]) -> "FileEntries":
        """A copy with the rows of these slices only."""
        entries = copy.copy(self)
        entries._rows = [row for rows in slices for row in self._rows[rows]]
        return entries


def _refused(errors: Sequence[ConfigError], rows: int) -> ConfigError:
    if len(errors) == 1:
        return errors[0]
    named = " ".join(map(str, errors[:MOST_NAMED]))
    more = f" And {len(errors) - MOST_NAMED} more." if len(errors) > MOST_NAMED else ""
    return ConfigError(f"{len(errors)} of {rows} rows cannot be read. {named}{more}")


def _place(file: Path, line: int) -> str:
    return f"line {line} of {file}"


def _decoded(content: bytes) -> str:
    """The text of bytes in UTF-8; ValueError: the reason why they are not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is no UTF-8 ({error.reason}): save the file as UTF-8, such as by `iconv -f LATIN1 -t UTF-8`"
        ) from error


# -- JSON --------------------------------------------------------------------------------------------------------------


def _objects(file: Path) -> Iterator[tuple[int, str | bytes]]:
    """The lines of a file that are not blank, or the elements of its array, each with the number of its first line."""
    with file.open("rb") as opened:
        if file.suffix == ".json" and opened.read(4096).removeprefix(BOM_UTF8).lstrip().startswith(b"["):
            opened.seek(0)
            yield from _elements(opened.read(), file)
        else:
            opened.seek(0)
            yield from ((line, content) for line, content in enumerate(opened, start=1) if content.strip())


def _elements(content: bytes, file: Path) -> Iterator[tuple[int, str]]:
    """The elements of a JSON array, each with its first line; ConfigError: the place from which on it is no JSON."""
    decoder = json.JSONDecoder()
    try:
        text = _decoded(content)
        begin = _after_space(text, text.index("[") + 1)
        line, more = text.count("\n", 0, begin) + 1, text[begin : begin + 1] != "]"
        while more:
            _, end = decoder.raw_decode(text, begin)
            yield line, text[begin:end]
            comma = _after_space(text, end)
            more = text[comma : comma + 1] == ","
            after = _after_space(text, comma + 1) if more else comma
            line += text.count("\n", begin, after)
            begin = after
        if text[begin:].strip() != "]":
            raise json.JSONDecodeError("Expecting ',' or the array's end", text, begin)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{_place(file, error.lineno)} is no JSON: {error.msg} at column {error.colno}.") from error
    except ValueError as error:
        raise ConfigError(f"{file} {error}.") from error


def _after_space(text: str, place: int) -> int:
    """The first place from `place` on that is no white space."""
    while text[place : place + 1].isspace():
        place += 1
    return place


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values; KeyError: a key that stands there twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise KeyError(max(keys, key=keys.count))
    return values


def _json_object(content: str | bytes) -> dict[str, Any]:
    """The JSON object of a text; ValueError: the reason why it is no object."""
    problem = "is no JSON object, which every entry has to be"
    try:
        text = content if isinstance(content, str) else _decoded(content)
        # Without the line's end, so that the error of a line that is cut off names a column of this line.
        value = json.loads(text.rstrip(), object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(f"{problem}: {error.msg} at column {error.colno}") from error
    except KeyError as error:
        raise ValueError(f"has the key {error} twice in one object: leave one of them out") from error
    if not isinstance(value, dict):
        raise ValueError(problem)
    return value


# -- CSV ---------------------------------------------------------------------------------------------------------------


def _records(file: Path) -> Iterator[tuple[int, tuple[list[str], list[str]]]]:
    """The header and the cells of each record, with the number of its first line; a blank line is no record."""
    csv.field_size_limit(sys.maxsize)  # a text may be long
    line = 0

    def lines() -> Iterator[str]:
        with file.open("rb") as opened:
            for number, content in enumerate(opened, start=1):
                try:
                    yield _decoded(content)
                except ValueError as error:
                    raise ConfigError(f"{_place(file, number)} {error}.") from error

    reader = csv.reader(lines(), strict=True)
    header: list[str] = []
    try:
        for cells in reader:
            first, line = line + 1, reader.line_num
            if not cells:
                continue
            if header:
                yield first, (header, cells)
            elif twice := [name for name in cells if cells.count(name) > 1]:
                raise ConfigError(f"{_place(file, first)}: there are two columns '{twice[0]}': rename one of them.")
            else:
                header = cells
    except csv.Error as error:
        raise ConfigError(f"{_place(file, line + 1)} is no CSV: {error}.") from error


def _cells(header: list[str], cells: list[str]) -> dict[str, Any]:
    """The cells by column, an empty one as None; ValueError: there are more or fewer cells than columns."""
    if len(cells) != len(header):
        raise ValueError(
            f"has {len(cells)} cells, and the header {len(header)}: put cells that contain commas in quotes"
        )
    return {name: cell or None for name, cell in zip(header, cells, strict=True)}


def _read_values(rows: Sequence[dict[str, Any]], columns: Mapping[str, None]) -> None:
    """Read a column as numbers or truth values, in place, if each of its cells is written as Python writes them."""
    for name in columns:
        if not any(isinstance(_value(row.get(name)), str) for row in rows):
            for row in rows:
                if name in row:
                    row[name] = _value(row[name])


def _value(cell: str | None) -> Any:
    """The number or truth value that Python writes in the same way as the cell; the cell itself if there is none."""
    if cell in ("True", "False"):
        return cell == "True"
    for kind in (int, float):
        try:
            if cell is not None and str(value := kind(cell)) == cell and cell not in ("nan", "inf", "-inf"):
                return value
        except ValueError:
            continue
    return cell

"""Reads pickles of plain data without the pickle module's machine: there is nothing here that could call anything.

`pickletools` reads the arguments of opcodes, no further than the bytes there are, and a small stack machine builds
containers, strings, numbers and bytes. Every opcode that names, makes or calls an object is refused.
"""

import io
import pickletools
from typing import Any

from trinity_lightning.common.experience.errors import ExperienceFormatError

MAX_DEPTH = 100
# Shared containers make a small pickle stand for a huge value; this many parts a byte is more than honest data have.
MAX_PARTS_PER_BYTE = 64

_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4"}
_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_BYTES = {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"}
_VALUES = frozenset({*_INTEGERS, *_STRINGS, *_BYTES, "BINFLOAT"})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset({"PROTO", "FRAME"})
_MEMO = {"BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"}
_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
# The opcodes whose arguments are read: those that are run, and two that are refused by what they name.
_READ = _VALUES | _IGNORED | _MEMO | {"GLOBAL", "INST"}


class _Machine:
    """The stack machine of pickle, for plain data."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, opcode: str, argument: Any) -> None:
        if opcode in _VALUES:
            self.stack.append(argument)
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif opcode in {"BINPUT", "LONG_BINPUT"}:
            self._memo[argument] = self._top()
        elif opcode in {"BINGET", "LONG_BINGET"}:
            self.stack.append(self._memo[argument])
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            self.stack.append(_EMPTY[opcode]())
        elif opcode == "MARK":
            self._marks.append(len(self.stack))
        elif opcode in _TUPLES:
            self.stack.append(tuple(self._pop(_TUPLES[opcode])))
        elif opcode == "TUPLE":
            self.stack.append(tuple(self._pop_to_mark()))
        elif opcode in {"APPEND", "APPENDS"}:
            items = self._pop(1) if opcode == "APPEND" else self._pop_to_mark()
            self._container(list).extend(items)
        elif opcode in {"SETITEM", "SETITEMS"}:
            items = self._pop(2) if opcode == "SETITEM" else self._pop_to_mark()
            self._container(dict).update(zip(items[::2], items[1::2], strict=True))
        elif opcode not in _IGNORED:
            raise ExperienceFormatError(f"metadata: refuses {self._describe(opcode, argument)}: not plain data.")

    def _describe(self, opcode: str, argument: Any) -> str:
        """What an opcode would have made, by name."""
        if opcode in {"GLOBAL", "INST"}:
            return str(argument).replace(" ", ".")[:200]
        if opcode == "STACK_GLOBAL":
            return ".".join(map(str, self.stack[-2:]))[:200]
        return f"the opcode {opcode}"

    def _floor(self) -> int:
        return self._marks[-1] if self._marks else 0

    def _top(self) -> Any:
        if len(self.stack) <= self._floor():
            raise ExperienceFormatError("metadata: an opcode finds its stack empty.")
        return self.stack[-1]

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) - self._floor() < count:
            raise ExperienceFormatError("metadata: an opcode finds its stack empty.")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise ExperienceFormatError("metadata: an opcode finds no mark.")
        mark = self._marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def _container(self, kind: type) -> Any:
        if type(self._top()) is not kind:
            raise ExperienceFormatError(
                f"metadata: an opcode finds {type(self._top()).__name__} for a {kind.__name__}."
            )
        return self.stack[-1]


def load_plain(data: bytes) -> Any:
    """The plain value that a pickle of protocol 2 or higher describes.

    Raises:
        ExperienceFormatError: it holds anything but plain containers, strings, numbers and bytes, is nested more than
            `MAX_DEPTH` deep, contains itself, or is damaged.
    """
    machine, stream = _Machine(), io.BytesIO(data)
    try:
        while (opcode := _OPCODES[stream.read(1)]).name != "STOP":
            read = opcode.arg.reader if opcode.arg and opcode.name in _READ else None
            machine.run(opcode.name, read(stream) if read else None)
    except ExperienceFormatError:
        raise
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ExperienceFormatError(f"metadata: no readable pickle: {type(error).__name__}: {error}") from error
    if len(machine.stack) != 1 or stream.tell() != len(data):
        raise ExperienceFormatError("metadata: the pickle does not end with its one value.")
    if _parts(machine.stack[0], {}, 0) > MAX_PARTS_PER_BYTE * len(data):
        raise ExperienceFormatError("metadata: the pickle stands for a value out of all proportion to its size.")
    return machine.stack[0]


def _parts(value: Any, known: dict[int, int | None], depth: int) -> int:
    """How many values a value is made of, shared ones counted every time; `known` by identity, None while under way."""
    if not isinstance(value, (list, dict, tuple)):
        return 1
    if id(value) in known:
        size = known[id(value)]
        if size is None:
            raise ExperienceFormatError("metadata: a container contains itself.")
        return size
    if depth >= MAX_DEPTH:
        raise ExperienceFormatError(f"metadata: nested more than {MAX_DEPTH} deep.")
    known[id(value)] = None
    children = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    size = known[id(value)] = 1 + sum(_parts(child, known, depth + 1) for child in children)
    return size

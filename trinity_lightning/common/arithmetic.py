"""Arithmetic that somebody else wrote, worked out exactly and without running it as code."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_ALLOWED = re.compile(r"[\d\s.+\-*/%()eE]*")  # all else is refused before Python's parser can warn of it
_HUGE = re.compile(r"[eE][-+]?\d{4}")
_LONGEST = 200  # characters: nesting and numbers stay small enough to be worked out at once


def evaluate(expression: str) -> tuple[Fraction, list[Fraction]]:
    """The value of numbers with + - * / // % and brackets, and the numbers that stand in it, in order.

    Raises:
        ValueError: it is longer than 200 characters, or holds anything else.
        SyntaxError: it is no expression.
        ZeroDivisionError: it divides by zero.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression is longer than {_LONGEST} characters")
    expression = expression.strip()
    if not _ALLOWED.fullmatch(expression) or _HUGE.search(expression):
        raise ValueError(f"cannot work out '{expression}'")
    numbers: list[Fraction] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            numbers.append(Fraction(ast.get_source_segment(expression, node) or ""))  # as written: floats are not exact
            return numbers[-1]
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return Fraction(_BINARY[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return _UNARY[type(node.op)](value(node.operand))
        raise ValueError(f"cannot work out '{ast.unparse(node)}'")

    try:
        return value(ast.parse(expression, mode="eval").body), numbers
    except ZeroDivisionError:  # whose message would be a Fraction
        raise ZeroDivisionError("division by zero") from None

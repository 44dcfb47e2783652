"""Arithmetic that somebody else wrote, worked out exactly and without running it as code."""

import ast
import operator
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
    numbers: list[Fraction] = []
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, numbers), numbers
    except ZeroDivisionError:  # whose message would be a Fraction
        raise ZeroDivisionError("division by zero") from None


def _value(node: ast.expr, numbers: list[Fraction]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        numbers.append(Fraction(repr(node.value)))  # 0.1 as it is written, not as the nearest binary fraction
        return numbers[-1]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return Fraction(_BINARY[type(node.op)](_value(node.left, numbers), _value(node.right, numbers)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, numbers))
    raise ValueError(f"cannot work out '{ast.unparse(node)}'")

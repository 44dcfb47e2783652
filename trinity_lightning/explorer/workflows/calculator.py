"""A tool to try tool use with."""

from trinity_lightning.explorer.rewards.puzzles import evaluate


def calculate(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: numbers with + - * / // % and brackets
    """
    value, _ = evaluate(expression)
    return str(value.numerator if value.denominator == 1 else float(value))

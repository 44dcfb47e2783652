from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_lightning.explorer.rewards.puzzles import evaluate


def test_values_are_exact_and_numbers_are_told_in_order() -> None:
    assert evaluate("0.1 + 0.2") == (Fraction(3, 10), [Fraction(1, 10), Fraction(1, 5)])
    assert evaluate("-(7 // 2) * 3 % 5") == (1, [7, 2, 3, 5])
    assert evaluate("1 / 3 * 3")[0] == 1
    assert evaluate("12345678901234567890.5 - 1e-30")[0] == Fraction("12345678901234567890.5") - Fraction(1, 10**30)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=6), st.data())
def test_it_agrees_with_python(numbers: list[int], data: st.DataObject) -> None:
    signs = data.draw(st.lists(st.sampled_from("+-*"), min_size=len(numbers), max_size=len(numbers)))
    text = "".join(f"{sign}{number}" for sign, number in zip(["", *signs[1:]], numbers, strict=True))
    assert evaluate(text) == (eval(text), numbers)  # noqa: S307 - digits and signs of our own


@pytest.mark.parametrize(
    "text", ["x", "2 ** 9", "'a'", "True", "(1, 2)", "1e9999", "1_0", "1+" * 200, "f(1)", "1 if 1 else 2"]
)
def test_all_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot work out|longer than 200|Invalid literal"):
        evaluate(text)


@pytest.mark.parametrize(
    ("text", "error"), [("1 +", SyntaxError), ("007", SyntaxError), ("1 / (2 - 2)", ZeroDivisionError)]
)
def test_errors_are_pythons(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        evaluate(text)

import asyncio
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.errors import refuses
from support.runs import ROOT

from trinity_lightning.common.thoughts import MARKERS, Response
from trinity_lightning.config.registry import PARTS
from trinity_lightning.errors import ArgumentError, ConfigError, RolloutError
from trinity_lightning.explorer.rewards import math_verifier, resolve_rewards, score
from trinity_lightning.explorer.rewards.answers import find_boxed, find_last_number, math_boxed_or_last
from trinity_lightning.explorer.rewards.math_verifier import MEMORY, MathVerifier
from trinity_lightning.explorer.rewards.puzzles import countdown, reasoning_gym
from trinity_lightning.explorer.rewards.text import (
    accuracy,
    contains_digits,
    exact_match,
    find_last_answer,
    last_number,
    think_answer_format,
)
from trinity_lightning.explorer.tasks.task import Task


def a_task(answer: Any = None, **raw_task: Any) -> Task:
    return Task("simple", {"answer": answer, **raw_task} if answer is not None else raw_task)


def scored(reward_fn: Any, response: str = "x", task: Task | None = None) -> tuple[float | None, dict[str, float]]:
    return asyncio.run(score(resolve_rewards(reward_fn), response, task or a_task("x")))


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("3 + 4 = 7", "7"),
        ("7-3", "3"),
        ("7 - 3 = -4", "-4"),
        ("it is -4!", "-4"),
        ("(-4)", "-4"),
        ("f(x)-4", "4"),
        ("−12", "-12"),
        ("about 3.50 dollars", "3.5"),
        ("$1,234,567.89", "1234567.89"),
        ("-1,000", "-1000"),
        ("1,2,3", "3"),
        ("10,20", "20"),
        ("12,3456", "3456"),
        ("0.5 or .25", "0.25"),
        ("007", "7"),
        ("1.5e3 m, -2E-4", "-0.0002"),
        ("3 or 2e5x", "5"),
        ("none at all", None),
        ("", None),
        ("- . ,", None),
    ],
)
def test_find_last_number(text: str, number: str | None) -> None:
    assert find_last_number(text) == (None if number is None else Decimal(number))


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**12), max_value=10**12))
def test_any_number_is_found_with_and_without_separators(number: Decimal) -> None:
    for text in (f"{number:f}", f"{number:,.4f}", f"so it is {number:,.4f}, I think."):
        assert find_last_number(text) == number


def test_last_number_compares_values() -> None:
    assert last_number("first 1, then 1,000.0", a_task("1000")) == 1.0
    assert last_number("1000, no: 5", a_task(1000)) == 0.0
    assert last_number("no idea", a_task(5)) == 0.0
    assert last_number("-0.50", a_task(-0.5)) == 1.0
    assert last_number("18", a_task("6 * 3 = 18 #### 18")) == 1.0
    assert last_number("0.00001", a_task(1e-05)) == 1.0
    assert last_number("5", a_task(1e-05)) == 0.0
    with pytest.raises(ValueError, match="holds no number"):
        last_number("5", a_task("five"))
    with refuses(".answer_field"):
        last_number("5", a_task())


def test_exact_match_and_digits() -> None:
    assert exact_match(" yes\n", a_task("yes")) == 1.0
    assert exact_match("Yes", a_task("yes")) == 0.0
    assert exact_match("5", a_task(5)) == 1.0
    assert contains_digits("a1b2", a_task()) == 0.5
    assert contains_digits("", a_task()) == 0.0


# -- maths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{4}", "4"),
        (r"\boxed{1} and then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{4} and \boxed{", "4"),
        (r"{ \boxed{4}", "4"),
        (r"a=3 \\\boxed{4}", "4"),
        (r"\boxed {4}", "4"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{}", ""),
        (r"\boxed{\boxed{4}}", "4"),
        (r"x = \boxed{2} and y = \boxed{3}", "2, 3"),
        (r"$x_1 = \boxed{2}$, $x_2 = \boxed{3}$", "2, 3"),
        (r"\boxed{1}, \boxed{2}, and \boxed{3}", "1, 2, 3"),
        (r"\boxed{1} as well as \boxed{2}, and also $\boxed{3}$", "1, 2, 3"),
        (r"\boxed{1}, as well as this: \boxed{2}", "2"),
        (r"$\boxed{a+b} \quad \text{and} \quad \boxed{a-b}$", "a+b, a-b"),
        (r"**\boxed{2}** or **\boxed{3}**", "2, 3"),
        (r"\boxed{\frac{1}{2}}, or \boxed{0.5}", r"\frac{1}{2}"),
        (r"\boxed{2}, no, \boxed{3}", "3"),
        (r"\boxed{2} and so the answer is \boxed{3}", "3"),
        (r"First \boxed{2}, then \boxed{3} and \boxed{4}.", "3, 4"),
        (r"\boxed{4}. So it is \boxed{4}.", "4"),
        (r"\boxed{1}" + " " * 100_000 + r"\boxed{2}", "2"),
        (r"So $\fbox{15}$, for $7 + 8$", "15"),
        (r"$\fbox{\frac{a_{b_{c}}}{2}}$", r"\frac{a_{b_{c}}}{2}"),
        (r"\boxed{1}, \fbox{2} and \boxed 3", "1, 2, 3"),
        (r"\boxed{\fbox{5}}", "5"),
        (r"\\boxed{x}", "x"),
        ("\\boxed\n{5}", "5"),
        (r"Hence $\boxed 5$, as $2 < 5 < 9$.", "5"),
        (r"$\boxed5$ or \(\boxed 6\)", "5, 6"),
        (r"\[ \boxed 5 \]", "5"),
        (r"it is \boxed5.", "5"),
        (r"it is \fbox 5 and done: $x$", "5"),
        (r"\boxed -3.5 is it", "-3.5"),
        (r"\boxed 1,000 of 2,000", "1,000"),
        (r"\boxed 5\% of them", r"5\%"),
        (r"$\boxed\frac12$", r"\frac12"),
        (r"\boxed\frac{1}{2} is it", r"\frac{1}{2}"),
        (r"\boxed\text{No}.", r"\text{No}"),
        (r"$\boxed x+1$", "x+1"),
        (r"\boxed A.", "A"),
        (r"\boxed{1} is given up for \boxed 2", "2"),
        ("\\boxed" + " " * 100_000 + "x y", None),
        (r"in \boxed form it is 5", None),
        (r"put it in \boxed.", None),
        (r"\boxedtext{5}", None),
        ("boxed 4", None),
        ("}}{", None),
    ],
)
def test_find_boxed(text: str, boxed: str | None) -> None:
    assert find_boxed(text) == boxed


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"\boxed{4} is it, 5 is not", "4", 1.0),
        (r"\boxed{5}, not 4", "4", 0.0),
        ("I get 4.", 4, 1.0),
        ("I get 4.0", r"so $\boxed{4}$", 1.0),
        (r"$x = \boxed{2}$ and $y = \boxed{3}$", "2, 3", 1.0),
        (r"\boxed{3}, \boxed{2}", r"so it is \boxed{2} or \boxed{3}", 1.0),
        (r"\boxed{2} or \boxed{3}", "3", 0.0),
        ("1,000", "a lot of text 3 #### 1000", 1.0),
        (r"\boxed{110}", "9 * 10 = 90, and 20 more. The answer is: 110", 1.0),
        (r"\boxed{90}", "9 * 10 = 90, and 20 more. The answer is: 110", 0.0),
        (r"\boxed{['a', 'b']}", '["a", "b"]', 1.0),
        (r"\boxed{['b', 'a']}", '["a", "b"]', 0.0),
        ("no number", "4", 0.0),
        (r"\boxed{", "4", 0.0),
    ],
)
def test_math_boxed_or_last(response: str, answer: Any, reward: float) -> None:
    assert math_boxed_or_last(response, a_task(answer)) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("<think>no, not 7</think> <answer> 2x + 1 </answer>", "1 + 2x", 1.0),
        (r"<answer>so it is \boxed{4}</answer>", 4, 1.0),
        ("<answer>4</answer>, or <answer>5</answer>", "4", 0.0),
        ("<answer>Paris</answer>", "Paris", 1.0),
        (r"It is $\frac{3}{6}$.", "#### 0.5", 1.0),
        ("The final answer is 12.", 12, 1.0),
        (r"4, no: \boxed{5}", "4", 0.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
        ("I get −12.", "-12", 1.0),
        ("The answer is 0.3333333", "1/3", 0.0),
        ("The answer is 50%", "50", 1.0),
        ("It is $lube$.", "blue", 0.0),
        ("The answer is **42**.", "42", 1.0),
        (r"<think>\boxed{3}</think> The answer is 4.", "4", 1.0),
        (r"<think>maybe \boxed{3}</think>", "3", 0.0),
        ("It is 1234." + " x" * 998, "4", 0.0),
        ("So " * 50_000 + "the answer is 4", "4", 1.0),
        ("It is 0.00001", 1e-05, 1.0),
        ("It is \ud800 \0 4", 4, 1.0),
        ("The answer is x = 3.", "3", 1.0),
        ("a + b = 3", "3", 1.0),
        ("The answer is 12 - a dozen", "12", 1.0),
        ("(see above)\n- 5", "5", 1.0),
        ("B", "B", 1.0),
        ("**B**\n", "B", 1.0),
        ("B", "C", 0.0),
        ("Yes.", "yes", 1.0),
        ("Paris", "Paris", 1.0),
        ("The capital is Paris", "Paris", 0.0),
        ("The correct option is B, since C is wrong.", "B", 1.0),
        ("The correct option is B, since C is wrong.", "C", 0.0),
        ("The solutions are x = 2 and x = 3.", "2, 3", 1.0),
        ("The solutions are x = 2 and x = 3.", "2", 0.0),
        ("The answer is 5 times 3.", "5", 0.0),
        ("The answer is 5 times as much.", "5", 1.0),
    ],
)
def test_accuracy(response: str, answer: Any, reward: float) -> None:
    assert accuracy(response, a_task(answer)) == reward


WORDS, SUMS = " and so on and on" * 200, " and then 3 + 4 = 7 is right, as 12 times 5 is 60" * 60


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("The answer is 42." + WORDS, "42", 1.0),
        ("It is 42." + WORDS, "42", 1.0),
        (r"It is $\frac{1}{2}$." + WORDS, "1/2", 1.0),
        ("x" * 3000 + " 42 " + "y" * 5000, "42", 1.0),
        ("It is 1234." + " x" * 2998, "1234", 1.0),
        ("It is 1234." + " x" * 2998, "4", 0.0),
        ("The answer is 42. Let me check:" + SUMS, "42", 1.0),
        ("The answer is 43. Let me check:" + SUMS, "42", 0.0),
        ("The final answer is $42$. I hope it is correct." + SUMS * 5, "42", 1.0),
        ("Answer: 42\n" + SUMS, "42", 1.0),
        ("the answer is 4." + " So" * 50_000, "4", 1.0),
        ("12 " * 20_000, "12", 1.0),
        (r"\[ x " * 5_000, "4", 0.0),
    ],
)
def test_an_answer_is_found_however_much_follows_it(response: str, answer: str, reward: float) -> None:
    assert accuracy(response, a_task(answer)) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("The answer is A.", "A", 1.0),
        ("The answer is (B) because A is wrong.", "A", 0.0),
        ("The answer is (B) because A is wrong.", "B", 1.0),
        ("The correct answer is option C", "C", 1.0),
        ("The answer is: **(C)**", "C", 1.0),
        ("<answer>(A) 5</answer>", "A", 1.0),
        ("<answer>(A) 5</answer>", "B", 0.0),
        ("The answer is not A. So B.", "A", 0.0),
        ("The answer is Paris, the capital.", "Paris", 1.0),
        ("The answer is not Paris.", "Paris", 0.0),
        ("The answer is London.", "Paris", 0.0),
        ("**Final Answer**: Paris", "Paris", 1.0),
        ("The answer is no solution.", "no solution", 1.0),
        ("The answer is at least 5.", "5", 0.0),
        ("The answer is at least 5.", "at least 5", 1.0),
        ("<answer>at least 5</answer>", "5", 0.0),
        ("I get more than 5", "5", 0.0),
        ("It is not 5.", "5", 0.0),
        ("It isn't 5", "5", 0.0),
        ("It's not 4 but 5.", "5", 1.0),
        ("The answer is > 5.", "5", 0.0),
        ("The answer is about 5", "5", 1.0),
        ("The answer is 5 or 6.", "6", 0.0),
        ("The answer is 5 or 6.", "5, 6", 1.0),
        ("The answer is 5 m, as it is long.", "5 cm", 0.0),
        ("The answer is 500 cm.", "5 m", 1.0),
        ("<answer>The answer is 5 m</answer>", "5 cm", 0.0),
        ("I get 5 m.", "5 cm", 0.0),
        ("I get 5 cm in this way.", "5 cm", 1.0),
        ("I get 12 in total.", "12 apples", 1.0),
        ("The answer is 3 hours 30 minutes.", "3.5 hours", 1.0),
        ("It is 50%.", "0.5", 1.0),
        ("The answer is $5.", "5 euros", 0.0),
        ("The answer is $5$.", "5 euros", 1.0),
        ("It is 1011_2.", "1011_3", 0.0),
        ("It is 1011_2.", "11", 1.0),
        ("The answer is 13. To check: the result is 12.", "12", 0.0),
        ("The answer is 12 (as 3 times 4 is 12).", "12", 1.0),
        ("The answer to question 3 is 12.", "12", 1.0),
        (r"Therefore, the answer is" + "\n\n$$42$$", "42", 1.0),
    ],
)
def test_an_answer_in_a_sentence_is_read_with_what_qualifies_it(response: str, answer: str, reward: float) -> None:
    assert accuracy(response, a_task(answer)) == reward


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        ("The result is 12", "12", 1.0),
        ("It costs $12", "12", 1.0),
        ("It is 12 apples.", "12", 1.0),
        ("50 km/h", "50", 1.0),
        (r"The result is \frac{1}{2}", "1/2", 1.0),
        (r"The answer is $\frac{1}{2}$.", "0.5", 1.0),
        ("The result is 1,000", "1000", 1.0),
        ("The result is 13", "12", 0.0),
        (r"It is $x = \boxed{2}$ and $y = \boxed{3}$", "3, 2", 1.0),
        (r"It is \boxed{2}, or \boxed{3}", "3", 0.0),
    ],
)
def test_an_answer_in_tags_is_read_as_without(answer: str, truth: str, reward: float) -> None:
    assert accuracy(answer, a_task(truth)) == reward
    assert accuracy(f"<think>so</think> <answer>{answer}</answer>", a_task(truth)) == reward


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        ("one of 10 11 12 13", "13", 0.0),
        ("12 or 13", "13", 0.0),
        ("12, or else 13", "12", 0.0),
        ("The answer is not 12, it is 13", "12", 0.0),
        ("The answer is not 12, it is 13", "13", 0.0),
        ("The answer isn't 12", "12", 0.0),
        ("The answer is 12, not 13", "12", 0.0),
        ("Either $x$ or $y$", "y", 0.0),
        ("2 + 2 = 4, so it is 5", "5", 0.0),
        ("With 3 apples and 9 more, the answer is 12", "12", 1.0),
        ("It is not 11: the result = 12 apples", "12", 1.0),
        ("12 cm^2, that is 12", "12", 1.0),
        ("The answer to question 3 is $x = 12$.", "12", 1.0),
    ],
)
def test_what_hedges_within_tags_is_no_answer(answer: str, truth: str, reward: float) -> None:
    assert accuracy(f"<answer>{answer}</answer>", a_task(truth)) == reward


@pytest.mark.parametrize("answer", ["1, 2, 3", "x + 3", r"\frac{2}{3}", r"\sqrt{3}", "[0, 3]"])
def test_a_number_within_the_mathematics_between_tags_is_no_answer(answer: str) -> None:
    assert accuracy(f"<answer>{answer}</answer>", a_task("3")) == 0.0


@pytest.mark.parametrize(
    "answer", ["x + 3", "y - 3", "3x", "3 y", "2x + 3", "3 + n", "n^3", "(a + b) * 3", "2 · 3", "3/n"]
)
@pytest.mark.parametrize("sentence", ["The answer is {}", "so {}.", "<answer>The answer is {}</answer>"])
def test_a_number_within_a_longer_term_is_no_answer(sentence: str, answer: str) -> None:
    assert accuracy(sentence.format(answer), a_task("3")) == 0.0


@pytest.mark.parametrize("answer", ["", " ", "so it is #### ", "$$", ".", "**", r"\boxed{}", r"\text{}"])
def test_an_empty_answer_is_no_answer(answer: str) -> None:
    for reward in (math_boxed_or_last, accuracy):
        with pytest.raises(ValueError, match=r"the task's answer .* is empty"):
            reward("no number", a_task(answer))


# -- the task's answer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (["7", "seven"], ("7", "seven"), "8"),
        ([7, "seven"], ("7", "seven"), "se"),
        (("a", "b"), ("a", "b"), "a, b"),
        (np.array(["3", "4"]), ("3", "4"), "3, 4"),
        (np.array([3, 4]), ("3", "4"), "34"),
        (["(1, 2)", "[1, 2]"], ("(1, 2)", "[1, 2]"), "1"),
        (7, ("7",), "8"),
        (7.0, ("7", "7.0"), "7.1"),
        (1e-05, ("0.00001", "1e-05"), "5"),
        (True, ("True",), "False"),
        (Decimal("2.50"), ("2.50",), "2"),
        (Fraction(1, 2), ("1/2",), "2"),
        (np.float32(0.1), ("0.1",), "0"),
        (np.float64(2.0), ("2", "2.0"), "3"),
        (np.int64(7), ("7",), "8"),
        (np.bool_(True), ("True",), "False"),
        (np.str_("7"), ("7",), "8"),
    ],
)
def test_answers_are_texts_numbers_or_lists_of_which_any_is_right(
    answer: Any, right: tuple[str, ...], wrong: str
) -> None:
    for text in right:
        assert exact_match(text, a_task(answer)) == 1.0
        assert math_boxed_or_last(rf"\boxed{{{text}}}", a_task(answer)) == 1.0
        assert accuracy(f"<answer>{text}</answer>", a_task(answer)) == 1.0
    assert exact_match(wrong, a_task(answer)) == 0.0
    assert math_boxed_or_last(rf"\boxed{{{wrong}}}", a_task(answer)) == 0.0
    assert accuracy(f"<answer>{wrong}</answer>", a_task(answer)) == 0.0


def test_a_json_list_of_texts_is_a_list_of_answers_and_one_of_numbers_is_not() -> None:
    for answer, reward in (('["2", "two"]', 1.0), (r'["\\frac{4}{2}"]', 1.0), ('["3"]', 0.0), ("[2, 3]", 0.0)):
        assert math_boxed_or_last(r"\boxed{2}", a_task(answer)) == reward
    assert exact_match('["2", "two"]', a_task('["2", "two"]')) == 1.0


def test_each_answer_of_a_list_is_read_out_of_its_solution() -> None:
    answers = [r"so it is $\boxed{4}$", "6 * 3 = 18 #### 18", "in all 5"]
    for number, reward in ((4, 1.0), (18, 1.0), (5, 0.0), (6, 0.0)):
        assert math_boxed_or_last(f"it is {number}", a_task(answers)) == reward
    assert [last_number(f"it is {number}", a_task(answers)) for number in (4, 18, 5, 6)] == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "answer",
    [
        {"style": "rule", "ground_truth": "7"},
        {},
        float("nan"),
        float("inf"),
        np.float32("nan"),
        Decimal("NaN"),
        [],
        np.array([]),
        [["7"]],
        [{"value": "7"}],
        ["7", None],
        ["7", float("nan")],
        ["7", " "],
        " \n",
        b"7",
        1j,
        object(),
    ],
)
@pytest.mark.parametrize("reward", [math_boxed_or_last, accuracy, exact_match, last_number])
def test_an_answer_that_cannot_be_compared_is_refused(reward: Any, answer: Any) -> None:
    with pytest.raises(ConfigError):
        reward("7", a_task(answer))
    with pytest.raises(ConfigError):
        reward.check_task({"prompt": "q", "answer": answer})


def test_a_mapping_is_refused_with_the_name_of_the_answer_in_it() -> None:
    stored = {"style": "rule", "ground_truth": "7"}
    for task, field in (
        (a_task(stored, reward_model=stored), "reward_model.ground_truth"),
        (a_task({"type": "int", "value": 7}), "answer.value"),
        (a_task(reward_model=stored), "reward_model.ground_truth"),
    ):
        with refuses(".answer_field") as refused:
            exact_match("7", task)
        assert f"answer_field={field}" in str(refused.value)


MONSTER = "10^{10^{10}}"


@pytest.mark.slow
def test_a_comparison_that_does_not_end_counts_as_wrong_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    verifier = MathVerifier(max_processes=2, cpu_seconds=1.0)
    with ThreadPoolExecutor(6) as threads:
        pairs = [("x+1", "1+x"), ("3", MONSTER)] * 3
        same = list(threads.map(lambda pair: verifier.same(*pair), pairs))
    assert same == [True, False] * 3
    assert caplog.text.count("takes too much time or memory") == 3
    verifier.close()
    assert verifier.find(r"it is $\frac{x}{2}$") == r"\frac{x}{2}"  # and starts again
    verifier.close()


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@pytest.mark.slow
def test_a_process_has_bounded_memory_and_one_that_somebody_ended_is_told_and_replaced() -> None:
    before, verifier = children(), MathVerifier(max_processes=1)
    assert verifier.same("4", "4")
    (process,) = children() - before
    assert process.rlimit(psutil.RLIMIT_AS)[0] == MEMORY
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # the verifier is to learn itself how it ended
    with pytest.raises(RuntimeError, match="ended with exit code -9"):
        verifier.same("4", "4")
    assert verifier.same("4", "4")
    verifier.close()


def test_closing_ends_what_is_under_way() -> None:
    before, verifier = children(), MathVerifier(max_processes=1, cpu_seconds=300.0)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(verifier.same, "3", MONSTER)
        while not any(process.cpu_times().user > 0 for process in children() - before):
            time.sleep(0.01)
        verifier.close()
        with pytest.raises(RuntimeError, match="ended with exit code -9"):
            asked.result()


CHATTY_AND_GREEDY = """
print("loading")
kept = []
ExprExtractionConfig = LatexExtractionConfig = dict
def parse(text, *args, **kwargs):
    print("reading", text)
    kept.extend([b"x" * (300 << 20)] if "big" in text else [])
    return [0, text]
def verify(*args, **kwargs):
    return True
"""


@pytest.mark.slow
def test_what_a_library_prints_is_no_reply_and_a_process_that_was_large_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text(CHATTY_AND_GREEDY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(math_verifier, "MEMORY", 500 << 20)
    before, verifier = children(), MathVerifier(max_processes=1)
    assert [verifier.find(text) for text in ("1", "2", "3")] == ["1", "2", "3"]
    (process,) = children() - before
    assert verifier.find("big") == "big"
    assert process not in children()
    assert verifier.find("4") == "4"
    verifier.close()


@pytest.mark.slow
def test_processes_end_with_the_one_that_asks() -> None:
    code = """
import time
import psutil
from trinity_lightning.explorer.rewards.math_verifier import MathVerifier
verifier = MathVerifier(1)
assert verifier.same("4", "4")
print(psutil.Process().children()[0].pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        assert run.stdout is not None
        family = [psutil.Process(int(run.stdout.readline()))]
        run.kill()
    assert not psutil.wait_procs(family, timeout=20)[1], "it outlived the run"


@pytest.mark.slow
def test_a_fork_has_processes_of_its_own() -> None:
    code = """
import os
import psutil
from trinity_lightning.explorer.rewards.math_verifier import MathVerifier
verifier = MathVerifier(1)
assert verifier.same("4", "4")
theirs = psutil.Process().children()
if (child := os.fork()) == 0:
    assert verifier.same("x", "x") and len(psutil.Process().children()) == 1
    verifier.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert verifier.same("4", "4") and psutil.Process().children() == theirs
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert run.returncode == 0, run.stderr


# -- tags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 4 </answer>", "4"),
        ("<answer>4</answer><answer>5\n6</answer>", "5\n6"),
        ("<answer><answer>4</answer>", "4"),
        ("<answer>4", None),
        ("4</answer>", None),
    ],
)
def test_find_last_answer(text: str, answer: str | None) -> None:
    assert find_last_answer(text) == answer


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>so\nso</think>\n<answer>4</answer>\n", 1.0),
        ("so</think><answer>4</answer>", 1.0),
        ("<think>so</think> hm <answer>4</answer>", 0.0),
        ("<think>so</think><answer>4</answer> or 5", 0.0),
        ("<think>so</think><answer> </answer>", 0.0),
        ("<think></think><answer>4</answer>", 0.0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0.0),
        ("<think>so</think><answer>4</answer><answer>4</answer>", 0.0),
        ("<answer>4</answer><think>so</think>", 0.0),
        ("4", 0.0),
        (" " * 100_000, 0.0),
        ("<think>" * 20_000, 0.0),
        ("<answer>" * 20_000, 0.0),
    ],
)
def test_think_answer_format(response: str, reward: float) -> None:
    assert think_answer_format(response, a_task()) == reward


# -- countdown --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>(6 - 3) * 8 + 1</answer>", 1.0),
        ("so <answer>1 + 8 × (6 - 3) = 25</answer>", 1.0),
        ("<answer>25</answer>", 0.1),
        ("<answer>6 * 3 + 8 - 1</answer>", 1.0),
        ("<answer>6 * 3 + 8 - 1 = 24</answer>", 0.1),
        ("<answer>6 * 3 + 8 - 1 = it</answer>", 0.1),
        ("<answer>6 * 3 + 8 - 1 * 1 % 1</answer>", 0.1),
        ("<answer>6 * (3 + 1) + 8 // 8</answer>", 0.1),
        ("<answer>6 * 3 + 8 + 1</answer>", 0.1),
        ("<answer>6 * 3 + 8 - 1 + 0</answer>", 0.1),
        ("<answer>8 * 3 + 1</answer>", 0.1),
        ("<answer>8 / (1 - 1)</answer>", 0.1),
        ("<answer>__import__('os')</answer>", 0.1),
        ("<answer></answer>", 0.0),
        ("<answer>**6 · 3 + 8 − 1**</answer>", 1.0),
        (r"<answer>$6 \times 3 + 8" + "\n- 1$</answer>", 1.0),
        ("6 * 3 + 8 - 1", 0.0),
    ],
)
def test_countdown(response: str, reward: float) -> None:
    assert countdown(response, a_task(nums=[6, 3, 8, 1], target=25)) == reward
    assert countdown(response, a_task(numbers=[1, 8, 3, 6], target="25")) == reward


def test_countdown_is_exact_and_knows_its_fields() -> None:
    assert countdown("<answer>7 // 2</answer>", a_task(nums=[7, 2], target=3)) == 0.1
    assert countdown("<answer>7 % 4</answer>", a_task(nums=None, numbers=[7, 4], target=3)) == 0.1
    assert countdown("<answer>(1 / 3 + 7) * 3</answer>", a_task(nums=[1, 3, 7, 3], target=22)) == 1.0
    for entry in (
        {"nums": [1, "x"], "target": 3},
        {"nums": [1, 2], "target": "x"},
        {"nums": np.ones(2)},
        {"nums": [1, 2]},
        {"nums": "12", "target": 3},
        {"target": 3},
    ):
        with pytest.raises(ValueError, match="a list of numbers 'nums' and a 'target'"):
            countdown("<answer>3</answer>", a_task(**entry))


# -- reasoning-gym ----------------------------------------------------------------------------------------------------


def test_reasoning_gym_asks_the_datasets_verifier() -> None:
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", size=3, seed=1)[2]
    task = a_task(entry["answer"], reasoning_gym={"name": "chain_sum", "entry": entry})
    assert reasoning_gym(entry["answer"], task) == 1.0
    assert reasoning_gym(f"12 ... <answer> {entry['answer']} </answer>", task) == 1.0
    assert reasoning_gym("I do not know", task) == 0.0
    with refuses(".source"):
        reasoning_gym("1", a_task("1"))


# -- several, and their failures --------------------------------------------------------------------------------------


async def asynchronous(response: str, task: Task) -> float:
    await asyncio.sleep(0)
    return 0.5


def parts(response: str, task: Task) -> dict[str, float]:
    return {"length": 0.25, "form": 0.5}


# The right answer considered in the thoughts; then another one, and a response that ends in the thoughts.
JUDGED = {
    "math": ("12", r"\boxed{12}", r"\boxed{13}"),
    "accuracy": ("12", "the answer is 12", "the answer is 13"),
    "last_number": ("12", "12", "13"),
    "exact_match": ("12", "12", "13"),
    "countdown": ("", "<answer>4*6</answer>", "I do not know."),
}


@pytest.mark.parametrize("opening", ["<think>", "[THINK]", "<|channel|>analysis<|message|>"])
@pytest.mark.parametrize("name", JUDGED)
def test_only_what_stands_behind_the_thoughts_is_an_answer(name: str, opening: str) -> None:
    answer, right, other = JUDGED[name]
    task = a_task(answer, nums=[4, 6], target=24)
    closing = next(markers.closing for markers in MARKERS if opening.startswith(markers.opening))
    assert scored(name, f"{opening}{right}{closing}{other}", task)[0] == 0
    assert scored(name, f"{opening}{right}", task)[0] == 0
    assert scored(name, f"{opening}{other}{closing}{right}", task)[0] == 1
    assert scored(name, Response(right, opened=True), task)[0] == 0


def test_reasoning_gyms_verifier_sees_no_thoughts() -> None:
    entry = {"question": "2+3", "answer": "5", "metadata": {}}
    source = {"name": "basic_arithmetic", "config": {}, "entry": entry}
    task = a_task(reasoning_gym=source)
    assert reasoning_gym("<think>4?</think>5", task) == 1
    assert reasoning_gym("<think><answer>5</answer></think>4", task) < 1
    assert reasoning_gym("<think><answer>5</answer>", task) == 0


def test_registered_names() -> None:
    names = "accuracy contains_digits countdown exact_match format last_number math reasoning_gym"
    assert set(names.split()) == set(PARTS["reward function"])


def test_no_reward_function_gives_no_reward() -> None:
    assert scored(None) == (None, {})


def test_names_paths_functions_lists_and_weights() -> None:
    assert scored("exact_match") == (1.0, {"reward/exact_match": 1.0})
    path = "trinity_lightning.explorer.rewards.text.exact_match"
    assert scored(path) == (1.0, {"reward/exact_match": 1.0})
    assert scored(asynchronous) == (0.5, {"reward/asynchronous": 0.5})
    metrics = {"reward/exact_match": 1.0, "reward/asynchronous": 0.5}
    assert scored(["exact_match", asynchronous]) == (1.5, metrics)
    assert scored({"exact_match": 2, asynchronous: -1.0}) == (1.5, metrics)
    assert scored([("exact_match", 2.0), asynchronous]) == (2.5, metrics)
    assert scored({parts: 2.0}) == (
        1.5,
        {"reward/parts/length": 0.25, "reward/parts/form": 0.5, "reward/parts": 0.75},
    )


@pytest.mark.parametrize("value", [1, True, np.float32(1.0), np.int64(1), torch.tensor(1.0), torch.ones(1)])
def test_any_kind_of_number_is_a_reward(value: Any) -> None:
    reward, _ = scored(lambda response, task: value)
    assert type(reward) is float
    assert reward == 1.0


@pytest.mark.parametrize(
    "value",
    ["1", None, float("nan"), float("inf"), 1e300, [1.0], torch.ones(2), {}, {"a": "b"}, {"a": float("nan")}, 1j],
)
def test_a_reward_that_is_no_number_says_so(value: Any) -> None:
    def judge(response: str, task: Task) -> Any:
        return value

    with pytest.raises(RolloutError, match=r"(?s)reward function 'judge' returned .*expected a finite number"):
        scored(judge)


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(1)])
def test_a_reward_that_raises_is_named(error: BaseException) -> None:
    async def judge(response: str, task: Task) -> float:
        raise error

    with pytest.raises(RolloutError, match=f"reward function 'judge' raised {type(error).__name__}: {error}"):
        scored(judge)


@pytest.mark.parametrize(
    ("reward_fn", "message"),
    [
        ("exact_mach", "Did you mean 'exact_match'"),
        ("no_such_module.judge", "no module 'no_such_module'"),
        ("math.pi", "cannot be called"),
        (5, "cannot be called"),
        ("collections.Counter", "'collections.Counter' is a class: give a function"),
        ("os.getcwd", r"'os\.getcwd' cannot be called as \(response, task\): too many positional arguments\."),
        (lambda response, task, *, scale: 1.0, r"reward\.args\.scale is missing"),
        (lambda task, response: 1.0, r"takes 'task' .*\(response, task\), in this order"),
        (lambda solution_str, ground_truth, method="strict": 1.0, r"'ground_truth'.*task\.raw_task\['answer'\]"),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 1.0, r"task\.raw_task\['answer'\]"),
        (lambda prompts, completions, **kwargs: [1.0], r"'prompts'.*task\.raw_task\['prompt'\]"),
        (lambda completions, **kwargs: [1.0], "one response at a time"),
        (lambda completion, answer: 1.0, r"'answer'.*task\.raw_task\['answer'\]"),
        (lambda prompt, response: 1.0, r"task\.raw_task\['prompt'\]"),
        ({"name": "math", "arg": {}}, "'arg'. Did you mean 'args'"),
        ({"name": "math", "args": {"tolerance": 1}}, r"reward\.args\.tolerance"),
        ({"math": {"weight": "much"}}, "weight of reward function 'math' is 'much': give a finite number"),
        ({"math": "much"}, "weight of reward function 'math' is 'much': give a finite number"),
        ({"math": float("nan")}, "give a finite number"),
        (["math", "math"], "two reward functions are called math"),
        ([lambda response, task: 1.0, lambda response, task: 2.0], "two reward functions are called <lambda>"),
    ],
)
def test_wrong_reward_functions_are_refused(reward_fn: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        resolve_rewards(reward_fn)
    assert refused.value.key == (message.replace("\\", "").split()[0] if message.startswith("reward") else "reward")


@dataclass
class Data:
    most: int = 8

    def __call__(self, response: str, task: Task) -> float:
        return min(len(response), self.most)


class Plain:
    def __init__(self, most):
        self.most = most

    def __call__(self, completion, task):
        return min(len(completion), self.most)


class Named(Plain):
    def __init__(self, *, most=8):
        super().__init__(most)


def with_keyword(answer, task, *, most):
    return min(len(answer), most)


def by_position(response, task, most=8):
    return min(len(response), most)


@pytest.mark.parametrize("source", [Data, Plain, Named, with_keyword, by_position])
def test_a_reward_with_one_argument_works_however_it_is_written(source: Any) -> None:
    name = f"{__name__}.{source.__name__}"
    part = {"name": name, "args": {"most": 3}}
    assert scored({**part, "weight": 0.5}, "abcdef")[1] == {f"reward/{source.__name__}": 3.0}
    assert scored({**part, "weight": 0.5}, "abcdef")[0] == 1.5
    assert scored([part, "contains_digits"], "abcdef")[0] == 3.0
    assert scored({name: {"args": {"most": 2}, "weight": 2.0}, "contains_digits": 1.0}, "abcdef")[0] == 4.0
    with pytest.raises(ArgumentError, match=r"reward\.args\.mist.*Did you mean 'most'"):
        resolve_rewards({"name": name, "args": {"mist": 3, "most": 3}})
    if source in (Plain, with_keyword):
        with pytest.raises(ArgumentError, match=r"reward\.args\.most is missing"):
            resolve_rewards(name)
    else:
        assert len(resolve_rewards(name)) == 1


def test_an_error_in_a_reward_names_its_line() -> None:
    def judge(response: str, task: Task) -> float:
        return task.raw_task["nothing"]

    with pytest.raises(RolloutError, match=r"raised KeyError: 'nothing' \(.*test_rewards\.py:\d+ in judge\)"):
        scored(judge)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\n\ndef judge(response, task:\n    return 1.0\n",
            r"line 3: SyntaxError: '\(' was never closed\.",
        ),
        ("import json\nimport numpyy\n", r"line 2: ModuleNotFoundError: No module named 'numpyy'\."),
        (
            "from json import lodes\n",
            r"line 1: ImportError: cannot import name 'lodes' from 'json' ",
        ),
    ],
)
def test_a_file_with_a_wrong_line_is_refused_by_that_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_reward.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with refuses("reward") as refused:
        resolve_rewards("broken_reward.judge")
    assert re.search(rf"broken_reward\.py, {message}", str(refused.value))


def test_the_traceback_of_a_library_that_cannot_be_imported_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_library.py").write_text("import numpyy\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("trinity_lightning.config.own_code.LIBRARIES", [tmp_path])
    with pytest.raises(ModuleNotFoundError, match="numpyy"):
        resolve_rewards("broken_library.judge")

"""Rewards that read a response as plain text: its last number, the whole of it, its form."""

import re

from trinity_lightning.explorer.rewards.answers import answer_of, answer_text, find_last_number, reads_answer
from trinity_lightning.explorer.tasks.task import Task

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
# Thoughts and answer of DeepSeek-R1 (arXiv 2501.12948, table 1). Reasoning models' chat templates write the first tag.
_UNTAGGED = r"(?:(?!</?(?:think|answer)>).)*"
_THINK_ANSWER = re.compile(rf"\s*+(?:<think>)?({_UNTAGGED})</think>\s*+<answer>({_UNTAGGED})</answer>\s*+", re.DOTALL)


def find_last_answer(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>` of a text, without the space around; None if there is none."""
    answers: list[str] = _ANSWER.findall(text)
    return answers[-1].strip() if answers else None


@reads_answer
def last_number(response: str, task: Task) -> float:
    """1 when the last number in the response equals the task's answer (the last number in it), else 0.

    Raises:
        ValueError: the task's answer holds no number.
    """
    expected = find_last_number(answer_text(task))
    if expected is None:
        raise ValueError(f"the task's answer {answer_of(task)!r} holds no number")
    return float(find_last_number(response) == expected)


@reads_answer
def exact_match(response: str, task: Task) -> float:
    """1 when the response is the task's answer, but for space around either, else 0."""
    return float(response.strip() == str(answer_of(task)).strip())


def think_answer_format(response: str, task: Task) -> float:
    """1 when the response is `<think>thoughts</think> <answer>answer</answer>` and nothing else, else 0.

    Each tag once and neither part empty; the opening `<think>` may be missing, if the chat template writes it.
    """
    parts = _THINK_ANSWER.fullmatch(response)
    return float(parts is not None and all(part.strip() for part in parts.groups()))


def contains_digits(response: str, task: Task) -> float:
    """The share of the response's characters that are digits: a reward that varies even for an untrained model."""
    return sum(character.isdigit() for character in response) / len(response) if response else 0.0

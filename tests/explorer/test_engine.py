"""The text of a response: rewards judge what was written."""

import json
from dataclasses import replace
from typing import Any

import pytest
from support.chat_tokenizers import byte_tokenizer

from trinity_lightning.common.inference import Completion
from trinity_lightning.common.thoughts import Markers, answer_part
from trinity_lightning.explorer.models.engine import response_text, written_text
from trinity_lightning.explorer.rewards.answers import math_boxed_or_last
from trinity_lightning.explorer.tasks.task import Task

SPECIAL = ("[THINK]", "[/THINK]", "[CALLS]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<s>", "<end>")
TOKENIZER = byte_tokenizer(None, SPECIAL, "<end>", "<s>", plain=["er>!"])
PROMPT = TOKENIZER.encode("<s>Sum?")
TASK = Task("simple", {"prompt": "Sum?", "answer": "8"})


def completion(text: str, prompt: str = "Sum?", **fields: Any) -> Completion:
    tokens = TOKENIZER.encode(text)
    values = {"finish_reason": "length", "stop_reason": None} | fields
    return Completion(TOKENIZER.encode(prompt), tokens, [0.0] * len(tokens), "", **values)


@pytest.mark.parametrize(
    "text",
    [
        "[THINK]Perhaps \\boxed{9}?[/THINK]It is 8.",
        "<|channel|>analysis<|message|>\\boxed{9}?<|end|><|start|>assistant<|channel|>final<|message|>8",
    ],
)
def test_markers_that_are_special_tokens_are_in_the_text(text: str) -> None:
    judged = response_text(TOKENIZER, PROMPT, TOKENIZER.encode(text))
    assert judged == text
    assert math_boxed_or_last(judged, TASK) == 1.0


def test_end_tokens_padding_and_the_beginning_of_texts_are_not_in_the_text() -> None:
    assert response_text(TOKENIZER, PROMPT, TOKENIZER.encode("<s>a[CALLS]<pad>b<end>")) == "a[CALLS]b"


def test_special_tokens_can_be_left_out() -> None:
    written = TOKENIZER.encode("[THINK]a[/THINK]b<end>")
    assert response_text(TOKENIZER, PROMPT, written, skip_special_tokens=True) == "ab"


@pytest.mark.parametrize("opening", ["[THINK]", "<think>\n", "<|begin_of_thought|>\n\n", "<reasoning>\n"])
def test_the_prompts_end_says_that_a_response_begins_in_its_thoughts(opening: str) -> None:
    prompt = TOKENIZER.encode(f"Sum?{opening}")
    cut = response_text(TOKENIZER, prompt, TOKENIZER.encode("Say \\boxed{8}. Or"))
    assert (cut, math_boxed_or_last(cut, TASK)) == ("Say \\boxed{8}. Or", 0.0)
    closing = {"[THINK]": "[/THINK]", "<|begin_of_thought|>\n\n": "<|end_of_thought|>"}.get(opening)
    closed = f"Say 9?{closing or opening.strip().replace('<', '</')}\\boxed{{8}}"
    assert math_boxed_or_last(response_text(TOKENIZER, prompt, TOKENIZER.encode(closed)), TASK) == 1.0


def test_the_stop_string_that_was_generated_is_in_the_text() -> None:
    """The last token may go on behind it; the text does not."""
    for text in ("<answer>8</answer>", "<answer>8</answer>!", "<answer>8</answer>, of a draft"):
        stopped = completion(text, finish_reason="stop", stop_reason="</answer>")
        assert written_text(TOKENIZER, stopped, {}) == "<answer>8</answer>"
        assert written_text(TOKENIZER, stopped, {"include_stop_str_in_output": False}) == "<answer>8"
    earlier = completion("a. b. c.", finish_reason="stop", stop_reason=".")  # min_tokens passed over the first two
    assert written_text(TOKENIZER, earlier, {}) == "a. b. c."


def test_the_end_token_is_not_in_the_text_and_a_stop_token_that_was_asked_for_is() -> None:
    ended = completion("8[CALLS]", finish_reason="stop")
    assert written_text(TOKENIZER, ended, {}) == "8"  # an end token of the engine's, whatever the tokenizer says
    asked = replace(ended, stop_reason=ended.token_ids[-1])
    settings = {"stop_token_ids": [ended.token_ids[-1]]}
    assert written_text(TOKENIZER, asked, settings) == "8[CALLS]"
    assert written_text(TOKENIZER, asked, settings | {"include_stop_str_in_output": False}) == "8"


def test_markers_of_ones_own_are_found_in_prompt_and_response() -> None:
    markers = (Markers("[T]", "[/T]"),)
    text = "[T]Perhaps \\boxed{9}?[/T]It is 8."
    assert math_boxed_or_last(written_text(TOKENIZER, completion(text), {}, markers), TASK) == 1.0
    assert math_boxed_or_last(written_text(TOKENIZER, completion(text), {}), TASK) == 0.0
    assert answer_part(written_text(TOKENIZER, completion("8", prompt="Sum? [T]\n"), {}, markers)) is None


def test_a_response_can_be_written_as_json() -> None:
    text = written_text(TOKENIZER, completion("8"), {})
    assert json.loads(json.dumps(text)) == "8"

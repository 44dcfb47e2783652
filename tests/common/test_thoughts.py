"""The answer behind a response's thoughts is what counts, for every model of the field."""

import pickle
from pathlib import Path

import pytest
from support.chat_tokenizers import byte_tokenizer

from trinity_lightning.common.thoughts import (
    MARKERS,
    Markers,
    Response,
    answer_part,
    markers_of,
    named_markers,
    opens_thoughts,
    split_thoughts,
)

# As these models write them: thoughts that name 9, then the answer 8.
WRITTEN = {
    "DeepSeek-R1, its template opens": "Is it 9? No.\n</think>\n\n8",
    "Qwen3": "<think>\nIs it 9? No.\n</think>\n\n8",
    "a prompt's own format": "<reasoning>Is it 9?</reasoning>\n8",
    "EXAONE Deep": "<thought>\nIs it 9?\n</thought>\n\n8",
    "Magistral": "[THINK]Is it 9?[/THINK]8",
    "Kimi-VL": "◁think▷Is it 9?◁/think▷8",
    "Seed-OSS": "<seed:think>Is it 9?</seed:think>8",
    "gpt-oss": "<|channel|>analysis<|message|>Is it 9?<|end|><|start|>assistant<|channel|>final<|message|>8",
    "gpt-oss, a preamble": "<|channel|>analysis<|message|>9?<|end|><|start|>assistant<|channel|>commentary<|message|>9 "
    "perhaps.<|end|><|start|>assistant<|channel|>final<|message|>8",
    "gpt-oss without thoughts": "<|channel|>final<|message|>8",
    "Gemma 4": "<|channel>thought\nIs it 9?<channel|>8",
    "Command A": "<|START_THINKING|>9?<|END_THINKING|><|START_RESPONSE|>8<|END_RESPONSE|>",
    "Command A, its template opens the answer": "8<|END_RESPONSE|>",
    "OpenThinker": "<|begin_of_thought|>9?<|end_of_thought|>\n\n<|begin_of_solution|>8<|end_of_solution|>",
    "Kimi-K3": "<|open|>think<|sep|>9?<|close|>think<|sep|><|open|>response<|sep|>8<|close|>response<|sep|>",
    "Apertus": "<|inner_prefix|>9?<|inner_suffix|>8",
    "Muse": " to=self<|message|>9?<|eom|><|start|>assistant to=user<|message|>8",
    "Inkling": "<|content_thinking|>9?<|end_message|><|message_model|><|content_text|>8<|end_message|>",
    "no thoughts": "8",
    "several thoughts": "<think>9</think>Perhaps 9.<think>No.</think>8",
    "an opening marker that they mention": "<think>I open with <think>, then 9?</think>8",
    "a closing marker that they mention": "<think>At the end comes </think>, then 9? No.</think>8",
    "two kinds": "<think>9?</think><reasoning>No.</reasoning>8",
}


@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN)
def test_the_answer_is_what_stands_behind_the_last_closed_thought(text: str) -> None:
    thoughts, answer = split_thoughts(text)
    assert answer is not None
    assert thoughts + answer == text
    counted = answer_part(text)
    assert counted is not None
    assert counted.strip() == "8"


UNFINISHED = [f"{markers.opening}\nPerhaps 9, or" for markers in MARKERS]


@pytest.mark.parametrize("text", UNFINISHED)
def test_a_response_cut_off_in_its_thoughts_has_no_answer(text: str) -> None:
    assert split_thoughts(text) == (text, None)
    assert answer_part(text) is None
    assert answer_part(f"<think>a</think>9{text}") is None


def test_a_prompt_that_opens_the_thoughts_leaves_only_the_closing_marker_to_the_response() -> None:
    cut = Response("Say 9. Or", opened=True)
    assert answer_part(cut) is None
    assert answer_part(Response("Say 9. Or", opened=False)) == "Say 9. Or"
    assert answer_part(Response("Say 9.</think>8", opened=True)) == "8"
    assert answer_part(cut.with_text("Or")) is None


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|turn>model\n<|channel>thought\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("Write <think> first.<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_only_the_end_of_the_prompt_says_whether_it_opens_thoughts(prompt: str, opens: bool) -> None:
    assert opens_thoughts(prompt, MARKERS) is opens


def test_markers_of_ones_own_replace_the_fields() -> None:
    markers = [Markers("[T]", "[/T]")]
    assert answer_part(Response("[T]9?[/T]8 <think> 7", markers)) == "8 <think> 7"
    assert answer_part(Response("[T]9?", markers)) is None


def test_tokens_named_after_thoughts_are_paired() -> None:
    tokens = ["<|think_start|>", "<|think_end|>", "<ifm|think>", "</ifm|think>", "<x>", "</x>", "<thinker>", "</s>"]
    assert set(named_markers(tokens)) == {
        Markers("<|think_start|>", "<|think_end|>"),
        Markers("<ifm|think>", "</ifm|think>"),
    }


def test_markers_are_found_in_the_tokenizer_and_in_the_chat_template() -> None:
    template = "{{ message['reasoning'] }}<cot:thoughts>{{ thinking }}</cot:thoughts> Here is my thought process: "
    markers = set(markers_of(byte_tokenizer(template, ["[REASON]", "[/REASON]", "[T]", "[/T]"], "<end>")))
    assert markers - {*MARKERS} == {
        Markers("[REASON]", "[/REASON]"),
        Markers("<cot:thoughts>", "</cot:thoughts>"),
        Markers("Here is my thought process:", "Here is my response:"),
    }
    assert set(markers_of(byte_tokenizer(None, ["[T]", "[/T]"], "<end>"))) == {*MARKERS}


TEMPLATES = {
    **dict.fromkeys(("deepseek_r1_distill", "nemotron_3_super", "qwen3_5_think", "qwen3_8"), True),
    **dict.fromkeys(("qwen3", "qwen3_5_nothink", "glm4moe", "gptoss", "gemma4", "cohere2", "llama3_2"), False),
}


@pytest.mark.parametrize(("name", "opens"), TEMPLATES.items())
def test_whether_the_templates_of_the_field_open_thoughts(name: str, opens: bool) -> None:
    trl = pytest.importorskip("trl")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    tokenizer = byte_tokenizer(template, [], "<end>", "<s>")
    messages = [{"role": "user", "content": "Write <think> first."}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert opens_thoughts(str(prompt), markers_of(tokenizer)) is opens


def test_a_response_is_its_text_and_keeps_what_is_known_of_it_in_other_processes() -> None:
    sent = pickle.dumps(Response("9", [Markers("[T]", "[/T]")], opened=True))
    response = pickle.loads(sent)  # noqa: S301 - as pebble and Ray send it
    assert list(response.markers) == [Markers("[T]", "[/T]")]
    assert answer_part(response) is None
    assert response == "9"

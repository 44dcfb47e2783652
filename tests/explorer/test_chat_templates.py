"""The chat templates of the field: every trained turn follows the prompt of rollouts, has its text, and ends."""

from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import KINDS, NAMES, TOOL, TRAINING, page, tokenizer_of, trained
from support.errors import refuses

from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.chat import render_chat
from trinity_lightning.explorer.models.imitation import HABITS, MARKED_OTHERWISE, OTHER_PROMPT, lacking
from trinity_lightning.explorer.models.turns import turn_end
from trinity_lightning.explorer.models.vllm_engine import with_end_tokens

PAGE = Path(__file__).parents[2] / "docs" / "chat_templates.md"


def text(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("name", [*NAMES, *TRAINING])
def test_a_trained_turn_follows_the_prompt_of_rollouts_has_its_text_and_ends_or_is_refused_or_warned_of(name):
    tokenizer, generation_config = tokenizer_of(name)
    ends = turn_end(tokenizer, generation_config).tokens
    assert set(with_end_tokens({}, ends)["stop_token_ids"]) == ends >= {tokenizer.eos_token_id}
    accepted = 0
    for kind, messages in KINDS.items():
        try:
            made = trained(tokenizer, generation_config, messages)
        except ConfigError:
            assert kind not in ("answer", "`<think>` in the content")
            continue
        accepted += 1
        assert made.habits <= set(HABITS)
        answers = [message for message in messages if message["role"] == "assistant"]
        assert all(turn[-1] in ends for turn in (*made.turns(), made.completed, made.chosen))
        assert made.completed == made.chosen
        assert made.expert in (None, made.completed)
        assert len(made.turns()) == len(answers)
        if OTHER_PROMPT not in made.habits:
            tools = [TOOL] if any("tool_calls" in message for message in messages) else None
            assert made.prompt == render_chat(tokenizer, messages[:-1], tools)
            behind = made.turns()[-1]  # marks may leave out what the template writes before the turn
            assert made.completed[-len(behind) :] == behind or MARKED_OTHERWISE in made.habits
            if MARKED_OTHERWISE in made.habits:
                continue
            assert made.tokens[: made.mask.index(True)] == render_chat(
                tokenizer, messages[: messages.index(answers[0])], tools
            )
        if not made.habits:
            begun = "<think>" if text(tokenizer, made.prompt).rstrip().endswith("<think>") else ""
            assert not lacking(messages[-1], begun + text(tokenizer, made.completed))
            written = [begun + text(tokenizer, turn) for turn in made.turns()]
            assert not [1 for message, turn in zip(answers, written, strict=True) if lacking(message, turn)]
        if tokenizer.bos_token:
            assert made.tokens.count(tokenizer.bos_token_id) == 1
    assert accepted >= 3


@pytest.mark.parametrize("name", ["diffusion_gemma", "gemma4", "gemma4_v2", "glm4moe", "gptoss", "llama3_1", "qwen2_5"])
def test_results_of_tools_follow_a_turn_that_called_one(name):
    tokenizer, generation_config = tokenizer_of(name)
    messages = KINDS["call and result"]
    whole = text(tokenizer, render_chat(tokenizer, messages[:3], [TOOL]))
    assert "insect" in whole
    so_far = [
        *render_chat(tokenizer, messages[:1], [TOOL]),
        *trained(tokenizer, generation_config, messages[:2]).completed,
    ]
    assert text(tokenizer, render_chat(tokenizer, messages[2:3], [TOOL], so_far, generation_config)) == whole


@pytest.mark.parametrize("name", ["phi3", "cohere2"])
def test_results_that_a_template_leaves_out_are_refused(name):
    tokenizer, generation_config = tokenizer_of(name)
    messages = KINDS["call and result"]
    so_far = [*render_chat(tokenizer, messages[:1]), tokenizer.eos_token_id]
    with refuses("model.name") as of_rollouts:
        render_chat(tokenizer, messages[2:3], [TOOL], so_far, generation_config)
    with refuses("model.name") as of_examples:
        trained(tokenizer, generation_config, messages)
    assert all("'tool'" in str(refused.value) for refused in (of_rollouts, of_examples))


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "python scripts/chat_templates_docs.py"
    assert len(NAMES) == 41

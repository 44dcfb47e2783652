"""The chat templates that TRL ships, each with a tokenizer of bytes, and what is trained with it.

`page` is docs/chat_templates.md.
"""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from support.chat_tokenizers import byte_tokenizer
from trinity_lightning.buffer.dataset import Example
from trinity_lightning.buffer.offline import AnswerReader
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.imitation import HABITS
from trinity_lightning.explorer.models.turns import turn_end
from trinity_lightning.explorer.tasks.taskset import Taskset

FOLDER = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"  # pyright: ignore
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja") if not file.stem.endswith("_training"))
TRAINING = sorted(file.stem for file in FOLDER.glob("*_training.jinja"))

# By the beginning of a template's name: the tokenizer's end token, and what generation_config.json has beside it.
ENDS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "diffusion_gemma": ("<eos>", "<turn|>", "<|tool_response>"),
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
    "gemma": ("<eos>", "<end_of_turn>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>", "<|endoftext|>"),
    "idefics3": ("<|end_of_text|>",),
    "llama3": ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    "llava": ("</s>",),
    "muse": ("<|eot|>",),
    "phi3": ("<|endoftext|>", "<|end|>"),
    "qwen": ("<|im_end|>", "<|endoftext|>"),
    "smolvlm": ("<end_of_utterance>",),
    "": ("<|im_end|>",),
}
BEGINNINGS = {
    "cohere": "<BOS_TOKEN>",
    "deepseek": "<｜begin▁of▁sentence｜>",
    "lfm2": "<|startoftext|>",
    "llama3": "<|begin_of_text|>",
    "llava": "<s>",
    "": "<bos>",
}
_SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"|｜]+[|｜]>|<(?:start|end)_of_\w+>|<\|?(?:turn|channel|tool\w*)\|?>|\[/?INST\]|\[gMASK\]|<sop>"
)


def tokenizer_of(name: str) -> tuple[Any, GenerationConfig]:
    """A tokenizer with a template, and the end tokens of the models that have it."""
    template = (FOLDER / f"{name}.jinja").read_text()
    ends = next(ends for start, ends in ENDS.items() if name.startswith(start))
    bos = next(bos for start, bos in BEGINNINGS.items() if name.startswith(start)) if "bos_token" in template else None
    special = {*_SPECIAL.findall(template), *ends, "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"}
    tokenizer = byte_tokenizer(template, sorted(special), ends[0], bos, plain=("<think>", "</think>"))
    return tokenizer, GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(list(ends)))


# -- conversations -----------------------------------------------------------------------------------------------------


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_CALL = {"type": "function", "id": "call12345", "function": {"name": "look_up", "arguments": {"word": "ant"}}}
_THOUGHTS = "<think>\nThree pairs.\n</think>\n\nSix."

KINDS: dict[str, list[dict[str, Any]]] = {
    "answer": [_user("Legs?"), _assistant("Six.")],
    "system message": [{"role": "system", "content": "Be brief."}, _user("Legs?"), _assistant("Six.")],
    "two turns": [_user("Legs?"), _assistant("Six."), _user("Wings?"), _assistant("Four.")],
    "reasoning_content": [_user("Legs?"), _assistant("Six.", reasoning_content="Three pairs.")],
    "`<think>` in the content": [_user("Legs?"), _assistant(_THOUGHTS)],
    "`<think>` in two turns": [
        _user("Legs?"),
        _assistant(_THOUGHTS),
        _user("Wings?"),
        _assistant("<think>\nTwo pairs.\n</think>\n\nFour."),
    ],
    "call and result": [
        _user("Legs?"),
        _assistant("", tool_calls=[_CALL]),
        {"role": "tool", "name": "look_up", "tool_call_id": "call12345", "content": "insect"},
        _assistant("Six."),
    ],
    "text and call": [_user("Legs?"), _assistant("Let me see.", tool_calls=[_CALL])],
}


# -- what is trained ---------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """The tokens that are made of a conversation.

    Attributes:
        tokens, mask: of SFT on `messages`.
        completed: tokens of the last turn by SFT on `prompt` and `completion`.
        chosen: of a preference pair.
        expert: of expert data; None if they cannot have such a turn.
        prompt: the tokens before the last turn, in `completed`.
        habits: what is warned of.
    """

    tokens: list[int]
    mask: list[bool]
    completed: list[int]
    chosen: list[int]
    expert: list[int] | None
    prompt: list[int]
    habits: set[str]

    def turns(self) -> list[list[int]]:
        """The tokens of each trained turn."""
        spans = groupby(zip(self.tokens, self.mask, strict=True), key=lambda pair: pair[1])
        return [[token for token, _ in span] for marked, span in spans if marked]


def trained(tokenizer: Any, generation_config: Any, messages: list[dict[str, Any]]) -> Trained:
    """The tokens of a conversation that SFT, preference pairs and expert data train; ConfigError: it is refused."""
    habits: set[str] = set()
    tools = {"tools": [TOOL]} if any("tool_calls" in message for message in messages) else {}

    def example(**fields: Any) -> Example:
        return Example(tokenizer, fields | tools, generation_config=generation_config, report=habits.add)

    whole: Any = example(messages=messages).response()
    completed: Any = example(prompt=messages[:-1], completion=messages[-1:]).response()
    warned = set(habits)
    pair: Any = example(prompt=messages[:-1], chosen=messages[-1:], rejected=[_assistant("No.")]).pair()
    plain = set(messages[-1]) == {"role", "content"} and not tools
    expert: Any = None
    if plain:
        reader = AnswerReader(Taskset([{"messages": messages}]), tokenizer, generation_config=generation_config)
        expert = reader.read(1)[0]
    begin = completed.prompt_length
    return Trained(
        tokens=whole.tokens.tolist(),
        mask=[False] * whole.prompt_length + whole.action_mask.tolist(),
        completed=completed.tokens.tolist()[begin:],
        chosen=[*pair.tokens.tolist(), *pair.chosen.tolist()][begin:],
        expert=expert.tokens.tolist()[expert.prompt_length :] if plain else None,
        prompt=completed.tokens.tolist()[:begin],
        habits=warned,
    )


# -- the page ----------------------------------------------------------------------------------------------------------


def page() -> str:
    """The text of docs/chat_templates.md."""
    head = (Path(__file__).parent / "chat_templates.md").read_text()
    numbers = {habit: number for number, habit in enumerate(HABITS, start=1)}
    listed = "\n".join(f"{number}. {habit[0].upper()}{habit[1:]}." for habit, number in numbers.items())
    rows = "\n".join(row for name in NAMES for row in _rows(name, numbers))
    return head.replace("HABITS", listed).replace("ROWS", rows)


def _rows(name: str, numbers: dict[str, int]) -> Iterator[str]:
    tokenizer, generation_config = tokenizer_of(name)
    ends = sorted(turn_end(tokenizer, generation_config).tokens)
    shown = " ".join(_code(token) for token in tokenizer.convert_ids_to_tokens(ends))
    for kind, messages in KINDS.items():
        first = f"**{name}**<br>{shown}" if kind == next(iter(KINDS)) else ""
        yield f"| {first} | {kind} | {' | '.join(_cells(tokenizer, generation_config, messages, numbers))} |"


def _cells(tokenizer: Any, generation_config: Any, messages: Any, numbers: dict[str, int]) -> tuple[str, str]:
    try:
        made = trained(tokenizer, generation_config, messages)
    except ConfigError as error:
        reason = str(error).split(": ", 1)[-1] if "refuses" in str(error) else str(error).split(":")[0]
        return f"refused: {_escaped(reason)}", "refused"
    turns = " · ".join(_code(tokenizer.decode(turn)) for turn in made.turns())
    warned = "".join(f" ({numbers[habit]})" for habit in sorted(made.habits, key=numbers.__getitem__))
    others = {"completion": made.completed, "pairs": made.chosen, "expert data": made.expert}
    last = made.turns()[-1]
    other = [f"{form}: {_code(tokenizer.decode(t))}" for form, t in others.items() if t is not None and t != last]
    return turns + warned, "; ".join(other) or "the same"


def _code(text: str) -> str:
    return f"`{_escaped(text)}`"


def _escaped(text: str) -> str:
    return text.replace("\n", "⏎").replace("|", "\\|")

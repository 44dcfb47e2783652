"""Splits a response into its thoughts and its answer, the text behind the last closed thought.

These are plain functions of text. A response of this run's model is a `Response`, which also has what its text does not
show: the markers of `model.thoughts`, and whether the prompt had opened the thoughts already.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple


class Markers(NamedTuple):
    """The text that opens thoughts and the one that closes them."""

    opening: str
    closing: str


# Markers of the field's models, from their chat templates. If a response has several messages, the beginning of the
# next one closes the thoughts.
MARKERS = (
    Markers("<think>", "</think>"),  # DeepSeek, Qwen, GLM, Kimi-K2, Nemotron, Phi-4, SmolLM3, OLMo 3, ...
    Markers("<thinking>", "</thinking>"),
    Markers("<thought>", "</thought>"),  # EXAONE Deep
    Markers("<Thought>", "</Thought>"),  # Marco-o1
    Markers("<reasoning>", "</reasoning>"),
    Markers("[THINK]", "[/THINK]"),  # Magistral, Ministral
    Markers("<|channel|>analysis", "<|start|>assistant"),  # gpt-oss
    Markers("<|channel>thought", "<channel|>"),  # Gemma 4
    Markers("<unused94>thought", "<unused95>"),  # MedGemma
    Markers("<seed:think>", "</seed:think>"),  # Seed-OSS
    Markers("<mm:think>", "</mm:think>"),  # MiniMax-M3
    Markers("<longcat_think>", "</longcat_think>"),
    Markers("◁think▷", "◁/think▷"),  # Kimi-VL
    Markers("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi-K3
    Markers("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    Markers("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker, Sky-T1
    Markers("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Markers("<|content_thinking|>", "<|message_model|>"),  # Inkling
    Markers("to=self<|message|>", "<|start|>assistant"),  # Muse
)
# Plain words, which are markers only if the chat template has them.
PHRASES = (Markers("Here is my thought process:", "Here is my response:"),)  # Granite 3.2
# Texts that some of these models write around an answer.
FRAMES = (
    Markers("<|channel|>final<|message|>", "<|end|>"),
    Markers("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    Markers("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    Markers("<|begin_of_solution|>", "<|end_of_solution|>"),
    Markers("<|content_text|>", "<|end_message|>"),
    Markers("to=user<|message|>", "<|eom|>"),
)


class Response(str):
    """A response's text that also says how to find its thoughts; otherwise a plain str.

    Attributes:
        markers: markers of its model's thoughts.
        opened: true if the prompt ends with an opening marker, so that the response begins within the thoughts.
    """

    markers: Sequence[Markers]
    opened: bool

    def __new__(cls, text: str, markers: Sequence[Markers] = MARKERS, opened: bool = False) -> "Response":
        response = super().__new__(cls, text)
        response.markers, response.opened = markers, opened
        return response

    def with_text(self, text: str) -> "Response":
        """Another text for the same response, such as the one without its tool calls."""
        return Response(text, self.markers, self.opened)


def split_thoughts(response: str) -> tuple[str, str | None]:
    """The thoughts of a response, with their markers, and the answer that follows; together they are the response.

    The answer begins behind the last closing marker. Closing markers before it are part of the thoughts: they close an
    earlier thought, or the thoughts mention them. A closing marker also closes thoughts that the prompt opened. The
    answer is None if the response was cut off in its thoughts: opened behind the last closing marker, or by the prompt,
    and not closed.
    """
    markers, opened = (response.markers, response.opened) if isinstance(response, Response) else (MARKERS, False)
    end = 0
    for _, closing in markers:
        if (place := response.rfind(closing)) >= 0:
            end = max(end, place + len(closing))
    unfinished = opened and not end
    if unfinished or any(response.find(opening, end) >= 0 for opening, _ in markers):
        return str(response), None
    return response[:end], response[end:]


def answer_part(response: str) -> str | None:
    """The answer of a response without thoughts and `FRAMES`; None if the response was cut off before it.

    A response without thoughts is all answer.
    """
    answer = split_thoughts(response)[1]
    if answer is None:
        return None
    for opening, closing in FRAMES:
        bare = answer.strip()
        if bare.startswith(opening) or bare.endswith(closing):  # the prompt may have the opening one
            answer = bare.removeprefix(opening).removesuffix(closing)
    return answer


# -- the markers of a model --------------------------------------------------------------------------------------------

_NAMED = re.compile(r"think|thought|reason", re.IGNORECASE)
_TAG = re.compile(r"<[^<>\s'\"]+>|\[[^\[\]\s'\"]+\]")
# Replacements that make an opening marker a closing one.
_CLOSING = (("<", "</"), ("[", "[/"), ("<|", "<|/"), ("begin", "end"), ("start", "end"), ("START", "END"))


def named_markers(tokens: Iterable[str]) -> tuple[Markers, ...]:
    """The pairs among tokens or tags whose names speak of thoughts, such as <|think_start|> and <|think_end|>."""
    names = {token for token in tokens if _NAMED.search(token)}
    return tuple(
        Markers(opening, closing)
        for opening in sorted(names)
        for begin, end in _CLOSING
        if (closing := opening.replace(begin, end, 1)) != opening and closing in names
    )


@lru_cache(maxsize=16)
def markers_of(tokenizer: Any) -> tuple[Markers, ...]:
    """The field's markers, and further ones among a tokenizer's tokens and in its chat template."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    phrases = tuple(markers for markers in PHRASES if markers.opening in template)
    added = getattr(tokenizer, "get_added_vocab", dict)()
    named = named_markers((*added, *_TAG.findall(template)))
    return tuple(dict.fromkeys((*MARKERS, *named, *phrases)))


def opens_thoughts(prompt: str, markers: Sequence[Markers]) -> bool:
    """True if a prompt ends with an opening marker, as many chat templates make it; white space may follow it."""
    return prompt.rstrip().endswith(tuple(opening for opening, _ in markers))

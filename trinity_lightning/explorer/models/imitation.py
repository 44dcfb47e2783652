"""Renders conversations for SFT, preference pairs and expert data in the tokens that rollouts would have."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from trinity_lightning.common.pictures.parts import count_places, text_of
from trinity_lightning.common.pictures.prompt import WrittenPictures
from trinity_lightning.common.thoughts import Markers, Response, markers_of, split_thoughts
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.chat import REASONING, TEMPLATE, Messages, apply_template, continued
from trinity_lightning.explorer.models.tool_calls import call_of_message
from trinity_lightning.explorer.models.turns import common_length, encode_text, is_space, turn_end

logger = logging.getLogger(__name__)

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # opens the assistant's part of a chat template
_MARKER = re.compile(r"[^\w\s](?:\S{0,60}[^\w\s])$")  # at the end of a prompt, such as <think>

# Habits of chat templates that change what is trained on; each is warned of once a run, with the number of examples.
OTHER_PROMPT = (
    "the chat template shows turns behind another beginning than the prompt of rollouts ends with (thoughts that it "
    "opens or skips there): they are trained as it shows them; a variable of the template such as enable_thinking, in "
    "chat_template_kwargs, may make both alike"
)
OTHER_TURNS = (
    "the chat template shows earlier turns otherwise than the last one: the conversation is put together turn by turn, "
    "as rollouts are"
)
UNENDED = "the chat template writes no end token between turns: the tokenizer's is added, with which rollouts end, too"
UNLISTED = (
    "the chat template ends turns with the marker of the next one, which is no eos_token_id of generation_config.json: "
    "rollouts end with it, but other programs would not stop there; add it to that file"
)
CUT_BESIDE_CALLS = "the chat template leaves out the text beside tool calls"
MARKED_OTHERWISE = (
    "the template's {% generation %} marks are of another text than was given (a reasoning is cut), leave out the end "
    "of turns, or follow another prompt than rollouts have"
)
HABITS = (OTHER_PROMPT, OTHER_TURNS, UNENDED, UNLISTED, CUT_BESIDE_CALLS, MARKED_OTHERWISE)


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant, in tokens.

    Attributes:
        context: token ids that the response follows.
        response: its token ids; the last one ends the turn if `ended`.
        ended: True if the chat template has ended it.
        lacks: number of tokens at the end of the rollouts' prompt that the context lacks.
    """

    context: list[int]
    response: list[int]
    ended: bool
    lacks: int = 0


class Imitation:
    """Renders the conversations of one entry of a dataset.

    A trained turn has to follow the prompt that rollouts have, and to hold the text of the entry. The chat template's
    rendering is taken if both hold; otherwise the prompt and the text are joined. Each turn ends with an end token: the
    template's, the marker of the next turn, or `TurnEnd.closing`.

    Args:
        tokenizer: the policy's.
        tools: functions on offer.
        variables: variables of the chat template.
        generation_config: the policy's, for its end tokens.
        report: called with each habit of the chat template that changes what is trained on.
        pictures: the pictures of the entry's conversations; each of these begins with the same ones.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        generation_config: Any = None,
        report: Callable[[str], object] = logger.warning,
        pictures: WrittenPictures | None = None,
    ) -> None:
        self._tokenizer, self._tools, self._variables = tokenizer, tools, dict(variables or {})
        self._generation_config, self._report, self._pictures = generation_config, report, pictures
        self._end = turn_end(tokenizer, generation_config)
        self._encoded: dict[str, list[int]] = {}  # token ids by text: an entry's prompts are encoded more than once

    def conversation(self, messages: Messages, first: int = 0) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, and a mask of the trained ones: the assistant's turns from message `first` on.

        Raises:
            ConfigError: the chat template refuses the messages, or leaves out a reasoning or a tool call.
        """
        places = [place for place in range(first, len(messages)) if messages[place].get("role") == "assistant"]
        turns = {place: self._turn(messages, place) for place in places}
        return self._as_rendered(messages, turns) or self._joined(messages, turns)

    def completion(self, prompt: Messages, answer: Messages) -> tuple[list[int], list[int]]:
        """The tokens of the prompt that rollouts have, and those of the conversation to the end of its last turn.

        Raises:
            ConfigError: as `conversation`.
        """
        messages = [*prompt, *answer]
        context = self.context(prompt)
        tokens, mask = self.conversation(messages, len(prompt))
        if True not in mask:  # the answer has another role
            return context, self._up_to_end(tokens)[0]
        return context, tokens[: len(mask) - mask[::-1].index(True)]

    def text(self, text: str) -> list[int]:
        """The tokens of a plain text; the tokenizer's end token is added unless the text ends with an end token."""
        ends = tuple(self._tokenizer.convert_ids_to_tokens(list(self._end.tokens)))
        text = self._filled(text)
        if text.rstrip().endswith(ends):
            return self._up_to_end(encode_text(self._tokenizer, text))[0]
        return encode_text(self._tokenizer, text + (self._tokenizer.eos_token or ""))

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt that is plain text."""
        return encode_text(self._tokenizer, self._filled(text))

    def marked(self, messages: Messages) -> tuple[list[int], list[bool]] | None:
        """Tokens and mask as `conversation` returns them, by the template's {% generation %} marks.

        None: the template has no marks, or they do not fit and are not needed.
        """
        if not _MARKS.search(self._tokenizer.get_chat_template()):
            return None
        form = {"return_dict": True, "return_assistant_tokens_mask": True}
        rendered = apply_template(self._tokenizer, messages, self._tools, **form, **self._variables)
        tokens, mask = list(rendered["input_ids"]), [bool(marked) for marked in rendered["assistant_masks"]]
        if self._pictures is not None:
            tokens, mask = self._with_pictures(self._pictures, messages, tokens, mask)
        if True not in mask:
            return tokens, mask
        answers = {place: message for place, message in enumerate(messages) if message.get("role") == "assistant"}
        learned = [place for place in answers if self._is_marked(messages, place, tokens, mask)]
        fit = [self._begin_marks(messages[:place], self._turn(messages, place), tokens, mask) for place in learned]
        if self._end_marks(tokens, mask, len(answers)) and all(fit):
            return tokens, mask
        if len(learned) == len(answers):
            return None  # all turns are trained on, which `conversation` finds without marks
        self._report(MARKED_OTHERWISE)
        return tokens, mask

    def context(self, messages: Messages) -> list[int]:
        """The tokens of the prompt that rollouts have."""
        return self._encode(self._text(messages, add_generation_prompt=True))

    # -- one turn ------------------------------------------------------------------------------------------------------

    def _turn(self, messages: Messages, place: int) -> Turn:
        """The assistant's turn at a place: as the template shows it if that fits rollouts, else made of its text."""
        message = messages[place]
        prompt, shown = self._text(messages[:place], add_generation_prompt=True), self._text(messages[: place + 1])
        context, whole = self._encode(prompt), self._encode(shown)
        behind = _remainder(shown, prompt)
        if whole[: len(context)] == context:
            response = whole[len(context) :]
        else:
            response = None if behind is None else self._encode(behind)
        cut = lacking(message, self._opening_of(prompt) + (shown if behind is None else behind))
        if response is not None and not cut and not self._opens_twice(prompt, behind):
            return Turn(context, *self._up_to_end(response))
        text = None if message.get("tool_calls") else self._text_behind(prompt, message)
        if text is not None:
            return Turn(context, self._with_end(self._encode(text)), True)
        if cut == "content" and message.get("tool_calls"):
            self._report(CUT_BESIDE_CALLS)
        elif cut:
            raise ConfigError(
                f"the chat template leaves out '{cut}' of turn {place}",
                key=TEMPLATE,
                fix="write it into the content as the model is to write it, give another template (the tokenizer's "
                "chat_template), or leave it out yourself",
            )
        if response is not None:
            return Turn(context, *self._up_to_end(response))
        begin = common_length(context, whole)
        self._report(OTHER_PROMPT)
        return Turn(whole[:begin], *self._up_to_end(whole[begin:]), lacks=len(context) - begin)

    def _text_behind(self, prompt: str, message: Mapping[str, Any]) -> str | None:
        """The text that the assistant writes behind a prompt; None if its thoughts do not fit the prompt's."""
        content, opened = text_of(message.get("content")), self._opened_thoughts(prompt)
        reasoning = next((str(message[name]) for name in REASONING if message.get(name)), None)
        if reasoning is not None:
            return f"{reasoning.strip()}\n{opened.closing}\n\n{content}" if opened else None
        end, begin = prompt.rstrip(), content.lstrip()
        opening = opened.opening if opened else _shared_marker(end, begin)
        if opening and begin.startswith(opening):
            return begin.removeprefix(opening).removeprefix(prompt[len(end) :])
        if opened:
            return None if split_thoughts(Response(content, [opened], opened=True))[1] is None else content
        return None if self._skips_thoughts(end) and split_thoughts(content)[0] else content

    def _opened_thoughts(self, prompt: str) -> Markers | None:
        """The markers of the thoughts that a prompt opens; None if it opens none."""
        return next((pair for pair in markers_of(self._tokenizer) if prompt.rstrip().endswith(pair.opening)), None)

    def _opening_of(self, prompt: str) -> str:
        """The opening marker of thoughts at the end of a prompt, which belongs to the turn; "" without one."""
        opened = self._opened_thoughts(prompt)
        return opened.opening if opened else ""

    def _opens_twice(self, prompt: str, behind: str | None) -> bool:
        """True if the template opens thoughts again behind a prompt that has opened them."""
        opened = self._opened_thoughts(prompt)
        return opened is not None and behind is not None and opened.opening in behind

    def _skips_thoughts(self, end: str) -> bool:
        """True if a prompt ends with empty thoughts, as templates write them with enable_thinking=False."""
        ended = (pair for pair in markers_of(self._tokenizer) if end.endswith(pair.closing))
        return any(end.removesuffix(pair.closing).rstrip().endswith(pair.opening) for pair in ended)

    def _up_to_end(self, response: list[int]) -> tuple[list[int], bool]:
        """The response up to the end token that closes it, and True; if there is none, the whole response and False."""
        end = len(response)
        while end and self._is_end_or_space(response[end - 1]):
            end -= 1
        stop = next((place for place in range(end, len(response)) if response[place] in self._end.tokens), None)
        return (response, False) if stop is None else (response[: stop + 1], True)

    def _is_end_or_space(self, token: int) -> bool:
        return token in self._end.tokens or is_space(self._tokenizer, token)

    def _with_end(self, response: list[int], calls: bool = False) -> list[int]:
        """The response with an end token, in place of the whitespace at its end."""
        response, has_ended = self._up_to_end(response)
        if has_ended:
            return response
        end = len(response)
        while end and is_space(self._tokenizer, response[end - 1]):
            end -= 1
        return [*response[:end], *(self._end.closing_calls if calls else self._end.closing)]

    def _end_of_next(self, behind: Sequence[int]) -> int:
        """Number of tokens behind a turn up to the one that ends it, such as the next turn's marker; 0 without one."""
        places = (place for place, token in enumerate(behind) if not is_space(self._tokenizer, token))
        place = next(places, len(behind))
        if place == len(behind) or behind[place] not in self._end.tokens:
            return 0
        if behind[place] in self._end.unlisted and self._generation_config is not None:
            self._report(UNLISTED)
        return place + 1

    # -- a conversation ------------------------------------------------------------------------------------------------

    def _as_rendered(self, messages: Messages, turns: Mapping[int, Turn]) -> tuple[list[int], list[bool]] | None:
        """The conversation as the chat template shows it; None if rollouts would have had other tokens."""
        tokens = self._whole(messages)
        mask = [False] * len(tokens)
        for place, turn in turns.items():
            begin, stop = len(turn.context), len(turn.context) + len(turn.response)
            if tokens[:stop] != [*turn.context, *turn.response]:
                if place != max(turns):
                    self._report(OTHER_TURNS)
                return None
            if not turn.ended:
                marker = self._end_of_next(tokens[stop:])
                if not marker:
                    if place != len(messages) - 1:
                        self._report(UNENDED)
                    return None
                stop += marker
            mask[begin:stop] = [True] * (stop - begin)
        return tokens, mask

    def _joined(self, messages: Messages, turns: Mapping[int, Turn]) -> tuple[list[int], list[bool]]:
        """The conversation put together turn by turn, each behind the tokens of the turns before, as in rollouts."""
        tokens: list[int] = []
        mask: list[bool] = []
        last: int | None = None  # place of the turn before
        for place, turn in turns.items():
            context = turn.context
            if last is not None:
                between = messages[last + 1 : place]
                before = count_places(messages[: last + 1])
                context = self._continued(tokens, between, before)
                if not turns[last].ended:
                    marker = self._end_of_next(context[len(tokens) :])
                    mask += [True] * marker
                    if not marker:
                        tokens = self._with_end(tokens)
                        mask = [*mask, *[True] * (len(tokens) - len(mask))][: len(tokens)]
                        context = self._continued(tokens, between, before)
                context = context[: len(context) - turn.lacks]
            mask += [False] * (len(context) - len(mask))
            tokens = [*context, *turn.response]
            mask += [True] * len(turn.response)
            last = place
        if last is not None and not turns[last].ended:
            tokens = self._with_end(tokens, bool(messages[last].get("tool_calls")))
            mask = [*mask, *[True] * (len(tokens) - len(mask))][: len(tokens)]
        return tokens, mask

    def _continued(self, tokens: list[int], messages: Messages, before: int) -> list[int]:
        """The tokens with further messages behind them, before which there are so many pictures."""
        rendered = continued(self._tokenizer, messages, self._tools, tokens, self._generation_config, **self._variables)
        return replace(rendered, text=self._filled(rendered.text, before)).token_ids(self._tokenizer)

    # -- the template's marks ------------------------------------------------------------------------------------------

    def _with_pictures(
        self, pictures: WrittenPictures, messages: Messages, tokens: list[int], mask: list[bool]
    ) -> tuple[list[int], list[bool]]:
        """Tokens and mask of a conversation, whose pictures have one token each, with all tokens of its pictures.

        Raises:
            ConfigError: a picture and the text beside it have tokens in common, so that the marks have no sure place.
        """
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        [place], written = encode(pictures.token), iter(pictures.texts)
        pieces = [encode(next(written, "")) if token == place else [token] for token in tokens]
        marks = [[mark] * len(piece) for piece, mark in zip(pieces, mask, strict=True)]
        tokens, mask = [*chain.from_iterable(pieces)], [*chain.from_iterable(marks)]
        if tokens != self._whole(messages):
            raise ConfigError(
                "the marks ({% generation %}) of the chat template cannot be followed beside pictures",
                key=TEMPLATE,
                fix="give the tokenizer's chat_template without these marks: all turns of the assistant are learned",
            )
        return tokens, mask

    def _is_marked(self, messages: Messages, place: int, tokens: list[int], mask: list[bool]) -> bool:
        """True if a turn is trained on: tokens at its place are marked, or marked tokens anywhere hold its text."""
        spans = (messages[:place], messages[: place + 1])
        begin, end = (common_length(self._whole(span), tokens) if span else 0 for span in spans)
        marked = [token for token, is_marked in zip(tokens, mask, strict=True) if is_marked]
        written = _squeezed(self._tokenizer.decode(marked, skip_special_tokens=False))
        content = text_of(messages[place].get("content"))
        answer = _squeezed(split_thoughts(content)[1] or content)
        return any(mask[begin:end]) or (bool(answer) and answer in written)

    def _begin_marks(self, before: Messages, turn: Turn, tokens: list[int], mask: list[bool]) -> bool:
        """Unmark the tokens of the rollouts' prompt before a turn, in place; False if the tokens hold another turn."""
        up_to_turn = [*turn.context, *turn.response]
        if tokens[: len(up_to_turn)] != up_to_turn:
            return False
        begin = common_length(self._whole(before), turn.context) if before else 0
        mask[begin : len(turn.context)] = [False] * (len(turn.context) - begin)
        return True

    def _end_marks(self, tokens: list[int], mask: list[bool], turns: int) -> bool:
        """Move the end of every turn's marks to its end token, in place; False if a turn has no end token."""
        stops = [place for place in range(1, len(mask) + 1) if mask[place - 1] and not any(mask[place : place + 1])]
        ended = 0
        for stop in stops:
            begin = stop - mask[stop - 1 :: -1].index(False) if False in mask[:stop] else 0
            response, has_ended = self._up_to_end(tokens[begin:stop])
            if has_ended:
                mask[begin + len(response) : stop] = [False] * (stop - begin - len(response))
            elif behind := self._end_of_next(tokens[stop:]):
                mask[stop : stop + behind] = [True] * behind
            elif stop == stops[-1] and all(is_space(self._tokenizer, token) for token in tokens[stop:]):
                tokens[:] = self._with_end(tokens[:stop])
                mask[:] = [*mask[:stop], *[True] * (len(tokens) - stop)][: len(tokens)]
            else:
                continue
            ended += 1
        return ended >= min(turns, len(stops))

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _whole(self, messages: Messages) -> list[int]:
        return self._encode(self._text(messages))

    def _text(self, messages: Messages, **settings: Any) -> str:
        """The conversation as the chat template writes it. ConfigError: the template refuses it, or it is empty."""
        if not messages:
            raise ConfigError("the assistant's turn follows no message", fix="begin conversations with another role")
        return apply_template(self._tokenizer, messages, self._tools, tokenize=False, **settings, **self._variables)

    def _encode(self, text: str) -> list[int]:
        if text not in self._encoded:
            self._encoded[text] = self._tokenizer.encode(self._filled(text), add_special_tokens=False)
        return self._encoded[text]

    def _filled(self, text: str, before: int = 0) -> str:
        return text if self._pictures is None else self._pictures.fill(text, before)


def _remainder(shown: str, prompt: str) -> str | None:
    """The text behind a prompt in a rendering; None if the rendering begins with another text.

    The whitespace at the end of the prompt may differ.
    """
    if shown.startswith(prompt):
        return shown[len(prompt) :]
    end = prompt.rstrip()
    return shown[len(end) :].lstrip() if shown.startswith(end) and end != prompt else None


def _shared_marker(end: str, begin: str) -> str | None:
    """The marker that a prompt ends with and a content begins with; None if there is none."""
    marker = _MARKER.search(end)
    places = range(len(marker[0])) if marker else ()
    parts = (marker[0][place:] for place in places if marker)
    return next((part for part in parts if len(part) > 2 and not part[0].isalnum() and begin.startswith(part)), None)


def lacking(message: Mapping[str, Any], text: str) -> str | None:
    """The name of a message's field that a rendering leaves out, ignoring whitespace; None if it shows all fields."""
    shown = _squeezed(text)
    for name in ("content", *REASONING):
        if _squeezed(text_of(message.get(name))) not in shown:
            return name
    calls = [call_of_message(entry) for entry in message.get("tool_calls") or ()]
    words = [word for call in calls if call for word in (call.name, *call.arguments)]
    return None if all(_squeezed(word) in shown for word in words) else "tool_calls"


def _squeezed(text: str) -> str:
    """The text without its whitespace, which templates trim and add."""
    return "".join(text.split())

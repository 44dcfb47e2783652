"""The tokens that begin and end a turn of a conversation, the same in training, expert data and rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

# A stand-in for an answer, by which the text that a template writes around answers is found.
PLACEHOLDER = "THE-RESPONSE-STANDS-HERE"
QUESTION: dict[str, Any] = {"role": "user", "content": "."}
RESULT: dict[str, Any] = {"role": "tool", "content": "."}

# -- the beginning -----------------------------------------------------------------------------------------------------


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain text, with the tokenizer's first tokens (such as BOS) once at the beginning.

    The text may have them already, as a rendered chat does. Tokens that the tokenizer adds at the end of a text are
    left out, because a prompt that has ended cannot be continued.
    """
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    beginning = _beginning(tokenizer)
    return token_ids if token_ids[: len(beginning)] == beginning else [*beginning, *token_ids]


def _beginning(tokenizer: Any) -> list[int]:
    """Token ids that the tokenizer adds in front of a text."""
    alone, added = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    return added[: next((place for place in range(len(added)) if added[place : place + len(alone)] == alone), 0)]


# -- the end -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnEnd:
    """The tokens that end a turn of the model.

    Attributes:
        tokens: all end tokens, taken from the tokenizer, generation_config.json and the chat template.
        closing: token ids that the chat template writes behind the last answer, up to the first end token. If the
            template writes no end token: the marker of the user's turn if generation_config.json lists it, else the
            tokenizer's end token.
        closing_calls: the same behind an answer that calls tools.
        markers: tokens that begin the next turn and thereby end this one, as in the GLM family; usually none.
        unlisted: markers that the model's files do not list as end tokens.
        earlier: the token that the template writes in place of `closing` behind turns before the last, as gpt-oss's
            template does; None: none.
    """

    tokens: frozenset[int]
    closing: tuple[int, ...]
    closing_calls: tuple[int, ...]
    markers: frozenset[int] = field(default=frozenset())
    unlisted: frozenset[int] = field(default=frozenset())
    earlier: int | None = None

    def already_written(self, last: int, behind: Sequence[int]) -> int:
        """Number of tokens that a template writes behind a turn, but which the turn itself already ended with.

        Args:
            last: the turn's last token. If the turn was cut off, it is no end token: the template closes the turn.
            behind: the tokens that the template writes behind the turn and before the model's next one.
        """
        # The marker of the next turn is written anew, because it names the next role, unless this turn ended with it.
        if last in self.tokens and self.markers.isdisjoint(self.closing):
            if tuple(behind[: len(self.closing)]) == self.closing:
                return len(self.closing)
            if behind and behind[0] == self.earlier:
                return 1
        return int(list(behind[:1]) == [last])


def end_tokens(tokenizer: Any, generation_config: Any = None) -> frozenset[int]:
    """Token ids that end a response: see `TurnEnd.tokens`.

    Args:
        tokenizer: a Hugging Face tokenizer, with or without a chat template.
        generation_config: the model's; only its `eos_token_id` is read. None: it has none.
    """
    return turn_end(tokenizer, generation_config).tokens


def turn_end(tokenizer: Any, generation_config: Any = None) -> TurnEnd:
    """The tokens that end a turn of the model; arguments as `end_tokens`."""
    listed = getattr(generation_config, "eos_token_id", None)
    listed = () if listed is None else (listed,) if isinstance(listed, int) else tuple(listed)
    template = tokenizer.get_chat_template() if getattr(tokenizer, "chat_template", None) else None
    return _turn_end(tokenizer, template, tokenizer.eos_token_id, frozenset(listed))


@lru_cache(maxsize=16)
def _turn_end(tokenizer: Any, template: str | None, eos: int | None, listed: frozenset[int]) -> TurnEnd:
    known = listed if eos is None else listed | {eos}
    default = () if eos is None else (eos,)
    if template is None:
        return TurnEnd(known, default, default)
    last, question, result = (_behind_answer(tokenizer, message) for message in (None, QUESTION, RESULT))
    # Tokens behind every answer are tried first: Phi's template ends turns with one token, and conversations with
    # another. `earlier` is for templates that do not end the last turn.
    shared = last[: common_length(last, question or last)]
    earlier = question[0] if question[:1] and question[0] == _end_of_user_turn(tokenizer) else None
    for tokens in (shared, last, () if earlier is None else (earlier,)):
        if closing := _closing(tokenizer, tokens, known):
            return TurnEnd(known | {closing[-1]}, closing, closing, earlier=earlier)
    user, tool = _first_control(tokenizer, question), _first_control(tokenizer, result)
    markers = frozenset(marker for marker in (user, tool) if marker is not None)
    closing = (user,) if user is not None and user in listed else default
    return TurnEnd(
        known | markers, closing, (tool,) if tool is not None and tool in listed else closing, markers, markers - known
    )


def _behind_answer(tokenizer: Any, following: dict[str, Any] | None) -> tuple[int, ...]:
    """Tokens that the template writes behind an answer, the next message included; () if it refuses the messages."""
    messages = [QUESTION, {"role": "assistant", "content": PLACEHOLDER}, *([following] if following else [])]
    text = _text_or_empty(tokenizer, [_in_template_form(tokenizer, message) for message in messages])
    _, answer, behind = text.rpartition(PLACEHOLDER)
    return tuple(tokenizer.encode(behind, add_special_tokens=False)) if answer else ()


def _end_of_user_turn(tokenizer: Any) -> int | None:
    """The control token with which the chat template ends a user's turn; None if it ends without one."""
    text = _text_or_empty(tokenizer, [_in_template_form(tokenizer, QUESTION)])
    tokens = tokenizer.encode(text.rstrip(), add_special_tokens=False)
    return tokens[-1] if tokens and is_control(tokenizer, tokens[-1]) else None


def _closing(tokenizer: Any, tokens: tuple[int, ...], known: frozenset[int]) -> tuple[int, ...]:
    """The tokens up to the first known end token, or else up to the last control token; () if there is neither."""
    ends = [place for place, token in enumerate(tokens) if token in known][:1]
    ends = ends or [place for place, token in enumerate(tokens) if is_control(tokenizer, token)][-1:]
    return tokens[: ends[0] + 1] if ends else ()


def _first_control(tokenizer: Any, tokens: tuple[int, ...]) -> int | None:
    """The control token that the tokens begin with, ignoring whitespace; None if they begin with another."""
    written = (token for token in tokens if not is_space(tokenizer, token))
    token = next(written, None)
    return token if token is not None and is_control(tokenizer, token) else None


def is_control(tokenizer: Any, token: int) -> bool:
    """True if the token was added to the vocabulary, as end tokens and role markers are, and is not whitespace."""
    added = tokenizer.added_tokens_decoder.get(token)
    return added is not None and bool(added.content.strip())


def is_space(tokenizer: Any, token: int) -> bool:
    """True if the token's text is whitespace."""
    return not tokenizer.decode([token], skip_special_tokens=False).strip()


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of leading elements that both sequences share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


# -- the form in which a template takes a message ----------------------------------------------------------------------


@lru_cache(maxsize=16)
def takes_parts(tokenizer: Any, template: str) -> bool:
    """True if the chat template shows a content only if it is a list of parts, as templates of vision models do."""
    message = {"role": "user", "content": PLACEHOLDER}
    texts = [_text_or_empty(tokenizer, [form], chat_template=template) for form in (message, in_parts(message))]
    return [PLACEHOLDER in text for text in texts] == [False, True]


def _in_template_form(tokenizer: Any, message: dict[str, Any]) -> dict[str, Any]:
    return in_parts(message) if takes_parts(tokenizer, tokenizer.get_chat_template()) else message


def shows(tokenizer: Any, *messages: dict[str, Any]) -> bool | None:
    """True if the chat template shows the message that holds the placeholder; None if it refuses the messages."""
    text = _text_or_empty(tokenizer, [_in_template_form(tokenizer, message) for message in messages])
    return PLACEHOLDER in text if text else None


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a list of one part; a list stays as it is."""
    content = message["content"]
    return message | {"content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


@lru_cache(maxsize=16)
def shows_pictures(tokenizer: Any, template: str) -> bool:
    """True if the chat template reads parts, as other contents, and has a place for a picture."""
    text = {"type": "text", "text": PLACEHOLDER}
    contents: list[Any] = [PLACEHOLDER, [text], [{"type": "image"}, text]]
    turns = [[{"role": "user", "content": content}] for content in contents]
    plain, in_part, with_picture = (_text_or_empty(tokenizer, turn, chat_template=template) for turn in turns)
    reads_parts = in_part == plain or takes_parts(tokenizer, template)
    return reads_parts and PLACEHOLDER in with_picture and with_picture != in_part


def _text_or_empty(tokenizer: Any, messages: list[dict[str, Any]], **settings: Any) -> str:
    """The conversation as text; empty if the template refuses it: it is a program, which may raise any error."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    except Exception:
        return ""

"""Messages whose content is a list of parts: texts, and pictures or places for them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_lightning.common.pictures.picture import FIELD, Picture, is_image, read_picture
from trinity_lightning.errors import ConfigError

IN_TEXT = "<image>"  # the same within a text, as datasets for LLaVA write it
SHOWN = "[picture]"  # in place of a picture in texts for people
_OWN = "image"  # key of a picture that a part brings along
_OWN_NAMES = ("image", "image_url", "path", "url")  # keys under which parts may have it

Messages = list[dict[str, Any]]


def is_place(part: object) -> bool:
    """True for a part that is a picture's place, as chat templates or OpenAI's API have it."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def has_places(message: Mapping[str, Any]) -> bool:
    """True if the message has a place for a picture."""
    return any(_places([message]))


def count_places(messages: Iterable[Mapping[str, Any]]) -> int:
    """Number of places for pictures."""
    return sum(1 for _ in _places(messages))


def pictures_in(messages: Iterable[Mapping[str, Any]]) -> list[Picture]:
    """The pictures of messages, in the order of their places.

    Raises:
        ConfigError: a place has none, or one that cannot be read.
    """
    values = [_own(place) for place in _places(messages)]
    if missing := sum(value is None for value in values):
        raise ConfigError(
            f"the messages have {len(values)} places for pictures, {missing} of them without a picture",
            key=FIELD,
            fix="give the pictures in the task's entry, in their parts, or to chat(messages, images=...)",
        )
    return [read_picture(value, Path()) for value in values]


def without_pictures(messages: Iterable[Any]) -> list[Any]:
    """Messages without the pictures that `placed` has put in their places, for files and for raw tasks."""
    return [
        {**message, "content": [_place() if _has_picture(part) else part for part in message["content"]]}
        if has_places(message)
        else message
        for message in messages
    ]


def _has_picture(part: Mapping[str, Any]) -> bool:
    return isinstance(_picture_in(part), Picture)


def with_data_urls(messages: Iterable[Mapping[str, Any]]) -> Messages:
    """Messages as OpenAI's API has them, each `Picture` as a data URL."""

    def part_of(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"type": "image_url", "image_url": {"url": _own(part).data_url}} if _has_picture(part) else part

    return [
        {**message, "content": [part_of(part) for part in message["content"]]} if has_places(message) else {**message}
        for message in messages
    ]


def _places(messages: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            yield from filter(is_place, content)


def text_of(content: object) -> str:
    """The text of a message's content: text, null (it only calls tools) or a list of parts, as in OpenAI's API.

    Raises:
        ConfigError: a part is neither text nor a picture, which is `[picture]` in the result.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(is_place(part) or _is_text(part) for part in content):
        return "".join(SHOWN if is_place(part) else part["text"] for part in content)
    raise ConfigError(f"a message's content must be text, or parts of type 'text'; this is {type(content).__name__}.")


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def read_parts(parts: Iterable[Mapping[str, Any]]) -> Messages:
    """Parts in one form: adjacent texts joined, none of them empty, and a picture that a part has under one name."""
    read: Messages = []
    for part in parts:
        if is_place(part):
            read.append(_place(_own(part)))
        elif read and not is_place(read[-1]):
            read[-1] = _text_part(read[-1]["text"] + text_of([part]))
        elif text := text_of([part]):
            read.append(_text_part(text))
    return read


def empty_places(parts: Iterable[Mapping[str, Any]]) -> Messages:
    """Parts in the form of `read_parts`, as chat templates read them: without pictures in their places."""
    return [_place() if is_place(part) else part for part in read_parts(parts)]


def _own(part: Mapping[str, Any]) -> Any:
    """The picture that a part brings along; None without any."""
    return next((part[name] for name in _OWN_NAMES if part.get(name) is not None), None)


def parts_of(value: object) -> Messages | None:
    """A picture, or a list with pictures, as the parts of a message; None: the value has no picture.

    Pixels are read now: who made the picture may draw into it, or write its file anew.

    Args:
        value: a picture of Pillow's, a `Picture`; or a list of these, of parts that bring a picture along, of texts,
            and of other values, which become JSON.

    Raises:
        ConfigError: as in `read_picture`; or the file is damaged.
    """
    values = list(value) if isinstance(value, list | tuple) else [value]
    if isinstance(value, Mapping) or not any(_picture_in(element) is not None for element in values):
        return None
    return read_parts(map(_part_of, values))


def _picture_in(value: object) -> Any:
    """A value that is a picture; or the picture that a part brings along, None without any."""
    if is_image(value) or isinstance(value, Picture):
        return value
    return _own(value) if isinstance(value, Mapping) and is_place(value) else None


def _part_of(value: Any) -> Mapping[str, Any]:
    if (source := _picture_in(value)) is not None:
        picture = read_picture(source, Path())
        _ = picture.image
        return _place(picture)
    if is_place(value) or _is_text(value):
        return value
    return _text_part(value if isinstance(value, str) else json_text(value))


def json_text(value: object) -> str:
    """Any value as JSON, for a model to read."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _place(picture: Any = None) -> dict[str, Any]:
    """The place of a picture, or of this one."""
    return {"type": "image"} if picture is None else {"type": "image", _OWN: picture}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


# -- pictures in their places ------------------------------------------------------------------------------------------


def placed(messages: Messages, pictures: Sequence[Picture], folder: Path) -> Messages:
    """Messages with each picture in its place, a part {"type": "image", "image": Picture}.

    Args:
        messages: messages; a place may have a picture of its own, others take the next one of `pictures`. Without any
            place, `<image>` in a user's text is one. Without that, too, the pictures come before the first user's text.
        pictures: pictures without a place; or those of all places, if the places' own ones are the same.
        folder: folder of the data, for pictures that places have.

    Raises:
        ConfigError: a picture cannot be read, or there are fewer or more places than pictures.
    """
    if not pictures and not count_places(messages):
        return messages
    messages = [
        message | {"content": read_parts(message["content"])} if has_places(message) else message
        for message in messages
    ]
    if pictures and not count_places(messages):
        messages = _with_places(messages, len(pictures))
    own = [read_picture(place[_OWN], folder) if _OWN in place else None for place in _places(messages)]
    rest = iter(_in_order(own, pictures))
    return [
        message | {"content": [_place(next(rest)) if is_place(part) else part for part in message["content"]]}
        if has_places(message)
        else message
        for message in messages
    ]


def _in_order(own: Sequence[Picture | None], pictures: Sequence[Picture]) -> list[Picture]:
    """The picture of each place: its own, or the next of `pictures`. These may repeat the places' own, all of them."""
    if len(own) == len(pictures) and all(
        mine is None or mine == picture for mine, picture in zip(own, pictures, strict=True)
    ):
        return list(pictures)
    free = sum(mine is None for mine in own)
    if free != len(pictures):
        filled = f" of {len(own)}, the others with pictures of their own" * (free < len(own))
        raise ConfigError(
            f"the messages have places for {free} pictures{filled}, and there are {len(pictures)} pictures",
            key=FIELD,
            fix="give each picture a part {'type': 'image'}, or write no such part, to have them before the text",
        )
    rest = iter(pictures)
    return [next(rest) if mine is None else mine for mine in own]


def _with_places(messages: Messages, count: int) -> Messages:
    """Messages with places where the user's texts have `<image>`, or else with all before the first of these texts."""
    asked = {turn: message for turn, message in enumerate(messages) if message.get("role") == "user"}
    texts = {turn: text_of(message.get("content")) for turn, message in asked.items()}
    if not texts:
        raise ConfigError("there are pictures, and no message of the user to show them in", key=FIELD)
    named = {turn: _split(text) for turn, text in texts.items() if IN_TEXT in text}
    first, text = next(iter(texts.items()))
    contents = named or {first: read_parts([*(_place() for _ in range(count)), _text_part(text)])}
    return [
        message | {"content": contents[turn]} if turn in contents else message for turn, message in enumerate(messages)
    ]


def _split(text: str) -> Messages:
    first, *others = map(_text_part, text.split(IN_TEXT))
    return read_parts([first, *(part for other in others for part in (_place(), other))])

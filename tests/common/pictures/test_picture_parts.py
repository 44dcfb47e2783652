"""Places of pictures in messages."""

import copy
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.errors import refuses

from trinity_lightning.common.pictures.parts import (
    count_places,
    has_places,
    parts_of,
    pictures_in,
    placed,
    text_of,
    with_data_urls,
    without_pictures,
)
from trinity_lightning.common.pictures.picture import FIELD, Picture
from trinity_lightning.errors import ConfigError

RED, BLUE, GREEN = (Picture(Image.new("RGB", (2, 2), color)) for color in ("red", "blue", "green"))
PLACE = {"type": "image"}
OWN = {"type": "image", "image": GREEN}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


SYSTEM, ANSWER = {"role": "system", "content": "<image>?"}, {"role": "assistant", "content": "<image>."}

CASES: dict[str, tuple[list[dict[str, Any]], list[Picture], list[dict[str, Any]], list[Picture]]] = {
    "text alone": ([SYSTEM, user("a <image>")], [], [SYSTEM, user("a <image>")], []),
    "before the first user's text": (
        [SYSTEM, user("a"), ANSWER, user("b")],
        [RED, BLUE],
        [SYSTEM, user([PLACE, PLACE, text("a")]), ANSWER, user("b")],
        [RED, BLUE],
    ),
    "before texts in parts": ([user([text("a"), text("b")])], [RED], [user([PLACE, text("ab")])], [RED]),
    "no text": ([user("")], [RED], [user([PLACE])], [RED]),
    "in parts": (
        [user([text("a"), PLACE, text("b"), text("c")]), ANSWER, user([PLACE])],
        [RED, BLUE],
        [user([text("a"), PLACE, text("bc")]), ANSWER, user([PLACE])],
        [RED, BLUE],
    ),
    "in users' texts": (
        [SYSTEM, user("<image>\na"), ANSWER, user("b<image>c<image>")],
        [RED, BLUE, RED],
        [SYSTEM, user([PLACE, text("\na")]), ANSWER, user([text("b"), PLACE, text("c"), PLACE])],
        [RED, BLUE, RED],
    ),
    "a text beside parts": ([user([PLACE, text("<image>")])], [RED], [user([PLACE, text("<image>")])], [RED]),
    "own ones": ([user([PLACE, OWN, PLACE])], [RED, BLUE], [user([PLACE, PLACE, PLACE])], [RED, GREEN, BLUE]),
    "own ones alone": (
        [user([OWN, {"type": "image_url", "image_url": RED}, {"type": "image", "image": None, "path": BLUE}])],
        [],
        [user([PLACE, PLACE, PLACE])],
        [GREEN, RED, BLUE],
    ),
}


@pytest.mark.parametrize(("messages", "pictures", "expected", "ordered"), CASES.values(), ids=CASES)
def test_pictures_take_places(messages: Any, pictures: Any, expected: Any, ordered: Any) -> None:
    before = copy.deepcopy(messages)
    result = placed(messages, pictures, Path())
    assert (without_pictures(result), pictures_in(result)) == (expected, ordered)
    assert messages == before
    assert placed(expected, ordered, Path()) == result
    assert placed(result, [], Path()) == placed(result, ordered, Path()) == result


def test_own_pictures_are_read_in_the_folder(tmp_path: Path) -> None:
    RED.image.save(tmp_path / "a.png")
    for part in ({"type": "image", "image": "a.png"}, {"type": "image_url", "image_url": {"url": "a.png"}}):
        assert placed([user([part])], [], tmp_path) == [user([PLACE | {"image": RED}])]


@pytest.mark.parametrize(
    ("messages", "pictures"),
    [
        ([user([PLACE])], []),
        ([user([PLACE])], [RED, BLUE]),
        ([user([PLACE, PLACE])], [RED]),
        ([user([OWN])], [RED]),
        ([user([OWN, PLACE])], [RED, BLUE]),
        ([user([OWN, OWN])], [GREEN]),
        ([user("<image>")], [RED, BLUE]),
        ([SYSTEM], [RED]),
    ],
)
def test_as_many_places_as_pictures(messages: Any, pictures: Any) -> None:
    with refuses(FIELD):
        placed(messages, pictures, Path())


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (GREEN.image, [OWN]),
        (GREEN, [OWN]),
        (["a", GREEN.image, "b", "c", OWN], [text("a"), OWN, text("bc"), OWN]),
        ((GREEN, {"left": 2}, text("!")), [OWN, text('{"left": 2}!')]),
        ("a", None),
        (["a", "b"], None),
        ([{"role": "user", "content": "a"}], None),
        (OWN, None),
        (["a", PLACE], None),
        (3, None),
        ([], None),
    ],
)
def test_answers_with_pictures_become_parts(value: Any, parts: Any) -> None:
    assert parts_of(value) == parts


def test_a_canvas_is_read_before_it_is_drawn_into() -> None:
    canvas = GREEN.image.copy()
    [part] = parts_of(canvas) or []
    canvas.paste(RED.image)
    assert part["image"] == GREEN


def test_messages_for_endpoints_have_data_urls() -> None:
    messages = [SYSTEM, user([PLACE, text("a"), PLACE])]
    [system, asked] = with_data_urls(placed(messages, [RED, BLUE], Path()))
    assert system == SYSTEM
    assert [part.get("type") for part in asked["content"]] == ["image_url", "text", "image_url"]
    assert pictures_in([asked]) == [RED, BLUE]


def test_pictures_in_places_may_be_given_again_beside_them(tmp_path: Path) -> None:
    GREEN.image.save(tmp_path / "a.png")
    again = Picture(tmp_path / "a.png")
    for pictures, parts in (([again], [OWN]), ([RED, again], [PLACE, OWN]), ([again, RED], [OWN, PLACE])):
        assert pictures_in(placed([user(parts)], pictures, Path())) == pictures
    unread = Picture(tmp_path / "a.png")
    [there] = pictures_in(placed([user([{"type": "image", "path": "a.png"}])], [unread], tmp_path))
    assert vars(there) == {"source": tmp_path / "a.png"}  # the same file is known without its pixels
    with refuses(FIELD) as refused:
        placed([user([OWN])], [RED], Path())
    assert "pictures of their own" in str(refused.value)


def test_texts_of_contents() -> None:
    assert text_of([text("a"), PLACE, text("b")]) == "a[picture]b"
    assert (text_of(None), text_of("a"), text_of([])) == ("", "a", "")
    for content in (3, [3], [{"type": "text"}], [{"type": "video"}]):
        with pytest.raises(ConfigError, match="text"):
            text_of(content)


def test_places_are_counted() -> None:
    messages = [SYSTEM, user([PLACE, text("a"), OWN]), {"role": "assistant", "content": None, "tool_calls": []}]
    assert count_places(messages) == 2
    assert list(map(has_places, messages)) == [False, True, False]

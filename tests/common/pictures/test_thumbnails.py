"""Small copies of pictures: how large they are, who carries them, and which files are read."""

import os
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from support.pictures import experience, prompt_of, random_picture

from trinity_lightning.common.inference import Completion
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.common.pictures.thumbnail_files import MOST_SHOWN, files_of
from trinity_lightning.common.pictures.thumbnails import (
    CARRIED,
    FILES,
    names_in,
    notes_of,
    side_by_side,
    taken_from,
    write_thumbnails,
)
from trinity_lightning.explorer.workflows.workflow import experience_of

FIRST, SECOND = random_picture(1, (20, 40)), random_picture(2, (300, 30))
NAMES = [f"{picture.digest}.jpg" for picture in (FIRST, SECOND)]


def prompt() -> PicturePrompt:
    return prompt_of("<image>, <image>?", [FIRST, SECOND])


@pytest.mark.parametrize(("size", "expected"), [((5000, 700), (128, 18)), ((3, 2000), (1, 128)), ((20, 40), (20, 40))])
def test_a_thumbnail_is_small(size: tuple[int, int], expected: tuple[int, int]) -> None:
    noise = Picture(Image.frombytes("RGB", size, os.urandom(3 * size[0] * size[1])))
    assert Image.open(BytesIO(noise.thumbnail)).size == expected
    assert len(noise.thumbnail) < 2**15


def test_a_rollout_carries_its_prompts_thumbnails_until_they_are_taken() -> None:
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    made = experience_of(Completion(prompt(), [20], [-1.0], "3", "stop"), asked)
    assert names_in(made) == NAMES
    assert made.prompt_text == "[picture]?"
    assert made.info[CARRIED].keys() == {*NAMES}
    assert made.info[CARRIED][NAMES[0]] is FIRST.thumbnail  # which the rollouts of a prompt share
    assert taken_from([made, experience(prompt(), [5])]) == {
        f"{picture.digest}.jpg": picture.thumbnail for picture in (FIRST, SECOND)
    }
    assert made.info == {"finish_reason": "stop", FILES: NAMES}
    assert taken_from([made]) == {}


@pytest.mark.parametrize("prompt_of_run", [[1, 2], prompt()], ids=["text", "pictures"])
def test_a_workflows_own_entries_of_info_stay(prompt_of_run: list[int]) -> None:
    own = {"pictures": 2, "thumbnails": {"a.jpg": b"mine"}}
    completion = Completion(prompt_of_run, [20], [-1.0], "3", "stop")
    made = experience_of(completion, [], info=own)
    assert taken_from([made]).keys() == ({*NAMES} if isinstance(prompt_of_run, PicturePrompt) else set())
    assert names_in(made) == (NAMES if isinstance(prompt_of_run, PicturePrompt) else [])
    assert own.items() <= made.info.items()


def test_rollouts_of_text_carry_nothing() -> None:
    assert notes_of([1, 2]) == {}
    assert experience_of(Completion([1, 2], [20], [-1.0], "3", "stop"), []).info == {"finish_reason": "stop"}


def test_of_many_pictures_the_first_are_carried() -> None:
    many = [random_picture(seed, (9, 9)) for seed in range(MOST_SHOWN + 2)]
    assert notes_of(prompt_of("<image>" * len(many), many))[FILES] == [f"{p.digest}.jpg" for p in many[:MOST_SHOWN]]


def test_each_is_written_once_and_read_by_a_name_that_is_a_hash(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    write_thumbnails(folder, taken_from([experience(prompt(), [5], info=notes_of(prompt()))]))
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    (folder / NAMES[0]).write_bytes(FIRST.thumbnail)
    before = [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]
    write_thumbnails(folder, dict.fromkeys(NAMES, b"others"))
    assert [path.stat().st_mtime_ns for path in sorted(folder.iterdir())] == before
    (tmp_path / "secret.jpg").write_bytes(FIRST.thumbnail)
    hostile = ["../secret.jpg", str(tmp_path / "secret.jpg"), f"{'0' * 32}.jpg", NAMES[1] + "\n", 3, None, ["a"]]
    assert files_of(folder, [*hostile, *NAMES]) == [folder / name for name in NAMES]
    assert files_of(folder, NAMES[0]) == files_of(folder, None) == files_of(folder, {"a": 1}) == []
    both = side_by_side(files_of(folder, NAMES))
    assert both.size == (20 + 128, 40)

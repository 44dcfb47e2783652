"""Small copies of the pictures of prompts, for people to look at.

A rollout notes the hashes of its prompt's pictures. The copies go with it to the explorer, which takes them out of it
before it is stored, and has each written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.files import disk_full_named
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.common.pictures.thumbnail_files import MOST_SHOWN
from trinity_lightning.common.runs import RESERVED

if TYPE_CHECKING:
    from PIL import Image

# Entries of an experience's info: the names of files, and the files' contents by their names.
FILES, CARRIED = f"{RESERVED}picture_files", f"{RESERVED}thumbnails"


def notes_of(prompt: object) -> dict[str, Any]:
    """Entries of an experience's info for the pictures of its prompt; none for a prompt without pictures."""
    pictures: Sequence[Picture] = prompt.pictures[:MOST_SHOWN] if isinstance(prompt, PicturePrompt) else ()
    thumbnails = {f"{picture.digest}.jpg": picture.thumbnail for picture in pictures}
    return {FILES: [f"{picture.digest}.jpg" for picture in pictures], CARRIED: thumbnails} if pictures else {}


def taken_from(experiences: Iterable[Experience]) -> dict[str, bytes]:
    """The thumbnails that experiences carry, by the names of their files; they do not carry them any more."""
    return {name: content for experience in experiences for name, content in experience.info.pop(CARRIED, {}).items()}


def names_in(experience: Experience) -> list[str]:
    """The names of the files with thumbnails of an experience's pictures."""
    return list(experience.info.get(FILES, ()))


def write_thumbnails(folder: Path, thumbnails: Mapping[str, bytes]) -> None:
    """Write thumbnails that are not in the folder yet. Nothing waits for the disk: a run does not need them.

    Raises:
        DiskFullError: the disk is full.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in thumbnails.items():
        if not (file := folder / name).exists():
            temporary = file.with_name(f".{name}.tmp")
            with disk_full_named(file):
                temporary.write_bytes(content)
            temporary.replace(file)


def side_by_side(files: Sequence[Path]) -> Image.Image:
    """One picture of several thumbnails, at least one."""
    from PIL import Image

    pictures = [Image.open(file) for file in files]
    whole = Image.new("RGB", (sum(p.width for p in pictures), max(p.height for p in pictures)), "white")
    left = 0
    for picture in pictures:
        whole.paste(picture, (left, 0))
        left += picture.width
    return whole

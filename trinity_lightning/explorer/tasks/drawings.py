"""Pictures that the package draws, with questions: how many squares there are, and which colour they have."""

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

from trinity_lightning.config.values import one_of, whole_number
from trinity_lightning.errors import ConfigError

EDGE = 64  # pixels of a picture's edge
CELLS = 4  # places for squares in a row, and in a column
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 205, 40)}
QUESTIONS = {
    "count": "How many squares?",
    "colour": "Which colour? " + ", ".join(f"{number} {name}" for number, name in enumerate(COLOURS, start=1)),
}
SPLITS = {"train": 4096, "heldout": 64}  # and how many entries they have


HELD_OUT = 8  # one picture in so many is held out, by its content


def drawings(
    split: str = "train", size: int | None = None, questions: str | Sequence[str] = ("colour",), most: int = 4
) -> "Drawings":
    """Pictures of equal squares on white, each with a question that a number from 1 to 9 answers.

    Args:
        split: `train` or `heldout`.
        size: number of entries; None: 4,096, or 64 that are held out.
        questions: `count` (how many squares there are), `colour` (which colour they have), or both, of which an entry
            has one.
        most: most squares of a picture.

    Raises:
        ConfigError: an unknown split or question, or a number out of its range.
    """
    one_of(".split", split, SPLITS, label="split of the drawings")
    names = [questions] if isinstance(questions, str) else sorted(questions)
    if not names:
        raise ConfigError("the drawings have no question", key=".args.questions", fix=f"name {' or '.join(QUESTIONS)}")
    for question in names:
        one_of(".args.questions", question, QUESTIONS, label="question about drawings")
    whole_number(".args.most", most, least=1, most=9)
    whole_number(".size", size, least=1, optional=True)
    return Drawings(split, size or SPLITS[split], names, most)


@dataclass(frozen=True)
class Drawings:
    """Entries that are drawn on demand, each the same in every process; no picture is in both splits."""

    split: str
    size: int
    questions: Sequence[str]
    most: int
    generated = True

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        generator = random.Random(f"{self.split} {index}")
        while True:
            count, colour = generator.randint(1, self.most), generator.choice(list(COLOURS))
            picture = drawing(generator.sample(range(CELLS**2), count), COLOURS[colour], generator)
            if (zlib.crc32(picture.tobytes()) % HELD_OUT == 0) == (self.split == "heldout"):
                break
        question = generator.choice(self.questions)
        answer = count if question == "count" else [*COLOURS].index(colour) + 1
        return {"prompt": QUESTIONS[question], "images": [picture], "answer": str(answer)}


def drawing(cells: list[int], colour: tuple[int, int, int], generator: random.Random) -> Image.Image:
    """A picture with a square in each of these cells, which are numbered row by row."""
    picture, width = Image.new("RGB", (EDGE, EDGE), "white"), EDGE // CELLS
    pen = ImageDraw.Draw(picture)
    for cell in cells:
        left, top = (place * width + generator.randint(1, 4) for place in (cell % CELLS, cell // CELLS))
        pen.rectangle((left, top, left + width - 6, top + width - 6), fill=colour)
    return picture

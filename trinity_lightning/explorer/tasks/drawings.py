"""Pictures that the package draws, with questions: how many squares there are, and which colour they have."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw

from trinity_lightning.config.values import one_of, whole_number

EDGE = 64  # pixels of a picture's edge
CELLS = 4  # places for squares in a row, and in a column
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 205, 40)}
QUESTIONS = {
    "count": "How many squares?",
    "colour": "Which colour? " + ", ".join(f"{number} {name}" for number, name in enumerate(COLOURS, start=1)),
}
SPLITS = {"train": 4096, "heldout": 64}  # and how many entries they have


class Drawings:
    """Pictures of equal squares on white. Every question is answered by a number from 1 to 9.

    Entry i is the same in every process, and held-out pictures are drawn for themselves.

    Args:
        split: `train` or `heldout`.
        size: number of entries; None: 4,096, or 64 that are held out.
        questions: `count` (how many squares there are), `colour` (which colour they have), or both, of which an entry
            has one.
        most: most squares of a picture.

    Raises:
        ConfigError: an unknown split or question, or a number out of its range.
    """

    generated = True

    def __init__(
        self,
        split: str = "train",
        size: int | None = None,
        questions: Sequence[str] = ("colour",),
        most: int = 4,
    ) -> None:
        one_of(".split", split, SPLITS, label="split of the drawings")
        for question in questions:
            one_of(".args.questions", question, QUESTIONS, label="question about drawings")
        whole_number(".args.most", most, least=1, most=9)
        whole_number(".size", size, least=1, optional=True)
        self._split, self._questions, self._most = split, sorted(questions), most
        self._size = size or SPLITS[split]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        generator = random.Random(f"{self._split} {index}")
        count, colour = generator.randint(1, self._most), generator.choice(list(COLOURS))
        picture = drawing(generator.sample(range(CELLS**2), count), COLOURS[colour], generator)
        question = generator.choice(self._questions)
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

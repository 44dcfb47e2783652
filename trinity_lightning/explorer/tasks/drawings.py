"""Pictures that the package draws: squares to be counted, and a colour to be named."""

import random
from collections.abc import Mapping
from typing import Any

from PIL import Image, ImageDraw

from trinity_lightning.config.values import one_of, whole_number

EDGE = 64  # pixels of a picture's edge
CELLS = 4  # places of squares in a row and in a column
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 205, 40),
}
QUESTIONS = ("count", "colour")
SPLITS = ("train", "heldout")


class Drawings:
    """Pictures of equal squares on white, each with a question about them.

    Entry i is the same in every process. The held-out pictures are drawn from seeds of their own.

    Args:
        split: `train` or `heldout`.
        size: number of entries.
        question: `count` (how many squares there are) or `colour` (which colour they have).
        most: most squares of a picture.

    Raises:
        ConfigError: an unknown split or question, or a number out of its range.
    """

    generated = True

    def __init__(self, split: str = "train", size: int | None = None, question: str = "count", most: int = 4) -> None:
        one_of("taskset.split", split, SPLITS, label="split of the drawings")
        one_of("taskset.args.question", question, QUESTIONS, label="question about drawings")
        whole_number("taskset.args.most", most, least=1, label="squares of a drawing")
        self._split, self._question, self._most = split, question, min(most, CELLS**2)
        self._size = size or (4096 if split == "train" else 64)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        generator = random.Random(f"{self._split} {index}")
        count, colour = generator.randint(1, self._most), generator.choice(sorted(COLOURS))
        picture = drawing(generator.sample(range(CELLS**2), count), COLOURS[colour], generator)
        if self._question == "count":
            return {"prompt": "How many squares?", "images": [picture], "answer": str(count)}
        return {"prompt": "Which colour?", "images": [picture], "answer": colour}


def drawing(cells: list[int], colour: tuple[int, int, int], generator: random.Random) -> Image.Image:
    """A picture with a square in each of these cells, which are numbered row by row."""
    picture = Image.new("RGB", (EDGE, EDGE), "white")
    pen, width = ImageDraw.Draw(picture), EDGE // CELLS
    for cell in cells:
        left, top = cell % CELLS * width + generator.randint(1, 4), cell // CELLS * width + generator.randint(1, 4)
        pen.rectangle((left, top, left + width - 6, top + width - 6), fill=colour)
    return picture

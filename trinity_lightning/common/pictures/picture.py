"""Pictures of tasks: read once, known by their content, and the same for engine and trainer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from PIL import Image
from xxhash import xxh3_128_hexdigest


@dataclass(frozen=True, eq=False)
class Picture:
    """An RGB picture; two are equal if their size and all of their pixels are.

    Attributes:
        image: the picture, in PIL's mode RGB.
    """

    image: Image.Image

    @cached_property
    def digest(self) -> str:
        """Hash of size and pixels, 32 hex digits."""
        return xxh3_128_hexdigest(repr(self.image.size).encode() + self.image.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

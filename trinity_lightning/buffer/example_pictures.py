"""Pictures of a dataset's examples. Their pixels are read when an example is taken, so that they are never in memory
all at once.
"""

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.pictures.processor import PictureProcessor
from trinity_lightning.common.pictures.prompt import PLACES
from trinity_lightning.common.rows import MOST_COMPARED, spread
from trinity_lightning.errors import ConfigError, StorageError


class ExamplePictures:
    """The pictures of examples, whose `multi_modal_inputs` have the places of these alone, until they are taken.

    Args:
        read: returns the pictures of an entry by its index in the dataset, in the order of their places.
        processor: the policy's.
        place: returns the place of an entry by its index, for messages.
    """

    def __init__(
        self, read: Callable[[int], Sequence[Picture]], processor: PictureProcessor, place: Callable[[int], str]
    ) -> None:
        self._read = lru_cache(maxsize=1)(read)  # the checksum of pictures is asked for beside their tensors
        self._processor, self._place = processor, place
        self._outlines: dict[int, str] = {}

    def note(self, index: int, pictures: Sequence[Picture]) -> None:
        """Remember what can be known of an entry's pictures before they are read."""
        self._outlines[index] = " ".join(picture.outline for picture in pictures)

    def outline(self, index: int) -> str:
        """Hashes of an entry's pictures, or of those in files the size in bytes; empty for an entry without any."""
        return self._outlines.get(index, "")

    @property
    def noted(self) -> bool:
        """True if there are pictures of any entry."""
        return bool(self._outlines)

    def checksum(self, example: Experience) -> int:
        """Checksum of the content of an example's pictures; 0 without any."""
        return self._checksum(index_of(example)) if example.multi_modal_inputs else 0

    def _checksum(self, index: int) -> int:
        return zlib.crc32(" ".join(picture.fingerprint for picture in self._read(index)).encode())

    def check_seen(self, seen: Mapping[int, int]) -> None:
        """Compare pictures with those that a run has read, which it saved checksums of: `MOST_COMPARED` at most.

        Raises:
            ConfigError: some have changed.
        """
        changed = [index for index in spread(sorted(seen), MOST_COMPARED) if self._checksum(index) != seen[index]]
        if changed:
            raise ConfigError(
                f"the pictures of {len(changed)} entries that the run to resume has read have changed, the first of "
                f"them those of {self._place(changed[0])}",
                key="buffer.path",
                fix="resume with the pictures as they were, or begin a new run",
            )

    def complete(self, example: Experience) -> Experience:
        """A copy of an example that has the tensors of its pictures; the example itself without pictures.

        Raises:
            StorageError: the pictures have other tokens than when the run began.
        """
        if (places := (example.multi_modal_inputs or {}).get(PLACES)) is None:
            return example
        pictures = self._read(index := index_of(example))
        inputs = self._processor.expand(self._processor.token * len(pictures), pictures).inputs
        if len(inputs[PLACES]) != len(places):
            raise StorageError(f"the pictures of {self._place(index)} of the dataset have changed since the run began.")
        example = copy.copy(example)
        example.multi_modal_inputs = {**inputs, PLACES: places}
        return example


def index_of(example: Experience) -> int:
    """The index of an example's entry in its dataset."""
    return int(example.eid.suffix)

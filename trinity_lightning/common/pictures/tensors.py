"""Tensors of pictures in experiences: which belong to which picture, and which pictures are equal."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from xxhash import xxh3_64_intdigest

from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.pictures.prompt import PLACES, joined_pictures

PIXELS = "pixel_values"
MASK = "pixel_attention_mask"  # Idefics3's: where pixels are a picture's own, and not padding
GRID = "image_grid_thw"  # Qwen-VL's: patches of each picture in time, height and width
# Of the parts of a tensor, by the numbers of their rows: the rollouts of a prompt share its tensors.
_HASHES: MutableMapping[Tensor, dict[tuple[int, ...], list[int]]] = WeakTensorKeyDictionary()


@dataclass(frozen=True, eq=False)
class PictureTensors:
    """The pictures of a row. A tile of a picture that the processor has cut up counts as a picture.

    Attributes:
        tensors: the processor's tensors of each picture, by name.
        hashes: hash of each picture's tensors, of 64 bits.
        places: places of each picture's tokens, int64 [tokens of the picture].
    """

    tensors: list[dict[str, Tensor]]
    hashes: list[int]
    places: list[Tensor]

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor] | None) -> "PictureTensors | None":
        """The pictures of `Experience.multi_modal_inputs`; None without any.

        Raises:
            ExperienceError: the places are missing, or are not as many as the tensors need; or as in `split_pictures`.
        """
        if not inputs:
            return None
        if PLACES not in inputs:
            raise ExperienceError(
                f"multi_modal_inputs has no {PLACES!r}: the places of the tokens that stand for pictures, int64 [m]."
            )
        places, pixels = inputs[PLACES], {name: tensor for name, tensor in inputs.items() if name != PLACES}
        rows = _rows_of_pictures(pixels)
        tensors = _split(pixels, rows)
        counts = _token_counts(pixels, len(tensors), len(places))
        if counts is None:
            raise ExperienceError(
                f"multi_modal_inputs: {PLACES} has {len(places)} places, which {len(tensors)} pictures cannot share."
            )
        return cls(tensors, _hashes(pixels, rows), list(places.split(counts)))

    @classmethod
    def of_experience(cls, experience: Experience) -> "PictureTensors | None":
        """The pictures of an experience; None without any. The error of `of` names it."""
        try:
            return cls.of(experience.multi_modal_inputs)
        except ExperienceError as error:
            raise ExperienceError(f"experience {experience.eid.uid}: {error}") from error


def split_pictures(inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors of each picture, by name; dimension 0 stays, with this picture's rows.

    Raises:
        ExperienceError: the tensors are not those of as many pictures.
    """
    return _split(inputs, _rows_of_pictures(inputs))


def _rows_of_pictures(inputs: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The numbers of rows (dimension 0) that the pictures have in each tensor; ExperienceError as `split_pictures`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    if PIXELS not in inputs or () in shapes.values():
        raise ExperienceError(
            f"multi_modal_inputs: expected {PIXELS!r} and {PLACES!r}, got tensors of shapes {shapes}."
        )
    pictures = len(inputs[GRID if GRID in inputs else PIXELS])
    rows = {name: [1] * pictures for name in inputs}
    if GRID in inputs:
        rows[PIXELS] = inputs[GRID].prod(-1).tolist()
    if any(sum(rows[name]) != len(tensor) for name, tensor in inputs.items()):
        grids = f" with {GRID} {inputs[GRID].tolist()!r:.100}" if GRID in inputs else ""
        raise ExperienceError(f"multi_modal_inputs: tensors of shapes {shapes}{grids} are not of as many pictures.")
    return rows


def _split(inputs: Mapping[str, Tensor], rows: Mapping[str, list[int]]) -> list[dict[str, Tensor]]:
    parts = zip(*(tensor.split(rows[name]) for name, tensor in inputs.items()), strict=True)
    return [dict(zip(inputs, part, strict=True)) for part in parts]


def _token_counts(inputs: Mapping[str, Tensor], pictures: int, places: int) -> list[int] | None:
    """Tokens of each picture: in proportion to its patches, or equally many; None if they do not add up to `places`."""
    sizes = inputs[GRID].prod(-1).tolist() if GRID in inputs else [1] * pictures
    counts = [size * places // sum(sizes) for size in sizes] if pictures else []
    return counts if sum(counts) == places and all(size * places % sum(sizes) == 0 for size in sizes) else None


def _hashes(inputs: Mapping[str, Tensor], rows: Mapping[str, list[int]]) -> list[int]:
    """Hash of each picture's tensors."""
    of_tensors = [(name, _hashes_of(inputs[name], rows[name])) for name in sorted(inputs)]
    return [
        xxh3_64_intdigest(repr([(name, hashes[picture]) for name, hashes in of_tensors]).encode())
        for picture in range(len(rows[PIXELS]))
    ]


def _hashes_of(tensor: Tensor, rows: list[int]) -> list[int]:
    """Hash of each picture's rows of a tensor; worked out once for a tensor that is split alike."""
    of_splits = _HASHES.setdefault(tensor, {})
    if (split := tuple(rows)) not in of_splits:
        of_splits[split] = [_hash_of(part) for part in tensor.split(rows)]
    return of_splits[split]


def _hash_of(tensor: Tensor) -> int:
    seed = xxh3_64_intdigest(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return xxh3_64_intdigest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, seed=seed)


def identity_of(experience: Experience) -> Tensor:
    """The tokens, int64 [seq], with a negative number in place of a picture's tokens, which its content decides.

    Equal beginnings of two such rows are computed alike, and none ends within a picture that both rows have.
    """
    tokens = experience.tokens.long()
    if (pictures := PictureTensors.of_experience(experience)) is None:
        return tokens
    tokens = tokens.clone()
    for hashed, places in zip(pictures.hashes, pictures.places, strict=True):
        tokens[places] = -1 - (hashed >> 1)
    return tokens


def joined(pictures: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Arguments of a model's `get_image_features` for these pictures: at least one, all of one family.

    Pictures of Idefics3 are padded to one size, and its mask says where. Others are joined along dimension 0.
    """
    joined = {name: joined_pictures([picture[name] for picture in pictures]) for name in pictures[0]}
    return {name: tensor[None] for name, tensor in joined.items()} if MASK in joined else joined


def features_of(outputs: Any) -> list[Tensor]:
    """A model's states of each picture, [tokens, hidden], from what its `get_image_features` returns.

    They are one tensor, [tokens of all pictures, hidden], if the model does not tell pictures apart.
    """
    states = getattr(outputs, "pooler_output", outputs)
    if isinstance(states, Tensor):
        return [states] if states.dim() == 2 else list(states.flatten(1, -2))
    return [part.flatten(0, -2) for part in states]

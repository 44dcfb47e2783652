"""Tensors of pictures in experiences: which belong to which picture, and which pictures are equal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from xxhash import xxh3_64_intdigest

from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.pictures.prompt import PLACES, joined_pictures

GRID = "image_grid_thw"  # Qwen-VL's: patches of each picture in time, height and width
_HASHES = WeakTensorKeyDictionary()  # of the pictures in a tensor of pixels, which the rollouts of a prompt share


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
            ExperienceError: the places are missing, or are not as many as the tensors need.
        """
        if not inputs:
            return None
        if PLACES not in inputs:
            raise ExperienceError(
                f"multi_modal_inputs has no {PLACES!r}: the places of the tokens that stand for pictures, int64 [m]."
            )
        places, pixels = inputs[PLACES], {name: tensor for name, tensor in inputs.items() if name != PLACES}
        tensors = split_pictures(pixels)
        counts = _token_counts(pixels, len(tensors), len(places))
        if counts is None:
            raise ExperienceError(
                f"multi_modal_inputs: {PLACES} has {len(places)} places, which {len(tensors)} pictures cannot share."
            )
        return cls(tensors, _hashes(inputs, tensors), list(places.split(counts)))

    @classmethod
    def of_experience(cls, experience: Experience) -> "PictureTensors | None":
        """The pictures of an experience; None without any. The error of `of` names it."""
        try:
            return cls.of(experience.multi_modal_inputs)
        except ExperienceError as error:
            raise ExperienceError(f"experience {experience.eid.uid}: {error}") from error


def split_pictures(inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors of each picture, by name; dimension 0 stays, with this picture's rows."""
    if GRID not in inputs:
        names, rows = list(inputs), zip(*(tensor.split(1) for tensor in inputs.values()), strict=True)
        return [dict(zip(names, row, strict=True)) for row in rows]
    grids = inputs[GRID].split(1)
    patches = inputs["pixel_values"].split([int(grid.prod()) for grid in grids])
    return [{"pixel_values": patch, GRID: grid} for patch, grid in zip(patches, grids, strict=True)]


def _token_counts(inputs: Mapping[str, Tensor], pictures: int, places: int) -> list[int] | None:
    """Tokens of each picture: in proportion to its patches, or equally many; None if they do not add up to `places`."""
    sizes = inputs[GRID].prod(-1).tolist() if GRID in inputs else [1] * pictures
    counts = [size * places // sum(sizes) for size in sizes] if pictures else []
    return counts if sum(counts) == places and all(size * places % sum(sizes) == 0 for size in sizes) else None


def _hashes(inputs: Mapping[str, Tensor], tensors: Sequence[Mapping[str, Tensor]]) -> list[int]:
    """Hash of each picture's tensors; worked out once for a tensor of pixels."""
    pixels = inputs["pixel_values"]
    if pixels not in _HASHES:
        _HASHES[pixels] = [_hash_of(picture) for picture in tensors]
    return _HASHES[pixels]


def _hash_of(picture: Mapping[str, Tensor]) -> int:
    total = 0
    for name in sorted(picture):
        tensor = picture[name].contiguous()
        header = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        total = xxh3_64_intdigest(header + tensor.view(torch.uint8).numpy().tobytes(), seed=total)
    return total


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
    return {name: tensor[None] for name, tensor in joined.items()} if "pixel_attention_mask" in joined else joined


def features_of(outputs: Any) -> Tensor:
    """A model's states of pictures, [tokens of all pictures, hidden], from what its `get_image_features` returns."""
    states = getattr(outputs, "pooler_output", outputs)
    parts = states if isinstance(states, list | tuple) else [states]
    return torch.cat([part.flatten(0, -2) for part in parts])

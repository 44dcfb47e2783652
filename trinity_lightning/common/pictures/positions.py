"""Positions of tokens in rows with pictures, by the rule of models that count a picture's rows and columns (M-RoPE)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.common.experience import ExperienceError
from trinity_lightning.common.pictures.tensors import GRID, PictureTensors

# `get_rope_index` of a model of transformers: maps token ids [1, seq], the type of each token (1: a picture's, else 0)
# and the grids of the pictures to positions in time, height and width [3, 1, seq], and to an offset of later tokens.
PositionRule = Callable[..., tuple[Tensor, Tensor]]


def position_rule(model: Any) -> PositionRule | None:
    """The model's own rule for positions; None: tokens are counted one by one."""
    return getattr(model.base_model, "get_rope_index", None)


def positions_of(rows: Sequence[Tensor], pictures: Sequence[PictureTensors | None], rule: Any) -> list[Tensor]:
    """Positions of each row's tokens, int64 [seq]; with a rule and a picture in any row, [3, seq].

    Tokens for pictures that the policy has sampled are text, as they are at no recorded place.

    Args:
        rows: token ids of each row, [seq].
        pictures: the pictures of each row.
        rule: the model's `position_rule`.

    Raises:
        ExperienceError: the grids of a row's pictures do not fit their places.
    """
    if rule is None or not any(row is not None for row in pictures):
        return [torch.arange(len(tokens)) for tokens in rows]
    return [_by_rule(rule, tokens, row) for tokens, row in zip(rows, pictures, strict=True)]


def _by_rule(rule: PositionRule, tokens: Tensor, pictures: PictureTensors | None) -> Tensor:
    types, grids = torch.zeros(len(tokens), dtype=torch.int64), None
    if pictures is not None:
        types[torch.cat(pictures.places)] = 1
        grids = torch.cat([picture[GRID] for picture in pictures.tensors])
    try:
        positions, _ = rule(tokens.long()[None], mm_token_type_ids=types[None], image_grid_thw=grids)
    except (RuntimeError, StopIteration) as error:  # tensors of other lengths, or fewer grids than runs of places
        raise ExperienceError(
            f"multi_modal_inputs: the grids {GRID} = {grids} do not fit the places of the pictures' tokens, which have "
            f"a token between two pictures ({error})."
        ) from error
    return positions[:, 0]

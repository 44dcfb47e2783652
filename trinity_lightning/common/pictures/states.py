"""States of pictures: each different picture of a batch is computed once, and put in the places of its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trinity_lightning.common.experience import ExperienceError
from trinity_lightning.common.pictures.families import check_family, family_of
from trinity_lightning.common.pictures.positions import position_rule
from trinity_lightning.common.pictures.tensors import PictureTensors, features_of, joined
from trinity_lightning.errors import ModelLoadError

PICTURES = "pictures"  # key of a batch's inputs


@dataclass(frozen=True)
class PictureInputs:
    """The different pictures of a batch, and the tokens that stand for them.

    Attributes:
        arguments: the model's arguments for their states, by name.
        places: places of the tokens in the flattened tokens of the batch, int64 [m], each once.
        states: which of the pictures' states each token has, int64 [m].
        counts: number of each different picture's tokens.
        hashes: hash of each different picture.
    """

    arguments: dict[str, Tensor]
    places: Tensor
    states: Tensor
    counts: tuple[int, ...]
    hashes: tuple[int, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, which move to a device together with a micro-batch's others."""
        return [self.places, self.states, *self.arguments.values()]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "PictureInputs":
        """The same with these in place of `tensors`."""
        places, states, *arguments = tensors
        return replace(self, places=places, states=states, arguments=dict(zip(self.arguments, arguments, strict=True)))

    def to(self, device: torch.device) -> "PictureInputs":
        """The same on a device."""
        return self.with_tensors([tensor.to(device) for tensor in self.tensors])


def picture_inputs(
    rows: Sequence[PictureTensors | None], place: Callable[[Tensor, Tensor], Tensor]
) -> PictureInputs | None:
    """The pictures of a batch; None without any.

    Args:
        rows: the pictures of each row.
        place: maps rows and indices of their tokens, int64 [m] each, to places in the flattened tokens.
    """
    first_states: dict[int, int] = {}  # by a picture's hash
    pictures: list[dict[str, Tensor]] = []
    counts: list[int] = []
    places, states = [], []
    for number, row in enumerate(rows):
        if row is None:
            continue
        for hashed, tensors, tokens in zip(row.hashes, row.tensors, row.places, strict=True):
            if hashed not in first_states:
                first_states[hashed] = sum(counts)
                counts.append(len(tokens))
                pictures.append(tensors)
            places.append(place(torch.full_like(tokens, number), tokens))
            states.append(first_states[hashed] + torch.arange(len(tokens)))
    if not pictures:
        return None
    # Rows that share a prefix have the same tokens, which get their states once: gradients would count double.
    different, first = np.unique(torch.cat(places).numpy(), return_index=True)
    states_of = torch.cat(states)[torch.from_numpy(first)]
    return PictureInputs(joined(pictures), torch.from_numpy(different), states_of, tuple(counts), tuple(first_states))


def with_states(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a model's forward pass: with pictures, embedded tokens in place of token ids.

    Raises:
        ConfigError: the model's family is refused (see `check_family`).
        ExperienceError: a picture has not as many states as there are tokens for it.
        ModelLoadError: the model has a rule for positions, by which there are none.
    """
    pictures: PictureInputs | None = inputs.get(PICTURES)
    if pictures is None:
        return inputs
    check_family(model.config)
    arguments = {name: value for name, value in inputs.items() if name not in (PICTURES, "input_ids")}
    positions = inputs.get("position_ids")
    if position_rule(model) is not None and (positions is None or positions.dim() < 3):
        raise ModelLoadError(f"{type(model).__name__} needs positions by its own rule: `collate` takes it.")
    if family_of(model.config).attends_both_ways:
        types = torch.zeros_like(inputs["input_ids"])
        arguments["token_type_ids"] = types.view(-1).index_fill(0, pictures.places, 1).view_as(types)
    embedded = model.get_input_embeddings()(inputs["input_ids"])
    if (kept := getattr(model, "kept_states", None)) is None:
        of_pictures = features_of(model.get_image_features(**pictures.arguments))
    else:  # the tower is frozen (`kept.KeptStates`)
        of_pictures = kept.states(model, pictures)
    _check_counts(model, pictures, [len(states) for states in of_pictures])
    features = torch.cat(of_pictures).to(embedded.dtype)
    # Indexing would add up gradients in any order on several threads of a CPU: the same run would have other bits.
    states = nn.functional.embedding(pictures.states, features)
    flat = embedded.flatten(0, 1).index_copy(0, pictures.places, states)
    return arguments | {"inputs_embeds": flat.view_as(embedded)}


def _check_counts(model: Any, pictures: PictureInputs, states: list[int]) -> None:
    """Refuse pictures whose states are not as many as their tokens; `states`: of each, or of all if not told apart."""
    told_apart = len(states) == len(pictures.counts)
    tokens = pictures.counts if told_apart else (sum(pictures.counts),)
    for count, expected in zip(tokens, states if told_apart else [sum(states)], strict=True):
        if count != expected:
            raise ExperienceError(
                f"{type(model).__name__} has {expected} states for pictures that stand for {count} tokens: tensors and "
                "tokens must come from the model's own processor."
            )

"""States of pictures from a frozen tower, which are kept until the end of an explore step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trinity_lightning.common.pictures.families import family_of
from trinity_lightning.common.pictures.states import PictureInputs
from trinity_lightning.common.pictures.tensors import MASK, features_of, joined, split_pictures
from trinity_lightning.config.models import is_picture_model

KEPT_BYTES = 1 << 30  # most that is kept; further pictures are computed in each pass


class KeptStates:
    """The states of an explore step's pictures, by hash: every pass, micro-batch and epoch of the step reads them.

    Each picture is computed alone: its states then have the same bits whichever pictures lie beside it, and a run that
    is resumed within a step goes on to the bit.

    Args:
        most_bytes: most bytes that are kept.

    Attributes:
        is_read: True if a model reads these states.
        of_tower: True if they are the tower's, a row for each patch; otherwise the projector's, a row for each token.
    """

    of_tower = False

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._states: dict[int, Tensor] = {}
        self._room = self._most_bytes = most_bytes
        self.is_read, self._is_on = False, True
        self._computed: list[int] = []

    def states(self, model: Any, pictures: PictureInputs) -> list[Tensor]:
        """States for the tokens of each picture, [tokens, hidden], as `features_of` has them."""
        if not self._is_on:
            return features_of(model.get_image_features(**pictures.arguments))
        alone = _each_alone(pictures.arguments)
        return self._all_of(
            pictures.hashes, lambda place: torch.cat(features_of(model.get_image_features(**alone[place])))
        )

    @torch.no_grad()
    def _all_of(self, hashes: Sequence[int], compute: Callable[[int], Tensor]) -> list[Tensor]:
        """The states of each picture; `compute` makes those of the i-th."""
        result = []
        for place, hashed in enumerate(hashes):
            states = self._states.get(hashed)
            if states is None:
                states = compute(place)
                self._computed.append(states.shape[-2])
                if states.nbytes <= self._room:
                    self._states[hashed] = states
                    self._room -= states.nbytes
            result.append(states)
        return result

    def attach(self, model: Any) -> None:
        """Let passes of the model read these states."""
        model.kept_states, self.is_read = self, True

    def drop(self) -> None:
        """Forget all states: another explore step begins."""
        self._states.clear()
        self._room = self._most_bytes

    def count(self) -> list[int]:
        """Rows of states of each picture that was computed since the last call."""
        computed, self._computed = self._computed, []
        return computed

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute all pictures meanwhile: the weights may be perturbed ones."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True


class KeptTowerStates(KeptStates):
    """The states that a frozen tower hands to a projector, which is trained; for families with `plain_tower`."""

    of_tower = True
    _hashes: Sequence[int] = ()  # of the pictures that go through the tower

    def states(self, model: Any, pictures: PictureInputs) -> list[Tensor]:
        self._hashes = pictures.hashes if self._is_on else ()
        try:
            return features_of(model.get_image_features(**pictures.arguments))
        finally:
            self._hashes = ()

    def attach(self, model: Any) -> None:
        from transformers.modeling_outputs import BaseModelOutput

        super().attach(model)
        tower = model.get_encoder("image")
        compute = tower.forward

        def forward(**arguments: Any) -> Any:
            rows = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
            if not self._hashes or any(len(value) != len(self._hashes) for value in rows.values()):
                return compute(**arguments)

            def of_picture(place: int) -> Tensor:
                alone = {name: value[place : place + 1] for name, value in rows.items()}
                return compute(**arguments | alone).last_hidden_state

            states: Any = torch.cat(self._all_of(self._hashes, of_picture))
            return BaseModelOutput(last_hidden_state=states)

        tower.forward = forward


def _each_alone(arguments: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The arguments of `get_image_features` for each picture alone, from those for several."""
    nested = MASK in arguments  # as `joined` makes them
    tensors = {name: tensor[0] for name, tensor in arguments.items()} if nested else arguments
    return [joined([picture]) for picture in split_pictures(tensors)]


def keep_states(policy: Any, reference: Any = None) -> KeptStates:
    """Let a policy whose tower is frozen, and a reference with the same tower, keep states of pictures.

    If the projector is frozen too, its states are kept, otherwise the tower's.

    Returns:
        The states. Nothing is kept for a text model, or where the tower is trained.
    """
    if not is_picture_model(policy.config):
        return KeptStates()
    tower = {id(parameter) for parameter in policy.get_encoder("image").parameters()}
    parts = picture_parameters(policy)
    kept = KeptStates()
    if any(parameter.requires_grad for parameter in parts.values()):
        parts = {name: parameter for name, parameter in parts.items() if id(parameter) in tower}
        if not family_of(policy.config).plain_tower or any(weight.requires_grad for weight in parts.values()):
            return KeptStates()
        kept = KeptTowerStates()
    kept.attach(policy)
    if reference is not None and all(_are_equal(reference.get_parameter(name), parts[name]) for name in parts):
        kept.attach(reference)
    return kept


def picture_parameters(model: Any) -> dict[str, nn.Parameter]:
    """A picture model's parameters outside its language model: tower and projector."""
    head = model.get_output_embeddings()
    language = {id(parameter) for part in (model.get_decoder(), head) for parameter in part.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in language}


def _are_equal(one: Any, other: Any) -> bool:
    """True if two weights, or this process's shares of them, are equal."""
    one, other = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in (one, other))
    return torch.equal(one.to(other.device), other)

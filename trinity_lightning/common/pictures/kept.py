"""States of pictures from a frozen tower, which are kept until the end of an explore step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

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

    def states(self, model: Any, pictures: PictureInputs) -> list[Tensor]:
        if not self._is_on:
            return super().states(model, pictures)
        tower = model.get_encoder("image")
        with _forward_of(tower, partial(self._through, tower.forward, pictures.hashes)):
            return features_of(model.get_image_features(**pictures.arguments))

    def _through(self, compute: Callable[..., Any], hashes: Sequence[int], **arguments: Any) -> Any:
        """The tower's output for pictures with these hashes; `compute` is its own pass."""
        from transformers.modeling_outputs import BaseModelOutput

        rows = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        if any(len(value) != len(hashes) for value in rows.values()):
            return compute(**arguments)

        def of_picture(place: int) -> Tensor:
            alone = {name: value[place : place + 1] for name, value in rows.items()}
            return compute(**arguments | alone).last_hidden_state

        states: Any = torch.cat(self._all_of(hashes, of_picture))
        return BaseModelOutput(last_hidden_state=states)


@contextmanager
def _forward_of(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute `forward` in place of its own, only meanwhile: a copy of it would call the original's."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward  # that of its class again
        else:
            module.forward = before


def _each_alone(arguments: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The arguments of `get_image_features` for each picture alone, from those for several."""
    nested = MASK in arguments  # as `joined` makes them
    tensors = {name: tensor[0] for name, tensor in arguments.items()} if nested else arguments
    return [joined([picture]) for picture in split_pictures(tensors)]


def keep_states(policy: Any, reference: Any = None) -> KeptStates:
    """Let a policy whose tower is frozen, and a reference with the same tower, keep states of pictures.

    States of an earlier fit are read no longer: it may have frozen what is trained now.

    Returns:
        The states. Nothing is kept where `kept_states_of` has none.
    """
    for model in (policy, reference):
        if hasattr(model, "kept_states"):
            del model.kept_states
    kind = kept_states_of(policy)
    if kind is None:
        return KeptStates()
    kept, parts = kind(), picture_parts(policy)
    shared = parts.tower if kind.of_tower else parts.tower | parts.projector
    policy.kept_states, kept.is_read = kept, True
    if reference is not None and all(_are_equal(reference.get_parameter(name), shared[name]) for name in shared):
        reference.kept_states = kept
    return kept


def kept_states_of(model: Any) -> type[KeptStates] | None:
    """The kind of states that are kept for a model: the projector's if it is frozen, too, otherwise the tower's.

    None: the model reads text alone, its tower is trained, or its projector reads more than the tower's last states.
    """
    if not is_picture_model(model.config):
        return None
    trains_tower, trains_projector = (any(p.requires_grad for p in part.values()) for part in picture_parts(model))
    if trains_tower:
        return None
    if not trains_projector:
        return KeptStates
    return KeptTowerStates if family_of(model.config).plain_tower else None


class PictureParts(NamedTuple):
    """A picture model's parameters outside its language model, by name.

    Attributes:
        tower: those of the encoder of pictures; in Qwen-VL the projector is one of its layers.
        projector: those between the tower and the language model.
    """

    tower: dict[str, nn.Parameter]
    projector: dict[str, nn.Parameter]


def picture_parts(model: Any) -> PictureParts:
    """The parts of a model that reads pictures."""
    head, encoder = model.get_output_embeddings(), model.get_encoder("image")
    language = {id(parameter) for part in (model.get_decoder(), head) for parameter in part.parameters()}
    encoding = {id(parameter) for parameter in encoder.parameters()}
    parts = PictureParts({}, {})
    for name, parameter in model.named_parameters():
        if id(parameter) not in language:
            (parts.tower if id(parameter) in encoding else parts.projector)[name] = parameter
    return parts


def _are_equal(one: Any, other: Any) -> bool:
    """True if two weights, or this process's shares of them, are equal."""
    one, other = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in (one, other))
    return torch.equal(one.to(other.device), other)

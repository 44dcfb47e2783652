"""Multi-modal inputs of experiences: the places of pictures among the tokens, and equal tensors as one object.

The rollouts of a prompt have the same pictures, which are much larger than their tokens. Equal tensors are found by a
hash of their content, so that a payload has them once, and memory too.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from trinity_lightning.common.experience.fields import INTEGER_DTYPES, PLACES, ExperienceError
from trinity_lightning.common.experience.payload import DTYPE_NAMES, host_tensor

if TYPE_CHECKING:
    from trinity_lightning.common.experience.experience import Experience

Inputs = dict[str, Tensor]

# -- places of pictures ------------------------------------------------------------------------------------------------


def misplaced(inputs: Mapping[str, Tensor], tokens: int, prompt_length: int, action_mask: Tensor | None) -> str | None:
    """The reason why an experience cannot have its pictures at `PLACES`; None if it can, or has no places.

    Args:
        inputs: multi-modal inputs.
        tokens: number of tokens.
        prompt_length, action_mask: fields of the experience.
    """
    if (places := inputs.get(PLACES)) is None:
        return None
    name = f"multi_modal_inputs[{PLACES!r}]"
    if places.dtype not in INTEGER_DTYPES or places.dim() != 1 or places.layout != torch.strided or places.is_meta:
        return f"{name}: expected a 1-D tensor of integers, got {places.dtype} of shape {tuple(places.shape)}."
    positions = places.cpu().long().numpy()
    if not len(positions):
        return None
    if positions[0] < 0 or positions[-1] >= tokens or (positions[1:] <= positions[:-1]).any():
        return f"{name}: expected rising places among {tokens} tokens, got {positions[:20].tolist()!r:.100}."
    if action_mask is None or positions[-1] < prompt_length:
        return None
    trained, later = action_mask.bool().cpu().numpy(), positions[positions >= prompt_length] - prompt_length
    later = later[later < len(trained)]  # the mask of a truncated prompt has another length than its tokens
    if trained[later].any():
        place = later[trained[later]][0] + prompt_length
        return f"{name}: expected no place of a token that is trained on (action_mask), got {place}."
    return None


# -- equal tensors -----------------------------------------------------------------------------------------------------

# Of a dict of inputs: its names, in order, with the hashes of their tensors.
Key = tuple[tuple[str, str], ...]


class InputTable:
    """Tensors of multi-modal inputs by the hash of their content. None may be changed meanwhile.

    Attributes:
        tensors: by hash; of equal tensors the first.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        # By identity, beside the object itself, which keeps its identity from being given to another.
        self._keys: dict[int, tuple[Inputs, Key]] = {}
        self._hashes: dict[int, tuple[Tensor, str]] = {}
        self._dicts: dict[Key, Inputs] = {}

    def key_of(self, inputs: Inputs) -> Key:
        """The key of a dict of inputs, whose tensors are taken into the table; equal dicts have equal keys.

        Raises:
            ExperienceError: a value is no tensor, or one that cannot be serialized; the message begins with its name.
        """
        if id(inputs) not in self._keys:
            self._keys[id(inputs)] = inputs, tuple((name, self._hash_of(name, inputs[name])) for name in inputs)
        return self._keys[id(inputs)][1]

    def shared(self, inputs: Inputs) -> Inputs:
        """The first equal dict of inputs that was asked for, with the table's tensors; errors as in `key_of`."""
        key = self.key_of(inputs)
        if key not in self._dicts:
            same = all(self.tensors[hashed] is inputs[name] for name, hashed in key)
            self._dicts[key] = inputs if same else {name: self.tensors[hashed] for name, hashed in key}
        return self._dicts[key]

    def _hash_of(self, name: Any, tensor: Any) -> str:
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ExperienceError(f"[{name!r}]: expected tensors by name, got a {type(tensor).__name__}.")
        if id(tensor) not in self._hashes:
            try:
                hashed = hash_of(tensor)
            except ExperienceError as error:
                raise ExperienceError(f"[{name!r}]: {error}") from error
            self._hashes[id(tensor)] = tensor, hashed
            self.tensors.setdefault(hashed, tensor)
        return self._hashes[id(tensor)][1]


def hash_of(tensor: Tensor) -> str:
    """Hash of a tensor's dtype, shape and bytes, 32 hex digits. ExperienceError: it cannot be serialized."""
    if tensor.dtype not in DTYPE_NAMES:
        raise ExperienceError(f"a tensor of dtype {tensor.dtype} cannot be serialized.")
    plain = host_tensor(tensor.detach()).resolve_conj().resolve_neg()
    digest = xxhash.xxh3_128(f"{DTYPE_NAMES[tensor.dtype]} {tuple(tensor.shape)}".encode())
    digest.update(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def share_inputs(experiences: Sequence["Experience"]) -> None:
    """Let experiences with equal multi-modal inputs have the same dict, and those with equal tensors the same tensors.

    Raises:
        ExperienceError: inputs that were assigned are no tensors, or cannot be serialized; the message names them.
    """
    table = InputTable()
    for experience in experiences:
        if inputs := experience.multi_modal_inputs:
            try:
                experience.multi_modal_inputs = table.shared(inputs)
            except ExperienceError as error:
                raise ExperienceError(f"experience {experience.eid.uid}: multi_modal_inputs{error}") from error

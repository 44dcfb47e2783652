"""Prompts with pictures: token ids, and the pictures in them, as engine and trainer see them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trinity_lightning.common.experience.fields import PLACES as PLACES
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Expansion:
    """A text with pictures as a model reads it.

    Attributes:
        unexpanded: token ids with one placeholder for each picture, as a chat template writes it.
        pictures: the pictures, in the order of their placeholders.
        token_ids: token ids with as many tokens for each picture as the model has states for it.
        inputs: the processor's tensors of the pictures, by name; dimension 0 has pictures, their tiles or patches.
            `PLACES` in `token_ids` are among them.
    """

    unexpanded: tuple[int, ...]
    pictures: tuple[Picture, ...]
    token_ids: tuple[int, ...]
    inputs: dict[str, Tensor]


@dataclass(frozen=True)
class WrittenPictures:
    """The pictures of a conversation, as a model's processor writes them in its text.

    Attributes:
        token: the placeholder of a picture in a text that is rendered by a chat template.
        texts: for each picture, in the order of their placeholders, what is written in its place.
    """

    token: str
    texts: Sequence[str]

    def fill(self, text: str, before: int = 0) -> str:
        """A text of the conversation with its pictures written out.

        Args:
            text: the text.
            before: number of pictures before it.

        Raises:
            ConfigError: it has a placeholder for which there is no picture.
        """
        first, *others = text.split(self.token)
        texts = self.texts[before : before + len(others)]
        if len(texts) < len(others):
            raise ConfigError(
                f"the text has places for {before + len(others)} pictures, and there are {len(self.texts)} pictures",
                key="buffer.path",
                fix=f"do not write {self.token} in a text that a chat template shows",
            )
        return first + "".join(written + other for written, other in zip(texts, others, strict=True))


class PicturePrompt(list[int]):
    """Token ids of a conversation with pictures.

    Attributes:
        expansions: the texts with pictures in it, each with the place of its first token.
    """

    def __init__(self, token_ids: Iterable[int], expansions: Iterable[tuple[int, Expansion]]) -> None:
        super().__init__(token_ids)
        self.expansions = tuple(expansions)

    @property
    def pictures(self) -> list[Picture]:
        """All pictures, in the order of their places."""
        return [picture for _, expansion in self.expansions for picture in expansion.pictures]

    @property
    def inputs(self) -> dict[str, Tensor]:
        """`Experience.multi_modal_inputs` of this prompt; prompts of one expansion share its dict."""
        if len(self.expansions) == 1 and self.expansions[0][0] == 0:
            return self.expansions[0][1].inputs
        parts = [expansion.inputs for _, expansion in self.expansions]
        joined = {name: joined_pictures([part[name] for part in parts]) for name in parts[0] if name != PLACES}
        return joined | {PLACES: torch.cat([part.inputs[PLACES] + start for start, part in self.expansions])}

    def inputs_within(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Same as `inputs`, as parts of the tensors of a longer prompt that begins with this one: they take no memory.

        Args:
            whole: the longer prompt's `inputs`.
        """
        if len(self.expansions) == 1:
            return self.inputs
        rows = {name: sum(len(expansion.inputs[name]) for _, expansion in self.expansions) for name in whole}
        return {name: tensor[: rows[name]] for name, tensor in whole.items()}

    @classmethod
    def joined(cls, *pieces: "Sequence[int] | Expansion") -> "PicturePrompt":
        """The prompt that has these pieces one behind the other."""
        token_ids: list[int] = []
        expansions: list[tuple[int, Expansion]] = []
        for piece in pieces:
            start = len(token_ids)
            if isinstance(piece, Expansion):
                expansions.append((start, piece))
            elif isinstance(piece, PicturePrompt):
                expansions += [(start + place, expansion) for place, expansion in piece.expansions]
            token_ids += piece.token_ids if isinstance(piece, Expansion) else piece
        return cls(token_ids, expansions)


def joined_pictures(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of pictures along dimension 0; those with pixels of several sizes are padded, as Idefics3's mask says."""
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return torch.cat(list(tensors))
    height, width = (max(tensor.shape[axis] for tensor in tensors) for axis in (-2, -1))
    return torch.cat(
        [
            torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1], 0, height - tensor.shape[-2]))
            for tensor in tensors
        ]
    )

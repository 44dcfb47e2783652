"""Families of models that read pictures, by their configuration's `model_type`: the one place that tells them apart."""

import inspect
from dataclasses import dataclass
from typing import Any

from trinity_lightning.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """Needs of a family beside states of pictures in the places of their tokens.

    Attributes:
        shares_prefixes: True if it attends causally within a picture, and a shared prefix with pictures was tested.
        attends_both_ways: True if the tokens of a picture see each other, later ones too; the model makes the mask from
            types of tokens.
        plain_tower: True if its projector reads the last states of a tower that takes one row a picture.
    """

    shares_prefixes: bool = False
    attends_both_ways: bool = False
    plain_tower: bool = False


# Loss and every gradient of these were compared with those of transformers' own forward pass.
FAMILIES = {
    "idefics3": Family(shares_prefixes=True, plain_tower=True),
    "smolvlm": Family(shares_prefixes=True, plain_tower=True),
    "qwen2_vl": Family(shares_prefixes=True),
    "qwen2_5_vl": Family(shares_prefixes=True),
    "llava": Family(),
    "gemma3": Family(attends_both_ways=True, plain_tower=True),
}
# Arguments of forward passes by which other families put pictures into a mask or into positions.
_TYPES = ("token_type_ids", "mm_token_type_ids")


def family_of(config: Any) -> Family:
    """The family of a model with this configuration; another family's rows are padded."""
    return FAMILIES.get(config.model_type, Family())


def check_family(config: Any) -> None:
    """Refuse a family that reads pictures by other means than states in their places, unless it has been tested.

    Raises:
        ConfigError: the family is none of `FAMILIES`, and has such means.
    """
    if (means := untested_means(config)) is not None:
        raise ConfigError(
            f"models of type '{config.model_type}' read pictures in a way that has not been tested ({means})",
            key="model.name",
            fix=f"choose one of {', '.join(FAMILIES)}, or train on text alone",
        )


def untested_means(config: Any) -> str | None:
    """The means of a refused family: how it reads pictures beside states in their places; None: it is not refused."""
    if config.model_type in FAMILIES:
        return None
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if any("deepstack" in name for name in vars(getattr(config, "vision_config", config))):
        return "DeepStack: several layers take states of pictures"
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if kind is not None and not hasattr(kind, "get_image_features"):
        return "no states of pictures in the places of tokens"
    arguments = [] if kind is None else inspect.signature(kind.forward).parameters
    return next((f"types of tokens, {name}" for name in _TYPES if name in arguments), None)

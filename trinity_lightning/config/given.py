"""Sections given as mappings, by scripts and by checkpoints."""

from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_lightning.config.explain import sentence_of
from trinity_lightning.config.sections import Section
from trinity_lightning.errors import ConfigError

S = TypeVar("S", bound=Section)


def section_given(key: str, kind: type[S], given: Any) -> S:
    """The section of that kind that stands under the dotted key, of these values; errors as `section_of`."""
    tree = OmegaConf.create()
    OmegaConf.update(tree, key, OmegaConf.structured(kind))
    section = OmegaConf.select(tree, key)
    try:
        section.merge_with(given)
        return OmegaConf.to_object(section)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(sentence_of(error)) from error
    except ConfigError as error:
        raise ConfigError(str(error) if kind._key else f"{key}.{error}") from error

"""Configurations, composed as the commands do."""

from functools import cache

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig

from trinity_lightning.config import hydra as compose
from trinity_lightning.config.registry import config_dir


def composed(*overrides: str, name: str = "train", hydra: bool = False) -> DictConfig:
    """The configuration that a command composes from these overrides; with `hydra`, its own section too."""
    register_once()
    with initialize_config_dir(str(config_dir("conf")), version_base="1.3"):
        given = overrides if hydra else ("output_dir=x", *overrides)
        return hydra_compose(name, list(given), return_hydra_config=hydra)


register = compose.register  # which the warm process replaces by what follows


@cache
def register_once(within: str | None = "") -> None:
    """Register what a command registers, once: it takes a third of the time of composing.

    A test that changes the table of parts registers them itself.
    """
    register(within)

"""Configurations, composed as the commands do."""

from copy import deepcopy
from functools import cache
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from trinity_lightning.config import hydra as compose
from trinity_lightning.config.registry import config_dir


def composed(*overrides: str, name: str = "train", hydra: bool = False) -> DictConfig:
    """The configuration that a command composes from these overrides; with `hydra`, its own section too."""
    register_once()
    with initialize_config_dir(str(config_dir("conf")), version_base="1.3"):
        settings = overrides if hydra else ("output_dir=x", *overrides)
        return hydra_compose(name, list(settings), return_hydra_config=hydra)


register = compose.register  # which the warm process replaces by what follows


@cache
def register_once(within: str | None = "") -> None:
    """Register what a command registers, once: it takes a third of the time of composing.

    A test that changes the table of parts registers them itself.
    """
    register(within)


# -- files that are parsed once, not by each of a thousand compositions ------------------------------------------------

OWN = (str(config_dir("conf")), str(config_dir("recipes")), "hydra")  # no test changes files of these places


def parse_once(source: Any) -> None:
    """Let a kind of Hydra's configuration sources parse a file of OWN once; it gets a copy each time."""
    load, parsed = source.load_config, {}

    def load_once(self: Any, config_path: str) -> Any:
        if not self.path.startswith(OWN):
            return load(self, config_path)
        if (self.path, config_path) not in parsed:
            parsed[self.path, config_path] = load(self, config_path)
        return deepcopy(parsed[self.path, config_path])

    source.load_config = load_once


Plugins.instance()  # which finds the sources
for scheme in ("file", "pkg"):
    parse_once(SourcesRegistry.instance().resolve(scheme))

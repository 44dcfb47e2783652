"""Configurations, composed as the commands do."""

import pickle
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
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


# -- choices that are composed once: most compositions differ only in values, which are set afterwards -----------------


class Choices:
    """The configurations of the choices that were composed, without the values that a command sets on top.

    Hydra decides on files by the choices of groups alone, merges them, and sets values in the result. The first two
    take nine tenths of the time of a composition. A folder that a test adds may change every choice: then Hydra
    composes as ever. What is registered, or no longer registered, may do so, too: then all is forgotten.
    """

    def __init__(self) -> None:
        self._loader: Any = config_loader_impl
        self.list_defaults = self._loader.create_defaults_list
        self.compose_defaults = ConfigLoaderImpl._compose_config_from_defaults_list
        self._store = ConfigStore.store
        self._registered: Any = None
        self._lists: dict[Any, DefaultsList] = {}
        self._composed: dict[int, bytes] = {}  # by the id of the defaults of one of `_lists`

    def install(self) -> None:
        """Let Hydra ask here first."""

        def store(*arguments: Any, **named: Any) -> None:
            self._forget()
            self._store(*arguments, **named)

        def compose(loader: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> DictConfig:
            return self._merged(loader, defaults, repo)

        self._loader.create_defaults_list = self._listed
        ConfigLoaderImpl._compose_config_from_defaults_list = compose  # type: ignore[method-assign]
        ConfigStore.store = store  # type: ignore[method-assign]

    def _forget(self) -> None:
        self._lists.clear()
        self._composed.clear()

    def _listed(self, repo: Any, config_name: str, overrides_list: list[Override], **named: Any) -> DefaultsList:
        if self._registered is not (registered := ConfigStore.instance().repo):  # as after a monkeypatch
            self._forget()
            self._registered = registered
        places = tuple(source.path for source in repo.get_sources())
        if not all(place.startswith(OWN) for place in filter(None, places)):  # the others are in memory
            return self.list_defaults(repo, config_name, overrides_list, **named)
        values, chosen = [], []
        for override in overrides_list:
            (values if sets_a_value(repo, override) else chosen).append(override)
        key = (places, config_name, *named.values(), *(override.input_line for override in chosen))
        if key not in self._lists:
            self._lists[key] = self.list_defaults(repo, config_name, overrides_list, **named)
        return replace(self._lists[key], config_overrides=values)

    def _merged(self, loader: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> DictConfig:
        if not any(defaults is listed.defaults for listed in self._lists.values()):
            return self.compose_defaults(loader, defaults, repo)
        if id(defaults) not in self._composed:
            self._composed[id(defaults)] = pickle.dumps(self.compose_defaults(loader, defaults, repo))
        return pickle.loads(self._composed[id(defaults)])  # noqa: S301  made here; in a third of a deep copy's time


def sets_a_value(repo: Any, override: Override) -> bool:
    """True if Hydra takes it for a value of a key, not for the choice of a group, nor for what a sweep tries."""
    if override.is_sweep_override():
        return False
    return isinstance(override.value(), dict) or not repo.group_exists(override.key_or_group)


SHARED = Choices()
SHARED.install()

"""Choices of Hydra's groups that are parts: parts of the registry's table, and users' parts by their dotted paths."""

from collections.abc import Callable
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

# For each group of conf/: the kind of its parts, and the values that a choice sets. A part needs a file in conf/ only
# if it has arguments to show.
CHOICES: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "algorithm": ("policy loss", lambda name: {"policy_loss": {"name": name}}),
    "add_strategy": ("add strategy", lambda name: {name: {"args": {}}}),
    "operators": ("experience operator", lambda name: {name: {"args": {}}}),
    "taskset": ("task source", lambda name: {"name": name, "source": name, "seed": "${seed}"}),
    "workflow": ("workflow", lambda name: {"name": name}),
    "engine": ("engine", lambda name: {"name": name}),
}


class OwnParts(ConfigSource):
    """Tells Hydra the values of the choice `GROUP=my_module.Part`."""

    @staticmethod
    def scheme() -> str:
        return "parts"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.rpartition("/")
        return group in CHOICES and "." in name

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.rpartition("/")
        values = OmegaConf.create(CHOICES[group][1](name))
        return ConfigResult(self.provider, self.full_path(), values, {"package": None})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class OwnPartsLast(SearchPathPlugin):
    """Makes Hydra ask `OwnParts` for a choice that it finds in no folder."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("trinity_lightning", f"{OwnParts.scheme()}://")


def register_own_parts() -> None:
    """Make `OwnParts` known to Hydra; calling it twice is allowed."""
    for plugin in (OwnParts, OwnPartsLast):
        Plugins.instance().register(plugin)

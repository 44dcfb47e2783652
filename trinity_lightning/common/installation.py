"""Reads what is installed beside this package from its metadata. Nothing of it is imported."""

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement

DISTRIBUTION = "trinity-lightning"


@dataclass
class Extra:
    """An extra of this package.

    Attributes:
        name: its name; "" for what every run needs.
        missing: its requirements that are not installed, or are too old, in words.
    """

    name: str
    missing: list[str]


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def extras() -> list[Extra]:
    """The extras with what is missing of each, what every run needs first; [] if this package was not installed."""
    try:
        metadata = importlib.metadata.metadata(DISTRIBUTION)
        texts = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    names = ["", *(metadata.get_all("Provides-Extra") or [])]
    return [Extra(name, _missing(texts, name)) for name in names]


def _missing(texts: Iterable[str], extra: str) -> list[str]:
    """The requirements of an extra that are not met; those of every run are no extra's."""
    missing = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # of a metadata format that this packaging does not know
            continue
        of_all = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if of_all != (not extra) or not (of_all or _is_of(requirement, extra)):
            continue
        version = version_of(requirement.name)
        if version is None:
            missing.append(requirement.name)
        elif not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{requirement.name}{requirement.specifier} (here is {version})")
    return missing


def _is_of(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is not None and requirement.marker.evaluate({"extra": extra})

"""Installed packages, by their metadata alone."""

import importlib.metadata

import pytest

from trinity_lightning.common import installation
from trinity_lightning.common.installation import Extra, extras, version_of

REQUIRES = [
    "torch>=2.10",
    "no-such-package>=1",
    'peft>=999; extra == "lora"',
    'torch>=1; extra == "lora"',
    'other-missing; extra == "sweep" and sys_platform == "linux"',
    'elsewhere; sys_platform == "win32"',
    'fine; sys_platform == "win32" and extra == "lora"',
    "not a ; requirement",
]


class Metadata:
    def get_all(self, name: str) -> list[str] | None:
        return {"Provides-Extra": ["lora", "sweep"]}.get(name)


def test_what_is_missing_of_each_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: Metadata())
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRES)
    peft = version_of("peft")
    missing_peft = "peft" if peft is None else f"peft>=999 (here is {peft})"
    assert extras() == [
        Extra("", ["no-such-package"]),
        Extra("lora", [missing_peft]),
        Extra("sweep", ["other-missing"]),
    ]


def test_a_package_that_pip_does_not_know_has_no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "DISTRIBUTION", "no-such-package")
    assert extras() == []
    assert version_of("no-such-package") is None


def test_this_environment_has_what_every_run_needs() -> None:
    assert extras()[0] == Extra("", [])

"""The table of parts: every name leads to something, and has a page of configuration if it needs one."""

import pytest

from trinity_lightning.config.registry import PARTS, import_object
from trinity_lightning.config.schema import options


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, paths in PARTS.items() for name in paths])
def test_every_name_leads_to_a_part(kind: str, name: str) -> None:
    assert callable(import_object(PARTS[kind][name]))


@pytest.mark.parametrize(
    ("kind", "group", "but"),
    [
        ("add strategy", "add_strategy", set()),
        ("experience operator", "operators", {"none"}),
        ("workflow", "workflow", {"evaluation"}),  # which is given as eval_workflow
        ("engine", "engine", set()),
    ],
)
def test_the_choices_of_a_group_are_the_parts_of_its_kind(kind: str, group: str, but: set[str]) -> None:
    assert set(PARTS[kind]) ^ set(options(group)) == but

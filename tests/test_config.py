"""The table of parts: every name leads to something, and the files of conf/ are of such names."""

import pytest
from omegaconf import OmegaConf
from support.compose import composed

from trinity_lightning.config.hydra import CHOICES
from trinity_lightning.config.registry import PARTS, import_object, options

PRESETS = {"ppo_critic", "dapo", "dr_grpo"}  # choices of algorithm that are known under a name of their own


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, paths in PARTS.items() for name in paths])
def test_every_name_leads_to_a_part(kind: str, name: str) -> None:
    assert callable(import_object(PARTS[kind][name]))


@pytest.mark.parametrize(("group", "kind"), [(group, kind) for group, (kind, _) in CHOICES.items()])
def test_a_choice_of_a_group_is_a_part_of_its_kind(group: str, kind: str) -> None:
    assert set(options(group)) - PRESETS <= {*PARTS[kind], "none"}


@pytest.mark.parametrize(
    ("choice", "key"),
    [
        ("taskset=my_tasks.Sums", "taskset.source"),
        ("workflow=my_workflow.Ask", "workflow.name"),
        ("engine=my_engine.Mine", "engine.name"),
        ("algorithm=my_loss.tempered", "algorithm.policy_loss.name"),
    ],
)
def test_a_dotted_path_is_a_choice_of_a_group(choice: str, key: str) -> None:
    assert OmegaConf.select(composed(choice), key) == choice.partition("=")[2]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_a_loss_with_settings_of_its_own(name: str) -> None:
    algorithm = composed(f"algorithm={name}").algorithm
    assert algorithm.policy_loss.name in ("grpo", "ppo")
    assert algorithm != composed("algorithm=grpo").algorithm

"""Compositions that tests share (tests/support/compose.py): they are Hydra's own, and no test changes another's."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError
from support.compose import SHARED, composed

CHOSEN = ("+recipe=grpo", "model=tiny", "logger=csv", "trainer=cpu", "~callbacks.checkpoint")


def text(config: DictConfig) -> str:
    """The configuration before it is resolved: what it resolves to has times."""
    return OmegaConf.to_yaml(config)


@pytest.fixture
def by_hydra(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DictConfig]:
    """Composes as a command does, sharing nothing."""

    def composed_alone(*overrides: str, **named: Any) -> DictConfig:
        with monkeypatch.context() as patch:
            patch.setattr(config_loader_impl, "create_defaults_list", SHARED.list_defaults)
            patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", SHARED.compose_defaults)
            return composed(*overrides, **named)

    return composed_alone


@pytest.mark.parametrize("hydra", [False, True])
@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_a_shared_composition_is_hydras(by_hydra: Callable[..., DictConfig], name: str, hydra: bool) -> None:
    for values in (("steps=3",), ("steps=4", "+algorithm.policy_loss.args.mine=3"), ("model.dtype=fp32",)):
        mine = composed(*CHOSEN, *values, name=name, hydra=hydra)
        assert text(mine) == text(by_hydra(*CHOSEN, *values, name=name, hydra=hydra))
    with pytest.raises(ConfigAttributeError):
        mine.no_such_key = 1


def test_no_composition_sees_what_was_done_to_another() -> None:
    before = text(first := composed(*CHOSEN))
    first.explorer.batch_size = 77
    del first.optimizer
    assert text(composed(*CHOSEN)) == before


def test_wrong_values_and_choices_are_refused_after_right_ones() -> None:
    composed(*CHOSEN)
    with pytest.raises(ConfigCompositionException, match="no_such_key"):
        composed(*CHOSEN, "no_such_key=1")
    with pytest.raises(ConfigCompositionException, match="force-add"):
        composed(*CHOSEN, "++engine=vllm")
    with pytest.raises(ConfigCompositionException, match="no_such_group"):
        composed(*CHOSEN, "~no_such_group")


def test_what_is_registered_later_is_there_as_long_as_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    store, steps = ConfigStore.instance(), composed(*CHOSEN).steps
    with monkeypatch.context() as patch:
        patch.setattr(store, "repo", copy.deepcopy(store.repo))
        store.store(group="recipe", name="grpo", node={"steps": steps + 1}, package="_global_")
        assert composed(*CHOSEN).steps == steps + 1
    assert composed(*CHOSEN).steps == steps


def test_a_folder_of_ones_own_is_read_each_time(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe" / "mine.yaml"
    recipe.parent.mkdir()
    for steps in (3, 4):
        recipe.write_text(f"# @package _global_\nsteps: {steps}\n")
        assert composed("+recipe=mine", f"hydra.searchpath=[{tmp_path}]").steps == steps

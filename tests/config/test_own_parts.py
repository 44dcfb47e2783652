"""Parts of the user's own: a misspelt path is refused with its key, before torch is imported, and with a near name."""

from pathlib import Path

import pytest
from support.compose import composed
from support.errors import refuses

from trinity_lightning.config.own_parts import check_own_parts
from trinity_lightning.config.registry import import_object
from trinity_lightning.config.run import validate

MULTI_TURN = ("workflow=multi_turn", "reward=null")


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_parts_nearby.py").write_text("class Part: ...\n")
    (tmp_path / "my_package_nearby").mkdir()
    (tmp_path / "my_package_nearby" / "__init__.py").touch()
    (tmp_path / "my_package_nearby" / "rewards.py").touch()


def check(*overrides: str, trains: bool = True) -> None:
    run = validate(composed("+recipe=grpo", "model=tiny", "engine=transformers", *overrides), trains=trains)
    check_own_parts(run, trains)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm.policy_loss=my_prts_nearby.Part"], "algorithm.policy_loss"),
        (["optimizer.name=my_prts_nearby.Part"], "optimizer.name"),
        (["optimizer.lr_scheduler=my_prts_nearby.Part"], "optimizer.lr_scheduler"),
        (["add_strategy=my_prts_nearby.Part"], "add_strategy.my_prts_nearby.Part"),
        (["+operators={mine: {name: my_prts_nearby.Part}}"], "operators.mine"),
        (["workflow=my_prts_nearby.Part"], "workflow.name"),
        (["eval_workflow=my_prts_nearby.Part"], "eval_workflow"),
        ([*MULTI_TURN, "workflow.args.environment=my_prts_nearby.Part"], "workflow.args.environment"),
        ([*MULTI_TURN, "workflow.args.environment={name: my_prts_nearby.Part}"], "workflow.args.environment"),
        ([*MULTI_TURN, "workflow.args.environment=gues_number"], "workflow.args.environment"),
    ],
)
def test_a_path_to_nothing_is_refused_with_its_key(overrides: list[str], key: str) -> None:
    with refuses(key) as refused:
        check(*overrides)
    assert "Did you mean '" in str(refused.value)


def test_an_evaluation_imports_no_part_of_the_training() -> None:
    check("algorithm.policy_loss=my_prts_nearby.Part", trains=False)
    with refuses("workflow.name"):
        check("workflow=my_prts_nearby.Part", trains=False)
    check("workflow=my_prts_nearby.Part", "eval_workflow=math", trains=False)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("my_prts_nearby.Part", "my_parts_nearby"),
        ("my_package_nearby.rewardss.count", "my_package_nearby.rewards"),
        ("my_pakage_nearby.rewards.count", "my_package_nearby"),
        ("my_parts_nearby.Prt", "Part"),
        ("trinity_lightning.explorer.reward.text.accuracy", "trinity_lightning.explorer.rewards"),
    ],
)
def test_a_path_to_nothing_is_refused_with_the_nearest_name(path: str, near: str) -> None:
    with refuses(None) as refused:
        import_object(path)
    assert f"Did you mean '{near}'?" in str(refused.value)


def test_a_module_of_pythonpath_is_near_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path / "my_package_nearby")
    with refuses(None) as refused:
        import_object("my_parts_neraby.Part")
    assert "Did you mean 'my_parts_nearby'?" in str(refused.value)

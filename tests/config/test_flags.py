"""Flags that Hydra does not have: a newcomer writes `--lr 1e-5`, and is told how settings are written."""

from pathlib import Path

import pytest
from support.errors import refuses
from support.runs import RunTrain

from trinity_lightning.config.flags import check_flags
from trinity_lightning.plan.command import PlanConfig


@pytest.mark.parametrize(
    ("arguments", "key", "setting"),
    [
        (["--lr", "1e-5"], "optimizer.lr", "optimizer.lr=1e-5"),
        (["+recipe=grpo", "--lr=1e-5", "seed=1"], "optimizer.lr", "optimizer.lr=1e-5"),
        (["-lr", "1e-5"], "optimizer.lr", "optimizer.lr=1e-5"),
        (["--learning-rate", "seed=1"], "optimizer.lr", "optimizer.lr=VALUE"),
        (["--optimizer.lrr", "--multirun"], "optimizer.lr", "optimizer.lr=VALUE"),
        (["--multirun", "--model.name=org/name"], "model.name", "model.name=org/name"),
        (["-model=tiny"], "model", "model=tiny"),  # argparse reads -m, --multirun, with a value
        (["-reward", "math"], "reward", "reward=math"),  # and -r, --run
        (["-plan.device=L4"], "plan.device", "plan.device=L4"),  # and -p, --package, whose value it would be
        (["-ckpt_path=last"], "ckpt_path", "ckpt_path=last"),  # and -c, --cfg
        (["--recipe", "grpo"], None, "+recipe=grpo"),
        (["--batch-size", "8"], None, "explorer.batch_size=8 or buffer.batch_size=8"),
        (["--zzz"], None, "key=value"),
    ],
)
def test_a_flag_that_is_a_setting_is_refused_with_the_setting(
    arguments: list[str], key: str | None, setting: str
) -> None:
    with refuses(key) as refused:
        check_flags(arguments)
    assert setting in str(refused.value)


def test_the_planner_has_keys_of_its_own() -> None:
    assert PlanConfig._key == "plan."  # its module is imported
    with refuses("plan.device"):
        check_flags(["--device", "H100-80GB"])


@pytest.mark.parametrize("arguments", [["--cfg", "foo"], ["--config-dir"], ["--config", "x"]])
def test_a_flag_of_hydras_that_is_written_wrongly_is_refused_with_its_name(arguments: list[str]) -> None:
    with refuses(None) as refused:
        check_flags(arguments)
    assert arguments[0] in str(refused.value)


def test_a_flag_between_the_settings_is_refused() -> None:
    with refuses(None) as refused:
        check_flags(["+recipe=grpo", "--multirun", "seed=1,2"])
    assert "'seed=1,2'" in str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--multirun", "+recipe=grpo", "seed=1,2"],
        ["+recipe=grpo", "seed=1", "-m"],
        ["--help"],
        ["+recipe=grpo", "--cfg", "job", "--resolve"],
        ["--config-dir", "folder", "+recipe=mine", "~logger"],
        ["-cd", "folder", "optimizer.lr=-1"],
        ["--hydra-help"],
        ["--info"],
    ],
)
def test_hydras_flags_pass(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    check_flags(arguments)


@pytest.mark.parametrize("flag", ["--config-dir", "-cd"])
def test_a_folder_of_recipes_that_is_not_there_is_refused_with_the_flag_and_what_to_give(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refuses(None) as refused:
        check_flags([flag, "my_conf", "+recipe=mine"])
    assert str(refused.value).startswith(f"--config-dir: there is no folder '{tmp_path}/my_conf': give the one that")


@pytest.mark.parametrize("program", ["train", "evaluate", "plan"])
def test_a_command_answers_a_flag_by_one_sentence(program: str, run_train: RunTrain, tmp_path: Path) -> None:
    completed = run_train(tmp_path, "+recipe=grpo", "--lr", "1e-5", program=f"trinity_lightning.{program}")
    assert completed.returncode == 2, completed.stdout
    [sentence] = completed.stdout.splitlines()
    assert "optimizer.lr=1e-5" in sentence
    assert not list(tmp_path.iterdir())

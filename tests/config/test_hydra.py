"""Folders of runs: where Hydra writes, and what is left of a run that ends at once."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from support.compose import composed
from support.errors import refuses

from trinity_lightning.config import hydra as compose
from trinity_lightning.errors import ConfigError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    HydraConfig.instance().cfg = None


def begin(*overrides: str) -> DictConfig:
    """The configuration of a run that Hydra begins: it asks for its folder, and then says which one it took."""
    config = composed("+recipe=grpo", *overrides, hydra=True)
    config.hydra.runtime.output_dir = str(Path(config.hydra.run.dir).absolute())
    HydraConfig.instance().set_config(config)
    return config


@pytest.mark.parametrize("chosen", ["mine", "a/b", "${output_root}/mine"])
def test_hydra_writes_to_the_output_dir_that_is_given(chosen: str, tmp_path: Path) -> None:
    config = begin(f"output_dir={chosen}")
    assert Path(config.hydra.runtime.output_dir) == tmp_path / chosen.replace("${output_root}", "outputs")
    compose.check_folder(config)
    assert not (tmp_path / "outputs").exists()


def test_a_run_has_one_folder_however_often_it_is_asked_for(tmp_path: Path) -> None:
    config = begin()
    assert config.hydra.run.dir == config.output_dir == config.hydra.runtime.output_dir
    compose.check_folder(config)
    assert len(list((tmp_path / "outputs" / "grpo").iterdir())) == 1


def test_two_folders_for_one_run_are_refused() -> None:
    with refuses("output_dir") as refused:
        compose.check_folder(begin("output_dir=mine", "hydra.run.dir=theirs"))
    assert "'mine'" in str(refused.value)
    assert "/theirs'" in str(refused.value)


@pytest.mark.parametrize("overrides", [(), ("output_dir=a/b",)])
@pytest.mark.parametrize(("error", "code"), [(ConfigError("no"), 2), (KeyboardInterrupt(), 130)])
def test_nothing_is_left_of_a_run_that_wrote_nothing(
    error: BaseException, code: int, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    folder = Path(begin(*overrides).output_dir)
    (folder / ".hydra").mkdir(parents=True)  # as Hydra does
    (folder / ".hydra" / "config.yaml").touch()
    (folder / "train.log").touch()
    with pytest.raises(SystemExit) as ended, compose.errors_as_sentences(folder):
        raise error
    assert ended.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_run_that_ctrl_c_ended_before_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(begin().output_dir)
    (folder / "train.log").touch()
    as_lightning_does = SystemExit(1)
    as_lightning_does.__context__ = KeyboardInterrupt()
    with pytest.raises(SystemExit) as ended, compose.errors_as_sentences(folder):
        raise as_lightning_does
    assert ended.value.code == 130
    assert capsys.readouterr().err == "trinity-lightning: interrupted.\n"
    assert list(tmp_path.iterdir()) == []


def test_another_exit_within_a_run_is_left_as_it_is() -> None:
    folder = Path(begin().output_dir)
    with pytest.raises(SystemExit) as ended, compose.errors_as_sentences(folder):
        sys.exit(5)
    assert ended.value.code == 5
    assert folder.is_dir()


@pytest.mark.parametrize("name", ["mine/checkpoints/last.ckpt", "yours/metrics.csv"])
def test_what_was_written_is_kept(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    begin(f"output_dir={folder}")
    (folder.parent / name).parent.mkdir(parents=True)
    (folder.parent / name).touch()
    with pytest.raises(SystemExit), compose.errors_as_sentences(folder):
        raise KeyboardInterrupt
    assert (folder.parent / name).is_file()


def test_a_folder_that_was_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    begin("output_dir=mine")
    with pytest.raises(SystemExit), compose.errors_as_sentences("mine"):
        raise ConfigError("no")
    assert (tmp_path / "mine").is_dir()


def logged(*overrides: str) -> Any:
    config = begin("logger=wandb_offline", *overrides)
    return OmegaConf.to_container(config.logger.wandb, resolve=True)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ((), "grpo"),
        (("optimizer.lr=1e-4", "seed=1"), "grpo lr=1e-4 seed=1"),
        (("seed=1", "taskset=reasoning_gym", "+optimizer.args.x=2"), "grpo reasoning_gym seed=1 x=2"),
        (("model=custom", "model.name=/models/mine"), "grpo custom mine"),
        (("name=first", "ckpt_path=a.ckpt", "output_root=elsewhere", "~callbacks.checkpoint"), "first"),
        ((f"reward={'x' * 200}", "seed=1"), "grpo ..."),
    ],
)
def test_a_run_of_wandb_is_named_by_what_the_command_says(overrides: tuple[str, ...], name: str) -> None:
    assert logged(*overrides)["name"] == name


@pytest.mark.parametrize(
    ("overrides", "tags"),
    [
        ((), ["grpo", "smollm2", "addition"]),
        (("model=custom", "model.name=org/mine", "reward={format: 0.5, math: 1}"), ["grpo", "mine", "format", "math"]),
        (("reward={name: my.Digits, args: {most: 4}}",), ["grpo", "smollm2", "my.Digits", "addition"]),
        (("+tasksets={sums: {source: addition}, more: {source: addition}}",), ["grpo", "smollm2", "sums", "more"]),
    ],
)
def test_a_run_of_wandb_has_tags_of_what_it_is_made_of(overrides: tuple[str, ...], tags: list[str]) -> None:
    assert logged(*overrides)["tags"][: len(tags)] == tags


def test_a_run_without_rollouts_has_no_tags_of_them() -> None:
    HydraConfig.instance().set_config(composed("+recipe=sft", "buffer.path=x", hydra=True))
    config = composed("+recipe=sft", "model=tiny", "buffer.path=x", "logger=wandb_offline")
    assert list(config.logger.wandb.tags) == ["sft", "tiny"]

"""Whole runs without rollouts: what one run kept, another is trained on."""

import csv
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs import Commands, RunTrain, equal, finished

from trinity_lightning.buffer.sql import SqlReader
from trinity_lightning.buffer.step_files import read_experiences
from trinity_lightning.common.experience import to_hf_datasets
from trinity_lightning.common.pictures.thumbnails import names_in

TINY = ("model=tiny", "logger=csv")
QUICK = ("explorer.batch_size=2", "explorer.repeat_times=4", "sampling.max_tokens=8", "explorer.eval_interval=0")
QUICK += ("reward=contains_digits",)
OFFLINE = ("+recipe=offline", *TINY, "buffer.batch_size=4", "optimizer.lr=1e-3")


@pytest.fixture(scope="module")
def recorded(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of experiences that a run of three steps kept."""
    folder = tmp_path_factory.mktemp("online")
    arguments = ("+recipe=grpo", *TINY, *QUICK, "explorer.eval_on_startup=false", "steps=3", "buffer.keep=true")
    done = run_train(folder, *arguments)
    assert done.returncode == 0, done.stdout[-4000:]
    (run,) = folder.glob("outputs/grpo/*")
    return run / "experiences"


def rows(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.glob("outputs/offline/*/metrics.csv")
    with file.open() as lines:
        return [row for row in csv.DictReader(lines) if float(row["actor/trained_rows"] or 0) > 0]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("outputs/offline/*/model/model.safetensors")
    return load_file(file)


def test_every_step_is_kept_with_its_advantages(recorded: Path) -> None:
    experiences = read_experiences(recorded)
    assert [e.eid.batch for e in experiences] == [step for step in (1, 2, 3) for _ in range(8)]
    assert all(e.advantages is not None and e.logprobs is not None for e in experiences)
    assert len(to_hf_datasets(experiences)) == 24


def test_offline_training_and_its_resume(recorded: Path, run_train: RunTrain, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    arguments = (*OFFLINE, f"buffer.path={recorded}")
    done = run_train(whole, *arguments, "steps=8")  # two steps more than a pass over the data
    assert done.returncode == 0, done.stdout[-4000:]
    trained = [int(row["step"]) for row in rows(whole)]  # a group of equal rewards trains nothing
    assert len(trained) >= 5
    assert trained[-1] >= 6
    assert all(float(row["actor/is_weight/mean"]) > 0 for row in rows(whole))
    assert run_train(parts, *arguments, "steps=5").returncode == 0
    before = weights(parts)
    done = run_train(parts, *arguments, "steps=8", "ckpt_path=last")
    assert done.returncode == 0, done.stdout[-4000:]
    resumed, expected = weights(parts), weights(whole)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    assert any(not torch.equal(resumed[name], before[name]) for name in before)


def test_a_run_resumed_within_its_steps_twice_has_the_rows_of_a_whole_one(
    recorded: Path, run_train: RunTrain, tmp_path: Path
) -> None:
    """Its second checkpoint is written by a run that was resumed itself."""
    each_item = ("+callbacks.checkpoint.every_n_train_steps=1", "callbacks.checkpoint.every_n_epochs=null")
    arguments = (*OFFLINE, f"buffer.path={recorded}", "steps=4", *each_item, "callbacks.checkpoint.save_top_k=-1")

    def labels() -> list[tuple[str, ...]]:
        return [tuple(row[name] for name in ("step", "explore_step", "actor/trained_rows")) for row in rows(tmp_path)]

    assert run_train(tmp_path, *arguments).returncode == 0
    expected = labels()
    for first in sorted(tmp_path.glob("outputs/offline/*/checkpoints/*.ckpt"))[:2]:
        copied = shutil.copy(first, tmp_path / "first.ckpt")
        done = run_train(tmp_path, *arguments, f"ckpt_path={copied}", f"output_dir={first.parents[1]}")
        assert done.returncode == 0, done.stdout[-4000:]
        assert labels() == expected


def test_a_run_on_pictures_and_what_it_keeps_are_the_same_if_it_is_resumed(run_train: Commands, tmp_path: Path) -> None:
    vision = ("+recipe=grpo_vision", "model=tiny_vision", "model.dtype=fp32", "engine=transformers", *TINY[1:], *QUICK)
    vision += ("explorer.eval_on_startup=false", "buffer.keep=true", "reward=contains_digits")
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = finished(run_train, tmp_path / "whole", *vision, "steps=3")
    finished(run_train, tmp_path / "parts", *vision, "steps=1")
    parts = finished(run_train, tmp_path / "parts", *vision, "steps=3", "ckpt_path=last")
    equal(parts, whole)
    kept, others = (read_experiences(run / "experiences") for run in (whole, parts))
    assert len(kept) == len(others) == 24
    for one, other in zip(kept, others, strict=True):
        other.eid.suffix = one.eid.suffix  # which is random
        assert one == other
    assert len({id(experience.multi_modal_inputs) for experience in kept}) == 6  # one for each prompt
    named = {name for experience in kept for name in names_in(experience)}
    assert named == {file.name for file in (whole / "completions" / "images").iterdir()}


def test_what_is_kept_in_a_database_is_there_once_and_trained_on(run_train: RunTrain, tmp_path: Path) -> None:
    """Also the step that a run resumed from an earlier checkpoint does again."""

    def run(*arguments: str) -> None:
        done = run_train(tmp_path, *arguments)
        assert done.returncode == 0, done.stdout[-4000:]

    keep = ("+recipe=grpo", *TINY, *QUICK, "engine=transformers", "explorer.eval_on_startup=false", "buffer.keep=sql")
    run(*keep, "steps=1")
    [checkpoint] = tmp_path.glob("outputs/grpo/*/checkpoints/*.ckpt")
    shutil.copy(checkpoint, tmp_path / "first.ckpt")
    run(*keep, "steps=2", "ckpt_path=last")
    run(*keep, "steps=2", f"ckpt_path={tmp_path / 'first.ckpt'}", f"output_dir={checkpoint.parents[1]}")
    database = checkpoint.parents[1] / "experiences.db"
    with SqlReader(database) as reader:
        experiences = reader.read(100)
    assert [e.eid.batch for e in experiences] == [1] * 8 + [2] * 8
    assert all(e.advantages is not None for e in experiences)
    run(*OFFLINE, "buffer.storage=sql", f"buffer.path={database}", "buffer.order=priority", "steps=3")
    assert rows(tmp_path)

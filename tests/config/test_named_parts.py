"""Mappings of named parts: an entry that is null is left out, and so are evaluations that belong to other tasks."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from support.compose import composed
from support.errors import refuses

from trinity_lightning.config.run import NAMED_PARTS, TrainConfig, typed_config, validate


def recipe(folder: Path, text: str, *overrides: str) -> tuple[DictConfig, TrainConfig]:
    """The configuration of a recipe of that text and its typed sections, checked as a command checks them."""
    (folder / "recipe").mkdir(exist_ok=True)
    (folder / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    (folder / "tasks.jsonl").write_text('{"prompt": "2 - 1?", "answer": "1"}\n')
    config = composed("model=tiny", "+recipe=mine", f"hydra.searchpath=[{folder}]", *overrides)
    return config, validate(config)


OWN = "taskset: {{source: dataset, path: {0}/tasks.jsonl}}\n"
ON = "defaults: [{0}, _self_]\n"


@pytest.mark.parametrize("base", ["grpo", "dapo", "rewards_mixed", "multi_turn"])
def test_a_recipe_with_its_own_tasks_is_not_evaluated_on_sums(base: str, tmp_path: Path) -> None:
    _, run = recipe(tmp_path, ON.format(base) + OWN.format(tmp_path))
    assert run.eval_tasksets == {}
    assert run.taskset.name == "dataset"


def test_neither_is_one_that_builds_on_no_other(tmp_path: Path) -> None:
    config, run = recipe(tmp_path, OWN.format(tmp_path))
    assert run.eval_tasksets == {}
    assert "eval_tasksets" in config
    assert list(config.eval_tasksets) == []


@pytest.mark.parametrize("choice", ["taskset=dataset", "taskset=reasoning_gym"])
def test_nor_one_that_chooses_another_taskset(choice: str, tmp_path: Path) -> None:
    path = [f"taskset.path={tmp_path}/tasks.jsonl"] if choice.endswith("dataset") else []
    assert recipe(tmp_path, ON.format("grpo"), choice, *path)[1].eval_tasksets == {}


def test_own_evaluations_are_kept_and_called_by_their_keys(tmp_path: Path) -> None:
    evaluated = f"eval_tasksets: {{held: {{source: dataset, path: {tmp_path}/tasks.jsonl}}}}\n"
    _, run = recipe(tmp_path, ON.format("grpo") + OWN.format(tmp_path) + evaluated)
    assert {key: taskset.name for key, taskset in run.eval_tasksets.items()} == {"held": "held"}


def test_sums_that_are_asked_for_are_kept(tmp_path: Path) -> None:
    sums = "eval_tasksets: {sums: {source: addition, split: heldout}}\n"
    assert list(recipe(tmp_path, OWN.format(tmp_path) + sums)[1].eval_tasksets) == ["sums"]


def test_a_mixture_with_sums_is_evaluated_on_the_held_out_ones(tmp_path: Path) -> None:
    mixed = f"tasksets: {{sums: {{source: addition}}, own: {{source: dataset, path: {tmp_path}/tasks.jsonl}}}}\n"
    _, run = recipe(tmp_path, ON.format("grpo") + OWN.format(tmp_path) + mixed)
    assert list(run.eval_tasksets) == ["addition_heldout"]
    assert [taskset.name for taskset in run.tasksets.values()] == ["sums", "own"]
    _, run = recipe(tmp_path, ON.format("grpo") + mixed, "tasksets.sums=null")
    assert list(run.eval_tasksets) == []


def test_a_run_without_rollouts_has_no_tasks_to_evaluate_on(tmp_path: Path) -> None:
    (tmp_path / "examples.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    config = composed("+recipe=sft", "model=tiny", f"buffer.path={tmp_path}/examples.jsonl")
    assert list(config.eval_tasksets) == ["addition_heldout"]
    assert validate(config, trains=False).eval_tasksets == {}


SET = {
    "tasksets": ("tasksets: {a: {source: addition}, b: {source: addition, seed: 1}}\n", "b"),
    "eval_tasksets": ("eval_tasksets: {more: {source: addition, split: heldout}}\n", "addition_heldout"),
    "auxiliary_models": (
        "auxiliary_models: {a: {model: tiny}, b: {model: tiny}}\noperators: {judge: {args: {model: b}}}\n",
        "a",
    ),
    "reward": ("reward: {math: 1.0, contains_digits: 0.1}\n", "math"),
    "operators": ("", "overlong_penalty"),
    "add_strategy": ("", "dapo"),
    "logger": ("", "wandb"),
    "callbacks": ("", "checkpoint"),
}


@pytest.mark.parametrize("key", SET)
def test_an_entry_that_is_null_is_left_out(key: str, tmp_path: Path) -> None:
    text, gone = SET[key]
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "base.yaml").write_text(f"# @package _global_\n{ON.format('dapo')}{text}")
    remaining = [name for name in composed("+recipe=base", f"hydra.searchpath=[{tmp_path}]")[key] if name != gone]
    config, run = recipe(tmp_path, ON.format("dapo") + text, f"{key}.{gone}=null")
    assert list(config[key]) == remaining
    inherited, _ = recipe(tmp_path, f"{ON.format('base')}{key}: {{{gone}: null}}\n")
    assert list(inherited[key]) == remaining
    if key not in ("logger", "callbacks"):
        assert list(getattr(run, key)) == remaining
        assert list(getattr(typed_config(inherited), key)) == remaining


def test_a_stream_that_is_null_is_left_out() -> None:
    gone = ("auxiliary_models.teacher=null", "operators.teacher_top_k=null")
    config = composed("+recipe=streams", "model=tiny", *gone, "algorithm.policy_loss.args.streams.teacher=null")
    streams: Any = validate(config).algorithm.policy_loss.args["streams"]
    assert list(streams) == ["rl", "expert", "tools"]


def test_a_whole_mapping_that_is_null_has_no_entry(tmp_path: Path) -> None:
    keys = [key for key in SET if key not in ("add_strategy",)]
    config, run = recipe(tmp_path, ON.format("dapo") + "".join(f"{key}: null\n" for key in keys))
    assert not any(config[key] for key in keys)
    assert (run.eval_tasksets, run.operators, run.reward) == ({}, {}, None)


def test_no_strategy_at_all_is_refused_as_before(tmp_path: Path) -> None:
    with refuses("add_strategy"):
        recipe(tmp_path, ON.format("grpo") + "add_strategy: {grpo: null}\n")


def test_every_mapping_of_named_parts_is_there() -> None:
    config = composed("+recipe=streams")
    assert {key for key in NAMED_PARTS if OmegaConf.select(config, key) is None} == {"reward", "reward_solved"}

"""Every recipe trains: one step with the tiny model, trained tokens, changed weights."""

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from support.compose import composed
from support.runs import ROOT, SMALL, RunTrain

from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.registry import options
from trinity_lightning.config.run import typed_config
from trinity_lightning.config.sections import PartConfig

BELOW = ("grpo_gsm8k", "rewards_mixed", "sweep_lr")


MODELS = {"grpo_vision": "tiny_vision"}  # in place of the tiny model


def assert_trains(run_train: RunTrain, folder: Path, recipe: str, *arguments: str) -> Path:
    """One step trains tokens, changes weights and samples from the policy that it trains; returns the run's folder."""
    done = run_train(folder, f"+recipe={recipe}", "steps=1", *SMALL, *arguments)
    assert done.returncode == 0, done.stdout[-4000:]
    [run] = folder.glob(f"outputs/{recipe}/*")
    with (run / "metrics.csv").open() as file:
        updates = [row for row in csv.DictReader(file) if row["actor/trained_rows"]]
    assert all(float(row["actor/trained_rows"]) > 0 for row in updates)
    assert float(updates[0]["actor/logprob_diff/max"]) < 1e-3
    before = load_file(Path(resolve_model(MODELS.get(recipe, "tiny"))) / "model.safetensors")
    after = load_file(run / "model" / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in after)
    return run


# Without rollouts: tests/test_offline_runs.py, tests/test_dataset_runs.py; a teacher: tests/test_auxiliary_models.py;
# what needs more: below.
ELSEWHERE = {"offline", "sft", "dpo", "on_policy_distill", "on_policy_distill_top_k", "streams", *BELOW}


def quickest_engine(recipe: str) -> tuple[str, ...]:
    """The training model itself, which needs no start, if a recipe rolls out as grpo does; otherwise its own engine."""
    sections = ("model", "engine", "synchronizer", "explorer", "workflow", "sampling")
    mine, grpo = (composed(f"+recipe={name}") for name in (recipe, "grpo"))
    rolls_out_alike = all(mine[section] == grpo[section] for section in sections)
    return ("engine=transformers",) if rolls_out_alike and recipe != "grpo" else ()


@pytest.mark.parametrize("recipe", sorted({*options("recipe")} - ELSEWHERE))
def test_a_recipe_trains_one_step(recipe: str, run_train: RunTrain, tmp_path: Path) -> None:
    model = [f"model={MODELS[recipe]}"] if recipe in MODELS else []
    assert_trains(run_train, tmp_path, recipe, *quickest_engine(recipe), *model)


@pytest.mark.parametrize("recipe", options("recipe"))
def test_a_recipes_header_says_where_it_is_from_and_what_to_expect(recipe: str) -> None:
    text = (ROOT / "recipes" / f"{recipe}.yaml").read_text()
    header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    for part in ("arXiv", f"+recipe={recipe}", "Hardware: ", "Minutes: ", "Curves: "):
        assert part in header, part


def test_gsm8k_trains_from_a_local_file_of_its_format(run_train: RunTrain, tmp_path: Path) -> None:
    sums = [{"question": f"What is {n} + 3?", "answer": f"{n} + 3 is {n + 3}.\n#### {n + 3}"} for n in range(4)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    files = (
        "taskset.path=gsm8k.jsonl",
        "eval_tasksets.gsm8k_test.path=gsm8k.jsonl",
        "eval_tasksets.gsm8k_test.split=train",  # a file's only one
        "engine.max_model_len=512",
        "eval_sampling.max_tokens=8",
    )
    run = assert_trains(run_train, tmp_path, "grpo_gsm8k", *files, "reward={math: 1.0, contains_digits: 1.0}")
    rollouts = [json.loads(line) for line in (run / "completions" / "step_1.jsonl").read_text().splitlines()]
    assert {"reward/math", "reward/contains_digits"} <= rollouts[0].keys()
    assert "What is" in rollouts[0]["prompt"]


def test_a_reward_of_ones_own_joins_the_mixed_ones() -> None:
    """By the command in the recipe's head."""
    recipe = (ROOT / "recipes" / "rewards_mixed.yaml").read_text()
    [command] = re.findall(r"train (.* reward\.exact_match=.*)", recipe)
    reward = composed(*shlex.split(command)).reward
    assert OmegaConf.to_container(reward) == {"last_number": 1.0, "exact_match": 0.5, "my_module.polite": 0.1}


def test_mixed_rewards_are_logged_each_by_itself(run_train: RunTrain, tmp_path: Path) -> None:
    small = [override for override in SMALL if not override.startswith("reward=")]
    done = run_train(
        tmp_path, "+recipe=rewards_mixed", *small, "steps=1", "engine=transformers", "+reward.contains_digits=0.5"
    )
    assert done.returncode == 0, done.stdout[-4000:]
    [file] = tmp_path.glob("outputs/rewards_mixed/*/metrics.csv")
    with file.open() as lines:
        row = next(row for row in csv.DictReader(lines) if row["reward/mean"])
    weights = {"last_number": 1.0, "exact_match": 0.2, "contains_digits": 0.5}
    mixed = sum(weight * float(row[f"reward/{name}/mean"]) for name, weight in weights.items())
    assert float(row["reward/mean"]) == pytest.approx(mixed, rel=1e-5)
    assert mixed > 0


def test_a_sweep_tries_learning_rates(run_train: RunTrain, tmp_path: Path) -> None:
    done = run_train(tmp_path, "--multirun", "+recipe=sweep_lr", "steps=1", *SMALL, "hydra.sweeper.n_trials=2")
    assert done.returncode == 0, done.stdout[-4000:]
    [sweep] = tmp_path.glob("outputs/sweep_lr/*")
    rates = [OmegaConf.load(sweep / job / "config.yaml").optimizer.lr for job in ("0", "1")]
    best = OmegaConf.load(sweep / "optimization_results.yaml")
    assert best.best_params["optimizer.lr"] in rates
    assert all(5e-6 <= rate <= 1e-4 for rate in rates)
    assert rates[0] != rates[1]


REWARD_THAT_FAILS_ONCE = """
from hydra.core.hydra_config import HydraConfig

def digits(response, task):
    if HydraConfig.get().job.num == 0:
        raise ValueError("of the first job")
    return sum(map(str.isdigit, response)) / max(len(response), 1)
"""


def test_a_sweep_goes_on_after_a_job_that_failed_and_compares_by_the_held_out_score(
    run_train: RunTrain, tmp_path: Path
) -> None:
    (tmp_path / "my_reward.py").write_text(REWARD_THAT_FAILS_ONCE)
    small = [override for override in SMALL if not override.startswith(("reward=", "explorer.eval"))]
    held = ("+eval_tasksets.addition_heldout.args.heldout=4", "eval_sampling.max_tokens=8", "save_model=false")
    swept = ("reward=my_reward.digits", "engine=transformers", "hydra.sweeper.n_trials=2", "steps=1")
    done = run_train(tmp_path, "--multirun", "+recipe=sweep_lr", *small, *held, *swept)
    assert done.returncode == 0, done.stdout[-4000:]
    [sweep] = tmp_path.glob("outputs/sweep_lr/*")
    best = OmegaConf.load(sweep / "optimization_results.yaml")
    assert best.best_params["optimizer.lr"] == OmegaConf.load(sweep / "1" / "config.yaml").optimizer.lr
    with (sweep / "1" / "metrics.csv").open() as file:
        scores = [row["eval/addition_heldout/mean@1"] for row in csv.DictReader(file)]
    assert best.best_value == pytest.approx(float(scores[-1]))
    report = run_train(tmp_path, str(sweep), program="trinity_lightning.report")
    assert report.returncode == 0, report.stdout
    assert "final and best eval/addition_heldout/mean@1" in report.stdout
    assert "optimizer.lr" in report.stdout
    assert "of the first job" in " ".join(report.stdout.split())
    assert (sweep / "report.html").is_file()


def composed_of_ones_own(folder: Path, text: str) -> DictConfig:
    """The configuration of a recipe of one's own with this text."""
    (folder / "recipe").mkdir()
    (folder / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    return composed("+recipe=mine", f"hydra.searchpath=[file://{folder}]")


def test_a_recipe_of_ones_own_builds_on_another(tmp_path: Path) -> None:
    text = "defaults: [dapo, _self_]\nname: mine\nexplorer: {repeat_times: 16}\n"
    config = composed_of_ones_own(tmp_path, text)
    assert (config.name, config.steps, config.explorer.repeat_times) == ("mine", 24, 16)
    assert list(config.add_strategy) == ["dapo", "grpo"]


@pytest.mark.parametrize(
    ("loss", "args"), [("cispo", {}), ("{name: cispo, args: {clip_range_high: 0.3}}", {"clip_range_high": 0.3})]
)
def test_a_recipe_of_ones_own_names_its_loss(loss: str, args: dict[str, float], tmp_path: Path) -> None:
    config = composed_of_ones_own(tmp_path, f"defaults: [grpo, _self_]\nalgorithm: {{policy_loss: {loss}}}\n")
    assert typed_config(config).algorithm.policy_loss == PartConfig("cispo", args)


def test_a_reasoning_gym_game_in_several_turns_trains(run_train: RunTrain, tmp_path: Path) -> None:
    game = ("taskset=reasoning_gym", "taskset.path=chain_sum", "reward={reasoning_gym: 1.0, contains_digits: 1.0}")
    run = assert_trains(run_train, tmp_path, "multi_turn", *game)
    rollouts = [json.loads(line) for line in (run / "completions" / "step_1.jsonl").read_text().splitlines()]
    assert len(rollouts) == 8
    assert all(rollout["completion"].count("That is wrong. Try again.") == 2 for rollout in rollouts)
    assert all(0.0 <= rollout["reward/reasoning_gym"] <= 1.0 for rollout in rollouts)

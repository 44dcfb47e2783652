"""The learning of recipes, seed by seed: curves at the start and the end of a run of the tiny model, and its seconds.

    python benchmarks/learning.py [--recipes grpo lora ...] [--seeds 1 2 3]

The tiny model starts from random weights and a reward that it varies in, the share of digits in a response. A curve is
given by its means over the first and the last fifth of the steps. One run after the other, each a process of its own.
What a recipe needs (examples, a teacher, a model to start from) is made before its first run, outside its seconds.
Prints one JSON line when all have ended, and on stderr a line a run.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from trinity_lightning.explorer.tasks.sources import addition

TINY = ("model=tiny", "optimizer.lr=5e-3", "steps=24", "logger=csv")
DIGITS = ("reward=contains_digits", "explorer.eval_on_startup=false", "explorer.eval_interval=0")
TAUGHT = (*DIGITS, "auxiliary_models.teacher.model={teacher}/model", "steps=12")
REWARD = ("reward/mean",)


class Recipe(NamedTuple):
    """The arguments of a recipe besides TINY, and the curves that show its learning.

    {name} in an argument is the path of that entry of Needs.
    """

    arguments: tuple[str, ...] = DIGITS
    curves: tuple[str, ...] = REWARD


RECIPES = {
    **dict.fromkeys(("grpo", "opmd", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "dppo", "rloo"), Recipe()),
    **dict.fromkeys(("reinforce_plus_plus", "ppo", "tool_use", "one_step_off_policy"), Recipe()),
    # Three turns a rollout: shorter ones, for a run to be over within a minute.
    "multi_turn": Recipe((*DIGITS, "steps=20", "sampling.max_tokens=16")),
    "rewards_mixed": Recipe((*DIGITS[1:], "+reward.contains_digits=1")),  # one more of them
    "mix": Recipe(DIGITS, (*REWARD, "actor/sft_loss")),
    # Most of a step goes into the teacher's likeliest tokens at each place, of the long prompts with tools too.
    "streams": Recipe(
        (*TAUGHT, "engine.max_model_len=511", "explorer.batch_size=4", "operators.teacher_top_k.args.k=4"),
        (*REWARD, "actor/expert_loss", "actor/teacher_loss"),
    ),
    "on_policy_distill": Recipe(TAUGHT, (*REWARD, "group_advantages/reverse_kl/mean")),
    "on_policy_distill_top_k": Recipe(TAUGHT, (*REWARD, "actor/pg_loss")),
    "lora": Recipe((*DIGITS, "model.name={reader}/model")),
    "sft": Recipe(("buffer.path={examples}/sums.jsonl",), ("actor/pg_loss",)),
    "dpo": Recipe(("buffer.path={examples}/pairs.jsonl",), ("actor/pg_loss", "actor/rewards/accuracies")),
}
# Models that recipes need, as the runs that train them.
MODELS = {
    "teacher": ("grpo", *DIGITS),
    # Adapters leave the head as it is, and the random one gives digits 0.143 of the probability at most, whatever it
    # sees. That of a model that has learned to read sums gives them 0.99, if asked to.
    "reader": ("sft", "buffer.path={examples}/text.jsonl", "steps=64"),
}
NOT_HERE = {
    "grpo_gsm8k": "it is grpo, on a dataset of the hub",
    "grpo_vision": "the tiny model reads no pictures; docs/pictures.md has what tiny_vision learns",
    "offline": "without rollouts it has no reward",
    "sweep_lr": "it is eight runs of grpo",
}


def train(folder: Path, recipe: str, *arguments: str) -> None:
    """A run, its folder being `folder`."""
    command = [sys.executable, "-m", "trinity_lightning.train", f"+recipe={recipe}", f"hydra.run.dir={folder}"]
    done = subprocess.run([*command, *TINY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{recipe} {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout[-4000:]}")


class Needs(dict[str, Path]):
    """By name, in a folder, the examples (three files), and runs of MODELS, each made when it is first looked up."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self["examples"] = folder / "examples"
        write_examples(self["examples"])

    def __missing__(self, name: str) -> Path:
        self[name] = self._folder / name
        recipe, *arguments = MODELS[name]
        train(self[name], recipe, *(argument.format_map(self) for argument in arguments))
        return self[name]


def write_examples(folder: Path) -> None:
    """The built-in sums as text, with their results, and as pairs of these and the same in letters, which are worse."""
    folder.mkdir()
    for entry in addition("train", low=0, high=20, heldout=128):
        prompt, right = entry["prompt"], entry["answer"]
        wrong = right.translate(str.maketrans("0123456789", "abcdefghij"))
        for name, example in (
            ("text", {"text": f"{prompt} {right}"}),
            ("sums", {"prompt": prompt, "completion": right}),
            ("pairs", {"prompt": prompt, "chosen": right, "rejected": wrong}),
        ):
            with (folder / f"{name}.jsonl").open("a") as lines:
                print(json.dumps(example), file=lines)


def learned(recipe: str, seed: int, needs: Needs) -> dict[str, Any]:
    """The curves and seconds of one run."""
    arguments = [argument.format_map(needs) for argument in RECIPES[recipe].arguments]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        train(Path(folder), recipe, *arguments, f"seed={seed}", "save_model=false")
        seconds = time.monotonic() - begin
        with (Path(folder) / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    averages: dict[str, Any] = {}
    for curve in RECIPES[recipe].curves:
        values = [float(row[curve]) for row in rows if row.get(curve)]
        share = max(len(values) // 5, 1)
        averages[curve] = [round(statistics.fmean(part), 3) for part in (values[:share], values[-share:])]
    return averages | {"seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    args = parser.parse_args()
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        needs = Needs(Path(folder))
        for recipe in args.recipes:
            for seed in args.seeds:
                result = learned(recipe, seed, needs)
                runs.setdefault(recipe, {})[str(seed)] = result
                print(recipe, f"seed={seed}", *(f"{name} {value}" for name, value in result.items()), file=sys.stderr)
    print(json.dumps({"benchmark": "learning", "runs": runs}))


if __name__ == "__main__":
    main()

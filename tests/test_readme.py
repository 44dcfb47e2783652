"""The reward and the recipe that the README shows, and the script of docs/guide_script.md, are run."""

import json
import re
from pathlib import Path

import pytest
from support.runs import ROOT, RunTrain


def blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_it_is_read_in_one_sitting_and_counts_the_recipes() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 200
    assert re.findall(r"\*\*(\d+) recipes\*\*", readme) == [str(len([*ROOT.glob("recipes/*.yaml")]))]


def test_what_it_claims_beside_others_can_be_looked_up() -> None:
    readme, performance = ((ROOT / name).read_text() for name in ("README.md", "docs/performance.md"))
    named = re.findall(r"(?:tests|benchmarks)/[\w/]+\.py", readme)
    assert len(named) >= 3
    assert [name for name in named if not (ROOT / name).exists()] == []
    [(least, most)] = re.findall(r"took TRL ([\d.]+) to ([\d.]+) times as long", readme)
    [table] = re.findall(r"^\| SmolLM2, seconds ours / TRL .*?\n\n", performance, re.MULTILINE | re.DOTALL)
    ratios = [float(ratio) for ratio in re.findall(r"\*\*([\d.]+)x\*\*", table)]
    assert [float(least), float(most)] == [min(ratios), max(ratios)]


def test_the_script_without_hydra_trains(run_train: RunTrain, tmp_path: Path) -> None:
    [script] = blocks("python", "docs/guide_script.md")
    assert len([line for line in script.splitlines() if line.strip()]) <= 28
    # The same script on the small model, for three steps, with a reward that a random model varies in.
    script = script.replace("smollm2", "tiny").replace("max_epochs=30", "max_epochs=3")
    [reward] = re.findall(r"return float\((.*)\)", script)
    script = script.replace(reward, "sum(map(str.isdigit, response))")
    file = tmp_path / "script.py"
    file.write_text(script + "\nprint('steps', trainer.global_step)\n")
    done = run_train(tmp_path, program=str(file))
    assert done.returncode == 0, done.stdout[-4000:]
    assert "steps 3" in done.stdout
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["reward", "recipe"])
def test_a_reward_and_a_recipe_of_ones_own(kind: str, run_train: RunTrain, tmp_path: Path) -> None:
    [reward] = blocks("python")
    [recipe] = blocks("yaml")
    (tmp_path / "my_rewards.py").write_text(reward)
    (tmp_path / "my_conf" / "recipe").mkdir(parents=True)
    (tmp_path / "my_conf" / "recipe" / "subtraction.yaml").write_text(recipe)
    tasks = [{"prompt": f"What is 9 - {n}? Reply with only the number.", "answer": str(9 - n)} for n in range(8)]
    (tmp_path / "subtraction.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    arguments = {
        "reward": ["+recipe=grpo", "reward=my_rewards.short_and_right", "explorer.eval_interval=0"],
        "recipe": ["--config-dir", "my_conf", "+recipe=subtraction"],
    }[kind]
    done = run_train(tmp_path, *arguments, "model=tiny", "steps=1", "logger=csv")
    assert done.returncode == 0, done.stdout[-4000:]
    [metrics] = tmp_path.glob("outputs/*/*/metrics.csv")
    evaluated = re.findall(r"eval/(\w+)/mean@1", metrics.read_text().partition("\n")[0])
    assert evaluated == {"reward": [], "recipe": ["subtraction_heldout"]}[kind]
    assert "addition" not in done.stdout
    if kind == "recipe":
        name = "subtraction_heldout"
        line = re.compile(
            rf"evaluated at step [01]/1  {name} mean@1 [\d.]+  pass@1 [\d.]+ \(short_and_right/right at 1\)"
        )
        assert len(line.findall(done.stdout)) == len(line.findall((metrics.parent / "train.log").read_text())) == 2
        page = (metrics.parent / "report.html").read_text().replace("<wbr>", "")
        assert re.findall(r'<div class="fact"><dt class="quiet">([^<]*)<', page)[0] == f"eval/{name}/mean@1"
    [completions] = tmp_path.glob("outputs/*/*/completions/step_1.jsonl")
    first = json.loads(completions.read_text().splitlines()[0])
    assert {"reward/short_and_right", "reward/short_and_right/right", "reward/short_and_right/short"} <= first.keys()

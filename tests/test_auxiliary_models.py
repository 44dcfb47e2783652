"""Judges and teachers from the command line: an endpoint that is asked, and a server that the run starts."""

import asyncio
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.judge_server import judge_server
from support.runs import SMALL, RunTrain

from trinity_lightning.config.models import resolve_model
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.openai_api import OpenAIModel

ONE_STEP = ("+recipe=grpo", *SMALL, "steps=1")


def metrics(folder: Path) -> dict[str, float]:
    [file] = folder.glob("outputs/*/*/metrics.csv")
    with file.open() as lines:
        [row] = [row for row in csv.DictReader(lines) if row["actor/trained_rows"]]
    return {name: float(value) for name, value in row.items() if value}


def by_length(body: dict[str, Any]) -> tuple[int, str]:
    """Shorter is better: a reward that varies with the response."""
    return 200, json.dumps({"score": 1 / (1 + len(body["messages"][-1]["content"]) % 7)})


@pytest.mark.parametrize("asked_by", ["workflow", "operator"])
def test_an_endpoint_judges(asked_by: str, run_train: RunTrain, tmp_path: Path) -> None:
    judging = {
        "workflow": ("workflow=judge", "+workflow.args.judge=umpire"),
        "operator": ("operators=judge", "operators.judge.args.model=umpire"),
    }
    with judge_server(by_length, ["some-model"]) as server:
        model = ("+auxiliary_models.umpire.model=some-model", f"+auxiliary_models.umpire.url={server.url}")
        done = run_train(tmp_path, *ONE_STEP, *judging[asked_by], *model)
    assert done.returncode == 0, done.stdout[-4000:]
    assert len(server.requests) == 8
    assert {request["model"] for request in server.requests} == {"some-model"}
    assert metrics(tmp_path)["actor/trained_rows"] > 0
    assert metrics(tmp_path)["frac_reward_zero_std"] < 1 or asked_by == "operator"  # rewards before operators


# Metrics that say that the teacher was heard; without an engine of vLLM's own where that is not the matter.
TAUGHT = {
    "on_policy_distill": ((), ("group_advantages/reverse_kl/mean",)),
    "on_policy_distill_top_k": (
        ("engine=transformers", "engine.max_model_len=511", "operators.teacher_top_k.args.k=40"),
        ("actor/pg_loss", "experience_pipeline/teacher_top_k/mass/mean"),
    ),
    "streams": (("engine=transformers", "engine.max_model_len=511"), ("actor/expert_loss", "actor/teacher_loss")),
}


@pytest.mark.parametrize("recipe", TAUGHT)
def test_a_server_of_the_runs_own_teaches(recipe: str, run_train: RunTrain, tmp_path: Path) -> None:
    arguments, names = TAUGHT[recipe]
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    for file in Path(resolve_model("tiny")).iterdir():
        (teacher / file.name).write_bytes(file.read_bytes())
    weights = load_file(teacher / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, teacher / "model.safetensors", {"format": "pt"})
    done = run_train(
        tmp_path,
        f"+recipe={recipe}",
        *SMALL,
        "steps=1",
        *arguments,
        f"auxiliary_models.teacher.model={teacher}",
        "+auxiliary_models.teacher.engine.max_model_len=512",
        "+auxiliary_models.teacher.engine.kv_cache_gb=0.1",
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert metrics(tmp_path)["actor/trained_rows"] == (24 if recipe == "streams" else 8)
    assert all(metrics(tmp_path)[name] != 0 for name in names)
    [run] = tmp_path.glob(f"outputs/{recipe}/*")
    trained = load_file(run / "model" / "model.safetensors")
    before = load_file(Path(resolve_model("tiny")) / "model.safetensors")
    assert any(not torch.equal(trained[name], before[name]) for name in trained)
    assert (run / "teacher.log").is_file()


@pytest.mark.parametrize("call", [("generate", "Hi"), ("render", []), ("logprobs", [1]), ("sync_weights", {}, 1)])
def test_an_endpoint_only_chats(call: tuple[Any, ...]) -> None:
    name, *arguments = call
    with pytest.raises(ConfigError, match=f"{name}.* only chats"):
        asyncio.run(getattr(OpenAIModel("http://127.0.0.1:9/v1", "m"), name)(*arguments))

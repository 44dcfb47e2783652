"""Whole evaluations: a model and its checkpoints, in processes of their own."""

import csv
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.compose import composed
from support.errors import refuses
from support.runs import RunTrain

from trinity_lightning.evaluation import Evaluation, build_evaluation, evaluation_rows
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.sync.stream import parameter_shapes
from trinity_lightning.trainer.policy import PolicyModule

QUICK = ("+recipe=grpo", "model=tiny", "reward=contains_digits", "explorer.batch_size=2", "explorer.repeat_times=4")
QUICK += ("sampling.max_tokens=8", "eval_sampling.max_tokens=8", "+eval_tasksets.addition_heldout.args.heldout=16")


def evaluations(file: Path) -> dict[int, dict[str, float]]:
    """Rewards on the held-out sums by explore step, as metrics.csv has them."""
    with file.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("eval/addition_heldout/mean@1")]
    names = [name for name in rows[0] if name.startswith("eval/") and "@" in name]
    return {int(float(row["explore_step"])): {name: float(row[name]) for name in names} for row in rows}


@pytest.fixture(scope="module")
def run_evaluate(run_train: RunTrain) -> RunTrain:
    return partial(run_train, program="trinity_lightning.evaluate")


@pytest.fixture(scope="module")
def trained(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint and an evaluation after each."""
    folder = tmp_path_factory.mktemp("trained")
    steps = ("steps=2", "explorer.eval_interval=1", "callbacks.checkpoint.every_n_epochs=1")
    keep = ("callbacks.checkpoint.save_top_k=-1", "logger=csv", "optimizer.lr=1e-2")
    done = run_train(folder, *QUICK, *steps, *keep)
    assert done.returncode == 0, done.stdout[-4000:]
    return folder


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_checkpoints_are_worth_what_they_were_in_training(engine: str, trained: Path, run_evaluate: RunTrain) -> None:
    (run,) = trained.glob("outputs/grpo/2*")
    out = f"hydra.run.dir={trained / engine}"
    done = run_evaluate(trained, *QUICK, f"engine={engine}", f"ckpt_path={run}", out)
    assert done.returncode == 0, done.stdout[-4000:]
    expected = evaluations(run / "metrics.csv")
    assert expected.pop(0) != expected[1] != expected[2]
    assert evaluations(trained / engine / "metrics.csv") == expected
    for step in (1, 2):
        assert (trained / engine / f"completions/eval_addition_heldout_step_{step}.jsonl").is_file()
    assert re.search(r"explore step +2\n", done.stdout)
    assert [path.name for path in (trained / "outputs").iterdir()] == ["grpo"]  # no folder of a run that never was


def test_the_model_itself_several_times(run_evaluate: RunTrain, tmp_path: Path) -> None:
    """In this one process, whatever the recipe trains with."""
    machines = ("trainer=ddp", "trainer.accelerator=cpu", "+trainer.num_nodes=2")
    done = run_evaluate(tmp_path, *QUICK, *machines, "eval_repeat_times=3", "eval_sampling.temperature=1.0")
    assert done.returncode == 0, done.stdout[-4000:]
    (row,) = re.findall(r"^ *addition_heldout .*$", done.stdout, re.MULTILINE)
    assert re.findall(r"\w+@\d", row) == [
        "mean@3", "std@3", "best@2", "best@3", "worst@2", "worst@3", "pass@2", "pass@3"
    ]  # fmt: skip
    assert re.search(r"^ *addition_heldout/reward/contains_digits +mean@3 ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model=tiny", "eval_tasksets=null"), "nothing to evaluate on"),
        (("+recipe=sft", "model=tiny", "buffer.path=org/data", "eval_repeat_times=2"), "nothing to evaluate on"),
        ((*QUICK, "ckpt_path=nowhere"), "'nowhere' is neither a checkpoint nor a folder that holds one"),
        ((*QUICK, "ckpt_path=last"), "ckpt_path=last: there is no checkpoint under"),
        ((*QUICK, "eval_repeat_tmes=3"), "eval_repeat_times"),
    ],
)
def test_wrong_input_is_one_message(
    arguments: tuple[str, ...], message: str, run_evaluate: RunTrain, tmp_path: Path
) -> None:
    done = run_evaluate(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stdout
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "outputs").exists()  # nothing is left of it


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    torch.save({"hyper_parameters": {"model": "tiny"}}, tmp_path / "it.ckpt")
    config = composed(*QUICK, "model=smollm2", "engine=transformers", f"output_dir={tmp_path}", "logger=csv")
    with refuses("model.name"):
        build_evaluation(config, [tmp_path / "it.ckpt"])


@pytest.mark.parametrize(("accelerator", "expected"), [("auto", [torch.device("cuda", 0)]), ("cpu", [])])
def test_the_training_model_generates_on_the_gpu(
    accelerator: str, expected: list[torch.device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[torch.device] = []
    load = PolicyModule.configure_model

    def loaded(policy: PolicyModule) -> None:
        load(policy)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # from here on: this torch has no CUDA

    monkeypatch.setattr(PolicyModule, "configure_model", loaded)
    monkeypatch.setattr(PolicyModule, "to", lambda _, device: moved.append(device))
    arguments = (*QUICK, "engine=transformers", f"trainer.accelerator={accelerator}", f"output_dir={tmp_path}")
    run = build_evaluation(composed(*arguments, "logger=csv", "model.dtype=fp32"), [])
    assert [engine.capabilities.shares_weights for engine in run.engines] == [True]
    assert moved == expected


@pytest.mark.parametrize("shares", [True, False])
def test_engines_are_sent_the_parameters_of_a_checkpoint_without_the_models_buffers(
    shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "head_dim": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "first_k_dense_replace": 1}
    settings: dict[str, Any] = sizes | heads | {"n_routed_experts": 4, "moe_intermediate_size": 8}
    model = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**settings, num_experts_per_tok=2))
    model.config.save_pretrained(tmp_path)
    saved = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    assert "model.model.layers.1.mlp.gate.e_score_correction_bias" in saved
    progress = {"fit_loop": {"epoch_progress": {"current": {"processed": 3}}}}
    torch.save({"state_dict": saved, "loops": progress}, tmp_path / "of_step_3.ckpt")
    engine = TransformersEngine("tiny")
    engine.bind(model)
    monkeypatch.setattr(engine, "capabilities", replace(engine.capabilities, shares_weights=shares))
    none: Any = None
    evaluation = Evaluation(str(tmp_path), none, [engine], [], tmp_path, none, [])
    step, weights = evaluation._weights(tmp_path / "of_step_3.ckpt")
    assert (step, weights.shapes) == (3, engine.weight_shapes if shares else parameter_shapes(str(tmp_path)))


def test_a_file_that_is_no_checkpoint(run_evaluate: RunTrain, tmp_path: Path) -> None:
    (tmp_path / "broken.ckpt").write_bytes(b"no checkpoint")
    done = run_evaluate(tmp_path, *QUICK, "engine=transformers", "ckpt_path=broken.ckpt")
    assert done.returncode == 2
    assert "'broken.ckpt' is no checkpoint of a training run" in done.stdout
    assert "Traceback" not in done.stdout


def test_an_evaluation_has_a_row_for_the_reward_and_one_for_each_other_metric() -> None:
    reward = {"eval/org/set/mean@2": 0.25, "eval/org/set/best@2": 1.0}
    other = {"eval/org/set/reward/math/mean@2": 1 / 3, "eval/org/set/seconds": 3.0}
    assert evaluation_rows(reward | other) == [
        ("org/set", "mean@2 0.25  best@2 1"),
        ("org/set/reward/math", "mean@2 0.3333"),
        ("org/set/seconds", "3"),
    ]

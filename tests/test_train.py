"""Whole runs on the tiny model: what they write, that they learn something, and that they survive being killed."""

import gc
import json
import shlex
import signal
import weakref
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from support.compose import composed
from support.runs import Commands, RunTrain, only, rows, same_metrics, start, steps_done, wait_for
from support.wandb_reader import read_wandb_run

from trinity_lightning.build import build

# Small steps, a checkpoint after each.
QUICK = ("+recipe=grpo", "model=tiny", "reward=contains_digits", "explorer.batch_size=4", "explorer.repeat_times=4")
QUICK += (
    "sampling.max_tokens=12",
    "explorer.eval_on_startup=false",
    "explorer.eval_interval=0",
    "callbacks.checkpoint.every_n_epochs=1",
)


@pytest.fixture(scope="module")
def initial_weights() -> dict[str, torch.Tensor]:
    from trinity_lightning.config.models import resolve_model

    return load_file(Path(resolve_model("tiny")) / "model.safetensors")


@pytest.fixture(scope="module")
def sweep(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep over two seeds of the tiny model, evaluations included."""
    folder = tmp_path_factory.mktemp("sweep")
    done = run_train(
        folder,
        "--multirun",
        "+recipe=grpo",
        "model=tiny",
        "reward=contains_digits",
        "seed=1,2",
        "steps=3",
        "explorer.eval_interval=3",
        "+eval_tasksets.addition_heldout.args.heldout=16",
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return only(folder, "outputs/grpo/*")


def test_a_sweep_has_a_run_a_job(sweep: Path, initial_weights: dict[str, torch.Tensor]) -> None:
    models = []
    for job in ("0", "1"):
        steps = rows(sweep / job)
        assert [row["explore_step"] for row in steps if row["reward/mean"]] == ["1", "2", "3"]
        trained = [row for row in steps if row["actor/pg_loss"]]
        assert len(trained) == 3
        assert all(float(row["actor/trained_rows"]) > 0 and float(row["actor/grad_norm"]) > 0 for row in trained)
        assert all(float(row["actor/logprob_diff/mean"]) < 1e-4 for row in trained)  # float32 on both sides
        assert any(float(row["frac_reward_zero_std"]) < 1 for row in trained)  # a random model's reward varies
        weights = load_file(sweep / job / "model" / "model.safetensors")
        assert any(not torch.equal(weights[name], initial_weights[name]) for name in weights)
        models.append(weights)
    assert any(not torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_sweep_writes_completions_and_evaluations(sweep: Path) -> None:
    lines = (sweep / "0" / "completions" / "step_1.jsonl").read_text().splitlines()
    completions = [json.loads(line) for line in lines]
    assert len(completions) == 64
    assert {"prompt", "completion", "reward", "advantage", "length", "truncated"} <= completions[0].keys()
    assert len({c["reward"] for c in completions}) > 1
    trained = [c for c in completions if c["trained"]]
    assert len(trained) == float(rows(sweep / "0")[1]["actor/trained_rows"])
    assert all(c["advantage"] == 0 and c["reason"] == "equal rewards" for c in completions if not c["trained"])
    log = (sweep / "0" / "train.log").read_text()
    assert [log.count(f": step {step}/3  reward") for step in (1, 2, 3)] == [1, 1, 1]
    evaluated = (sweep / "0" / "completions" / "eval_addition_heldout_step_3.jsonl").read_text().splitlines()
    assert len(evaluated) == 16
    assert sum(row["eval/addition_heldout/mean@1"] != "" for row in rows(sweep / "0")) == 2  # before and after


def test_a_sweep_logs_to_wandb_in_one_group(sweep: Path) -> None:
    runs = [read_wandb_run(only(sweep / job, "wandb/offline-run-*")) for job in ("0", "1")]
    assert runs[0].group == runs[1].group
    assert runs[0].group.startswith("grpo/")
    for seed, run in enumerate(runs, start=1):
        assert run.config["seed"] == seed
        assert run.config["model"]["name"] == "tiny"
        rewards = [entry["reward/mean"] for entry in run.history if "reward/mean" in entry]
        assert len(rewards) == 3
        assert run.summary["explore_step"] == 3
        assert "eval/addition_heldout/mean@1" in run.summary
        assert "actor/grad_norm" in run.summary
        assert "completions" in run.tables


class Failing(L.Callback):
    """Fails as training starts, with seed 1; with another one the weights of the job before are gone."""

    policies: ClassVar[list[weakref.ref[L.LightningModule]]] = []

    def __init__(self, seed: int) -> None:
        self._fails = seed == 1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        gc.collect()
        assert [policy() for policy in self.policies] == [None] * len(self.policies)
        self.policies.append(weakref.ref(pl_module))
        if self._fails:
            raise RuntimeError("this job fails")


def test_a_job_of_a_sweep_that_fails_leaves_nothing_to_the_next_one(run_train: RunTrain, tmp_path: Path) -> None:
    """Neither its run of W&B nor its policy, though Hydra keeps the error."""
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    data = ("+recipe=sft", "model=tiny", "buffer.path=data.jsonl", "buffer.batch_size=1", "steps=1")
    failing = "+callbacks.failing={_target_: test_train.Failing, seed: ${seed}}"
    done = run_train(tmp_path, "--multirun", *data, "seed=1,2", failing)
    assert "this job fails" in done.stdout
    folders = [only(tmp_path, f"outputs/sft/*/{job}") for job in (0, 1)]
    runs = [read_wandb_run(only(folder, "wandb/offline-run-*")) for folder in folders]
    assert [run.config["seed"] for run in runs] == [1, 2]
    assert [run.exit_code for run in runs] == [1, 0]
    assert (folders[1] / "model").is_dir()


def test_the_saved_model_loads_in_transformers(sweep: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(sweep / "0" / "model")
    tokenizer = AutoTokenizer.from_pretrained(sweep / "0" / "model")
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1"}], return_tensors="pt", return_dict=True
    )
    made = model.generate(**tokens, max_new_tokens=4, do_sample=False)
    assert made.shape[1] > tokens["input_ids"].shape[1]


def test_a_saved_model_is_trained_on(sweep: Path, run_train: RunTrain, tmp_path: Path) -> None:
    """A folder of one's own loads in vLLM and in the trainer; the transformers engine and CSV alone run too."""
    model = ("model=custom", f"model.name={sweep / '0' / 'model'}", "model.dtype=fp32")
    quick = [argument for argument in QUICK if argument != "model=tiny"]
    for engine in ("vllm", "transformers"):
        done = run_train(tmp_path, *quick, *model, f"engine={engine}", "logger=csv", "steps=2", f"name={engine}")
        assert done.returncode == 0, done.stdout[-4000:]
        folder = only(tmp_path, f"outputs/{engine}/*")
        trained = [row for row in rows(folder) if row["actor/pg_loss"]]
        assert len(trained) == 2
        assert done.stdout.count("step 1/2") == 1  # the log has it too, and the terminal not twice
        assert all(float(row["actor/logprob_diff/mean"]) < 1e-4 for row in trained)
        assert not (folder / "wandb").exists()


def resumable(folder: Path, steps: int) -> bool:
    """True if a checkpoint exists and step `steps` is under way."""
    return steps_done(folder, "grpo") >= steps and any(folder.glob("outputs/grpo/*/checkpoints/*.ckpt"))


@pytest.fixture(scope="module")
def uninterrupted(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = run_train(folder, *QUICK, "steps=5", "algorithm.optimizer_steps=2", "logger=csv")
    assert done.returncode == 0, done.stdout[-4000:]
    return only(folder, "outputs/grpo/*")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_equals_an_uninterrupted_one(
    how: signal.Signals, uninterrupted: Path, run_train: Commands, tmp_path: Path
) -> None:
    arguments = (*QUICK, "steps=5", "algorithm.optimizer_steps=2", "logger=csv")
    # One of them is a process from its very beginning.
    process = start(tmp_path, *arguments) if how == signal.SIGINT else run_train.start(tmp_path, *arguments)
    wait_for(lambda: resumable(tmp_path, 3), process)
    process.send_signal(how)
    process.wait(timeout=120)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert steps_done(tmp_path, "grpo") < 5
    resume = [*arguments, "ckpt_path=last"]
    if how == signal.SIGINT:  # what is printed can be pasted
        command = (tmp_path / "stdout").read_text().partition("Resume with: python -m trinity_lightning.train ")[2]
        resume = shlex.split(command.partition("\n")[0])
        folder = only(tmp_path, "outputs/grpo/*")
        assert resume == [*arguments, f"output_dir={folder}", "ckpt_path=last"]
    done = run_train(tmp_path, *resume)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "resuming with" not in done.stdout
    folder = only(tmp_path, "outputs/grpo/*")  # it went on in the same folder
    expected, resumed = (load_file(path / "model" / "model.safetensors") for path in (uninterrupted, folder))
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    same_metrics(uninterrupted, folder)
    for step in range(1, 6):
        name = f"completions/step_{step}.jsonl"
        assert (folder / name).read_text() == (uninterrupted / name).read_text()


def test_without_the_checkpoint_callback_lightning_saves_nothing_of_its_own(tmp_path: Path) -> None:
    quiet = ("engine=transformers", "logger=csv", "~callbacks.checkpoint")
    assert build(composed(*QUICK[:-1], *quiet, f"output_dir={tmp_path}")).trainer.checkpoint_callbacks == []


def test_smollm2_trains_in_bfloat16(run_train: RunTrain, tmp_path: Path) -> None:
    small = ("explorer.batch_size=4", "explorer.repeat_times=4", "explorer.eval_on_startup=false")
    done = run_train(tmp_path, "+recipe=grpo", *small, "explorer.eval_interval=0", "steps=2", "logger=csv")
    assert done.returncode == 0, done.stdout[-4000:]
    folder = only(tmp_path, "outputs/grpo/*")
    trained = [row for row in rows(folder) if row["actor/pg_loss"]]
    assert trained
    assert all(float(row["actor/logprob_diff/mean"]) < 0.06 for row in trained)
    assert all(float(row["actor/trained_rows"]) > 0 for row in trained)
    weights = load_file(folder / "model" / "model.safetensors")
    from trinity_lightning.config.models import resolve_model

    before = load_file(Path(resolve_model("smollm2")) / "model.safetensors")
    assert any(not torch.equal(weights[name], before[name]) for name in before if name in weights)

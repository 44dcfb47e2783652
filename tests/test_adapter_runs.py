"""Whole runs that train adapters: gone on with, evaluated, ahead of the trainer, and on two processes with servers."""

from pathlib import Path

import pytest
from support.compose import composed
from support.errors import refuses
from support.runs import (
    SHARDS,
    SMALL,
    TWO,
    Commands,
    alike,
    equal,
    finished,
    only,
    rows,
    same_model,
    with_a_server_killed,
)
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from trinity_lightning.build import build
from trinity_lightning.config.models import resolve_model

STEPS = 3
REWARD = "eval/addition_heldout/mean@1"
RUN = ("+recipe=lora", *SMALL, "name=run", "model.lora.r=4", "optimizer.lr=0.03", "algorithm.kl.coef=0.01")
RUN += ("explorer.eval_interval=1", "eval_sampling.max_tokens=8", "+eval_tasksets.addition_heldout.args.heldout=16")
RUN += ("synchronizer.check_interval=1",)
ALONE = (*RUN, "synchronizer.lora=adapter")  # vLLM computes with the adapters itself
SERVER = (*ALONE, "engine=vllm_server")
# The third step is rolled out by weights of two steps before, the fourth by those of one.
AHEAD = (*SERVER, "explorer.sync_offset=1", "explorer.sync_interval=2", "explorer.eval_interval=0")
AHEAD += ("algorithm.old_logprobs=engine", "algorithm.rollout_correction.level=none")


@pytest.fixture(scope="module")
def whole(run_train: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all steps, with an evaluation after each."""
    run = finished(run_train, tmp_path_factory.mktemp("whole"), *RUN, f"steps={STEPS}")
    assert len(evaluated(run)) >= STEPS
    return run


@pytest.fixture(scope="module")
def alone(run_train: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, of an engine that is sent adapters."""
    return finished(run_train, tmp_path_factory.mktemp("alone"), *ALONE, f"steps={STEPS}")


def evaluated(folder: Path) -> list[float]:
    return [float(row[REWARD]) for row in rows(folder) if row.get(REWARD)]


def assert_proven(folder: Path, syncs: int = STEPS) -> None:
    """At each sync, the engine's log-probabilities were the trainer's."""
    probes = [float(row["sync/probe_diff/max"]) for row in rows(folder) if row.get("time/sync_weight")]
    assert len(probes) == syncs
    assert max(probes) < 1e-4


def test_a_run_goes_on_with_the_same_bits(whole: Path, run_train: Commands, tmp_path: Path) -> None:
    finished(run_train, tmp_path, *RUN, "steps=1")
    equal(finished(run_train, tmp_path, *RUN, f"steps={STEPS}", "ckpt_path=last"), whole)
    assert_proven(whole)
    assert any(float(row["actor/kl_loss"] or 0) > 0 for row in rows(whole))


def test_a_checkpoint_is_evaluated_as_it_was_in_training(alone: Path, run_train: Commands, tmp_path: Path) -> None:
    """With merged weights, whatever the run has sent its engine."""
    out = f"hydra.run.dir={tmp_path}"
    [checkpoint] = (alone / "checkpoints").glob("*.ckpt")
    done = run_train(tmp_path, *ALONE, f"ckpt_path={checkpoint}", out, program="trinity_lightning.evaluate")
    assert done.returncode == 0, done.stdout[-4000:]
    assert evaluated(tmp_path) == evaluated(alone)[-1:]


@pytest.mark.slow
def test_a_target_that_is_not_there_is_refused_before_an_engine_is_loaded(tmp_path: Path) -> None:
    with refuses("model.lora.targets"):
        build(composed(*RUN, "model.lora.targets=[q_prj]", f"output_dir={tmp_path}"))


@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_a_model_that_vllm_has_no_adapters_for_is_refused(engine: str, run_train: Commands, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    tokenizer.save_pretrained(tmp_path / "gpt2")
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=256, n_embd=16, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    model = ("model=custom", f"model.name={tmp_path / 'gpt2'}", f"engine={engine}", "engine.max_model_len=256")
    done = run_train(tmp_path, *ALONE, *model, "steps=1")
    assert done.returncode == 2, done.stdout[-4000:]
    assert "gpt2': leave synchronizer.lora merged." in done.stdout
    assert "Traceback" not in done.stdout


def test_vllm_computes_with_the_adapters_itself(whole: Path, alone: Path) -> None:
    """The drill perturbs them, and the log-probabilities of each step are compared with the trainer's."""
    alike(alone, whole)
    assert evaluated(alone) == evaluated(whole)
    assert_proven(alone)


def test_a_run_that_sends_adapters_goes_on_with_the_same_bits(alone: Path, run_train: Commands, tmp_path: Path) -> None:
    """By a server, by another one, and by an engine of its own process."""
    finished(run_train, tmp_path, *SERVER, "steps=1")
    finished(run_train, tmp_path, *SERVER, "steps=2", "ckpt_path=last")
    run = finished(run_train, tmp_path, *ALONE, f"steps={STEPS}", "ckpt_path=last")
    same_model(run, alone)
    alike(run, alone)
    assert evaluated(run) == evaluated(alone)


def test_a_run_ahead_whose_server_has_older_adapters_goes_on_with_the_same_bits(
    run_train: Commands, tmp_path_factory: pytest.TempPathFactory
) -> None:
    uninterrupted, stopped = (tmp_path_factory.mktemp(name) for name in ("uninterrupted", "stopped"))
    ahead = finished(run_train, uninterrupted, *AHEAD, "steps=4")
    assert [float(row["sample/lag/mean"]) for row in rows(ahead)] == [0, 1, 2, 1]
    assert_proven(ahead, syncs=2)
    finished(run_train, stopped, *AHEAD, "steps=2")
    equal(finished(run_train, stopped, *AHEAD, "steps=4", "ckpt_path=last"), ahead)


def test_two_processes_send_two_servers_adapters_as_one_does_though_one_is_killed(
    alone: Path, run_train: Commands, tmp_path: Path
) -> None:
    run = with_a_server_killed(run_train, tmp_path, *SERVER, *TWO, f"steps={STEPS}")
    alike(run, alone)
    assert evaluated(run) == evaluated(alone)
    assert_proven(run)


def test_two_processes_and_a_server_train_as_one(whole: Path, run_train: Commands, tmp_path: Path) -> None:
    """Each has a share of the policy. The server is sent merged weights, which are proven at each step.

    The run goes on from a checkpoint in shards, which has the adapters alone.
    """
    together = (*SHARDS, "trainer.strategy.save_distributed_checkpoint=true")
    begun = finished(run_train, tmp_path, *RUN, "steps=1", *together)
    assert only(begun / "checkpoints", "*.ckpt").is_dir()
    run = finished(run_train, tmp_path, *RUN, f"steps={STEPS}", *together, "engine=vllm_server", "ckpt_path=last")
    alike(run, whole)
    assert evaluated(run) == evaluated(whole)

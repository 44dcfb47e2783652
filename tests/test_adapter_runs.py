"""Whole runs that train adapters: gone on with, evaluated, and on two processes with a server."""

from pathlib import Path

import pytest
from support.runs import SHARDS, SMALL, TWO, Commands, alike, equal, finished, only, rows

STEPS = 3
REWARD = "eval/addition_heldout/mean@1"
RUN = ("+recipe=lora", *SMALL, "name=run", "model.lora.r=4", "optimizer.lr=0.03", "algorithm.kl.coef=0.01")
RUN += ("explorer.eval_interval=1", "eval_sampling.max_tokens=8", "+eval_tasksets.addition_heldout.args.heldout=16")
ALONE = (*RUN, "synchronizer.lora=adapter", "synchronizer.check_interval=1")  # vLLM computes with the adapters itself


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


def assert_proven(folder: Path) -> None:
    """At each sync, the engine's log-probabilities were the trainer's."""
    probes = [float(row["sync/probe_diff/max"]) for row in rows(folder) if row.get("time/sync_weight")]
    assert len(probes) == STEPS
    assert max(probes) < 1e-4


def test_a_run_goes_on_with_the_same_bits(whole: Path, run_train: Commands, tmp_path: Path) -> None:
    finished(run_train, tmp_path, *RUN, "steps=1")
    equal(finished(run_train, tmp_path, *RUN, f"steps={STEPS}", "ckpt_path=last"), whole)
    assert any(float(row["actor/kl_loss"] or 0) > 0 for row in rows(whole))


def test_a_checkpoint_is_evaluated_as_it_was_in_training(whole: Path, run_train: Commands, tmp_path: Path) -> None:
    out = f"hydra.run.dir={tmp_path}"
    [checkpoint] = (whole / "checkpoints").glob("*.ckpt")
    done = run_train(tmp_path, *RUN, f"ckpt_path={checkpoint}", out, program="trinity_lightning.evaluate")
    assert done.returncode == 0, done.stdout[-4000:]
    assert evaluated(tmp_path) == evaluated(whole)[-1:]


def test_a_target_that_is_not_there_is_refused_before_an_engine_is_loaded(run_train: Commands, tmp_path: Path) -> None:
    done = run_train(tmp_path, *RUN, "steps=1", "model.lora.targets=[q_prj]", "+engine.args.block_size=7")
    assert done.returncode == 2
    assert "model.lora.targets" in done.stdout
    assert "Did you mean 'q_proj'" in done.stdout
    assert "Traceback" not in done.stdout


def test_vllm_computes_with_the_adapters_itself(whole: Path, alone: Path) -> None:
    """The drill perturbs them, and the log-probabilities of each step are compared with the trainer's."""
    alike(alone, whole)
    assert evaluated(alone) == evaluated(whole)
    assert_proven(alone)


def test_a_run_that_sends_adapters_goes_on_with_the_same_bits(alone: Path, run_train: Commands, tmp_path: Path) -> None:
    finished(run_train, tmp_path, *ALONE, "steps=1")
    equal(finished(run_train, tmp_path, *ALONE, f"steps={STEPS}", "ckpt_path=last"), alone)


def test_two_processes_send_a_server_adapters_as_one(alone: Path, run_train: Commands, tmp_path: Path) -> None:
    run = finished(run_train, tmp_path, *ALONE, f"steps={STEPS}", "engine=vllm_server", *TWO)
    alike(run, alone)
    assert evaluated(run) == evaluated(alone)


def test_two_processes_and_a_server_train_as_one(whole: Path, run_train: Commands, tmp_path: Path) -> None:
    """Each has a share of the policy. The server is sent merged weights, which are proven at each step.

    The run goes on from a checkpoint in shards, which has the adapters alone.
    """
    together = (*SHARDS, "trainer.strategy.save_distributed_checkpoint=true", "synchronizer.check_interval=1")
    begun = finished(run_train, tmp_path, *RUN, "steps=1", *together)
    assert only(begun / "checkpoints", "*.ckpt").is_dir()
    run = finished(run_train, tmp_path, *RUN, f"steps={STEPS}", *together, "engine=vllm_server", "ckpt_path=last")
    alike(run, whole)
    assert evaluated(run) == evaluated(whole)

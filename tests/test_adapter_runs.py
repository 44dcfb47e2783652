"""Whole runs that train adapters: gone on with, and on two processes with a server."""

from pathlib import Path

import pytest
from support.runs import SHARDS, SMALL, Commands, alike, equal, finished, only, rows

STEPS = 3
REWARD = "eval/addition_heldout/mean@1"
RUN = ("+recipe=lora", *SMALL, "name=run", "model.lora.r=4", "optimizer.lr=0.03", "algorithm.kl.coef=0.01")
RUN += ("explorer.eval_interval=1", "eval_sampling.max_tokens=8", "+eval_tasksets.addition_heldout.args.heldout=16")


@pytest.fixture(scope="module")
def whole(run_train: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all steps, with an evaluation after each."""
    run = finished(run_train, tmp_path_factory.mktemp("whole"), *RUN, f"steps={STEPS}")
    assert len(evaluated(run)) >= STEPS
    return run


def evaluated(folder: Path) -> list[float]:
    return [float(row[REWARD]) for row in rows(folder) if row.get(REWARD)]


def test_a_run_goes_on_with_the_same_bits(whole: Path, run_train: Commands, tmp_path: Path) -> None:
    finished(run_train, tmp_path, *RUN, "steps=1")
    equal(finished(run_train, tmp_path, *RUN, f"steps={STEPS}", "ckpt_path=last"), whole)
    assert any(float(row["actor/kl_loss"] or 0) > 0 for row in rows(whole))


def test_a_target_that_is_not_there_is_refused_before_an_engine_is_loaded(run_train: Commands, tmp_path: Path) -> None:
    done = run_train(tmp_path, *RUN, "steps=1", "model.lora.targets=[q_prj]", "+engine.args.block_size=7")
    assert done.returncode == 2
    assert "model.lora.targets" in done.stdout
    assert "Did you mean 'q_proj'" in done.stdout
    assert "Traceback" not in done.stdout


def test_vllm_computes_with_the_adapters_itself(whole: Path, run_train: Commands, tmp_path: Path) -> None:
    """The drill perturbs them, and the log-probabilities of each step are compared with the trainer's."""
    alone = ("synchronizer.lora=adapter", "synchronizer.check_interval=1")
    run = finished(run_train, tmp_path, *RUN, f"steps={STEPS}", *alone)
    alike(run, whole)
    assert evaluated(run) == evaluated(whole)
    probes = [float(row["sync/probe_diff/max"]) for row in rows(run) if row.get("time/sync_weight")]
    assert len(probes) == STEPS
    assert max(probes) < 1e-4


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

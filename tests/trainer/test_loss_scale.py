"""A policy in float16 learns as one in float32; an overflow costs a step and halves the loss scale, on all ranks."""

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.engine_promises import ask
from support.errors import refuses
from support.float16 import CASES as ON_RANKS
from support.float16 import HERE, INTERVAL, SCALE, Overflows, half_policy, overflow, resumed
from support.policy import (
    Gradients,
    Prepare,
    assert_same_gradients,
    batch_of,
    fit,
    groups,
    make_experiences,
    make_policy,
    optimizer_of,
    pairs,
)
from support.replicas import RANKS, STRATEGIES, ragged, rewarded, start
from support.runs import Commands
from support.tiny_vllm import tiny_engine
from torch import Tensor

from trinity_lightning.config.algorithm import KLConfig
from trinity_lightning.config.engines import EngineDtype
from trinity_lightning.config.model import LoRAConfig, OptimizerConfig
from trinity_lightning.config.trainer import check_trainer_settings
from trinity_lightning.errors import LossScaleError, TrinityError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.interruption import StopCheckpoint
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.trainer.checkpoint import AtomicCheckpointIO
from trinity_lightning.trainer.loss_scale import LEAST, START, LossScale
from trinity_lightning.trainer.policy import PolicyModule

# -- the rule ----------------------------------------------------------------------------------------------------------


def test_the_factor_is_that_of_torchs_own_scaler() -> None:
    drawn, interval = random.Random(0), 3
    mine = LossScale(interval=interval)
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=START, growth_interval=interval)  # pyright: ignore
    for step in range(60):
        overflows = drawn.random() < 0.3
        scaler.scale(parameter.sum()).backward()
        assert parameter.grad is not None
        if overflows:
            parameter.grad[1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mine.overflowed(step) if overflows else mine.stepped()
        assert mine.scale == scaler.get_scale()
    assert mine.skipped_steps > 10


def test_gradients_are_divided_without_rounding() -> None:
    gradients = [torch.randn(3, 2), torch.randn(5), torch.empty(0)]
    scaled = [gradient * 2.0**13 for gradient in gradients]
    LossScale(scale=2.0**13).divide(iter(scaled))
    assert all(map(torch.equal, scaled, gradients))


def test_other_dtypes_have_no_factor() -> None:
    assert make_policy(dtype="fp32").loss_scale is None
    assert make_policy(dtype="bf16").loss_scale is None
    logged = fit(make_policy(dtype="bf16"), [batch_of(make_experiences())]).logged_metrics
    assert not {"actor/loss_scale", "actor/skipped_steps"} & logged.keys()


DTYPES = ("fp16", "bf16", "fp32")

# -- as float32 --------------------------------------------------------------------------------------------------------


def gradients_of(policy: PolicyModule, items: list[Any], prepare: bool = False) -> Gradients:
    """Losses and gradients of a fit, which takes a step for each item."""
    batches, seen = [batch_of(item) for item in items], Gradients()
    trainer = fit(policy, batches, seen, *([Prepare(batches)] if prepare else []))
    assert trainer.global_step == len(items)
    return seen


def error_of(mine: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Norm of the difference of two gradients, as a share of the norm of the exact one."""
    difference = torch.cat([(mine[name] - exact[name]).flatten() for name in exact])
    return float(difference.norm() / torch.cat([gradient.flatten() for gradient in exact.values()]).norm())


CASES: dict[str, dict[str, Any]] = {
    "padded": {"layout": "padded"},
    "shared prefixes": {"items": [groups(count=8, seed=seed) for seed in range(2)], "layout": "shared_prefix"},
    "reference and several steps": {"prepare": True, "kl": KLConfig(coef=0.1), "optimizer_steps": 3},
    "clipped": {"max_grad_norm": 0.05, "entropy_coef": 0.01},
    "sums": {"loss_agg_mode": "seq-mean-token-sum"},
    "sft": {"policy_loss": "sft"},
    "dpo": {"policy_loss": "dpo", "items": [pairs(seed=seed) for seed in range(2)]},
    "recomputed activations": {"model": {"gradient_checkpointing": True}},
    "adapters": {"model": {"lora": LoRAConfig(r=2)}},
    "adamw_offload": {"optimizer": OptimizerConfig(name="adamw_offload", lr=1e-3)},
    "a critic": {"items": rewarded(), "prepare": True, "critic": {"lr": 1e-2, "kl_coef": 0.1}},
    "a value model": {"items": rewarded(), "prepare": True, "critic": {"lr": 1e-2, "model": "tiny"}},
}


@pytest.mark.parametrize("case", CASES)
def test_it_learns_as_float32_does(case: str) -> None:
    settings: dict[str, Any] = {"max_tokens_per_micro_batch": 40} | CASES[case]
    items, prepare = settings.pop("items", ragged()), settings.pop("prepare", False)
    torch.manual_seed(0)  # of adapters
    half = gradients_of(make_policy(dtype="fp16", **settings), items, prepare)
    torch.manual_seed(0)
    full = gradients_of(make_policy(**settings), items, prepare)
    assert half.losses == pytest.approx(full.losses, rel=0.01, abs=2e-3)
    assert {gradient.dtype for gradient in half.steps[0].values()} == {torch.float32}
    assert half.steps[0].keys() == full.steps[0].keys()
    assert error_of(half.steps[0], full.steps[0]) < 0.01


def test_it_is_nearer_to_float32_than_bfloat16() -> None:
    half, rounded, full = (gradients_of(make_policy(dtype=dtype), ragged()).steps[0] for dtype in DTYPES)
    assert error_of(half, full) < error_of(rounded, full) / 3


def test_small_gradients_survive_by_the_factor() -> None:
    items = ragged()[:1]
    for experience in items[0]:
        assert experience.advantages is not None
        experience.advantages = 1e-5 * experience.advantages
    full = gradients_of(make_policy(), items).steps[0]
    assert error_of(gradients_of(half_policy(scale=2.0**20), items).steps[0], full) < 0.01
    assert error_of(gradients_of(half_policy(scale=1.0), items).steps[0], full) > 0.05


def test_the_norm_is_that_of_the_gradient_and_clips_it() -> None:
    batches = [batch_of(ragged()[0])]
    norms = [float(fit(make_policy(dtype=dtype), batches).logged_metrics["actor/grad_norm"]) for dtype in DTYPES]
    assert norms[0] == pytest.approx(norms[2], rel=0.01)
    seen = Gradients()
    fit(make_policy(dtype="fp16", max_grad_norm=norms[0] / 4), batches, seen)
    clipped = torch.cat([gradient.flatten() for gradient in seen.steps[0].values()])
    assert float(clipped.norm()) == pytest.approx(norms[0] / 4, rel=1e-3)


@pytest.mark.slow
@torch.compiler.set_stance("force_eager")
def test_moments_in_eight_bits_go_with_it() -> None:
    pytest.importorskip("torchao")
    optimizer = OptimizerConfig(name="adamw_8bit", lr=1e-3, eps=1e-4)
    half, full = (
        fit_weights(make_policy(optimizer, dtype, max_tokens_per_micro_batch=40)) for dtype in ("fp16", "fp32")
    )
    torch.testing.assert_close(half, full, rtol=0.01, atol=2e-3)


def fit_weights(policy: PolicyModule) -> dict[str, Tensor]:
    """The weights after a fit, in float32."""
    fit(policy, [batch_of(item) for item in ragged()])
    return {name: weight.detach().float() for name, weight in policy.policy.named_parameters()}


# -- overflows ---------------------------------------------------------------------------------------------------------


class Watch(L.Callback):
    """Keeps steps taken, left out and bad, and the factor, after each item."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        scale = pl_module.loss_scale
        assert all(parameter.grad is None for parameter in pl_module.policy.parameters())
        self.seen.append((trainer.global_step, scale.skipped_steps, pl_module.bad_steps, scale.scale))


def test_an_overflow_takes_no_step_halves_the_factor_and_is_no_bad_step(caplog: pytest.LogCaptureFixture) -> None:
    policy, watch = half_policy(max_bad_steps=1), Watch()
    policy.configure_model()
    before = {name: weight.clone() for name, weight in policy.policy.state_dict().items()}
    batches = [batch_of(item, step=step) for step, item in enumerate([*ragged(), *ragged()], start=1)]
    with caplog.at_level(logging.WARNING):
        trainer = fit(policy, batches[:2], Overflows(0, 1), watch)
    assert watch.seen == [(0, 1, 0, SCALE / 2), (0, 2, 0, SCALE / 4)]
    assert all(torch.equal(weight, before[name]) for name, weight in policy.policy.state_dict().items())
    assert not optimizer_of(policy).state_dict()["state"]["inner"]["state"]
    assert trainer.logged_metrics["actor/skipped_steps"] == 2
    assert trainer.logged_metrics["actor/bad_steps"] == trainer.logged_metrics["actor/trained_rows"] == 0
    assert "explore step 2 overflowed float16 at loss scale 512" in caplog.text
    watch.seen.clear()
    fit(policy, batches, Overflows(2), watch)
    grown = [(1, 2, 0, SCALE / 4), (2, 2, 0, SCALE / 2), (2, 3, 0, SCALE / 4), (3, 3, 0, SCALE / 4)]
    assert watch.seen == [*grown, (4, 3, 0, SCALE / 2), (5, 3, 0, SCALE / 2)]


def test_a_factor_that_is_too_large_comes_down_by_itself() -> None:
    policy, watch = half_policy(scale=2.0**40), Watch()
    batches = [batch_of(item) for item in ragged() * 12]
    trainer = fit(policy, batches, watch)
    assert policy.loss_scale is not None
    assert trainer.global_step + policy.loss_scale.skipped_steps == len(batches)
    assert watch.seen[0] == (0, 1, 0, 2.0**39)
    assert trainer.global_step > 0


def test_a_factor_at_its_floor_ends_the_run_and_a_resumed_run_begins_anew(tmp_path: Path) -> None:
    policy, watch = half_policy(scale=4 * LEAST, max_bad_steps=1), Watch()
    batches = [batch_of(item) for item in ragged() * 2]
    with pytest.raises(LossScaleError, match=r"model\.dtype=fp16"):
        fit(policy, batches, Overflows(*range(6)), watch, StopCheckpoint(tmp_path))
    assert [scale for *_, scale in watch.seen] == [2 * LEAST, LEAST]
    assert policy.loss_scale is not None
    assert policy.loss_scale.scale == START
    resumed = half_policy()
    fit(resumed, batches, ckpt_path=tmp_path / "interrupted.ckpt")
    assert resumed.loss_scale == LossScale(4 * START, INTERVAL, clean_steps=0, skipped_steps=2)  # the other four items


def test_a_loss_that_is_not_finite_is_a_bad_step() -> None:
    items = ragged()
    assert items[0][1].advantages is not None
    items[0][1].advantages = items[0][1].advantages * torch.inf
    watch = Watch()
    fit(half_policy(), [batch_of(item) for item in items], watch)
    assert watch.seen[0] == (0, 0, 1, SCALE)
    with pytest.raises(TrinityError, match=r"max_bad_steps.*another model\.dtype"):
        fit(half_policy(max_bad_steps=1), [batch_of(items[0])])


# -- checkpoints -------------------------------------------------------------------------------------------------------


class SaveAfter(L.Callback):
    """Saves a checkpoint when so many items are done."""

    def __init__(self, items: int, path: Path) -> None:
        self.items = items
        self.path = path

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == self.items:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_offload"])
@pytest.mark.parametrize("items", [2, 4])
def test_a_run_resumed_before_the_factor_grows_is_the_same_to_the_bit(
    items: int, optimizer: str, tmp_path: Path
) -> None:
    """An overflow in the second item, and a factor that is doubled after the fifth."""
    config = OptimizerConfig(name=optimizer, lr=1e-3)
    batches, file = [batch_of(item) for item in ragged() * 2], tmp_path / "it.ckpt"
    whole, again = (half_policy(interval=3, optimizer=config) for _ in range(2))
    fit(whole, batches, Overflows(1), SaveAfter(items, file), plugins=[AtomicCheckpointIO()])
    fit(again, batches, Overflows(1), ckpt_path=file)
    assert whole.loss_scale == again.loss_scale == LossScale(SCALE, 3, clean_steps=1, skipped_steps=1)
    assert all(map(torch.equal, again.policy.parameters(), whole.policy.parameters()))
    masters = [optimizer_of(policy).state_dict()["state"]["masters"] for policy in (whole, again)]
    assert all(map(torch.equal, *masters))


def test_a_checkpoint_of_another_dtype_begins_with_a_new_factor(tmp_path: Path) -> None:
    batches = [batch_of(item) for item in ragged()]
    fit(make_policy(dtype="bf16"), batches).save_checkpoint(tmp_path / "it.ckpt")
    policy = make_policy(dtype="fp16")
    fit(policy, batches, ckpt_path=tmp_path / "it.ckpt", max_epochs=2)
    assert policy.loss_scale == LossScale(clean_steps=3)


# -- several processes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, run_train: Commands) -> list[dict[str, dict[str, dict[str, Any]]]]:
    """Results of two processes."""
    return start(tmp_path_factory.mktemp("float16"), run_train, RANKS, program="support.float16")


@pytest.mark.slow
@pytest.mark.parametrize("way", STRATEGIES)
def test_all_ranks_leave_out_the_step_that_overflows_on_one(ranks: list[Any], way: str) -> None:
    alone, of_ranks = overflow(), [rank[way]["overflow"] for rank in ranks]
    for result in of_ranks:
        names = ("actor/skipped_steps", "actor/loss_scale", "actor/bad_steps")
        logged = [tuple(item[name] for name in names) for item in result["metrics"]]
        assert logged == [(0, SCALE, 0), (1, SCALE / 2, 0), (1, SCALE / 2, 0)]
        torch.testing.assert_close(result["weights"], of_ranks[0]["weights"], rtol=0, atol=0)
        for mine, expected in zip(result["gradients"], alone["gradients"], strict=True):
            assert_same_gradients(mine, expected, tolerance=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "case"), HERE)
def test_two_processes_train_as_one_but_for_rounding(ranks: list[Any], way: str, case: str) -> None:
    alone, of_ranks = ON_RANKS[case](), [rank[way][case] for rank in ranks]
    assert of_ranks[0]["losses"] == pytest.approx(alone["losses"], rel=1e-3, abs=1e-4)
    for mine, expected in zip(of_ranks[0]["gradients"], alone["gradients"], strict=True):
        assert error_of(mine, expected) < 0.01
    for part in ("weights", "losses"):
        torch.testing.assert_close(of_ranks[1][part], of_ranks[0][part], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("way", STRATEGIES)
def test_ranks_resume_to_the_bit_before_the_factor_grows(
    ranks: list[Any], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in ranks:
        whole, again = rank[way]["resumed False"], rank[way]["resumed True"]
        assert whole["scale"] == again["scale"]
        assert whole["scale"]["scale"] == SCALE * 2**3
        torch.testing.assert_close(again["weights"], whole["weights"], rtol=0, atol=0)
    assert resumed(stops=False)["scale"] == ranks[0]["ddp"]["resumed False"]["scale"]


# -- what does not go with it ------------------------------------------------------------------------------------------


def test_mixed_precision_is_refused_by_name() -> None:
    with refuses("trainer.precision"):
        fit(make_policy(dtype="fp16"), [batch_of(ragged()[0])], precision="bf16-mixed")
    with refuses("trainer.precision") as refused:
        check_trainer_settings({"precision": "16-mixed"})
    assert "model.dtype=fp16" in str(refused.value)


# -- engine and trainer ------------------------------------------------------------------------------------------------


def difference(engine: Any, policy: PolicyModule) -> float:
    """Mean absolute difference of a response's log-probabilities by the engine that wrote it and by the policy."""
    driver = Driver([engine])
    try:
        driver.run(engine.load())
        completion = ask(engine, driver, max_tokens=64)
        driver.run(engine.shutdown())
    finally:
        driver.close()
    prompt = list(completion.prompt_token_ids)
    mine = policy.sequence_logprobs([*prompt, *completion.token_ids])[len(prompt) - 1 :]
    assert len(mine) == len(completion.logprobs) > 20
    return float((torch.tensor(mine) - torch.tensor(completion.logprobs)).abs().mean())


def of_transformers(policy: PolicyModule, dtype: str) -> TransformersEngine:
    engine = TransformersEngine("tiny", max_model_len=128)
    engine.bind(policy.policy)
    return engine


def of_vllm(policy: PolicyModule, dtype: str) -> Any:
    return tiny_engine(dtype=EngineDtype(dtype), max_model_len=128)


@pytest.mark.parametrize("make", [of_transformers, pytest.param(of_vllm, marks=pytest.mark.slow)])
def test_engine_and_trainer_differ_by_about_an_eighth_of_bfloat16s_difference(
    make: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    """SmolLM2 on PROBE_TEXT, with vLLM: 0.0044 nats on average against 0.040, and 0.028 against 0.45 at most."""
    if make is of_vllm:
        request.getfixturevalue("needs_vllm")
    differences = []
    for dtype in ("fp16", "bf16"):
        policy = make_policy(dtype=dtype)
        policy.configure_model()
        differences.append(difference(make(policy, dtype), policy))
    half, rounded = differences
    assert 4 < rounded / half < 16

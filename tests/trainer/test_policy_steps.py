"""PolicyModule over several items: steps, counters, precision, saving and resuming."""

import gc
import logging
import math
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from support.errors import refuses
from support.policy import (
    Gradients,
    Items,
    Prepare,
    assert_same_gradients,
    batch_of,
    fit,
    load_tiny,
    make_experiences,
    make_policy,
    one_step,
    optimizer_of,
    rate_of,
)
from support.trainer import quiet_trainer
from torch.utils._pytree import tree_leaves

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.config.algorithm import AlgorithmConfig, KLConfig, Layout
from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.errors import ConfigError, ModelLoadError, TrinityError
from trinity_lightning.explorer.interruption import StopCheckpoint
from trinity_lightning.trainer import flops
from trinity_lightning.trainer import policy as policy_module
from trinity_lightning.trainer.checkpoint import AtomicCheckpointIO
from trinity_lightning.trainer.flops import ModelSize, Work, attended
from trinity_lightning.trainer.objective import describe_fault
from trinity_lightning.trainer.optim import parameter_groups
from trinity_lightning.trainer.policy import PolicyModule


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


def nothing_to_train():
    return [Experience(eid=EID(batch=1, task=9), tokens=[5, 6, 7], prompt_length=1, advantages=[0.0, 0.0])]


# -- steps and counters ------------------------------------------------------------------------------------------------


def test_items_are_steps_plus_skipped_and_skipping_takes_no_step():
    schedule = OptimizerConfig(lr=1e-3, lr_scheduler="linear", total_steps=4)
    policy, seen = make_policy(optimizer=schedule), Gradients()
    weights, rates = [], []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module: Any, outputs, batch, batch_idx):
            weights.append([p.detach().clone() for p in pl_module.policy.parameters()])
            rates.append(rate_of(pl_module))
            assert trainer.global_step + pl_module.skipped_items == batch_idx + 1

    batches = [batch_of(make_experiences()), batch_of(nothing_to_train()), batch_of(make_experiences()), batch_of([])]
    trainer = fit(policy, batches, seen, Watch())
    assert (trainer.global_step, policy.skipped_items, len(seen.steps)) == (2, 2, 2)
    assert rates == pytest.approx([0.75e-3, 0.75e-3, 0.5e-3, 0.5e-3])
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights[1], weights[2], strict=True))
    assert trainer.logged_metrics["actor/skipped_items"] == 2
    assert trainer.logged_metrics["actor/trained_rows"] == trainer.logged_metrics["actor/micro_batches"] == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_no_gradient_is_kept_between_steps(dtype):
    with_gradient = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module: Any, outputs, batch, batch_idx):
            with_gradient.append([name for name, p in pl_module.policy.named_parameters() if p.grad is not None])

    trainer = fit(make_policy(dtype=dtype), [batch_of(make_experiences())] * 2, Watch())
    assert (trainer.global_step, with_gradient) == (2, [[], []])


def test_the_rate_that_is_logged_is_the_one_that_was_used():
    schedule = OptimizerConfig(lr=1e-3, lr_scheduler="linear", total_steps=2)
    trainer = fit(make_policy(optimizer=schedule), [batch_of(make_experiences())] * 2)
    assert trainer.logged_metrics["actor/lr"] == pytest.approx(0.5e-3)


def test_a_constant_rate_warms_up_where_asked():
    rates = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module: Any, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    config = OptimizerConfig(lr=1e-3, lr_scheduler="constant", warmup_steps=2)
    fit(make_policy(optimizer=config), [batch_of(make_experiences())] * 4, Watch())
    assert rates == pytest.approx([0.0, 0.5e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_logged(share):
    experiences = make_experiences()
    _, gradients = one_step(experiences)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    seen = Gradients()
    trainer = fit(make_policy(max_grad_norm=share * norm), [batch_of(experiences)], seen)
    assert trainer.logged_metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    factor = min(share, 1.0)
    assert_same_gradients(seen.steps[0], {name: factor * g for name, g in gradients.items()})


def spoilt():
    experiences = make_experiences()
    experiences[1].advantages = experiences[1].advantages + float("nan")
    return experiences


class Ends(L.Callback):
    """Ends a fit at its first item by that error."""

    def __init__(self, error):
        self.error = error

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        raise self.error


@pytest.mark.parametrize("error", [None, ValueError("on purpose"), KeyboardInterrupt()])
def test_pythons_collector_is_frozen_while_a_fit_trains_however_it_ends(error, monkeypatch):
    frozen, seen = [], []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(gc, "unfreeze", frozen.clear)
    others = [LambdaCallback(on_train_batch_start=lambda *_: seen.extend(frozen)), *([Ends(error)] if error else [])]
    with nullcontext() if error is None else pytest.raises((ValueError, SystemExit)):
        fit(make_policy(), [batch_of(make_experiences())], *others)
    assert (seen, frozen) == ([True], [])


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:.*does not have many workers.*")
def test_a_second_fit_of_a_trainer_says_nothing_of_callbacks(tmp_path, caplog):
    trainer, loader = quiet_trainer(tmp_path), Items([batch_of(make_experiences())])
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(make_policy(), loader)
    assert trainer.current_epoch == 2
    assert "callbacks" not in caplog.text


def test_a_gradient_that_is_not_finite_takes_no_step_and_is_counted_and_named(tiny, caplog):
    schedule = OptimizerConfig(lr=1e-3, lr_scheduler="linear", total_steps=4)
    policy, counts = make_policy(optimizer=schedule, max_bad_steps=2), []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module: Any, outputs, batch, batch_idx):
            counts.append((trainer.global_step, pl_module.bad_steps, pl_module.bad_steps_in_a_row))
            assert all(p.grad is None for p in pl_module.policy.parameters())
            if batch_idx == 0:
                assert all(
                    torch.equal(a, b) for a, b in zip(policy.policy.parameters(), tiny.parameters(), strict=True)
                )
                assert not optimizer_of(policy).state_dict()["state"]
                assert rate_of(policy) == 1e-3

    batches = [batch_of(experiences, step=3) for experiences in (spoilt(), make_experiences(), spoilt())]
    trainer = fit(policy, batches, Watch())
    assert counts == [(0, 1, 1), (1, 1, 0), (1, 2, 1)]
    assert trainer.logged_metrics["actor/bad_steps"] == 2
    assert trainer.logged_metrics["actor/trained_rows"] == 0
    assert "explore step 3 has norm nan (not finite: advantages of experiences 1/0/1" in caplog.text
    assert "the gradient of model.embed_tokens.weight): no optimizer step was taken" in caplog.text


def test_gradients_that_are_not_finite_stop_the_run_after_some_in_a_row_also_over_a_resume(tiny, tmp_path):
    batches = [batch_of(spoilt(), step=step) for step in range(1, 5)]
    policy = make_policy(max_bad_steps=3)
    with pytest.raises(TrinityError, match="explore step 3"):
        fit(policy, batches, SaveAfter(2, tmp_path / "it.ckpt"))
    assert all(torch.equal(a, b) for a, b in zip(policy.policy.parameters(), tiny.parameters(), strict=True))
    resumed = make_policy(max_bad_steps=3)
    with pytest.raises(TrinityError, match="explore step 3"):
        fit(resumed, batches, ckpt_path=tmp_path / "it.ckpt")
    assert (resumed.bad_steps, resumed.bad_steps_in_a_row) == (2, 0)


def test_a_run_that_gradients_ended_may_skip_as_many_again_and_counts_each_once(tmp_path):
    batches = [batch_of(spoilt(), step=step) for step in range(1, 5)]  # the second is handed out again
    with pytest.raises(TrinityError, match="explore step 2"):
        fit(make_policy(max_bad_steps=2), batches, StopCheckpoint(tmp_path))
    resumed = make_policy(max_bad_steps=2)
    with pytest.raises(TrinityError, match="explore step 3"):
        fit(resumed, batches, ckpt_path=tmp_path / "interrupted.ckpt")
    assert resumed.bad_steps == 2


def test_a_loss_that_is_not_finite_names_the_experiences_of_its_micro_batch():
    batch = batch_of(make_experiences(count=4))
    losses = torch.tensor([1.0, float("inf")])
    assert describe_fault(batch, [[0, 1], [3, 2]], losses, []) == (
        f"not finite: the loss of experiences {batch.experiences[2].eid}, {batch.experiences[3].eid}"
    )


def test_experiences_without_advantages_are_an_error():
    experiences = make_experiences()
    for experience in experiences:
        experience.advantages = None
    with refuses("add_strategy"):
        fit(make_policy(), [batch_of(experiences)])


def test_costs_are_logged():
    experiences = make_experiences(zero_every=2)
    trainer = fit(make_policy(), [batch_of(experiences, step=7)])
    metrics = trainer.logged_metrics
    assert metrics["explore_step"] == 7
    assert 0 < metrics["time/collate"] < metrics["time/train"]
    computed = [e for index, e in enumerate(experiences) if index % 2]
    tokens, trained = sum(len(e.tokens) for e in computed), sum(int(e.action_mask.sum()) for e in computed)
    assert metrics["perf/tokens_per_second"] == pytest.approx(tokens / float(metrics["time/train"]), rel=1e-5)
    assert metrics["perf/trained_tokens_per_second"] == pytest.approx(trained / float(metrics["time/train"]), rel=1e-5)
    assert metrics["perf/padding_ratio"] >= 1


def test_the_time_of_training_ends_when_the_optimizers_kernels_do(monkeypatch):
    order = []
    monkeypatch.setattr(policy_module, "await_kernels", lambda device: (order.append("kernels"), time.sleep(0.3)))
    noted = LambdaCallback(on_before_optimizer_step=lambda *_: order.append("optimizer's step"))
    metrics = fit(make_policy(), [batch_of(make_experiences())], noted).logged_metrics
    assert order == ["optimizer's step", "kernels"]
    assert metrics["time/train"] > 0.3


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [("fp32", None, torch.float32), ("bf16", None, torch.bfloat16), ("fp32", "bf16-mixed", torch.bfloat16)],
)
def test_utilization_is_a_share_of_the_peak_of_the_products_dtype(dtype, precision, expected, monkeypatch):
    peaks = {expected: 1e15}  # another dtype's is not known
    monkeypatch.setattr(flops, "peak_flops", lambda device, dtype, shapes: peaks.get(dtype))
    experiences = make_experiences()
    policy = make_policy(dtype=dtype, layout=Layout.padded, max_tokens_per_micro_batch=10_000)
    metrics = fit(policy, [batch_of(experiences)], precision=precision).logged_metrics
    rows, width = len(experiences), max(len(e.tokens) for e in experiences)
    trained = sum(int(e.action_mask.sum()) for e in experiences)
    operations = ModelSize.of(policy.policy).training_flops(Work(rows * width, trained, rows * attended(width)))
    assert metrics["perf/mfu"] == pytest.approx(operations / float(metrics["time/train"]) / 1e15, rel=1e-5)


def test_utilization_of_an_unknown_device_is_left_out(monkeypatch):
    monkeypatch.setattr(flops, "peak_flops", lambda device, dtype, shapes: None)
    assert "perf/mfu" not in fit(make_policy(), [batch_of(make_experiences())]).logged_metrics


@pytest.mark.parametrize("policy_loss", ["ppo", "gspo", "cispo", "sapo", "mix"])
def test_shares_of_tokens_are_not_diluted_by_rows_that_are_skipped(policy_loss):
    """The loss counts rows without advantage, which leave the gradient alone; measurements are of what was computed."""
    settings: dict[str, Any] = {"policy_loss": policy_loss, "optimizer_steps": 2, "max_tokens_per_micro_batch": 30}
    settings |= {"policy_loss": {"name": "mix", "args": {"mu": 0.5}}} if policy_loss == "mix" else {}
    experiences = make_experiences(zero_every=2)
    trained = experiences[1::2]
    logged = []
    for rows in (experiences, trained):
        old = [e.logprobs for e in rows]  # far enough to be clipped
        trainer = fit(make_policy(**settings), [batch_of(rows, old_logprobs=old)])
        logged.append(trainer.logged_metrics)
    shares = [name for name in logged[0] if name.startswith(("actor/ppo_kl", "actor/pg_clipfrac"))]
    assert shares
    for name in shares:
        assert float(logged[0][name]) == pytest.approx(float(logged[1][name]), rel=1e-5), name
    assert logged[0]["actor/ppo_kl"] != 0
    share = sum(int(e.action_mask.sum()) for e in trained) / sum(int(e.action_mask.sum()) for e in experiences)
    if policy_loss == "ppo":
        expected = share * float(logged[1]["actor/pg_loss"])
        assert float(logged[0]["actor/pg_loss"]) == pytest.approx(expected, rel=1e-5)


# -- precision, set-up, saving -----------------------------------------------------------------------------------------


def test_bf16_mixed_trains_float32_weights():
    experiences = make_experiences()
    loss, gradients = one_step(experiences)
    seen = Gradients()
    trainer = fit(make_policy(max_grad_norm=1e9), [batch_of(experiences)], seen, precision="bf16-mixed")
    assert trainer.global_step == 1
    assert all(g.dtype == torch.float32 for g in seen.steps[0].values())
    flat, expected = (torch.cat([g.flatten() for g in gs.values()]) for gs in (seen.steps[0], gradients))
    assert torch.nn.functional.cosine_similarity(flat, expected, dim=0) > 0.99
    assert seen.losses[0] == pytest.approx(loss, abs=0.02)
    assert not torch.equal(flat, expected)  # it was computed in bfloat16


def test_first_ratio_is_one_under_mixed_precision():
    batches = [batch_of(make_experiences())]
    trainer = fit(
        make_policy(optimizer_steps=2, max_tokens_per_micro_batch=10_000),
        batches,
        Prepare(batches),
        precision="bf16-mixed",
    )
    assert trainer.logged_metrics["actor/ppo_kl"] == 0.0


def test_bf16_weights_train_with_float32_masters(tiny):
    experiences = make_experiences()
    seen = Gradients()
    policy = make_policy(OptimizerConfig(lr=1e-5), dtype="bf16")  # far below the resolution of most weights
    fit(policy, [batch_of(experiences)] * 3, seen)
    assert policy.policy.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in seen.steps[0].values())
    masters = optimizer_of(policy).state_dict()["state"]["masters"]
    start = [p.detach() for group in parameter_groups(tiny) for p in group["params"]]
    assert all((m - p.bfloat16().float()).abs().max() > 1e-5 for m, p in zip(masters, start, strict=True))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"gradient_clip_val": 0.5}, "trainer.gradient_clip_val"),
        ({"accumulate_grad_batches": 2}, "trainer.accumulate_grad_batches"),
        ({"precision": "64-true"}, "trainer.precision"),
        ({"precision": "bf16-true"}, "trainer.precision"),
        ({"devices": 2}, "trainer.strategy"),
        ({"devices": 1, "num_nodes": 2}, "trainer.strategy"),
    ],
)
def test_settings_of_the_trainer_that_would_not_act_are_refused_before_the_model_is_loaded(settings, key):
    policy = make_policy()
    plain: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    trainer: Any = L.Trainer(**plain, **settings)
    trainer.strategy._launcher = None  # here, not in processes of their own
    with refuses(key):
        trainer.fit(policy, Items([batch_of(make_experiences())]))
    assert policy.model is None


def test_configure_model_is_idempotent_and_trains():
    policy = make_policy(kl=KLConfig(coef=0.1))
    with pytest.raises(ModelLoadError, match=r"configure_model\(\)"):
        _ = policy.policy
    policy.configure_model()
    model, reference = policy.model, policy.reference
    policy.configure_model()
    assert policy.model is model
    assert policy.reference is reference
    assert policy.policy.training


def test_no_reference_without_a_kl_term():
    for kl in (KLConfig("k3", 0.0), KLConfig("none", 0.0)):
        policy = make_policy(kl=kl)
        policy.configure_model()
        assert policy.reference is None


def test_save_pretrained_writes_what_transformers_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = make_policy()
    fit(policy, [batch_of(make_experiences())])
    policy.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, mine), (other, theirs) in zip(policy.policy.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(mine, theirs)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("7") == policy.tokenizer.encode("7")
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


# -- resuming ----------------------------------------------------------------------------------------------------------


class Draws(L.Callback):
    """Draws a random number where an explorer might, and where training might."""

    def __init__(self):
        self.drawn = []

    def on_train_start(self, trainer, pl_module: Any):
        if trainer.global_step:
            self.drawn.append(torch.rand(()).item())

    def on_train_batch_end(self, trainer, pl_module: Any, outputs, batch, batch_idx):
        if trainer.global_step + pl_module.skipped_items > 3:
            self.drawn.append(torch.rand(()).item())


class SaveAfter(L.Callback):
    """Saves a checkpoint when so many items are done."""

    def __init__(self, items, path):
        self.items = items
        self.path = path

    def on_train_batch_end(self, trainer, pl_module: Any, outputs, batch, batch_idx):
        if batch_idx + 1 == self.items:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(dtype, tmp_path):
    optimizer = OptimizerConfig(lr=1e-3, lr_scheduler="cosine", total_steps=10, warmup_steps=1, weight_decay=0.1)
    batches = [batch_of(nothing_to_train())] + [batch_of(make_experiences(seed=seed)) for seed in range(4)]

    def run(*callbacks, **settings):
        L.seed_everything(3, verbose=False)
        policy, draws = make_policy(optimizer, dtype=dtype), Draws()
        trainer = fit(policy, batches, draws, *callbacks, **settings)
        return trainer, policy, draws.drawn

    trainer, policy, drawn = run(SaveAfter(3, tmp_path / "it.ckpt"), plugins=[AtomicCheckpointIO()])
    assert (trainer.global_step, policy.skipped_items) == (4, 1)
    resumed_trainer, resumed, resumed_draws = run(ckpt_path=tmp_path / "it.ckpt")
    assert (resumed_trainer.global_step, resumed.skipped_items) == (4, 1)
    assert len(drawn) == 2
    assert resumed_draws[:2] == drawn  # the first of them before training started
    for mine, theirs in zip(policy.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert rate_of(resumed) == rate_of(policy)
    mine, theirs = (tree_leaves(optimizer_of(trained).state_dict()["state"]) for trained in (policy, resumed))
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if isinstance(a, torch.Tensor)]
    assert len(pairs) > 10
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_resume_with_another_number_of_threads_says_that_its_bits_differ(tmp_path, caplog, monkeypatch):
    batches = [batch_of(make_experiences(seed=seed)) for seed in range(2)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    trainer = fit(make_policy(), batches, SaveAfter(1, tmp_path / "it.ckpt"), plugins=[AtomicCheckpointIO()])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)  # as at the end of a run, which had fewer
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for file in ("it.ckpt", "final.ckpt"):
        fit(make_policy(), batches, ckpt_path=tmp_path / file, max_epochs=2)
    assert "threads" not in caplog.text
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    fit(make_policy(), batches, ckpt_path=tmp_path / "it.ckpt")
    assert "OMP_NUM_THREADS=3 keeps it so" in caplog.text
    caplog.clear()
    checkpoint = torch.load(tmp_path / "it.ckpt", weights_only=True)
    del checkpoint["policy"]["threads"]  # as earlier versions saved it
    torch.save(checkpoint, tmp_path / "it.ckpt")
    fit(make_policy(), batches, ckpt_path=tmp_path / "it.ckpt")
    assert "threads" not in caplog.text


def test_the_algorithm_is_the_policys_own_and_its_sections_are_checked():
    algorithm = AlgorithmConfig(policy_loss={"name": "ppo", "args": {"clip_range_low": 0.1}})
    policy = PolicyModule("tiny", algorithm)
    algorithm.rollout_correction.level, algorithm.policy_loss.args["clip_range_low"] = "none", 0.3
    assert policy.algorithm.rollout_correction.level == "token"
    assert policy.algorithm.policy_loss.args == {"clip_range_low": 0.1}
    algorithm.kl.coef = -1.0
    with refuses("algorithm.kl.coef"):
        PolicyModule("tiny", algorithm)


def test_weights_alone_are_loaded_from_a_checkpoint(tmp_path):
    policy = make_policy()
    fit(policy, [batch_of(make_experiences())]).save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    loaded = PolicyModule.load_from_checkpoint(tmp_path / "weights.ckpt", model="tiny", dtype="fp32", weights_only=True)
    for mine, theirs in zip(policy.policy.parameters(), loaded.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "content",
    [None, b"garbage", torch.zeros(2), {"loops": 3}],
    ids=["no file", "no pickle", "no mapping", "no weights"],
)
def test_what_is_no_checkpoint_loads_no_policy(content, tmp_path):
    if isinstance(content, bytes):
        (tmp_path / "it.ckpt").write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / "it.ckpt")
    with refuses("ckpt_path") as refused:
        PolicyModule.load_from_checkpoint(tmp_path / "it.ckpt")
    assert f"'{tmp_path / 'it.ckpt'}'" in str(refused.value)


def test_a_folder_that_is_no_checkpoint_loads_no_policy_and_says_what_to_give(tmp_path):
    run, model = tmp_path / "run", tmp_path / "model"
    for file in (run / "checkpoints" / "epoch=1.ckpt", model / "config.json"):
        file.parent.mkdir(parents=True)
        file.touch()
    for folder, named in (
        (run, f"'{run / 'checkpoints' / 'epoch=1.ckpt'}'"),
        (model, f"PolicyModule('{model}')"),
    ):
        with refuses("ckpt_path") as refused:
            PolicyModule.load_from_checkpoint(folder)
        assert named in str(refused.value)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    fit(make_policy(), [batch_of(make_experiences())]).save_checkpoint(tmp_path / "it.ckpt")
    checkpoint = torch.load(tmp_path / "it.ckpt", weights_only=True)
    checkpoint["state_dict"] = {name: tensor[:1] for name, tensor in checkpoint["state_dict"].items()}
    torch.save(checkpoint, tmp_path / "smaller.ckpt")
    with refuses("model"):
        fit(make_policy(), [batch_of(make_experiences())], ckpt_path=tmp_path / "smaller.ckpt", max_epochs=2)


def test_a_policy_is_loaded_from_its_checkpoint_alone(tmp_path):
    loss = {"name": "ppo", "args": {"clip_range_high": 0.28}}
    settings = {"layout": "shared_prefix", "policy_loss": loss, "kl": KLConfig("k3", 0.1)}
    policy = make_policy(OptimizerConfig(lr=1e-2), "bf16", {"gradient_checkpointing": True}, **settings)
    batches = [batch_of(make_experiences())]
    fit(policy, batches, Prepare(batches)).save_checkpoint(tmp_path / "it.ckpt")
    loaded = PolicyModule.load_from_checkpoint(tmp_path / "it.ckpt")
    assert loaded.algorithm == policy.algorithm
    assert loaded.optimizer_config == policy.optimizer_config
    assert loaded.policy.is_gradient_checkpointing
    for mine, saved in zip(loaded.policy.parameters(), policy.policy.parameters(), strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine, saved)
    plain = PolicyModule.load_from_checkpoint(tmp_path / "it.ckpt", algorithm=None, dtype="fp32")  # these hold
    assert plain.algorithm == AlgorithmConfig()
    assert plain.policy.dtype == torch.float32


def test_a_policy_is_loaded_with_another_optimizer_than_its_checkpoints(tmp_path):
    fit(make_policy(), [batch_of(make_experiences())]).save_checkpoint(tmp_path / "it.ckpt")
    sgd = OptimizerConfig(name="torch.optim.SGD", lr=0.5)
    for chosen, expected in ((sgd, sgd), (asdict(sgd), sgd), (None, OptimizerConfig())):
        loaded = PolicyModule.load_from_checkpoint(tmp_path / "it.ckpt", optimizer=chosen)
        assert loaded.optimizer_config == expected


class FailsEarly(L.Callback):
    """Ends a fit before it trains."""

    def on_fit_start(self, trainer, pl_module):
        raise ValueError("no engine")


def test_a_policy_that_was_loaded_trains_anew_with_random_states_and_counters_of_its_own(tmp_path):
    batches = [batch_of(nothing_to_train()), batch_of(make_experiences())]
    trainer = fit(policy := make_policy(), batches)
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    assert policy.skipped_items == 1
    failed, drawn = make_policy(), []
    with pytest.raises(ValueError, match="no engine"):
        fit(failed, batches, FailsEarly(), ckpt_path=tmp_path / "it.ckpt")
    for seed in (5, 6, 5):
        loaded = PolicyModule.load_from_checkpoint(tmp_path / "it.ckpt")
        L.seed_everything(seed, verbose=False)
        draw = LambdaCallback(on_train_start=lambda *_: drawn.append(torch.rand(()).item()))
        fit(loaded, batches[1:], draw)
        assert loaded.skipped_items == 0
    L.seed_everything(5, verbose=False)
    fit(failed, batches[1:], draw)  # nor if a fit that was to resume has ended before it trained
    assert drawn[0] == drawn[2] != drawn[1]
    assert drawn[0] == drawn[3]


def test_a_checkpoint_of_an_earlier_version_is_refused_by_what_it_lacks(tmp_path):
    fit(make_policy(), [batch_of(make_experiences())]).save_checkpoint(tmp_path / "it.ckpt")
    checkpoint = torch.load(tmp_path / "it.ckpt", weights_only=True)
    del checkpoint["policy"]["bad_steps"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    policy = make_policy(model={"optimizer_factory": torch.optim.AdamW})
    with pytest.raises(ConfigError, match="bad_steps"):
        fit(policy, [batch_of(make_experiences())], ckpt_path=tmp_path / "old.ckpt", max_epochs=2)

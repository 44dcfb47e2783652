"""A critic beside the policy: values, advantages and gradients against plain code; warm-up, KL, resuming."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.compose import composed
from support.errors import refuses
from support.policy import (
    Gradients,
    Prepare,
    assert_same_gradients,
    batch_of,
    fit,
    groups,
    make_experiences,
    make_policy,
    naive_logprobs,
    padded,
    rate_of,
)

from trinity_lightning.algorithm.gae import gae, whitened
from trinity_lightning.config.algorithm import Layout
from trinity_lightning.config.model import LoRAConfig, OptimizerConfig
from trinity_lightning.errors import ModelLoadError
from trinity_lightning.resume import checkpoint_to_resume
from trinity_lightning.sync.stream import weight_stream
from trinity_lightning.trainer.critic import Critic
from trinity_lightning.trainer.policy import PolicyModule

LR = {"lr": 1e-2}


def rollouts(make=make_experiences, **settings):
    """Ragged experiences as the add strategy leaves them: with rewards, without advantages."""
    experiences = make(**settings)
    for index, experience in enumerate(experiences):
        experience.advantages, experience.reward = None, float(index % 3) / 2
    return experiences


def actor_critic(critic: dict[str, Any] | None = None, **settings: Any) -> PolicyModule:
    return make_policy(critic=LR | (critic or {}), **settings)


def with_head(policy: PolicyModule, seed: int = 0) -> PolicyModule:
    """Loaded, with a head that says something: it begins with zeros."""
    policy.configure_model()
    generator = torch.Generator().manual_seed(seed)
    assert isinstance(policy.critic, Critic)
    with torch.no_grad():
        for parameter in policy.critic.head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return policy


def naive_values(model, head, experiences):
    """Values [B, R] of the states before response tokens, one experience at a time."""
    rows = []
    for e in experiences:
        states = model.base_model(input_ids=e.tokens.long()[None]).last_hidden_state[0]
        rows.append(head(states[e.prompt_length - 1 : len(e.tokens) - 1]).squeeze(-1))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class OfCritic(Gradients):
    """Gradients of the critic's own parameters, too."""

    def on_before_optimizer_step(self, trainer, pl_module: Any, optimizer):
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        parameters = pl_module.critic.named_parameters()
        self.steps[-1] |= {f"critic.{name}": p.grad.clone() for name, p in parameters if p.grad is not None}


@pytest.mark.parametrize("value_model", [None, "tiny"])
@pytest.mark.parametrize("layout", [Layout.padded, Layout.shared_prefix])
def test_loss_and_every_gradient_equal_the_naive_ones(layout, value_model):
    experiences, seen = rollouts(groups), OfCritic()
    settings = {"layout": layout, "max_tokens_per_micro_batch": 60, "optimizer_steps": 2}
    policy = with_head(actor_critic({"model": value_model, "lam": 0.9, "clip_range": 0.05}, **settings))
    batch = batch_of(experiences)
    plain = with_head(actor_critic({"model": value_model}))
    assert isinstance(plain.critic, Critic)
    model, critic = plain.policy, plain.critic
    mask = padded(experiences, "action_mask").bool()
    values = naive_values(critic.model or model, critic.head, experiences)
    rewards = torch.zeros(mask.shape)
    for row, experience in enumerate(experiences):
        rewards[row, int(mask[row].nonzero().max())] = experience.reward or 0.0
    advantages, returns = gae(values.detach(), rewards, mask, 1.0, 0.9)
    advantages = whitened(advantages, mask)
    logprobs = naive_logprobs(model, experiences)
    weight = (logprobs.detach() - padded(experiences, "logprobs")).exp().clamp(max=2.0)
    ratio = (logprobs - logprobs.detach()).exp()
    expected = (-ratio * advantages * weight * mask).sum() / mask.sum()
    expected = expected + 0.1 * 0.5 * ((values - returns).square() * mask).sum() / mask.sum()
    expected.backward()
    fit(policy, [batch], Prepare([batch]), seen)
    assert seen.losses[0] == pytest.approx(expected.item(), rel=1e-5)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients |= {f"critic.{name}": p.grad for name, p in critic.named_parameters() if p.grad is not None}
    assert_same_gradients(seen.steps[0], gradients, tolerance=2e-5)


def test_both_layouts_have_the_same_values():
    trained = []
    for layout in (Layout.padded, Layout.shared_prefix):
        batch = batch_of(rollouts(groups))
        fit(with_head(actor_critic(layout=layout)), [batch], Prepare([batch]))
        trained.append(batch.columns)
    for name in ("values", "returns", "advantages"):
        torch.testing.assert_close(*(torch.cat(columns[name]) for columns in trained), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("value_model", [None, "tiny"])
def test_warming_up_trains_the_critic_alone(value_model, dtype):
    policy, batch = actor_critic({"model": value_model, "warmup_steps": 2}, dtype=dtype), batch_of(rollouts())
    policy.configure_model()
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    fit(policy, [batch, batch], Prepare([batch]))
    moved = {name for name, weight in policy.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved
    assert all(name.startswith("critic.") for name in moved)
    assert ("critic.model.model.layers.0.mlp.up_proj.weight" in moved) == (value_model is not None)
    fit(policy, [batch, batch, batch], Prepare([batch]))
    assert any(
        not torch.equal(weight, before[name]) for name, weight in policy.policy.state_dict(prefix="model.").items()
    )


def test_the_kl_of_every_token_is_subtracted_and_its_weight_follows_the_target():
    experiences = rollouts()
    policy = actor_critic({"kl_coef": 0.5, "kl_target": 100.0, "whiten": False})
    policy.configure_model()
    assert isinstance(policy.critic, Critic)
    batch = batch_of(experiences)
    columns = {
        name: [torch.full((e.response_length,), value) for e in experiences]
        for name, value in (("values", 0.0), ("old_logprobs", -1.0), ("ref_logprobs", -1.2))
    }
    experiences[0].action_mask[:] = False  # a response without trained tokens
    batch = batch_of(experiences)
    weighed = policy.critic.weigh(batch, columns)
    policy.critic.adapt(batch, columns)
    for experience, returns in zip(experiences, weighed["returns"], strict=True):
        mask = experience.action_mask
        to_go = mask.flip(0).cumsum(0).flip(0)  # tokens, each with 0.2 nats
        torch.testing.assert_close(returns[mask], (experience.reward - 0.5 * 0.2 * to_go)[mask])
    assert float(policy.critic.kl_coef) == pytest.approx(0.5 * (1 - 0.1 * 0.2))  # the error is bounded
    mean = 0.2 * batch.num_tokens / (len(experiences) - 1)
    batch.columns = columns | weighed
    assert policy.critic.metrics(batch)["critic/kl"] == pytest.approx(mean, rel=1e-5)
    policy.critic.config.kl_target = mean / 1.1
    policy.critic.adapt(batch, columns)
    assert float(policy.critic.kl_coef) == pytest.approx(0.5 * (1 - 0.1 * 0.2) * (1 + 0.1 * 0.1), rel=1e-5)


def test_a_kl_in_the_reward_has_a_reference_and_metrics():
    batch = batch_of(rollouts())
    trainer = fit(actor_critic({"kl_coef": 0.1}), [batch, batch], Prepare([batch]))
    assert trainer.logged_metrics["critic/kl"] == 0  # it is the initial policy still
    assert trainer.logged_metrics["critic/kl_coef"] == pytest.approx(0.1)
    assert "actor/kl_loss" not in trainer.logged_metrics
    assert math.isfinite(trainer.logged_metrics["critic/explained_variance"])


@pytest.mark.slow
def test_a_critic_learns_what_states_are_worth():
    batch = batch_of(rollouts())
    policy = actor_critic({"model": "tiny", "lr": 1e-2, "clip_range": None, "warmup_steps": 100})
    fit(policy, [batch] * 40, Prepare([batch]))
    again = batch_of(batch.experiences)
    trainer = fit(policy, [again], Prepare([again]))
    assert trainer.logged_metrics["critic/explained_variance"] > 0.9


@pytest.mark.slow
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path):
    critic = {"kl_coef": 0.1, "kl_target": 3.0}
    batches = [batch_of(rollouts(seed=seed)) for seed in range(4)]
    whole, first, rest = (actor_critic(critic) for _ in range(3))
    fit(whole, batches, Prepare(batches))
    one = fit(first, batches, Prepare(batches), limit_train_batches=2, max_epochs=1)
    one.save_checkpoint(file := tmp_path / "half.ckpt", weights_only=False)
    loaded = PolicyModule.load_from_checkpoint(file, weights_only=True)
    torch.testing.assert_close(loaded.state_dict(), first.state_dict(), rtol=0, atol=0)
    fit(rest, batches[2:], ckpt_path=file, max_epochs=2)
    torch.testing.assert_close(rest.state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert isinstance(whole.critic, Critic)
    assert float(whole.critic.kl_coef) != 0.1


@pytest.mark.parametrize(("before", "schedule"), [(0.0, "constant"), (0.1, "linear")])
def test_a_resumed_run_takes_its_learning_rates_and_the_weight_of_its_kl_from_the_configuration(
    before: float, schedule: str, tmp_path: Path
):
    batches = [batch_of(rollouts(seed=seed)) for seed in range(3)]
    optimizer = OptimizerConfig(lr=1e-3, lr_scheduler=schedule, warmup_steps=4, total_steps=6)
    first = actor_critic({"kl_coef": before}, optimizer=optimizer)
    one = fit(first, batches, Prepare(batches), limit_train_batches=2, max_epochs=1)
    one.save_checkpoint(file := tmp_path / "half.ckpt", weights_only=False)
    rest = actor_critic({"kl_coef": 0.2, "lr": 4e-2}, optimizer=OptimizerConfig(lr=3e-3, warmup_steps=4))
    trainer = fit(rest, batches[2:], Prepare(batches[2:]), ckpt_path=file, max_epochs=2)
    expected = {"actor/lr": 3e-3 * 2 / 4, "critic/lr": 4e-2 * 2 / 4, "critic/kl_coef": 0.2}
    assert {name: float(trainer.logged_metrics[name]) for name in expected} == pytest.approx(expected)
    assert rate_of(rest) == pytest.approx(3e-3 * 3 / 4)


@pytest.mark.slow
def test_a_checkpoint_of_another_critic_is_refused(tmp_path: Path):
    batches, file = [batch_of(rollouts())], tmp_path / "it.ckpt"
    fit(actor_critic(), batches, Prepare(batches)).save_checkpoint(file)
    with refuses("algorithm.critic"):
        fit(make_policy(), batches, ckpt_path=file, max_epochs=2)
    config = composed("model=tiny", "steps=2", f"ckpt_path={file}")
    with refuses("algorithm.critic"):
        checkpoint_to_resume(config, tmp_path)
    config = composed("model=tiny", "steps=2", f"ckpt_path={file}", "algorithm=ppo_critic", "add_strategy=critic")
    assert checkpoint_to_resume(config, tmp_path) == str(file)
    fit(make_policy(), [batch_of(make_experiences())]).save_checkpoint(file)
    with refuses("algorithm.critic"):
        fit(actor_critic(), batches, ckpt_path=file, max_epochs=2)


def test_values_are_computed_without_the_value_models_dropout():
    policy = with_head(actor_critic({"model": "tiny"}, layout=Layout.padded))
    assert isinstance(policy.critic, Critic)
    layers = policy.critic.model.model
    layers.norm = torch.nn.Sequential(layers.norm, torch.nn.Dropout(0.5))
    batches = [batch_of(rollouts()) for _ in range(2)]
    fit(policy, batches, Prepare(batches))
    torch.testing.assert_close(*(batch.columns["values"] for batch in batches))
    assert policy.critic.training


def test_values_that_a_script_gives_stay():
    batch = batch_of(rollouts())

    class WithoutReference(Prepare):
        def on_train_start(self, trainer, pl_module: Any):
            super().on_train_start(trainer, pl_module)
            del batch.columns["ref_logprobs"]
            self.columns_given = dict(batch.columns)

    fit(actor_critic({"kl_coef": 0.1}), [batch], prepare := WithoutReference([batch]))
    assert "ref_logprobs" in batch.columns
    assert all(batch.columns[name] is column for name, column in prepare.columns_given.items())


def test_models_that_show_no_states_or_no_logits_are_refused_before_training():
    policy = with_head(actor_critic(layout=Layout.padded))
    policy.policy.base_model_prefix = "lm_head"
    with pytest.raises(ModelLoadError, match=r"LlamaForCausalLM.*algorithm\.critic\.model"):
        policy.check_trainable()
    policy = with_head(actor_critic({"model": "tiny"}))
    assert isinstance(policy.critic, Critic)
    policy.critic.model.forward = lambda **_: SimpleNamespace()
    with pytest.raises(ModelLoadError, match=r"LlamaForCausalLM.*'logits'"):
        policy.check_trainable()


def test_the_critic_is_in_checkpoints_alone(tmp_path: Path):
    policy = with_head(actor_critic())
    assert {"critic.head.weight", "critic.head.bias", "critic.kl_scale"} < policy.state_dict().keys()
    assert {name for name, _ in weight_stream(policy.policy)} == {
        name for name, _ in weight_stream(make_loaded().policy)
    }
    policy.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() <= policy.policy.state_dict().keys()


def make_loaded() -> PolicyModule:
    policy = make_policy()
    policy.configure_model()
    return policy


def test_a_batch_without_values_is_refused():
    with refuses(None) as refused:
        fit(actor_critic(), [batch_of(rollouts())])
    assert "'values'" in str(refused.value)


def test_experiences_with_advantages_or_without_rewards_are_refused():
    batch = batch_of(make_experiences())
    with refuses("algorithm.critic"):
        fit(actor_critic(), [batch], Prepare([batch]))
    batch = batch_of(rollouts())
    batch.experiences[0].reward = None
    with refuses("algorithm.critic"):
        fit(actor_critic(), [batch], Prepare([batch]))


def test_adapters_losses_without_advantages_and_other_vocabularies_are_refused():
    with refuses("algorithm.critic"):
        actor_critic(model={"lora": LoRAConfig(r=4)})
    for loss in ("sft", "dpo"):
        with refuses("algorithm.critic"):
            actor_critic(policy_loss=loss)
    with refuses("algorithm.critic.model"):
        actor_critic({"model": "smollm2"}).configure_model()
    with refuses("algorithm.critic.kl_target"):
        actor_critic({"kl_target": 6.0})
    with refuses("algorithm.critic.gama"):
        actor_critic({"gama": 1.0})

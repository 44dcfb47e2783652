"""The objective that an algorithm of the configuration minimises: its losses, averages and arguments."""

import inspect
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning import Trainer
from omegaconf import OmegaConf
from support.compose import composed
from support.errors import refuses
from support.policy import (
    Gradients,
    Prepare,
    assert_same_gradients,
    batch_of,
    fit,
    load_tiny,
    make_experiences,
    naive_gradients,
    naive_grpo,
    naive_logprobs,
    padded,
)
from support.runs import ROOT
from torch import Tensor

from trinity_lightning.algorithm.policy_loss import POLICY_LOSS_FN, aggregate, create_policy_loss
from trinity_lightning.algorithm.policy_loss.create import accepted
from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.buffer.offline import OfflineExperienceDataModule, marked
from trinity_lightning.buffer.reader import MemoryReader
from trinity_lightning.common.experience import ExperienceError
from trinity_lightning.config.algorithm import AlgorithmConfig, KLConfig, Layout, RolloutCorrectionConfig
from trinity_lightning.config.explorer import ExplorerConfig, SamplingConfig
from trinity_lightning.config.registry import options
from trinity_lightning.errors import ConfigError, PartError
from trinity_lightning.explorer.callback import ExplorerCallback
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.taskset import Taskset
from trinity_lightning.trainer.layout import collate, cut
from trinity_lightning.trainer.objective import Objective
from trinity_lightning.trainer.policy import PolicyModule

# All but those with columns of their own, which test_policy_streams.py has.
COMMON_LOSSES = sorted({*POLICY_LOSS_FN} - {"streams", "teacher_kl"})


def algorithm_of(*overrides: str) -> AlgorithmConfig:
    """The algorithm of a training run with these overrides."""
    return OmegaConf.to_object(composed(*overrides).algorithm)  # type: ignore[return-value]


def inputs(seed: int = 0) -> tuple[Any, ...]:
    """Log-probabilities, entropies, the micro-batch and the optimizer batch of ragged experiences."""
    experiences = make_experiences(seed=seed)
    batch = batch_of(experiences)
    (part,) = cut(batch, range(len(experiences)), 10_000, Layout.padded)
    micro = collate(batch, part, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    shape = micro.action_mask.shape
    logprobs = -torch.rand(shape, generator=generator)
    old = logprobs + 0.2 * torch.randn(shape, generator=generator)
    micro.columns["old_logprobs"] = old
    return logprobs, torch.rand(shape, generator=generator), micro, batch, batch.num_tokens, batch.num_tokens


def loss_of(config: AlgorithmConfig) -> float:
    config.rollout_correction.level = "none"
    config.optimizer_steps = 2  # the ratio is not 1
    arguments = inputs()
    columns = arguments[2].columns
    columns["ref_logprobs"] = columns["old_logprobs"] - 0.1
    return Objective(config)(*arguments)[0].item()


def own_loss(name: str, **arguments: Any) -> float:
    """The loss of the function itself, with the defaults of its signature."""
    logprobs, _, micro, *_ = inputs()
    old, mask, advantages = micro.columns["old_logprobs"], micro.action_mask, micro.columns["advantages"]
    loss_fn = POLICY_LOSS_FN.get(name)
    arguments |= accepted(loss_fn, {"ref_logprobs": old - 0.1})
    return loss_fn(logprobs, old, mask, advantages, **arguments)[0].item()


@pytest.mark.parametrize("name", COMMON_LOSSES)
def test_a_loss_is_trained_with_its_own_defaults(name: str) -> None:
    """By the choice of the algorithm, and by the loss's name alone."""
    expected = pytest.approx(own_loss(name), rel=1e-6)
    assert loss_of(algorithm_of(f"algorithm={name}")) == expected
    assert loss_of(AlgorithmConfig(policy_loss=name)) == expected


@pytest.mark.parametrize("name", ["gspo", "sapo"])
def test_losses_of_sequences_are_not_averaged_over_tokens(name: str) -> None:
    token_mean = loss_of(algorithm_of(f"algorithm={name}", "algorithm.loss_agg_mode=token-mean"))
    assert token_mean == pytest.approx(own_loss(name, loss_agg_mode="token-mean"), rel=1e-6)
    assert token_mean != pytest.approx(own_loss(name), rel=1e-3)


@pytest.mark.parametrize("recipe", options("recipe"))
def test_a_recipe_says_its_objective_in_its_first_lines(recipe: str) -> None:
    """Clip range, KL penalty and average as composed; or that they are those of recipe=grpo."""
    header = (ROOT / "recipes" / f"{recipe}.yaml").read_text().partition("#\n")[0]
    header = " ".join(header.replace("#", "").split())
    says, config = header.partition("Objective:")[2], algorithm_of(f"+recipe={recipe}")
    assert (config.loss_agg_mode is None) == (recipe != "dr_grpo")  # a loss has its own average
    if "that of recipe=grpo" in says:
        same = ("policy_loss", "loss_agg_mode", "kl", "entropy_coef", "optimizer_steps", "critic")
        grpo = algorithm_of("+recipe=grpo")
        assert [getattr(config, name) for name in same] == [getattr(grpo, name) for name in same]
        return
    assert ("no KL penalty" in says) == (config.kl.coef == 0)
    loss = create_policy_loss(config.policy_loss.name, **config.policy_loss.args)
    defaults = {name: parameter.default for name, parameter in inspect.signature(loss).parameters.items()}
    average = config.loss_agg_mode or defaults.get("loss_agg_mode", "over pairs")
    assert (average or "token-mean") in says  # a mixture has the average of its terms
    if (low := defaults.get("clip_range_low")) is not None:
        assert f"{1 - low:g}, {1 + defaults['clip_range_high']:g}" in says
    assert ("two optimizer steps" in header) == (config.optimizer_steps == 2)


@pytest.mark.parametrize("recipe", [name for name in options("recipe") if name not in ("offline", "dr_grpo")])
def test_no_recipe_overrides_how_its_loss_is_averaged(recipe: str) -> None:
    assert algorithm_of(f"+recipe={recipe}").loss_agg_mode is None


def test_mix_leaves_the_usual_loss_its_own_average() -> None:
    mixed = own_loss("mix", usual="gspo")
    assert mixed == pytest.approx(0.9 * own_loss("gspo"), rel=1e-6)
    mixed = own_loss("mix", usual="gspo", loss_agg_mode="token-mean")
    assert mixed == pytest.approx(0.9 * own_loss("gspo", loss_agg_mode="token-mean"), rel=1e-6)


def test_arguments_of_the_loss_need_no_plus_sign() -> None:
    config = algorithm_of("+recipe=dapo", "algorithm.policy_loss.args.dual_clip=null")
    assert config.policy_loss.args == {"clip_range_high": 0.28, "dual_clip": None}
    expected = own_loss("ppo", clip_range_high=0.28, dual_clip=None)
    assert loss_of(config) == pytest.approx(expected, rel=1e-6)


def needs_reference(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor,
    weight: float = 1.0,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    max_response_length: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of one's own that moves the policy away from the reference."""
    loss = aggregate(-weight * advantages * (logprobs - ref_logprobs).square(), action_mask, num_tokens=num_tokens)
    return loss, {"pg_loss": loss.detach()}


def test_a_shifted_baseline_or_a_regularizer_trains_rows_without_advantage() -> None:
    assert Objective(AlgorithmConfig(policy_loss="asymre")).needs_all_rows
    assert not Objective(AlgorithmConfig(policy_loss="rec")).needs_all_rows
    regularized = {"name": "rec", "args": {"regularizer": "k2", "regularizer_coef": 0.1}}
    assert Objective(AlgorithmConfig(policy_loss=regularized)).needs_all_rows


def test_a_loss_that_needs_the_reference_is_given_it() -> None:
    config = AlgorithmConfig(policy_loss={"name": "test_objective.needs_reference", "args": {"weight": 2.0}})
    config.rollout_correction.level = "none"
    objective = Objective(config)
    assert objective.needs_reference
    assert not objective.needs_all_rows  # without advantage it has no gradient
    arguments = inputs()
    with pytest.raises(ConfigError, match="'ref_logprobs'"):
        objective(*arguments)
    logprobs, _, micro, *_ = arguments
    micro.columns["ref_logprobs"] = logprobs - 0.5
    expected = -2.0 * 0.25 * micro.columns["advantages"][micro.action_mask].mean()
    assert objective(*arguments)[0].item() == pytest.approx(expected.item(), rel=1e-5)


def may_use_reference(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    max_response_length: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of one's own that reports the reference, if there is one."""
    loss = aggregate(-advantages * logprobs, action_mask, num_tokens=num_tokens)
    return loss, {"pg_loss": loss.detach()} | ({} if ref_logprobs is None else {"ref/max": ref_logprobs.amax()})


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_a_loss_that_may_use_the_reference_is_given_the_one_of_the_kl_term(coef: float) -> None:
    objective = Objective(AlgorithmConfig(policy_loss="test_objective.may_use_reference", kl=KLConfig(coef=coef)))
    arguments = inputs()
    arguments[2].columns["ref_logprobs"] = arguments[0] - 0.5
    assert objective.needs_reference == ("ref/max" in objective(*arguments)[1]) == (coef > 0)


def test_only_a_loss_or_a_kl_term_that_needs_it_loads_a_reference() -> None:
    assert [name for name in COMMON_LOSSES if Objective(AlgorithmConfig(policy_loss=name)).needs_reference] == ["dpo"]
    assert Objective(AlgorithmConfig(kl=KLConfig(coef=0.1))).needs_reference


def test_k1_as_a_loss_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for kl in (KLConfig("none", 0.0), KLConfig("k3", 0.1)):
        PolicyModule("tiny", AlgorithmConfig(kl=kl))
    assert not caplog.records
    PolicyModule("tiny", AlgorithmConfig(kl=KLConfig("k1", 0.1)))
    [record] = caplog.records
    assert "algorithm.kl.name=k1" in record.message


@pytest.mark.slow
def test_weights_that_a_loss_is_not_proportional_to_are_warned_of() -> None:
    assert [name for name in options("algorithm") if Objective(algorithm_of(f"algorithm={name}")).caveats] == []
    weighed = {"name": "rec", "args": {"weight": "advantage"}}
    for loss in ("asymre", weighed, {"name": "mix", "args": {"usual": "asymre"}}):
        [caveat] = Objective(AlgorithmConfig(policy_loss=loss)).caveats
        assert "algorithm.rollout_correction" in caveat


# -- The ratio against the engine --------------------------------------------------------------------------------------


def against_engine(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(
        old_logprobs="engine", rollout_correction=RolloutCorrectionConfig(level="none"), max_grad_norm=None, **settings
    )


@pytest.mark.parametrize("optimizer_steps", [1, 3])
@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "sapo", "topr", "sppo", "dppo"])
def test_the_ratio_is_against_the_engine(name: str, optimizer_steps: int) -> None:
    """However many optimizer steps there are, nothing is computed before the first."""
    objective = Objective(against_engine(policy_loss=name, optimizer_steps=optimizer_steps))
    assert not objective.needs_old_logprobs
    logprobs, entropy, micro, batch, tokens, _ = inputs()
    loss, metrics = objective(logprobs, entropy, micro, batch, tokens, tokens)
    engine = micro.columns["logprobs"]
    expected, _ = POLICY_LOSS_FN.get(name)(logprobs, engine, micro.action_mask, micro.columns["advantages"])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    difference = (logprobs - engine).abs()[micro.action_mask]  # the alarm compares trainer and engine all the same
    assert metrics["logprob_diff/mean"].item() == pytest.approx(difference.mean().item(), rel=1e-5)
    assert metrics["logprob_diff/max"].item() == pytest.approx(difference.max().item(), rel=1e-5)
    assert "is_weight/mean" not in metrics


def test_gradients_against_the_engine_equal_the_naive_ones() -> None:
    experiences = make_experiences()
    config = against_engine(max_tokens_per_micro_batch=64)
    seen, batches = Gradients(), [batch_of(experiences)]
    fit(PolicyModule("tiny", config, dtype="fp32"), batches, Prepare(batches), seen)
    assert batches[0].columns == {}
    tiny = load_tiny()
    expected = naive_grpo(tiny, experiences, old=padded(experiences, "logprobs"))  # whose weights are then 1
    assert seen.losses[0] == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(seen.steps[0], naive_gradients(tiny, expected))


@pytest.mark.parametrize("optimizer_steps", [1, 2])
def test_tokens_are_left_out_of_sequences_that_the_policy_moved_away_from(optimizer_steps: int) -> None:
    """By what sampled them, not by the policy before the step; the totals still count them."""
    config = AlgorithmConfig(optimizer_steps=optimizer_steps, off_policy_mask_threshold=0.05)
    config.rollout_correction.level = "none"
    logprobs, entropy, micro, batch, tokens, _ = inputs()
    micro.columns["logprobs"] = logprobs + torch.linspace(-0.3, 0.5, len(logprobs))[:, None]
    loss, metrics = Objective(config)(logprobs, entropy, micro, batch, tokens, tokens)
    mask, advantages = micro.action_mask, micro.columns["advantages"]
    moved = ((micro.columns["logprobs"] - logprobs) * mask).sum(-1) / mask.sum(-1).clamp(min=1) > 0.05
    left_out = moved[:, None] & (advantages < 0)
    old = micro.columns["old_logprobs"] if optimizer_steps > 1 else logprobs
    expected, _ = POLICY_LOSS_FN.get("ppo")(
        logprobs, old, mask, advantages.masked_fill(left_out, 0.0), num_tokens=tokens
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["off_policy_mask/frac"].item() == pytest.approx((left_out & mask).sum().item() / tokens)
    assert 0 < metrics["off_policy_mask/frac"] < 1


def test_a_loss_without_advantages_has_nothing_to_leave_out() -> None:
    with refuses("algorithm.off_policy_mask_threshold"):
        Objective(AlgorithmConfig(policy_loss="sft", off_policy_mask_threshold=0.1))


@pytest.mark.parametrize("name", ["reinforce", "opmd", "sft"])
def test_a_loss_without_a_ratio_has_nothing_to_hold_against_the_engine(name: str) -> None:
    with refuses("algorithm.old_logprobs"):
        Objective(against_engine(policy_loss=name))


def test_experiences_without_the_engines_log_probabilities_are_named() -> None:
    experiences = make_experiences()
    experiences[5].logprobs = None
    policy = PolicyModule("tiny", against_engine(), dtype="fp32")
    with pytest.raises(ExperienceError, match=str(experiences[5].eid)):
        fit(policy, [batch_of(experiences)])


def test_an_experts_rows_need_no_log_probabilities_of_the_engine() -> None:
    experiences = make_experiences()
    experts = [marked(experience, expert=True) for experience in make_experiences(4, seed=7, batch=2)]
    for expert in experts:
        expert.logprobs = None
    losses = []
    for settings in ({}, {"policy_loss": {"name": "mix", "args": {"mu": 0.25}}}):
        seen = Gradients()
        rows = experiences + (experts if settings else [])
        fit(PolicyModule("tiny", against_engine(**settings), dtype="fp32"), [batch_of(rows)], seen)
        losses.append(seen.losses[0])
    tiny, mask = load_tiny(), padded(experts, "action_mask")
    with torch.no_grad():
        sft = -naive_logprobs(tiny, experts)[mask].mean().item()
    assert losses[1] == pytest.approx(0.75 * losses[0] + 0.25 * sft, rel=1e-5)


def only_reference(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    max_response_length: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of one's own with a reference and without a ratio."""
    loss = aggregate(-advantages * (logprobs - ref_logprobs).exp(), action_mask, num_tokens=num_tokens)
    return loss, {"pg_loss": loss.detach()}


def of_pairs(
    logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, *, pairs: Tensor, **_: Any
) -> Any:
    chosen, rejected = logprobs.sum(-1)[pairs].unbind(1)
    return (rejected - chosen).mean(), {"pg_loss": torch.zeros(())}


def detached(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **totals: Any) -> Any:
    return aggregate(-advantages * logprobs.detach(), action_mask), {"pg_loss": torch.zeros(())}


def without_metrics(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **_: Any) -> Any:
    return aggregate(-advantages * logprobs, action_mask)


def without_pg_loss(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **_: Any) -> Any:
    return aggregate(-advantages * logprobs, action_mask), {}


def without_totals(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor) -> Any:
    return aggregate(-advantages * logprobs, action_mask), {"pg_loss": torch.zeros(())}


def one_a_token(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **_: Any) -> Any:
    return -advantages * logprobs, {"pg_loss": torch.zeros(())}


@pytest.mark.parametrize("name", ["one_a_token", "detached", "without_metrics", "without_pg_loss", "without_totals"])
def test_a_loss_of_ones_own_is_tried_before_anything_is_loaded(name: str) -> None:
    with refuses("algorithm.policy_loss") as refused:
        Objective(AlgorithmConfig(policy_loss=f"test_objective.{name}"))
    assert name in str(refused.value)


def failing_later(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **_: Any) -> Any:
    if logprobs.shape[0] > 2:
        raise RuntimeError("too many rows")
    return aggregate(-advantages * logprobs, action_mask), {"pg_loss": torch.zeros(())}


def test_an_error_in_a_loss_while_it_trains_names_its_line() -> None:
    objective = Objective(AlgorithmConfig(policy_loss="test_objective.failing_later"))
    with pytest.raises(PartError, match=r"test_objective\.py:\d+ in failing_later"):
        objective(*inputs())


def test_a_loss_of_ones_own_may_ask_for_pairs() -> None:
    assert Objective(AlgorithmConfig(policy_loss="test_objective.of_pairs")).pairs


def test_a_ratio_to_the_reference_is_none_to_the_engine() -> None:
    with refuses("algorithm.old_logprobs"):
        Objective(against_engine(policy_loss="test_objective.only_reference"))


def test_kl_and_entropy_of_a_mixture_are_averaged_as_its_rollouts() -> None:
    arguments = inputs()
    logprobs, entropy, micro, *_ = arguments
    micro.columns["ref_logprobs"] = logprobs - 0.5
    for usual, mode in (("gspo", "seq-mean-token-mean"), ("ppo", "token-mean")):
        values = []
        for coef in (0.0, 0.1):
            config = AlgorithmConfig(policy_loss={"name": "mix", "args": {"usual": usual}}, entropy_coef=coef)
            values.append(Objective(config)(*arguments)[0].item())
        expected = -0.1 * aggregate(entropy, micro.action_mask, mode).item()
        assert values[1] - values[0] == pytest.approx(expected, abs=1e-6)
    config = AlgorithmConfig(
        policy_loss={"name": "mix", "args": {"usual_args": {"loss_agg_mode": "seq-mean-token-sum"}}}, entropy_coef=0.1
    )
    whole, without = Objective(config), Objective(replace(config, entropy_coef=0.0))
    expected = -0.1 * aggregate(entropy, micro.action_mask, "seq-mean-token-sum").item()
    assert whole(*arguments)[0].item() - without(*arguments)[0].item() == pytest.approx(expected, rel=1e-5)


# -- Experiences of older weights --------------------------------------------------------------------------------------


def uncorrected(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(level="none"), **settings)


def test_uncorrected_rollouts_of_older_weights_are_refused_before_anything_is_loaded() -> None:
    source = TaskSource(Taskset.addition(), "simple", "math", SamplingConfig(max_tokens=8))
    policy = PolicyModule("tiny", uncorrected())
    callback = ExplorerCallback(Explorer(ExplorerConfig(sync_interval=4), [VLLMEngine("tiny")], source))
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[callback])
    with refuses("algorithm.policy_loss"):
        trainer.fit(policy, datamodule=ExperienceDataModule("grpo"))
    assert policy.model is None


def offline(policy: PolicyModule, experiences: list[Any]) -> None:
    """Train on them as on stored ones."""
    data = OfflineExperienceDataModule(MemoryReader(experiences), batch_size=len(experiences), steps_per_epoch=1)
    settings: Any = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)  # Lightning's own
        Trainer(**settings).fit(policy, datamodule=data)


def test_uncorrected_stored_experiences_are_refused() -> None:
    with refuses("algorithm.policy_loss"):
        offline(PolicyModule("tiny", uncorrected()), make_experiences())


def test_stored_experiences_that_cannot_be_corrected_are_named() -> None:
    experiences = make_experiences()
    experiences[5].logprobs = None
    with pytest.raises(ExperienceError, match=str(experiences[5].eid)):
        offline(PolicyModule("tiny", dtype="fp32"), experiences)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy_loss": "sft"},
        {"policy_loss": "opmd"},
        {"policy_loss": {"name": "mix", "args": {"usual": "opmd"}}},
        {"policy_loss": "test_objective.may_use_reference"},
    ],
)
def test_losses_for_experiences_of_any_policy_need_no_correction(settings: dict[str, Any]) -> None:
    experiences = make_experiences()
    for experience in experiences:
        experience.logprobs = None
    for algorithm in (uncorrected(**settings), AlgorithmConfig(**settings)):
        policy = PolicyModule("tiny", algorithm, dtype="fp32")
        offline(policy, experiences)
        assert policy.skipped_items == 0

"""TRL's GRPOTrainer is an oracle of the losses: the same loss, and the same gradient of every token and weight."""

import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.pictures import experience, plain_logprobs, plain_model, prompt_of, random_picture
from support.policy import (
    Gradients,
    assert_same_gradients,
    fit,
    groups,
    load_plain,
    make_policy,
    moved_policy,
    naive_gradients,
    naive_logprobs,
    padded,
)
from transformers import AutoProcessor

from trinity_lightning.algorithm.correction import off_policy_mask, rollout_correction
from trinity_lightning.algorithm.kl import kl_loss
from trinity_lightning.algorithm.policy_loss import create_policy_loss
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.algorithm import KLConfig, RolloutCorrectionConfig
from trinity_lightning.config.models import resolve_model

B, R, MAX_COMPLETION = 6, 9, 12
BETA = 0.3
GRPO_MODE: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-mean"}
ACROSS_STEPS = 0.4


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A real GRPOTrainer on a tiny model; the tests set its loss, and hand it log-probabilities of their own."""
    with warnings.catch_warnings(), patch("trl.import_utils.is_vllm_available", lambda **_: False):  # vLLM is slow
        warnings.simplefilter("ignore")  # TRL's imports and set-up warn of matters that are not ours
        return make_trainer(str(tmp_path_factory.mktemp("trl")))


def make_trainer(output_dir):
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")), pad_token="<pad>", eos_token="<eos>"
    )
    config = Qwen2Config(
        vocab_size=4,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    args = GRPOConfig(
        output_dir=output_dir,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=MAX_COMPLETION,
        disable_tqdm=True,
    )
    model = Qwen2ForCausalLM(config)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=tokenizer,
    )
    model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.fixture(params=[0, 1])
def tensors(request):
    """Random float32 tensors of one batch; old log-probabilities far enough away for every clip to be reached."""
    generator = torch.Generator().manual_seed(request.param)

    def normal(scale):
        return torch.randn(B, R, generator=generator) * scale

    logprobs = -normal(1.0).abs()
    mask = torch.arange(R) < torch.randint(1, R + 1, (B, 1), generator=generator)
    mask[:, 0] = True
    mask[1, 0] = mask[1].sum() == 1  # a hole, as a tool's output leaves one
    return SimpleNamespace(
        logprobs=logprobs,
        old=logprobs + normal(ACROSS_STEPS),
        ref=logprobs + normal(ACROSS_STEPS),
        samp=logprobs + normal(ACROSS_STEPS),
        mask=mask,
        advantages=torch.randn(B, generator=generator),
    )


def configure(trainer, monkeypatch, **settings):
    """Give TRL's trainer another loss."""
    defaults = {"loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.0}
    defaults |= {"epsilon_low": 0.2, "epsilon_high": 0.2, "use_vllm": False, "delta": None}
    defaults |= {"use_bias_correction_kl": False, "off_policy_mask_threshold": None}
    for name, value in (defaults | settings).items():
        target = trainer.args if name in ("delta", "use_bias_correction_kl") else trainer
        monkeypatch.setattr(target, name, value)


def trl_loss(trainer, t, monkeypatch, on_policy, **settings):
    """TRL's loss and its gradient with respect to the log-probabilities."""
    configure(trainer, monkeypatch, **settings)
    leaf = t.logprobs.clone().requires_grad_()
    monkeypatch.setattr(
        trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (leaf, torch.zeros_like(leaf), None)
    )
    inputs = {
        "prompt_ids": torch.full((B, 2), 2),
        "prompt_mask": torch.ones(B, 2, dtype=torch.int64),
        "completion_ids": torch.full((B, R), 3),
        "completion_mask": t.mask.long(),
        "advantages": t.advantages,
        "num_items_in_batch": t.mask.sum(),
        "ref_per_token_logps": t.ref,
    }
    if not on_policy:
        inputs["old_per_token_logps"] = t.old
    if settings.get("use_vllm"):
        old = t.logprobs if on_policy else t.old
        inputs["sampling_per_token_logps"] = t.samp
        inputs["importance_sampling_ratio"] = torch.exp((old - t.samp) * t.mask).clamp(max=2.0)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), leaf.grad


def our_loss(t, name, on_policy, kl=None, correct=False, drift=None, **args):
    leaf = t.logprobs.clone().requires_grad_()
    old = leaf.detach() if on_policy else t.old
    advantages = t.advantages[:, None].expand(B, R)
    if correct:
        advantages = advantages * rollout_correction(old, t.samp, t.mask)[0]
    if drift is not None:
        advantages = advantages * off_policy_mask(leaf, t.samp, t.mask, advantages, threshold=drift)[0]
    loss_fn = create_policy_loss(name, **args)
    loss, _ = loss_fn(leaf, old, t.mask, advantages, max_response_length=MAX_COMPLETION)
    if kl is not None:
        mode = args["loss_agg_mode"]
        loss = loss + kl_loss(kl, leaf, t.ref, old, t.mask, coefficient=BETA, loss_agg_mode=mode)[0]
    loss.backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize(("direction", "beta"), [("forward", 0), ("reverse", 1)])
def test_a_teachers_top_k(direction, beta, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with patch("trl.import_utils.is_vllm_available", lambda **_: False):
        from trl.experimental.server_distillation import server_distillation_trainer as trl

    logits = torch.randn(2, B, R, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    student, teacher = logits.log_softmax(-1)[..., :5].clone()
    leaves = [student.clone().requires_grad_() for _ in range(2)]
    all_kept = torch.ones(student.shape, dtype=torch.bool)
    buckets = [trl._add_tail_bucket(logprobs, all_kept) for logprobs in (leaves[0], teacher)]
    theirs = trl._jsd_divergence(buckets[0][0], buckets[1][0], beta, buckets[0][1]).sum(-1).mean()
    mask = torch.ones(B, R, dtype=torch.bool)
    tensors = {"teacher_top_k_logprobs": teacher, "top_k_logprobs": leaves[1], "direction": direction}
    ours, _ = create_policy_loss("teacher_kl")(mask, mask, mask, mask, **tensors)
    torch.testing.assert_close(ours, theirs)
    theirs.backward()
    ours.backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)


CASES = {
    "grpo": ({}, {"name": "grpo", "dual_clip": None, **GRPO_MODE}),
    "grpo_dual_clip": (
        {"delta": 1.5},
        {"name": "ppo", "dual_clip": 1.5, **GRPO_MODE},
    ),
    "grpo_asymmetric": (
        {"epsilon_low": 0.1, "epsilon_high": 0.28},
        {"name": "ppo", "dual_clip": None, "clip_range_low": 0.1, "clip_range_high": 0.28, **GRPO_MODE},
    ),
    "bnpo": ({"loss_type": "bnpo"}, {"name": "ppo", "dual_clip": None}),
    "dapo": ({"loss_type": "dapo"}, {"name": "ppo", "dual_clip": None, "loss_agg_mode": "token-mean"}),
    "dr_grpo": (
        {"loss_type": "dr_grpo"},
        {"name": "ppo", "dual_clip": None, "loss_agg_mode": "seq-mean-token-sum-norm"},
    ),
    "luspo": ({"loss_type": "luspo"}, {"name": "ppo", "dual_clip": None, "loss_agg_mode": "seq-mean-token-sum"}),
    "luspo_of_sequences": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
        {"name": "gspo", "clip_range_low": 0.05, "clip_range_high": 0.1, "loss_agg_mode": "seq-mean-token-sum"},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, {"name": "cispo", "absolute_cap": 1.3}),
    "sapo": ({"loss_type": "sapo"}, {"name": "sapo"}),
    "gspo": (
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
        {"name": "gspo", "clip_range_low": 0.05, "clip_range_high": 0.1},
    ),
    "grpo_kl": ({"beta": BETA}, {"name": "grpo", "dual_clip": None, "kl": "k3", **GRPO_MODE}),
    "grpo_corrected_kl": (
        {"beta": BETA, "use_bias_correction_kl": True},
        {"name": "grpo", "dual_clip": None, "kl": "corrected_k3", **GRPO_MODE},
    ),
    "rollout_correction": (
        {"use_vllm": True, "vllm_importance_sampling_correction": True},
        {"name": "grpo", "dual_clip": None, "correct": True, **GRPO_MODE},
    ),
    "off_policy_mask": (
        {"use_vllm": True, "vllm_importance_sampling_correction": True, "off_policy_mask_threshold": 0.05},
        {"name": "grpo", "dual_clip": None, "correct": True, "drift": 0.05, **GRPO_MODE},
    ),
}


@pytest.mark.parametrize("on_policy", [False, True], ids=["off_policy", "on_policy"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_trl(case, on_policy, trainer, tensors, monkeypatch):
    theirs, ours = CASES[case]
    if case == "grpo_corrected_kl":  # ours bounds the ratio by 2, theirs does not: compare below the bound
        tensors.old = torch.maximum(tensors.old, tensors.logprobs - 0.6)
    expected, expected_grad = trl_loss(trainer, tensors, monkeypatch, on_policy, **theirs)
    loss, grad = our_loss(tensors, on_policy=on_policy, **ours)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-7)
    assert expected_grad.abs().sum() > 0


def rollouts(policy):
    """Ragged rollouts with holes, of an engine near the policy: within the bound of `corrected_k3`."""
    rows = groups()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for row, logprobs in zip(rows, naive_logprobs(policy.policy, rows), strict=True):
            away = 1.2 * torch.rand(row.response_length, generator=generator) - 0.6
            row.logprobs = logprobs[: row.response_length] + away
    return rows


def algorithm_of(name, kl=None, correct=False, drift=None, loss_agg_mode=None, **args):
    """Settings of the algorithm for a case of `CASES`; the ratio is against the engine, unless that is corrected."""
    algorithm = {"policy_loss": {"name": name, "args": args}, "loss_agg_mode": loss_agg_mode}
    algorithm |= {"off_policy_mask_threshold": drift, "kl": KLConfig(kl, BETA) if kl else KLConfig()}
    against_engine = {"old_logprobs": "engine", "rollout_correction": RolloutCorrectionConfig(level="none")}
    return algorithm | ({} if correct else against_engine)


def inputs_of(rows, model, corrects):
    """The same rollouts as TRL has them, with what its KL and its correction for older weights need."""
    inputs = batch_of_trl(rows)
    with torch.no_grad():
        logprobs, ref = naive_logprobs(model, rows), naive_logprobs(load_plain(), rows)
    if corrects:
        samp = inputs.pop("old_per_token_logps")
        ratio = (logprobs - samp).exp().clamp(max=2.0)
        inputs |= {"sampling_per_token_logps": samp, "importance_sampling_ratio": ratio}
    return inputs | {"ref_per_token_logps": ref}


def batch_of_trl(rows):
    """The same rollouts as TRL has them: prompts padded on the left, responses on the right."""
    prompts = [row.tokens[: row.prompt_length].long().flip(0) for row in rows]
    responses = [row.tokens[row.prompt_length :].long() for row in rows]
    prompt_ids, prompt_mask, completion_ids, completion_mask = (
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        for tokens in (prompts, responses)
        for rows in (tokens, [torch.ones_like(row) for row in tokens])
    )
    mask = padded(rows, "action_mask")
    return {
        "prompt_ids": prompt_ids.flip(1),
        "prompt_mask": prompt_mask.flip(1),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "tool_mask": mask.long(),
        "advantages": torch.stack([row.advantages[0] for row in rows]),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": padded(rows, "logprobs"),
    }


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_every_weight_equals_trl(case, trainer, monkeypatch):
    from trl.trainer.utils import add_fused_lm_head

    theirs, ours = CASES[case]
    policy, model, seen = moved_policy(**algorithm_of(**ours)), load_plain().train(), Gradients()
    model.load_state_dict(policy.policy.state_dict())
    rows = rollouts(policy)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))  # as its trainer does
    configure(trainer, monkeypatch, **theirs)
    expected = trainer._compute_loss(model, inputs_of(rows, model, corrects="use_vllm" in theirs))
    fit(policy, [OptimizerBatch.of(rows, 1, MAX_COMPLETION)], seen)
    assert seen.losses[0] == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    assert_same_gradients(seen.steps[0], naive_gradients(model, expected))


def pictures_of(prompts):
    """Prompts with pictures as TRL has them: its processor pads texts on the left, and number and size of pictures."""
    processor = AutoProcessor.from_pretrained(resolve_model("tiny_vision"))
    texts = [processor.tokenizer.decode(prompt.expansions[0][1].unexpanded) for prompt in prompts]
    images = [[picture.image for picture in prompt.pictures] for prompt in prompts]
    inputs = processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")
    names = {"input_ids": "prompt_ids", "attention_mask": "prompt_mask"}
    return {names.get(name, name): tensor for name, tensor in inputs.items()} | {"num_images": list(map(len, images))}


def test_loss_and_gradients_on_pictures_equal_trl(trainer, monkeypatch):
    """Prompts with one picture and with two, of all sizes, two of them with equal text."""
    from trl.trainer.utils import add_fused_lm_head

    first, second = random_picture(1), random_picture(2)
    texts = [("<image>How many?", [first]), ("<image>How many?", [second]), ("<image> or <image>?", [first, second])]
    prompts = [prompt_of(*text) for text in texts for _ in range(2)]
    model, seen = plain_model().train(), Gradients()
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, prompt in enumerate(prompts):
        response = torch.randint(4, 99, (3 + number,), generator=generator).tolist()
        row = experience(prompt, response, number // 2, number % 2)
        with torch.no_grad():
            logprobs = plain_logprobs(model, row.tokens.tolist(), row.multi_modal_inputs)[len(prompt) - 1 :]
        row.logprobs = logprobs + 0.6 * torch.rand(len(response), generator=generator) - 0.3
        rows.append(row)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    configure(trainer, monkeypatch)
    expected = trainer._compute_loss(model, batch_of_trl(rows) | pictures_of(prompts))
    policy = make_policy(name="tiny_vision", max_tokens_per_micro_batch=300, **algorithm_of("grpo", **GRPO_MODE))
    fit(policy, [OptimizerBatch.of(rows, 1, MAX_COMPLETION)], seen)
    assert seen.losses[0] == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    ours, gradients = (  # a bias of all keys changes no attention without rotations: its gradient is rounding alone
        {name: gradient for name, gradient in all_of_them.items() if not name.endswith("k_proj.bias")}
        for all_of_them in (seen.steps[0], naive_gradients(model, expected))
    )
    assert any("vision_model" in name for name in ours)
    assert_same_gradients(ours, gradients)

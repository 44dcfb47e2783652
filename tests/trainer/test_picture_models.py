"""Models that read pictures, as the trainer has them: loaded, adapted, sent to engines and saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.errors import refuses
from support.picture_models import FAMILIES, family_model, smolvlm_folder
from support.policy import make_policy
from transformers import AutoModelForImageTextToText, AutoProcessor

from trinity_lightning.common.pictures.processor import load_processor
from trinity_lightning.config.model import Dropout, LoRAConfig, ModelConfig
from trinity_lightning.config.models import load_tokenizer, resolve_model
from trinity_lightning.sync.stream import parameter_shapes, weight_stream
from trinity_lightning.trainer.adapter import Adapter, check_adapter
from trinity_lightning.trainer.model import has_dropout, load_model, switch_off_dropout


def inputs_with_padding(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two random pictures, whose tower attends under a mask: the second is padded."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(1, 2, 3, 64, 64, generator=generator) * 2 - 1
    mask = torch.ones(1, 2, 64, 64, dtype=torch.int64)
    mask[0, 1, 40:], mask[0, 1, :, 24:] = 0, 0
    token_ids = torch.randint(4, 98, (1, 60), generator=generator)
    token_ids[0, 5:21], token_ids[0, 30:46] = 100, 100
    return {"input_ids": token_ids, "pixel_values": pixels * mask[:, :, None], "pixel_attention_mask": mask}


def logprobs_and_gradients(model: Any, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    inputs = inputs_with_padding(seed)
    model.zero_grad()
    logprobs = model(**inputs).logits.log_softmax(-1)
    logprobs.gather(-1, inputs["input_ids"].roll(-1, 1)[..., None]).mean().backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_tower_attends_as_transformers_own_does(attention: str) -> None:
    ours, our_gradients = logprobs_and_gradients(load_model("tiny_vision", torch.float32, Dropout.off, "sdpa"))
    plain = AutoModelForImageTextToText.from_pretrained(resolve_model("tiny_vision"), attn_implementation=attention)
    expected, gradients = logprobs_and_gradients(plain)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    assert our_gradients.keys() == gradients.keys() == {name for name, _ in plain.named_parameters()}
    for name, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_sixteen_bits_are_as_close_to_float32_as_transformers_own() -> None:
    """Short sequences are computed in float32 then, and norms and feed-forward parts of the language are lean.

    One batch is one draw of roundings: single ratios lie between 0.7 and 1.5, and that of several is near 1.
    """
    plain = AutoModelForImageTextToText.from_pretrained(resolve_model("tiny_vision"), dtype=torch.bfloat16)
    models = [load_model("tiny_vision", dtype, Dropout.off, "sdpa") for dtype in (torch.float32, torch.bfloat16)]
    logprob_errors, gradient_errors = torch.zeros(2), torch.zeros(2)
    for seed in range(8):
        (exact, gradients), *others = (logprobs_and_gradients(model, seed) for model in (*models, plain))
        for place, (logprobs, rounded) in enumerate(others):
            logprob_errors[place] += (logprobs - exact).abs().mean()
            gradient_errors[place] += sum((rounded[name] - exact).square().sum() for name, exact in gradients.items())
    for ours, theirs in (logprob_errors, gradient_errors):
        assert ours < 1.2 * theirs


def test_dropout_of_the_tower_is_off_too() -> None:
    model = family_model("smolvlm")
    assert not has_dropout(model)
    for module in model.get_encoder("image").modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.5
    model.config.vision_config.attention_dropout = 0.5
    assert has_dropout(model)
    switch_off_dropout(model)
    assert not has_dropout(model)
    assert model.config.vision_config.attention_dropout == 0


# Weights on their way to engines, and on disk


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_sent_as_checkpoints_have_them(family: str, tmp_path: Path) -> None:
    model = family_model(family)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = dict(weight_stream(model))
    tied = sent.keys() - saved.keys()  # checkpoints have the tied head under its other name alone
    assert all(name.endswith("lm_head.weight") for name in tied)
    assert saved.keys() <= sent.keys()
    assert all(torch.equal(sent[name], weight) for name, weight in saved.items())
    assert parameter_shapes(str(tmp_path)) == {name: tuple(weight.shape) for name, weight in sent.items()}


def test_a_saved_policy_is_a_folder_with_its_processor(tmp_path: Path) -> None:
    policy = make_policy(name="tiny_vision")
    policy.configure_model()
    with torch.no_grad():
        policy.policy.model.vision_model.post_layernorm.bias += 1
    policy.try_saving(tmp_path)
    assert not [*tmp_path.iterdir()]
    policy.save_pretrained(tmp_path / "model")
    model, processor = (
        kind.from_pretrained(tmp_path / "model") for kind in (AutoModelForImageTextToText, AutoProcessor)
    )
    for name, weight in policy.policy.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    assert processor.image_seq_len == 16
    assert processor.chat_template == load_tokenizer("tiny_vision").chat_template


def test_a_saved_smolvlm_has_the_files_that_its_checkpoints_have(tmp_path: Path) -> None:
    folder = smolvlm_folder(tmp_path / "smolvlm")
    policy = make_policy(name=str(folder))
    policy.configure_model()
    policy.save_pretrained(tmp_path / "model")
    for file in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        assert (tmp_path / "model" / file).read_bytes() == (folder / file).read_bytes()
    assert load_processor(str(tmp_path / "model")) is not None
    assert load_tokenizer(str(tmp_path / "model")).chat_template == load_tokenizer("tiny_vision").chat_template


# Adapters


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]], ids=str)
def test_adapters_are_of_the_language_layers(targets: Any) -> None:
    """The tower's layers have some of the same names."""
    policy = make_policy(name="tiny_vision", model={"lora": LoRAConfig(r=2, targets=targets)})
    policy.configure_model()
    adapted = {name.split(".lora_")[0] for name, p in policy.policy.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in adapted} >= {"q_proj", "v_proj"}
    assert len(adapted) == 2 * (7 if targets == "all-linear" else 2)
    assert all(name.startswith("model.text_model.layers.") for name in adapted)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_language_layers_to_adapt(family: str) -> None:
    model = family_model(family)
    Adapter(model, LoRAConfig(r=2), family)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2
    assert not [name for name in trained if "vis" in name or "project" in name]


def test_merged_adapters_are_sent_by_the_checkpoints_names() -> None:
    policy = make_policy(name="tiny_vision", model={"lora": LoRAConfig(r=2)})
    policy.configure_model()
    shapes = parameter_shapes(str(resolve_model("tiny_vision")))
    assert dict(weight_stream(policy.policy).shapes) == shapes


def test_layers_of_the_tower_alone_are_no_targets() -> None:
    check_adapter(ModelConfig("tiny_vision", lora=LoRAConfig(r=2, targets=["q_proj"])))
    with refuses("model.lora.targets"):
        check_adapter(ModelConfig("tiny_vision", lora=LoRAConfig(r=2, targets=["fc1"])))

"""Folders of small random models that read pictures: of other families, and as SmolVLM's checkpoints lay files out."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    LlavaConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from trinity_lightning.config.models import resolve_model

_LANGUAGE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 112,
    "max_position_embeddings": 128,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_POSITIONS = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "bos_token_id": 1, "eos_token_id": 2}


def family_config(family: str) -> PretrainedConfig:
    """A small configuration of a family of models that read pictures."""
    if family == "smolvlm":
        language = {"model_type": "llama", **_LANGUAGE}
        return SmolVLMConfig(vision_config=_TOWER, text_config=language, image_token_id=100, pad_token_id=0)
    if family == "llava":
        tower = {"model_type": "clip_vision_model", "projection_dim": 32, **_TOWER}
        return LlavaConfig(vision_config=tower, text_config={"model_type": "llama", **_LANGUAGE}, image_token_index=100)
    if family == "gemma3":
        language = {"model_type": "gemma3_text", "head_dim": 16, **_LANGUAGE}
        tower = {"model_type": "siglip_vision_model", **_TOWER}
        return Gemma3Config(vision_config=tower, text_config=language, mm_tokens_per_image=4, image_token_index=100)
    if family == "qwen3_vl":  # is refused
        tower = {"hidden_size": 32, "depth": 2, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
        positions = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}, "head_dim": 16}
        return Qwen3VLConfig(vision_config=tower, text_config=_LANGUAGE | positions, image_token_id=100)
    depth: dict[str, Any] = {"hidden_size": 32, "depth": 2, "num_heads": 2, "patch_size": 8}
    if family == "qwen2_vl":
        tower = {"embed_dim": 32, "mlp_ratio": 2, **depth}
        return Qwen2VLConfig(vision_config=tower, text_config=_LANGUAGE | _POSITIONS, image_token_id=100)
    tower = {"intermediate_size": 64, "out_hidden_size": 32, "fullatt_block_indexes": [1], **depth}
    return Qwen2_5_VLConfig(vision_config=tower, text_config=_LANGUAGE | _POSITIONS, image_token_id=100)


FAMILIES = ("smolvlm", "llava", "gemma3", "qwen2_vl", "qwen2_5_vl")


def family_model(family: str) -> Any:
    """A small random model of a family."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(family_config(family))


def smolvlm_folder(folder: Path) -> Path:
    """`tiny_vision` as a SmolVLM2 whose files are those of its checkpoints, which have more of them."""
    shutil.copytree(resolve_model("tiny_vision"), folder)
    change_json(folder / "config.json", model_type="smolvlm", architectures=["SmolVLMForConditionalGeneration"])
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    change_json(folder / "config.json", vision_config={**vision, "model_type": "smolvlm_vision"})
    pictures = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    kinds = {"image_processor_type": "SmolVLMImageProcessor", "processor_class": "SmolVLMProcessor"}
    write_json(folder / "preprocessor_config.json", pictures | kinds)
    write_json(folder / "video_preprocessor_config.json", {"video_processor_type": "SmolVLMVideoProcessor"})
    write_json(folder / "processor_config.json", {"image_seq_len": 16, "processor_class": "SmolVLMProcessor"})
    change_json(folder / "tokenizer_config.json", processor_class="SmolVLMProcessor")
    template = folder / "chat_template.jinja"
    write_json(folder / "chat_template.json", {"chat_template": template.read_text()})
    template.unlink()
    return folder


def refused_folder(folder: Path) -> Path:
    """`tiny_vision` with a configuration of Qwen3-VL, whose family is refused; it has no weights of its own."""
    shutil.copytree(resolve_model("tiny_vision"), folder)
    Qwen3VLConfig().save_pretrained(folder)
    return folder


def change_json(file: Path, **entries: Any) -> None:
    """Set entries of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | entries
    write_json(file, {name: value for name, value in content.items() if value is not None})


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2))

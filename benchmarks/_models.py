"""Models of published shapes with random weights, made on the spot: speed and memory are those of the real ones."""

import trinity_lightning  # noqa: F401  first: torch and OpenMP read what it sets when they are loaded

# isort: split
from functools import partial
from pathlib import Path
from typing import Any

# Of the published configurations, what speed and memory follow from. `qwen2` is a small one of 4M parameters.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "0.5B": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "1.5B": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7B": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


def folder_of(model: str, scratch: Path, device: str = "cpu", dtype: str = "float32") -> tuple[str, int]:
    """The folder of a model and the size of its vocabulary; one of `SHAPES` is made in `scratch`, unless it is there.

    Args:
        model: a name in `SHAPES`, or any model of this package.
        scratch: folder for models that are made.
        device: where random weights are drawn: quicker on a GPU.
        dtype: dtype of the weights in the folder.
    """
    from transformers import AutoConfig

    from trinity_lightning.config.models import resolve_model, write_once

    folder = scratch / model if model in SHAPES else Path(resolve_model(model))
    if not folder.exists():
        write_once(folder, partial(_make, model=model, device=device, dtype=dtype))
    return str(folder), AutoConfig.from_pretrained(folder).vocab_size


def _make(folder: Path, model: str, device: str, dtype: str) -> None:
    """Write the model, and the tokenizer of `tiny`: its tokens have text, the many others have none."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from trinity_lightning.config.models import load_tokenizer

    tokenizer: Any = load_tokenizer("tiny")
    tokenizer.model_max_length = 32768
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(**SHAPES[model], eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)

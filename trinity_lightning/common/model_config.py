"""A model's configuration, and the sizes in which its logits are cut: for computing, and for counting memory."""

from typing import Any

# Bytes of logits that trainer/head.py computes at once. On a CPU they are the logits of 2,730 tokens of SmolLM2 in
# bfloat16, a tenth of the bytes that its layers keep.
CHUNK_BYTES, GPU_CHUNK_BYTES = 256 << 20, 1 << 30
# Bytes of float32 that the softmax reads and writes at once: on a CPU they have to stay in the cache from pass to pass.
BLOCK_BYTES, GPU_BLOCK_BYTES = 2 << 20, 256 << 20


def layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer of a Hugging Face model: the model's own, unless layers differ (Gemma 4)."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def query_width(config: Any) -> int:
    """Number of a layer's attention heads times their width; 0 without attention."""
    heads = getattr(config, "num_attention_heads", None) or 0
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))

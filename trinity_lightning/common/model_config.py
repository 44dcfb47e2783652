"""A model's configuration, and the sizes in which its logits are cut: for computing, and for counting memory."""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class TowerSizes:
    """The sizes of a picture model's vision tower.

    Attributes:
        layers: number of its layers.
        hidden: width of a patch's states.
        intermediate: width of the feed-forward part.
        edge: pixels of a patch's edge.
        patches: patches of a picture behind each of its tokens.
    """

    layers: int
    hidden: int
    intermediate: int
    edge: int
    patches: int

    @classmethod
    def of(cls, config: Any) -> "TowerSizes | None":
        """The sizes by a Hugging Face configuration; None for a text model, or a tower without such sizes."""
        tower = getattr(config, "vision_config", None)
        layers = _first(tower, "num_hidden_layers", "depth")
        hidden, edge = _first(tower, "embed_dim", "hidden_size"), _first(tower, "patch_size")
        if not (layers and hidden and isinstance(edge, int)):
            return None
        ratio = getattr(tower, "mlp_ratio", None) or 4
        intermediate = _first(tower, "intermediate_size") or int(ratio * hidden)
        shuffle = _first(config, "scale_factor") or _first(tower, "spatial_merge_size") or 1
        tokens = _first(config, "mm_tokens_per_image")  # Gemma 3's, whatever the size
        patches = (getattr(tower, "image_size", 0) // edge) ** 2 // tokens if tokens else shuffle**2
        return cls(layers, hidden, intermediate, edge, patches)


def _first(config: Any, *names: str) -> int | None:
    """The first of these numbers that a configuration has, and that is not 0."""
    return next((value for name in names if (value := getattr(config, name, None))), None)

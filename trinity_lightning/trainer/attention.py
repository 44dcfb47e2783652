"""The attention that models are loaded with: transformers' `sdpa`, and two things that it lacks.

Short sequences in bfloat16 on a CPU, where torch's own backward pass is slow and coarse; and rows that share prefixes.
"""

from typing import Any

import torch
from torch import Tensor

from trinity_lightning.trainer.flex_prefix import FlexSharedPrefix
from trinity_lightning.trainer.shared_prefix import SHORT_TOKENS, CpuSharedPrefix

NAME = "sdpa_short"
# Settings of layers that are not plain causal attention.
NOT_SHARED = ("dropout", "sliding_window", "softcap", "s_aux", "position_bias", "cache")


def attention_implementation(name: str) -> str:
    """The name to load a transformers model with: for `sdpa`, that of `attention`, which is registered."""
    if name != "sdpa":
        return name
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


@torch.compiler.disable(reason="what a micro-batch's segments are differs each time: graphs end before it")
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    shared_prefix: CpuSharedPrefix | FlexSharedPrefix | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa`; with `shared_prefix`, an argument of the model's forward pass, that of such a micro-batch.

    Arguments and result are those of every attention function of transformers: query [B, heads, S, D], key and value
    [B, key-value heads, S, D]; result [B, S, heads, D].

    Raises:
        NotImplementedError: prefixes are shared, and the layer asks for more than plain causal attention.
    """
    if shared_prefix is None:
        return _short_attention(module, query, key, value, attention_mask, **settings)
    unknown = [name for name in NOT_SHARED if settings.get(name)]
    if unknown or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"no shared prefixes with {', '.join(unknown) or 'attention that looks ahead'}")
    return shared_prefix(query, key, value, settings.get("scaling") or query.shape[-1] ** -0.5), None


def _short_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """`sdpa`, in float32 where a whole sequence of at most 192 tokens comes in bfloat16 on the CPU.

    Its gradients are three times as exact there, too.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    whole = query.shape[2] == key.shape[2]  # not one new token before a cache
    rounded = torch.bfloat16 in (query.dtype, key.dtype, value.dtype)  # not all of them are under mixed precision
    if not (rounded and query.device.type == "cpu" and whole and key.shape[2] <= SHORT_TOKENS):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    with torch.autocast("cpu", enabled=False):  # it would round them again
        output, _ = sdpa_attention_forward(
            module, query.float(), key.float(), value.float(), attention_mask, **settings
        )
    return output.bfloat16(), None

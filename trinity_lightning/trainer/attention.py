"""Attention for short sequences in bfloat16 on a CPU, where torch's own backward pass is slow and coarse."""

from typing import Any

import torch
from torch import Tensor

# Measured on AVX-512 with AMX: at 16 tokens float32 takes a sixth of the time, at 128 half, at 256 as much.
SHORT_TOKENS = 192
NAME = "sdpa_short"


def attention_implementation(name: str) -> str:
    """The name to load a transformers model with: for `sdpa`, that of `short_attention`, which is registered."""
    if name != "sdpa":
        return name
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, short_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def short_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """transformers' `sdpa`, in float32 where a whole sequence of at most 192 tokens comes in bfloat16 on the CPU.

    Its gradients are three times as exact there, too. Arguments and result are those of every attention function of
    transformers: query [B, heads, S, D], key and value [B, key-value heads, S, D]; result [B, S, heads, D].
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

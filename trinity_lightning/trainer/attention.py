"""Attention that transformers' `sdpa` lacks: short sequences in bfloat16 on a CPU, and rows that share prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from trinity_lightning.common.hardware import in_threads

if TYPE_CHECKING:
    from trinity_lightning.trainer.flex_attention import FlexSharedPrefix

# -- rows that share prefixes ------------------------------------------------------------------------------------------
# Every token attends causally within its own segment, a row's own to their whole prefix too. A GPU: `flex_attention`.


@dataclass(frozen=True)
class Segments:
    """What lies where among T tokens: all prefixes, the rows without a prefix, then the rows of each prefix in turn.

    Attributes:
        prefixes: length of each prefix.
        members: how many rows each prefix has.
        own: length of each row, less its prefix.
    """

    prefixes: Sequence[int]
    members: Sequence[int]
    own: Sequence[int]

    def starts(self) -> list[int]:
        """Where each segment starts, prefixes first; and T."""
        return [0, *accumulate([*self.prefixes, *self.own])]

    def own_starts(self) -> list[int]:
        """Where each row's own tokens start; and T."""
        return self.starts()[len(self.prefixes) :]

    def seen(self) -> list[int]:
        """The prefix that each segment sees; -1: none."""
        alone = len(self.own) - sum(self.members)
        of_rows = [prefix for prefix, count in enumerate(self.members) for _ in range(count)]
        return [-1] * (len(self.prefixes) + alone) + of_rows

    def of_tokens(self) -> tuple[Tensor, Tensor]:
        """Of each token, its segment and the prefix that it sees (-1: none), int64 [T]."""
        lengths = torch.tensor([end - start for start, end in pairwise(self.starts())])
        segment, prefix = torch.arange(len(lengths)), torch.tensor(self.seen())
        return segment.repeat_interleave(lengths), prefix.repeat_interleave(lengths)


# -- on a CPU ----------------------------------------------------------------------------------------------------------
# A few neighbouring queries and all keys that any of them sees are a tile: two products and a softmax forward, four
# products backward, in float32, under a mask that is made once a micro-batch. Tokens stay where they are, without
# padding. The query heads that share a key head are further rows of one product, so that no key is repeated. Tiles are
# dealt to threads, each of which computes its own on one core: an operation of a tile is too small to be shared out.

# Queries of a tile. Short segments share one while that computes at most so many more scores. Forward and backward of a
# layer of SmolLM2 on one core, 415 tokens of short rows: 5.7, 5.0, 5.9 ms with 0, 1,000, 2,500, and 6.2 without limit.
TILE_TOKENS, FREE_SCORES = 64, 1024
# The softmax of a tile is kept for the backward pass if it has at most so many keys, and else computed again: of long
# rows it would take more memory than all else that a layer keeps.
KEPT_KEYS = 192


@dataclass(frozen=True)
class _Tile:
    """Neighbouring queries, and the keys that they see.

    Attributes:
        queries: which tokens.
        keys: which tokens: some prefixes, if there are any, and some up to the last query.
        mask: 0 where a query sees a key, else minus infinity: float32 [queries, 1, keys].
    """

    queries: slice
    keys: Sequence[slice]
    mask: Tensor

    def of_queries(self, states: Tensor) -> Tensor:
        """Of all queries [key heads, T, shared, D], those of this tile [key heads, queries * shared, D]."""
        return states[:, self.queries].flatten(1, 2)

    def of_keys(self, states: Tensor) -> Tensor:
        """Of all keys or values [key heads, T, D], those of this tile [key heads, keys, D]."""
        return torch.cat([states[:, tokens] for tokens in self.keys], 1)

    def add_of_keys(self, total: Tensor, gradients: Tensor) -> None:
        """Add gradients of this tile's keys or values to those of all."""
        parts = gradients.split([tokens.stop - tokens.start for tokens in self.keys], 1)
        for tokens, part in zip(self.keys, parts, strict=True):
            total[:, tokens] += part

    def room(self, queries: Tensor) -> Tensor | None:
        """Memory for what `weights` computes, of all queries [key heads, T, shared, D]; None if that is not kept."""
        (heads, _, shared, _), (length, _, keys) = queries.shape, self.mask.shape
        return queries.new_empty(heads, length * shared, keys) if keys <= KEPT_KEYS else None

    def weights(self, queries: Tensor, keys: Tensor, room: Tensor | None = None) -> Tensor:
        """Softmax of the scores of this tile's queries and keys: [key heads, queries * shared, keys]."""
        scores = torch.bmm(queries, keys.mT)
        scores.unflatten(1, (len(self.mask), -1)).add_(self.mask)
        return torch.softmax(scores, -1, out=room)


Shares = Sequence[Sequence[_Tile]]  # of each thread


def _neighbours(segments: Segments) -> list[tuple[slice, slice]]:
    """Tokens of the segments of each tile, or of a longer segment; and of the prefixes that they see (0:0: none)."""
    starts, seen = segments.starts(), segments.seen()

    def tokens(first: int, last: int) -> tuple[slice, slice]:
        prefixes = slice(starts[max(seen[first], 0)], starts[seen[last] + 1])
        return slice(starts[first], starts[last + 1]), prefixes

    def scores(first: int, last: int) -> int:
        own, prefixes = tokens(first, last)
        length = own.stop - own.start
        return length * (length + prefixes.stop - prefixes.start)

    found = [(0, 0)]
    for each in range(1, len(seen)):
        first, last = found[-1]
        fits = starts[each + 1] - starts[first] <= TILE_TOKENS and each != len(segments.prefixes)
        if fits and scores(first, each) <= scores(first, last) + scores(each, each) + FREE_SCORES:
            found[-1] = (first, each)
        else:
            found.append((each, each))
    return [tokens(first, last) for first, last in found]


@dataclass(frozen=True)
class CpuSharedPrefix:
    """Attention over shared prefixes on a CPU.

    Attributes:
        shares: the tiles of each thread; together they have each of the T tokens once among their queries.
        padding: tokens to append to the T; none.
    """

    shares: Shares
    padding = 0

    @classmethod
    def of(cls, segments: Segments, threads: int | None = None) -> "CpuSharedPrefix":
        """Tiles of whole segments, prefixes and rows apart, or of a piece of a long one; threads: as torch has."""
        segment, prefix = segments.of_tokens()
        tiles = []
        for own, prefixes in _neighbours(segments):
            length = own.stop - own.start
            pieces = -(-length // TILE_TOKENS)
            for start, end in pairwise(own.start + length * piece // pieces for piece in range(pieces + 1)):
                keys = [part for part in (prefixes, slice(own.start, end)) if part.stop]
                query, key = torch.arange(start, end)[:, None], torch.cat([torch.arange(k.start, k.stop) for k in keys])
                visible = (segment[query] == segment[key]) & (key <= query) | (prefix[query] == segment[key])
                mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None]
                tiles.append(_Tile(slice(start, end), keys, mask))
        threads = min(threads or torch.get_num_threads(), len(tiles))
        tiles.sort(key=lambda tile: tile.mask.numel())  # for each thread to compute about as many scores
        return cls([tiles[first::threads] for first in range(threads)])

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [1, heads, T, D], key and value [1, key-value heads, T, D] to results [1, T, heads, D]."""
        with torch.autocast("cpu", enabled=False):  # it would round them again
            return _Attention.apply(query, key, value, self.shares, scale)


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, shares: Shares, scale: float) -> Tensor:
        queries, keys, values = _of_kernel(query, key, value, scale)
        out = queries.new_empty(*queries.shape[:-1], values.shape[-1])  # values may be narrower
        kept = [[tile.room(queries) for tile in tiles] for tiles in shares]

        def compute(tiles: Sequence[_Tile], kept: Sequence[Tensor | None]) -> None:
            for tile, room in zip(tiles, kept, strict=True):
                weights = tile.weights(tile.of_queries(queries), tile.of_keys(keys), room)
                tile.of_queries(out).copy_(torch.bmm(weights, tile.of_keys(values)))

        in_threads(compute, shares, kept)
        ctx.save_for_backward(query, key, value, *chain.from_iterable(kept))
        ctx.shares, ctx.scale = shares, scale
        return _of_heads(out, query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *saved = ctx.saved_tensors
        queries, keys, values = _of_kernel(query, key, value, ctx.scale)
        grad, of_queries = _by_key_head(grads[0].transpose(1, 2), key.shape[1]), torch.empty_like(queries)
        kept = [[saved.pop(0) for _ in tiles] for tiles in ctx.shares]

        def compute(tiles: Sequence[_Tile], kept: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
            of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
            for tile, weights in zip(tiles, kept, strict=True):
                own_queries, own_keys, own_grad = tile.of_queries(queries), tile.of_keys(keys), tile.of_queries(grad)
                if weights is None:
                    weights = tile.weights(own_queries, own_keys)
                of_weights = torch.bmm(own_grad, tile.of_keys(values).mT)
                of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
                tile.of_queries(of_queries).copy_(torch.bmm(of_scores, own_keys))
                tile.add_of_keys(of_keys, torch.bmm(of_scores.mT, own_queries))
                tile.add_of_keys(of_values, torch.bmm(weights.mT, own_grad))
            return of_keys, of_values

        shares = zip(*in_threads(compute, ctx.shares, kept), strict=True)
        of_keys, of_values = (torch.stack(each).sum(0) for each in shares)
        return (
            _of_heads(of_queries.mul_(ctx.scale), query.dtype).transpose(1, 2),
            _of_heads(of_keys[:, :, None], key.dtype).transpose(1, 2),
            _of_heads(of_values[:, :, None], value.dtype).transpose(1, 2),
            None,
            None,
        )


def _of_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled queries [key heads, T, shared, D], keys and values [key heads, T, D]."""
    heads = key.shape[1]
    return _by_key_head(query, heads) * scale, _by_key_head(key, heads)[:, :, 0], _by_key_head(value, heads)[:, :, 0]


def _by_key_head(states: Tensor, heads: int) -> Tensor:
    """States [1, heads * shared, T, D] as [heads, T, shared, D], in float32 if they are rounded ones."""
    dtype = torch.promote_types(states.dtype, torch.float32)
    return states[0].unflatten(0, (heads, -1)).transpose(1, 2).to(dtype).contiguous()


def _of_heads(states: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse: [heads, T, shared, D] as [1, T, heads * shared, D]."""
    return states.transpose(0, 1).to(dtype).flatten(1, 2)[None]


# -- what models are loaded with ---------------------------------------------------------------------------------------

NAME = "sdpa_short"
# Bfloat16 is slow and coarse in torch's CPU kernel in short sequences: at 16 tokens float32 takes a sixth of the time.
SHORT_TOKENS = 192
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
    shared_prefix: "CpuSharedPrefix | FlexSharedPrefix | None" = None,
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
    """`sdpa`, in float32, three times as exact, where a whole sequence of at most 192 tokens is bfloat16 on the CPU."""
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

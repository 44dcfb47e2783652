"""Attention in place of transformers' own: for rows that share prefixes, and short sequences in 16 bits on a CPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from trinity_lightning.common.hardware import is_before_ampere

# -- attention over rows that share prefixes ---------------------------------------------------------------------------
# Every token attends causally within its own segment: a prefix, or the rest of a row behind its prefix. The rest of a
# row also attends to its whole prefix.


@dataclass(frozen=True)
class Segments:
    """The order of T tokens: all prefixes, then the rows without a prefix, then the rows of each prefix in turn.

    Attributes:
        prefixes: length of each prefix.
        members: number of rows of each prefix.
        rests: length of each row without its prefix.
    """

    prefixes: Sequence[int]
    members: Sequence[int]
    rests: Sequence[int]

    def starts(self) -> list[int]:
        """Start of each segment, prefixes first; T comes last."""
        return [0, *accumulate([*self.prefixes, *self.rests])]

    def seen(self) -> list[int]:
        """The prefix that each segment sees; -1: none."""
        alone = len(self.rests) - sum(self.members)
        prefix_of_rows = [prefix for prefix, count in enumerate(self.members) for _ in range(count)]
        return [-1] * (len(self.prefixes) + alone) + prefix_of_rows

    def of_tokens(self) -> tuple[Tensor, Tensor]:
        """Segment of each token, and the prefix that it sees (-1: none), int64 [T] each."""
        lengths = torch.tensor([end - start for start, end in pairwise(self.starts())])
        segment, prefix = torch.arange(len(lengths)), torch.tensor(self.seen())
        return segment.repeat_interleave(lengths), prefix.repeat_interleave(lengths)


# -- attention over shared prefixes on a CPU ---------------------------------------------------------------------------
# A tile is a few neighbouring queries and all keys that any of them sees. Tiles of about the same shape are padded to
# one shape, gathered, and computed together, under a mask that is made once a micro-batch. The forward pass uses
# torch's kernel. Its backward pass is slow on short rows, so ours computes the softmax again, and five products in
# float32. Query heads that share a key head are further rows of one product: no key is repeated.

TILE_TOKENS = 64  # most queries of a tile
FREE_SCORES = 1024  # most scores that short segments may add by sharing a tile
# Most scores that padding may add for each tile that is computed together with others: to compute them takes as long as
# to call torch's operations for one more tile.
FREE_PADDING = 2048
# Most scores of tiles computed together: the scores of all heads should fit into a core's cache. (A layer of SmolLM2
# takes three quarters of the time, for a prefix of 64 and eight rows of 128 tokens.)
MOST_SCORES = 100_000
KEY_STEP = 16  # keys of a tile are padded to a multiple of it: torch's kernel is slow on a new shape

# Tokens of neighbouring queries, and tokens of the keys that any of them sees: int64 [queries] and [keys].
_Tile = tuple[Tensor, Tensor]


def _padded(tokens: Sequence[Tensor], step: int) -> tuple[Tensor, Tensor]:
    """Tokens of tiles, padded: int64 [n, a multiple of `step`]; and true where they are padding."""
    table = nn.utils.rnn.pad_sequence(list(tokens), batch_first=True, padding_value=-1)
    table = nn.functional.pad(table, (0, -table.shape[1] % step), value=-1)
    padding = table < 0
    return torch.where(padding, table[:, :1], table), padding


def _neighbours(segments: Segments) -> list[tuple[slice, slice]]:
    """Runs of neighbouring short segments, or a longer segment alone: slices of their tokens, and of their prefixes'.

    The second slice is 0:0 if they see no prefix.
    """
    starts, seen = segments.starts(), segments.seen()

    def tokens(first: int, last: int) -> tuple[slice, slice]:
        prefixes = slice(starts[max(seen[first], 0)], starts[seen[last] + 1])
        return slice(starts[first], starts[last + 1]), prefixes

    def scores(first: int, last: int) -> int:
        segment, prefixes = tokens(first, last)
        length = segment.stop - segment.start
        return length * (length + prefixes.stop - prefixes.start)

    runs = [(0, 0)]
    for segment in range(1, len(seen)):
        first, last = runs[-1]
        fits = starts[segment + 1] - starts[first] <= TILE_TOKENS and segment != len(segments.prefixes)
        if fits and scores(first, segment) <= scores(first, last) + scores(segment, segment) + FREE_SCORES:
            runs[-1] = (first, segment)
        else:
            runs.append((segment, segment))
    return [tokens(first, last) for first, last in runs]


def _tiles(segments: Segments) -> list[_Tile]:
    """Tiles of whole segments (prefixes and rows apart), or of a piece of a long segment."""
    tiles = []
    for rows, prefixes in _neighbours(segments):
        before = torch.arange(prefixes.start, prefixes.stop)
        for start in range(rows.start, rows.stop, TILE_TOKENS):
            end = min(start + TILE_TOKENS, rows.stop)
            tiles.append((torch.arange(start, end), torch.cat([before, torch.arange(rows.start, end)])))
    return tiles


def _by_shape(tiles: Sequence[_Tile]) -> list[list[_Tile]]:
    """Group the tiles that are computed together: tiles of about the same shape."""

    def scores(tiles: Sequence[_Tile]) -> int:
        return len(tiles) * max(len(queries) for queries, _ in tiles) * max(len(keys) for _, keys in tiles)

    groups: list[list[_Tile]] = []
    for tile in sorted(tiles, key=lambda tile: (len(tile[1]), len(tile[0]))):
        joined = [*groups[-1], tile] if groups else []
        if joined and scores(joined) <= min(scores(groups[-1]) + scores([tile]) + FREE_PADDING, MOST_SCORES):
            groups[-1] = joined
        else:
            groups.append([tile])
    return groups


@dataclass(frozen=True)
class CpuSharedPrefix:
    """Attention over shared prefixes on a CPU.

    Attributes:
        segments: the order of the T tokens.
        padding: number of tokens to append to the T; 0.
    """

    segments: Segments
    padding = 0
    _groups: "dict[int, _Groups]" = field(default_factory=dict, init=False)  # by key heads: the same in all layers

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Map query [1, heads, T, D], key and value [1, key-value heads, T, D] to results [1, T, heads, D]."""
        heads = key.shape[1]
        groups = self._groups.get(heads) or self._groups.setdefault(heads, _groups(self.segments, heads))
        states = (tensor[0].to(query.dtype).transpose(0, 1) for tensor in (query, key, value))
        tables = (state.unflatten(1, (heads, -1)).flatten(0, 1) for state in states)
        return _Attention.apply(*tables, groups, scale).view(1, query.shape[2], query.shape[1], -1)


@dataclass(frozen=True)
class _Group:
    """n tiles, padded to one shape of q queries and k keys; a tile is padded with its own first token.

    Tensors of all tokens are tables [T * heads, shared, D]. Row t * heads + h belongs to token t and key head h; the
    `shared` query heads of that key head are further queries.

    Attributes:
        heads: number of key heads.
        queries: rows of the table, one key head after the other, int64 [heads * n * q].
        padded: places in `queries` that are padding, int64.
        keys: rows of the table, int64 [heads * n * k].
        bias: 0 where a query sees a key, else minus infinity: float32 [n, q, 1, k].
    """

    heads: int
    queries: Tensor
    padded: Tensor
    keys: Tensor
    bias: Tensor

    @classmethod
    def of(cls, tiles: Sequence[_Tile], segment: Tensor, prefix: Tensor, heads: int) -> "_Group":
        """The group of these tiles, given the segment and prefix of each token (`Segments.of_tokens`)."""
        (queries, no_query), (keys, no_key) = map(_padded, zip(*tiles, strict=True), (1, KEY_STEP))
        query, key = queries[..., None], keys[:, None]
        visible = (segment[query] == segment[key]) & (key <= query) | (prefix[query] == segment[key])
        bias = torch.zeros(visible.shape).masked_fill_(~visible | no_key[:, None], -torch.inf)
        head = torch.arange(heads)[:, None]
        queries, keys = ((tokens.flatten() * heads + head).flatten() for tokens in (queries, keys))
        return cls(heads, queries, no_query.flatten().repeat(heads).nonzero()[:, 0], keys, bias[:, :, None])

    def states(self, table: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of a table: the queries [heads, n, q * shared, D], or the keys [heads, n, k, D]."""
        return table.index_select(0, rows).to(dtype).view(self.heads, len(self.bias), -1, table.shape[-1])

    def mask(self, heads: int, shared: int, dtype: torch.dtype) -> Tensor:
        """A copy of the bias for `heads` key heads, each with `shared` query heads: [heads, n, q * shared, k]."""
        n, queries, _, keys = self.bias.shape
        return torch.empty(heads, n, queries, shared, keys, dtype=dtype).copy_(self.bias).flatten(2, 3)


# Groups; and for each row of a table, the place of its result among those of all queries: int64 [T * key heads].
_Groups = tuple[list[_Group], Tensor]


def _groups(segments: Segments, heads: int) -> _Groups:
    segment, prefix = segments.of_tokens()
    groups = [_Group.of(tiles, segment, prefix, heads) for tiles in _by_shape(_tiles(segments))]
    masks = [torch.ones_like(group.queries).index_fill_(0, group.padded, 0) for group in groups]
    real = torch.cat(masks).nonzero()[:, 0]
    places = torch.empty_like(real)
    places[torch.cat([group.queries for group in groups])[real]] = real
    return groups, places


class _Attention(Function):
    """Maps tables of queries [T * key heads, shared, D], keys and values [T * key heads, 1, D] to one of results."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # it would round the products
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, groups: _Groups, scale: float) -> Tensor:
        results, dtype = [], query.dtype
        for group in groups[0]:
            tables = (query, group.queries), (key, group.keys), (value, group.keys)
            queries, keys, values = (group.states(*table, dtype) for table in tables)
            mask = group.mask(1, query.shape[1], dtype)
            result = scaled_dot_product_attention(queries, keys, values, mask, scale=scale)
            results.append(result.reshape(-1, query.shape[1], value.shape[-1]))
        ctx.save_for_backward(query, key, value)
        ctx.groups, ctx.scale = groups, scale
        return torch.cat(results).index_select(0, groups[1])

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        dtype = torch.promote_types(query.dtype, torch.float32)
        query_grads: list[Tensor] = []
        key_grads, value_grads = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        for group in ctx.groups[0]:
            tables = (query, group.queries), (grads[0], group.queries), (key, group.keys), (value, group.keys)
            queries, grad, keys, values = (group.states(*table, dtype).flatten(0, 1) for table in tables)
            grad.view(len(group.queries), -1).index_fill_(0, group.padded, 0.0)
            scores = group.mask(group.heads, query.shape[1], dtype).flatten(0, 1)
            weights = scores.baddbmm_(queries, keys.mT, alpha=ctx.scale).softmax(-1)
            score_grads = torch.ops.aten._softmax_backward_data(torch.bmm(grad, values.mT), weights, -1, dtype)
            of_queries = torch.bmm(score_grads, keys).mul_(ctx.scale)
            query_grads.append(of_queries.view(-1, *query.shape[1:]).to(query.dtype))
            key_grads.index_add_(0, group.keys, torch.bmm(score_grads.mT, queries).view(-1, *key.shape[1:]))
            value_grads.index_add_(0, group.keys, torch.bmm(weights.mT, grad).view(-1, *value.shape[1:]))
        results = torch.cat(query_grads).index_select(0, ctx.groups[1]), key_grads.mul_(ctx.scale), value_grads
        return *(result.to(query.dtype) for result in results), None, None


# -- attention over shared prefixes on a GPU ---------------------------------------------------------------------------

BLOCK_TOKENS = 128  # tokens of a block, as in FlexAttention, whose kernels take whole blocks


@dataclass(frozen=True)
class FlexSharedPrefix:
    """Attention over shared prefixes on a GPU.

    Attributes:
        mask: FlexAttention's mask of the T tokens and the padding.
    """

    mask: BlockMask

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Map query [1, heads, T, D], key and value [1, key-value heads, T, D] to results [1, T, heads, D]."""
        query, key = query.to(value.dtype), key.to(value.dtype)  # one dtype, or there is no backward pass
        for states in (query, key, value):
            torch._dynamo.mark_static(states, [0, 1, 3])  # all but the tokens: as many heads as blocks mean nothing
        out = _compiled()(query, key, value, block_mask=self.mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous()


@dataclass(frozen=True)
class FlexTables:
    """The tensors that a FlexSharedPrefix is made of; on the CPU, until they move together with a micro-batch's others.

    Attributes:
        tensors: segment of each token, the prefix that it sees, and the tables of blocks (see `block_mask`).
        padding: number of tokens to append to the T, up to whole blocks, at least two.
    """

    tensors: tuple[Tensor, ...]
    padding: int

    @classmethod
    def of(cls, segments: Segments) -> "FlexTables":
        """The tables for these segments."""
        segment, prefix = token_segments(segments)
        seen, full = block_tables(segment, prefix)
        tables = (table for blocks in (seen & ~full, full) for table in _rows(blocks))
        return cls((segment, prefix, *tables), len(segment) - segments.starts()[-1])

    def attention(self, tensors: Sequence[Tensor]) -> FlexSharedPrefix:
        """The attention, given these tensors on the device that computes it."""
        segment, prefix, *tables = tensors
        return FlexSharedPrefix(block_mask(segment, prefix, tables))


@cache
def _compiled() -> Callable[..., Tensor]:
    """FlexAttention compiled for any length: each micro-batch has another."""
    return torch.compile(flex_attention, dynamic=True)


def token_segments(segments: Segments) -> tuple[Tensor, Tensor]:
    """Segment of each token, and the prefix that it sees (-1: none), int64 [T] each, padded to two blocks or more.

    Prefixes are the first segments; padding is one more segment at the end. A single block would have a kernel of its
    own.
    """
    segment, prefix = segments.of_tokens()
    padding = (0, max(2 * BLOCK_TOKENS - len(segment), -len(segment) % BLOCK_TOKENS))
    return pad(segment, padding, value=int(segment[-1]) + 1), pad(prefix, padding, value=-1)


def block_mask(segment: Tensor, prefix: Tensor, tables: Sequence[Tensor]) -> BlockMask:
    """FlexAttention's mask of T x T tokens, where T is a multiple of the block.

    Args:
        segment, prefix: as `token_segments` returns them.
        tables: for each row of blocks the number of blocks seen in part, and these blocks; the same of blocks seen in
            full. All tensors are on one device, and nothing is copied from another.
    """

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_segment = (segment[query] == segment[key]) & (key <= query)
        return in_segment | (prefix[query] == segment[key])

    lengths = len(segment), len(segment)
    return BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=BLOCK_TOKENS, mask_mod=sees, seq_lengths=lengths)


def block_tables(segment: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
    """Two tables [blocks of queries, blocks of keys], bool: true where any key of the block is seen, and where all are.

    Where several segments cover a block, it may count as seen in part although all of it is seen; this is exact too.
    """
    first, last = segment[::BLOCK_TOKENS], segment[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]
    prefixes = prefix.view(-1, BLOCK_TOKENS)
    lowest = prefixes.where(prefixes >= 0, len(segment)).amin(1)  # lowest prefix that a token of the block sees
    highest = prefixes.amax(1)
    blocks = torch.arange(len(first))
    before = blocks < blocks[:, None]
    seen = (blocks == blocks[:, None]) | (before & (first[:, None] <= last))
    seen |= (lowest[:, None] <= last) & (first <= highest[:, None])
    one_segment, one_prefix = first == last, prefixes.amin(1) == highest
    full = before & (one_segment[:, None] & one_segment) & (first[:, None] == first)
    full |= one_prefix[:, None] & one_segment & (first == highest[:, None])
    return seen, full


def _rows(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """A table of blocks in FlexAttention's form: number of true blocks in each row, and the blocks, true ones first."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None]


# -- attention over rows that lie one behind another -----------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Rows of the same length, one behind another in one row of tokens; each attends to itself alone.

    Attributes:
        count: number of rows, B.
    """

    count: int

    def apart(self, states: Tensor) -> Tensor:
        """States [1, heads, B * S, D] as [B, heads, S, D]."""
        return states[0].unflatten(1, (self.count, -1)).transpose(0, 1)


@dataclass(frozen=True)
class OneRow:
    """The attention of a micro-batch that is one row; one class for all, since torch.compile tells classes apart."""

    attention: CpuSharedPrefix | FlexSharedPrefix | Rows


# -- the attention that models are loaded with -------------------------------------------------------------------------

SHORT_SDPA = "sdpa_short"
HALF = (torch.bfloat16, torch.float16)
# In torch's CPU kernel bfloat16 is slow on short sequences, and coarse in the backward pass. Measured on AVX-512 with
# AMX, forward and backward: float32 takes a sixth of the time at 16 tokens, half at 128, and as much at 256.
SHORT_TOKENS = 192
# Settings of layers whose attention is not plain and causal.
NOT_SHARED = ("dropout", "sliding_window", "softcap", "s_aux", "position_bias", "cache")


def attention_implementation(name: str) -> str:
    """The name to load a transformers model with; for `sdpa` the name under which `attention` is registered here."""
    if name != "sdpa":
        return name
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(SHORT_SDPA, attention)
    AttentionMaskInterface.register(SHORT_SDPA, sdpa_mask)
    return SHORT_SDPA


@torch.compiler.disable(reason="the segments of each micro-batch differ: graphs end before it")
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    shared_prefix: CpuSharedPrefix | FlexSharedPrefix | OneRow | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' `sdpa`; or the attention `shared_prefix`, if the model's forward pass is given one.

    Arguments and result are as in every attention function of transformers: query [B, heads, S, D], key and value
    [B, key-value heads, S, D]; result [B, S, heads, D].

    Raises:
        NotImplementedError: prefixes are shared, and the layer asks for more than plain causal attention.
    """
    if shared_prefix is None:
        return _short_attention(module, query, key, value, attention_mask, **settings)
    if isinstance(shared_prefix, OneRow):
        inner = shared_prefix.attention
        if isinstance(inner, Rows):
            query, key, value = map(inner.apart, (query, key, value))
            states, _ = _short_attention(module, query, key, value, None, **settings)
        else:
            states, _ = attention(module, query, key, value, None, inner, **settings)
        # Of a view torch.compile also looks at the shape of what it views.
        return torch.ops.aten._unsafe_view(states, (1, -1, *states.shape[2:])), None
    unknown = [name for name in NOT_SHARED if settings.get(name)]
    if unknown or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"no shared prefixes with {', '.join(unknown) or 'attention that looks ahead'}")
    return shared_prefix(query, key, value, settings.get("scaling") or query.shape[-1] ** -0.5), None


def _short_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Compute `sdpa`, in float32 for whole sequences in 16 bits of at most 192 tokens on the CPU."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    whole = query.shape[2] == key.shape[2]  # not one new token before a cache
    dtypes = (query.dtype, key.dtype, value.dtype)
    rounded = next((dtype for dtype in dtypes if dtype in HALF), None)  # mixed precision rounds only some of them
    if not (rounded and query.device.type == "cpu" and whole and key.shape[2] <= SHORT_TOKENS):
        if attention_mask is None:
            key, value = _for_older_gpus(module, key, value)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    with torch.autocast("cpu", enabled=False):  # it would round them again
        output, _ = sdpa_attention_forward(
            module, query.float(), key.float(), value.float(), attention_mask, **settings
        )
    return output.to(rounded), None


def _for_older_gpus(module: torch.nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, one for each query head on a GPU before Ampere.

    Without a mask transformers leaves it to torch to repeat them. Of torch's kernels only FlashAttention does, which
    these GPUs do not have: torch would then compute all scores at once. Its memory-efficient kernel takes copies.
    """
    groups: Any = getattr(module, "num_key_value_groups", 1)
    if groups == 1 or not is_before_ampere(key.device):
        return key, value
    from transformers.integrations.sdpa_attention import repeat_kv, use_gqa_in_sdpa

    if not use_gqa_in_sdpa(None, key, value):  # transformers repeats them itself
        return key, value
    return repeat_kv(key, groups), repeat_kv(value, groups)

"""Layers of transformers computed otherwise: attention that `sdpa` lacks, norms and feed-forward parts that keep less.

Such attention is over rows that share prefixes, and of short bfloat16 sequences on a CPU.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention, silu

# -- attention over rows that share prefixes ---------------------------------------------------------------------------
# Every token attends causally within its own segment (a prefix, or what a row has behind one), and a row's own tokens
# to their whole prefix too. On a GPU: `gpu`.


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


# -- the same on a CPU -------------------------------------------------------------------------------------------------
# A few neighbouring queries and all keys that any of them sees are a tile. Tiles of about the same shape are padded to
# one, gathered, and computed together, under a mask that is made once a micro-batch: forward by torch's kernel;
# backward, since that kernel's own is slow on short rows, by a softmax computed again and five products in float32. The
# query heads that share a key head are further rows of one product: no key is repeated.

# Queries of a tile. Short segments share one while that computes at most so many more scores.
TILE_TOKENS, FREE_SCORES = 64, 1024
# Tiles are computed together if padding computes at most so many more scores for each, in which time torch would have
# called the operations of another, and up to so many in all: scores of all heads should fit into a core's cache. (A
# layer of SmolLM2 takes three quarters of the time, for a prefix of 64 and eight rows of 128 tokens.)
FREE_PADDING, MOST_SCORES = 2048, 100_000
KEY_STEP = 16  # keys of a tile are padded to multiples of this: torch's kernel is slow on a shape that is new to it

# Tokens of neighbouring queries, and of the keys that any of them sees: int64 [queries] and [keys].
_Tile = tuple[Tensor, Tensor]


def _padded(tokens: Sequence[Tensor], step: int) -> tuple[Tensor, Tensor]:
    """Tokens of tiles, int64 [n, a multiple of `step`], and which of them are padding."""
    table = nn.utils.rnn.pad_sequence(list(tokens), batch_first=True, padding_value=-1)
    table = nn.functional.pad(table, (0, -table.shape[1] % step), value=-1)
    padding = table < 0
    return torch.where(padding, table[:, :1], table), padding


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


def _tiles(segments: Segments) -> list[_Tile]:
    """Tiles of whole segments, prefixes and rows apart, or of a piece of a long one."""
    tiles = []
    for own, prefixes in _neighbours(segments):
        before = torch.arange(prefixes.start, prefixes.stop)
        for start in range(own.start, own.stop, TILE_TOKENS):
            end = min(start + TILE_TOKENS, own.stop)
            tiles.append((torch.arange(start, end), torch.cat([before, torch.arange(own.start, end)])))
    return tiles


def _alike(tiles: Sequence[_Tile]) -> list[list[_Tile]]:
    """Which tiles are computed together."""

    def scores(tiles: Sequence[_Tile]) -> int:
        return len(tiles) * max(len(queries) for queries, _ in tiles) * max(len(keys) for _, keys in tiles)

    found: list[list[_Tile]] = []
    for tile in sorted(tiles, key=lambda tile: (len(tile[1]), len(tile[0]))):
        joined = [*found[-1], tile] if found else []
        if joined and scores(joined) <= min(scores(found[-1]) + scores([tile]) + FREE_PADDING, MOST_SCORES):
            found[-1] = joined
        else:
            found.append([tile])
    return found


@dataclass(frozen=True)
class CpuSharedPrefix:
    """Attention over shared prefixes on a CPU, of tokens that lie as the segments say.

    Attributes:
        padding: tokens to append to the T; none.
    """

    segments: Segments
    padding = 0
    _of_heads: "dict[int, _Groups]" = field(default_factory=dict, init=False)  # by key heads: the same in all layers

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [1, heads, T, D], key and value [1, key-value heads, T, D] to results [1, T, heads, D]."""
        heads = key.shape[1]
        groups = self._of_heads.get(heads) or self._of_heads.setdefault(heads, _groups(self.segments, heads))
        states = (each[0].to(query.dtype).transpose(0, 1) for each in (query, key, value))
        tables = (each.unflatten(1, (heads, -1)).flatten(0, 1) for each in states)
        return _Attention.apply(*tables, groups, scale).view(1, query.shape[2], query.shape[1], -1)


@dataclass(frozen=True)
class _Group:
    """Tiles padded to one shape, each by its own first tokens.

    They are n tiles of q queries and k keys in a table [T * heads, shared, D] of all tokens: its row t * heads + h is
    that of token t and key head h, whose `shared` query heads are further queries.

    Attributes:
        heads: key heads.
        queries: rows of the table, of one key head after the other, int64 [heads * n * q].
        padded: which of those are padding, int64.
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
        """`segment` and `prefix` are those of each token, int64 [T]."""
        (queries, no_query), (keys, no_key) = map(_padded, zip(*tiles, strict=True), (1, KEY_STEP))
        query, key = queries[..., None], keys[:, None]
        visible = (segment[query] == segment[key]) & (key <= query) | (prefix[query] == segment[key])
        bias = torch.zeros(visible.shape).masked_fill_(~visible | no_key[:, None], -torch.inf)
        of_head = torch.arange(heads)[:, None]
        queries, keys = ((each.flatten() * heads + of_head).flatten() for each in (queries, keys))
        return cls(heads, queries, no_query.flatten().repeat(heads).nonzero()[:, 0], keys, bias[:, :, None])

    def states(self, table: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Those of the queries [heads, n, q * shared, D], or of the keys [heads, n, k, D]."""
        return table.index_select(0, rows).to(dtype).view(self.heads, len(self.bias), -1, table.shape[-1])

    def mask(self, heads: int, shared: int, dtype: torch.dtype) -> Tensor:
        """A copy for so many key heads and queries of each: [heads, n, q * shared, k]."""
        n, queries, _, keys = self.bias.shape
        return torch.empty(heads, n, queries, shared, keys, dtype=dtype).copy_(self.bias).flatten(2, 3)


# Groups; and where the result of each row of a table is among those of all groups' queries: int64 [T * key heads].
_Groups = tuple[list[_Group], Tensor]


def _groups(segments: Segments, heads: int) -> _Groups:
    segment, prefix = segments.of_tokens()
    groups = [_Group.of(tiles, segment, prefix, heads) for tiles in _alike(_tiles(segments))]
    real = torch.cat([torch.ones_like(each.queries).index_fill_(0, each.padded, 0) for each in groups]).nonzero()[:, 0]
    places = torch.empty_like(real)
    places[torch.cat([group.queries for group in groups])[real]] = real
    return groups, places


class _Attention(Function):
    """Of tables of queries [T * key heads, shared, D], keys and values [T * key heads, 1, D], that of results."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # it would round the products
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, groups: _Groups, scale: float) -> Tensor:
        results, dtype = [], query.dtype
        for group in groups[0]:
            tables = (query, group.queries), (key, group.keys), (value, group.keys)
            own, keys, values = (group.states(*each, dtype) for each in tables)
            found = scaled_dot_product_attention(own, keys, values, group.mask(1, query.shape[1], dtype), scale=scale)
            results.append(found.reshape(-1, query.shape[1], value.shape[-1]))
        ctx.save_for_backward(query, key, value)
        ctx.groups, ctx.scale = groups, scale
        return torch.cat(results).index_select(0, groups[1])

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        dtype = torch.promote_types(query.dtype, torch.float32)
        of_queries, of_keys, of_values = [], torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        for group in ctx.groups[0]:
            tables = (query, group.queries), (grads[0], group.queries), (key, group.keys), (value, group.keys)
            own, grad, keys, values = (group.states(*each, dtype).flatten(0, 1) for each in tables)
            grad.view(len(group.queries), -1).index_fill_(0, group.padded, 0.0)
            scores = group.mask(group.heads, query.shape[1], dtype).flatten(0, 1)
            weights = scores.baddbmm_(own, keys.mT, alpha=ctx.scale).softmax(-1)
            of_scores = torch.ops.aten._softmax_backward_data(torch.bmm(grad, values.mT), weights, -1, dtype)
            of_own = torch.bmm(of_scores, keys).mul_(ctx.scale)
            of_queries.append(of_own.view(-1, *query.shape[1:]).to(query.dtype))
            of_keys.index_add_(0, group.keys, torch.bmm(of_scores.mT, own).view(-1, *key.shape[1:]))
            of_values.index_add_(0, group.keys, torch.bmm(weights.mT, grad).view(-1, *value.shape[1:]))
        found = torch.cat(of_queries).index_select(0, ctx.groups[1]), of_keys.mul_(ctx.scale), of_values
        return *(each.to(query.dtype) for each in found), None, None


# -- the attention that models are loaded with -------------------------------------------------------------------------

SHORT_SDPA = "sdpa_short"
# Bfloat16 is slow in torch's CPU kernel where a sequence is short, and backward coarse, too. Measured on AVX-512 with
# AMX, forward and backward: at 16 tokens float32 takes a sixth of the time, at 128 half, at 256 as much.
SHORT_TOKENS = 192
# Settings of layers that are not plain causal attention.
NOT_SHARED = ("dropout", "sliding_window", "softcap", "s_aux", "position_bias", "cache")


def attention_implementation(name: str) -> str:
    """The name to load a transformers model with: for `sdpa`, that of `attention`, which is registered."""
    if name != "sdpa":
        return name
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(SHORT_SDPA, attention)
    AttentionMaskInterface.register(SHORT_SDPA, sdpa_mask)
    return SHORT_SDPA


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
    """`sdpa`, in float32 where a whole sequence of at most 192 tokens comes in bfloat16 on the CPU."""
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


# -- norms and feed-forward parts that keep less for the backward pass on a CPU, and compute the same ------------------

CHECKED_ROWS = 4


def lean_layers(model: nn.Module) -> None:
    """Let norms and gated feed-forward parts keep less, each in its place.

    Those with the parts of a kind below that, tried on random weights, have the same results to the bit.
    """
    tried: dict[tuple[type, ...], bool] = {}
    for module in list(model.modules()):
        original = type(module)
        for kind in (LeanNorm, LeanFeedForward):
            if kind.has_parts_of(module):
                alike = kind, original, type(getattr(module, "act_fn", None))
                if alike not in tried:
                    tried[alike] = _computes_the_same(kind, module)
                if tried[alike]:
                    module.__class__ = _lean(kind, original)


@cache
def _lean(kind: type, original: type) -> type:
    return type(f"Lean{original.__name__}", (kind, original), {})


@torch.no_grad()
def _computes_the_same(kind: type, module: nn.Module) -> bool:
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    tried = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        # The device is named: Lightning makes models on a GPU with that as torch's default.
        return torch.randn(*shape, generator=generator, device="cpu")

    for parameter in tried.parameters():
        parameter.copy_(drawn(*parameter.shape))
    first = next(tried.parameters())
    states = drawn(CHECKED_ROWS, first.shape[-1]).to(first)
    expected = tried(states)
    tried.__class__ = _lean(kind, type(module))
    return torch.equal(tried(states), expected)


class LeanNorm(nn.Module):
    """A root-mean-square norm that keeps its input as it is, instead of in float32 and normalised too."""

    weight: nn.Parameter
    variance_epsilon: float

    @classmethod
    def has_parts_of(cls, module: nn.Module) -> bool:
        return hasattr(module, "variance_epsilon") and [name for name, _ in module.named_parameters()] == ["weight"]

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _is_rounded_on_cpu(hidden_states) or self.weight.dtype != hidden_states.dtype:
            return super().forward(hidden_states)
        return _Norm.apply(hidden_states, self.weight, self.variance_epsilon)


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        exact = states.float()
        scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(states, weight, scale)
        return exact.mul_(scale).to(states.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        states, weight, scale = ctx.saved_tensors
        normalised, grad = states.float().mul_(scale), grads[0].float()
        products = grad * normalised
        of_weight = products.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        # With n = x s and s = (mean x^2 + epsilon)^(-1/2): d/dx = s (d/dn - n mean(n d/dn)).
        mean = (products @ weight.float()).div_(-grad.shape[-1])
        grad = grad.mul_(weight).addcmul_(normalised, mean[..., None])
        return grad.mul_(scale).to(states.dtype), of_weight, None


class LeanFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) keeping gate(x), up(x); their product if `down` is an adapter's or has hooks."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    @classmethod
    def has_parts_of(cls, module: nn.Module) -> bool:
        return [name for name, _ in module.named_children()] == ["gate_proj", "up_proj", "down_proj", "act_fn"]

    def forward(self, x: Tensor) -> Tensor:
        if not _is_rounded_on_cpu(x):
            return super().forward(x)
        gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
        if type(down) is nn.Linear and down.bias is None and not (down._forward_hooks or down._forward_pre_hooks):
            return _GatedSilu.apply(gate, up, down.weight)
        return down(_GatedSilu.apply(gate, up, None))


class _GatedSilu(Function):
    """silu(gate) * up; with the weight of a linear layer, times that, which then has no input to keep."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        states = silu(gate).mul_(up)
        return states if weight is None else states @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (gate, up, weight), grad, of_weight = ctx.saved_tensors, grads[0], None
        activated = silu(gate)
        if ctx.needs_input_grad[2]:
            # Copied transposed: with AMX the product takes two thirds longer if it reads it so.
            of_weight = grad.flatten(0, -2).T.contiguous() @ (activated * up).flatten(0, -2)
        grad = grad if weight is None else grad @ weight
        return torch.ops.aten.silu_backward(grad * up, gate), activated.mul_(grad), of_weight


def _is_rounded_on_cpu(states: Tensor) -> bool:
    """Float32 would gain less, and under mixed precision operations choose their dtypes themselves."""
    return states.device.type == "cpu" and states.dtype == torch.bfloat16 and not torch.is_autocast_enabled("cpu")


BLOCK_TOKENS = 128  # FlexAttention's own, and the length that its kernels take whole blocks of


@dataclass(frozen=True)
class FlexSharedPrefix:
    """Attention over shared prefixes on a GPU.

    Attributes:
        mask: which blocks of tokens see which.
        padding: tokens to append to the T, up to whole blocks.
    """

    mask: BlockMask
    padding: int

    @classmethod
    def of(cls, segments: Segments, device: torch.device) -> "FlexSharedPrefix":
        """The mask for these segments; block tables are made on the CPU, and moved."""
        segment, prefix = token_segments(segments)
        return cls(block_mask(segment, prefix, device), len(segment) - segments.starts()[-1])

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [1, heads, T, D], key and value [1, key-value heads, T, D] to results [1, T, heads, D]."""
        query, key = query.to(value.dtype), key.to(value.dtype)  # one dtype, or there is no backward pass
        out = _compiled()(query, key, value, block_mask=self.mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous()


@cache
def _compiled() -> Callable[..., Tensor]:
    """Compiled for any length: each micro-batch has another."""
    return torch.compile(flex_attention, dynamic=True)


def token_segments(segments: Segments) -> tuple[Tensor, Tensor]:
    """Of each token, padding to whole blocks included, its segment and the prefix that it sees (-1: none): int64 [T].

    Prefixes are the first segments; padding is one more at the end.
    """
    segment, prefix = segments.of_tokens()
    padding = (0, -len(segment) % BLOCK_TOKENS)
    return pad(segment, padding, value=int(segment[-1]) + 1), pad(prefix, padding, value=-1)


def block_mask(segment: Tensor, prefix: Tensor, device: torch.device) -> BlockMask:
    """FlexAttention's mask of T x T tokens, a multiple of the block: what is seen in part, and what is in full."""
    some, full = block_tables(segment, prefix)
    segment, prefix, tokens = segment.to(device), prefix.to(device), len(segment)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (segment[query] == segment[key]) & (key <= query)
        return own | (prefix[query] == segment[key])

    tables = [table.to(device) for blocks in (some & ~full, full) for table in _rows(blocks)]
    return BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=BLOCK_TOKENS, mask_mod=sees, seq_lengths=(tokens, tokens))


def block_tables(segment: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
    """Which blocks of queries see any of, and which see all of, which blocks of keys: bool [blocks, blocks] each.

    A few blocks that are seen in full count as seen in part, where no segment covers them alone; that is exact too.
    """
    first, last = segment[::BLOCK_TOKENS], segment[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]
    prefixes = prefix.view(-1, BLOCK_TOKENS)
    lowest = prefixes.where(prefixes >= 0, len(segment)).amin(1)  # of those that any of the block's tokens sees
    highest = prefixes.amax(1)
    blocks = torch.arange(len(first))
    before = blocks < blocks[:, None]
    some = (blocks == blocks[:, None]) | (before & (first[:, None] <= last))
    some |= (lowest[:, None] <= last) & (first <= highest[:, None])
    one, one_prefix = first == last, prefixes.amin(1) == highest
    full = before & (one[:, None] & one) & (first[:, None] == first)
    full |= one_prefix[:, None] & one & (first == highest[:, None])
    return some, full


def _rows(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """A table of blocks as FlexAttention takes it: how many in each row, and which, those that count first."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None]

"""Layers of transformers computed otherwise: attention that `sdpa` lacks, norms and feed-forward parts that keep less.

Such attention is over rows that share prefixes, and of short bfloat16 sequences on a CPU.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import silu

if TYPE_CHECKING:
    from trinity_lightning.trainer.gpu import FlexSharedPrefix

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


# -- the same on a CPU -------------------------------------------------------------------------------------------------
# A few neighbouring queries and all keys that any of them sees are a tile. Tiles of about the same shape are padded to
# one, gathered, and computed together: two products and a softmax forward, four products backward, in float32, under a
# mask that is made once a micro-batch. The query heads that share a key head are further rows of one product: no key is
# repeated.

# Queries of a tile. Short segments share one while that computes at most so many more scores.
TILE_TOKENS, FREE_SCORES = 64, 1024
# Tiles are computed together if padding computes at most so many more scores for each, in which time torch would have
# called the operations of another, and up to so many in all: scores of all heads should fit into a core's cache. A
# layer of SmolLM2, forward and backward, on two cores with AMX: 3.2 instead of 5.1 ms for 415 tokens of short rows, 8.0
# instead of 14.4 for a prefix of 64 and eight rows of 128 tokens.
FREE_PADDING, MOST_SCORES = 2048, 100_000
# The softmax of tiles is kept for the backward pass if they have at most so many keys, and else computed again: of long
# rows it would take more memory than all else that a layer keeps.
KEPT_KEYS = 192
_NONE = -2  # segment and prefix of padding (-1 is: no prefix)


# Tokens of neighbouring queries, and of the keys that any of them sees: int64 [queries] and [keys].
_Tile = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Tiles:
    """Tiles padded to one shape; T stands for no token.

    Attributes:
        queries: tokens, int64 [n, queries].
        keys: tokens, int64 [n, keys].
        mask: 0 where a query sees a key, else minus infinity: float32 [n, queries, 1, keys]. What pads
            queries sees all.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor

    @classmethod
    def of(cls, tiles: Sequence[_Tile], segment: Tensor, prefix: Tensor) -> "_Tiles":
        """`segment` and `prefix` are those of each token, int64 [T + 1], and `_NONE` of no token."""
        queries, keys = (
            nn.utils.rnn.pad_sequence(list(tokens), batch_first=True, padding_value=len(segment) - 1)
            for tokens in zip(*tiles, strict=True)
        )
        query, key = queries[..., None], keys[:, None]
        visible = (segment[query] == segment[key]) & (key <= query) | (prefix[query] == segment[key])
        mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
        return cls(queries, keys, mask.masked_fill_(segment[query] == _NONE, 0.0)[:, :, None])

    def places(self, heads: int, tokens: int) -> tuple["_Places", "_Places"]:
        """Of the queries and of the keys, in tables of so many key heads and tokens."""
        return _Places(self.queries, heads, tokens + 1), _Places(self.keys, heads, tokens + 1)

    def weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Softmax of the scores of queries and keys of these tiles: [key heads * n, queries * shared, keys]."""
        scores = torch.bmm(queries, keys.mT)
        count, rows, _, columns = self.mask.shape
        scores.view(-1, count, rows, scores.shape[1] // rows, columns).add_(self.mask)
        return scores.softmax(-1)


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
    """Attention over shared prefixes on a CPU.

    Attributes:
        tiles: which together have each of the T tokens once among their queries.
        padding: tokens to append to the T; none.
    """

    tiles: Sequence[_Tiles]
    padding = 0

    @classmethod
    def of(cls, segments: Segments) -> "CpuSharedPrefix":
        """For tokens that lie so."""
        segment, prefix = (nn.functional.pad(each, (0, 1), value=_NONE) for each in segments.of_tokens())
        return cls([_Tiles.of(each, segment, prefix) for each in _alike(_tiles(segments))])

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [1, heads, T, D], key and value [1, key-value heads, T, D] to results [1, T, heads, D]."""
        return _Attention.apply(query, key, value, self.tiles, scale)


class _Attention(Function):
    """Query [1, heads, T, D], key and value [1, key-value heads, T, D] to results [1, T, heads, D]."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # it would round the products
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiles: Sequence[_Tiles], scale: float) -> Tensor:
        queries, keys, values = _tables(query, key, value, scale)
        out = queries.new_empty(*queries.shape[:-1], values.shape[-1])  # values may be narrower
        kept: list[Tensor | None] = []
        for each in tiles:
            rows, columns = each.places(key.shape[1], key.shape[2])
            weights = each.weights(rows.of(queries), columns.of(keys))
            rows.put(out, torch.bmm(weights, columns.of(values)))
            kept.append(weights if weights.shape[-1] <= KEPT_KEYS else None)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.tiles, ctx.scale = tiles, scale
        return _of_heads(out, key.shape[1], query.dtype)

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        heads = key.shape[1]
        queries, keys, values = _tables(query, key, value, ctx.scale)
        grad = _table(grads[0].transpose(1, 2), heads)
        of_queries, of_keys, of_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        for each, weights in zip(ctx.tiles, kept, strict=True):
            rows, columns = each.places(heads, key.shape[2])
            own_queries, own_keys, own_grad = rows.of(queries), columns.of(keys), rows.of(grad)
            if weights is None:
                weights = each.weights(own_queries, own_keys)
            of_weights = torch.bmm(own_grad, columns.of(values).mT)
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            rows.put(of_queries, torch.bmm(of_scores, own_keys))
            columns.add(of_keys, torch.bmm(of_scores.mT, own_queries))
            columns.add(of_values, torch.bmm(weights.mT, own_grad))
        found = (of_queries.mul_(ctx.scale), query), (of_keys, key), (of_values, value)
        return *(_of_heads(table, heads, states.dtype).transpose(1, 2) for table, states in found), None, None


# A table holds the states of T tokens and zeros for none, of each key head in turn: [key heads * (T + 1), shared, D].


def _tables(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Those of scaled queries, of keys and of values."""
    heads = key.shape[1]
    return _table(query, heads).mul_(scale), _table(key, heads), _table(value, heads)


def _table(states: Tensor, heads: int) -> Tensor:
    """Of states [1, heads * shared, T, D], in float32 if they are rounded ones."""
    states = states[0].unflatten(0, (heads, -1)).transpose(1, 2)
    dtype = torch.promote_types(states.dtype, torch.float32)
    table = states.new_empty(heads, states.shape[1] + 1, *states.shape[2:], dtype=dtype)
    table[:, :-1] = states
    table[:, -1] = 0.0
    return table.flatten(0, 1)


def _of_heads(table: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """The reverse: states [1, T, heads * shared, D]."""
    return table.unflatten(0, (heads, -1))[:, :-1].transpose(0, 1).to(dtype).flatten(1, 2)[None]


class _Places:
    """Which rows of a table are those of n tiles' tokens [n, m], for each of the heads in turn."""

    def __init__(self, tokens: Tensor, heads: int, total: int) -> None:
        self.tiles = heads * len(tokens)
        self.rows = (tokens.flatten() + total * torch.arange(heads)[:, None]).flatten()

    def of(self, table: Tensor) -> Tensor:
        """Those rows, [heads * n, m * shared, D]."""
        return table.index_select(0, self.rows).view(self.tiles, -1, table.shape[-1])

    def put(self, table: Tensor, states: Tensor) -> None:
        """Write them; each token but none is there once."""
        table.index_copy_(0, self.rows, states.view(-1, *table.shape[1:]))

    def add(self, table: Tensor, states: Tensor) -> None:
        """Add to them."""
        table.index_add_(0, self.rows, states.view(-1, *table.shape[1:]))


# -- the attention that models are loaded with -------------------------------------------------------------------------

SHORT_SDPA = "sdpa_short"
# Bfloat16 is slow and coarse in torch's CPU kernel where a sequence is short. Measured on AVX-512 with AMX: at 16
# tokens float32 takes a sixth of the time, at 128 half, at 256 as much.
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


# -- norms and feed-forward parts that keep less for the backward pass on a CPU, and compute the same ------------------

CHECKED_ROWS = 4


def lean_layers(model: nn.Module) -> None:
    """Let the norms and gated feed-forward parts of the kinds that are known here keep less, each in its place.

    Of a kind are layers with the same parts that, tried on random weights, have the same results to the bit.
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
    for parameter in tried.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    width = next(tried.parameters()).shape[-1]
    states = torch.randn(CHECKED_ROWS, width, generator=generator).to(next(tried.parameters()))
    expected = tried(states)
    tried.__class__ = _lean(kind, type(module))
    return torch.equal(tried(states), expected)


class LeanNorm(nn.Module):
    """A root-mean-square norm that keeps its input as it is, instead of in float32 and normalised too."""

    weight: nn.Parameter
    variance_epsilon: float

    @classmethod
    def has_parts_of(cls, module: nn.Module) -> bool:
        """Whether it may be one."""
        return hasattr(module, "variance_epsilon") and [name for name, _ in module.named_parameters()] == ["weight"]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """States [..., width] of the same shape."""
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
        normalised = states.float().mul_(scale)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (grads[0] * normalised.to(states.dtype)).flatten(0, -2).sum(0)
        # With n = x s and s = (mean x^2 + epsilon)^(-1/2): d/dx = s (d/dn - n mean(n d/dn)).
        grad = (grads[0] * weight).float()
        mean = torch.linalg.vecdot(grad, normalised).div_(-grad.shape[-1])
        return grad.addcmul_(normalised, mean[..., None]).mul_(scale).to(states.dtype), of_weight, None


class LeanFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) keeping gate(x), up(x); their product if `down` is an adapter's or has hooks."""

    parts: ClassVar = ["gate_proj", "up_proj", "down_proj", "act_fn"]
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    @classmethod
    def has_parts_of(cls, module: nn.Module) -> bool:
        """Whether it may be one."""
        return [name for name, _ in module.named_children()] == cls.parts

    def forward(self, x: Tensor) -> Tensor:
        """States [..., width] of the same shape."""
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
            of_weight = grad.flatten(0, -2).T @ (activated * up).flatten(0, -2)
        grad = grad if weight is None else grad @ weight
        return torch.ops.aten.silu_backward(grad * up, gate), activated.mul_(grad), of_weight


def _is_rounded_on_cpu(states: Tensor) -> bool:
    """Float32 would gain less, and under mixed precision operations choose their dtypes themselves."""
    return states.device.type == "cpu" and states.dtype == torch.bfloat16 and not torch.is_autocast_enabled("cpu")

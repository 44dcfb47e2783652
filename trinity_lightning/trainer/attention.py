"""Attention that transformers' `sdpa` lacks: short sequences in bfloat16 on a CPU, and rows that share prefixes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# -- rows that share prefixes, on a CPU --------------------------------------------------------------------------------
# Every token attends causally within its own segment (a prefix, or what a row has behind one), and a row's own tokens
# to their whole prefix besides. Both are calls of torch's flash kernel over many segments at once; their results
# merge by the log-sum-exp of their scores: with l = log(exp(l1) + exp(l2)), out = exp(l1 - l) out1 + exp(l2 - l)
# out2. Backward, each call with the merged `out` and `l` yields its own part of the gradient, and no key is ever
# copied for each row (Dao et al., arXiv 2205.14135, appendix B: the gradient of a block needs no more than those
# two).

# Bfloat16 is slow and coarse in torch's CPU kernel where a sequence is short. Measured on AVX-512 with AMX: at 16
# tokens float32 takes a sixth of the time, at 128 half, at 256 as much.
SHORT_TOKENS = 192
# Segments are padded to the longest beside them while that computes at most so many times their scores, or so few more
# that a further call would cost more.
MOST_PADDING, FREE_SCORES = 1.3, 1024


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


@dataclass(frozen=True)
class _Spans:
    """Spans of tokens side by side, padded on the right to the longest.

    Attributes:
        tokens: which token each is, 0 where padded, int64 [n, L].
        real: which are no padding, bool [n, L].
    """

    tokens: Tensor
    real: Tensor

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int]) -> "_Spans":
        offsets = torch.arange(max(lengths))
        real = offsets < torch.tensor(lengths)[:, None]
        return cls((torch.tensor(starts)[:, None] + offsets).masked_fill(~real, 0), real)

    def gather(self, values: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """Values [T, heads or a divisor of it, D] of these tokens, as the kernel takes them: [n, heads, L, D]."""
        found = values.index_select(0, self.tokens.flatten()).to(dtype)
        if found.shape[1] != heads:
            found = found.repeat_interleave(heads // found.shape[1], 1)
        return found.view(*self.tokens.shape, heads, -1).transpose(1, 2)


@dataclass(frozen=True)
class _Call:
    """One call of the kernel: n spans of queries, each over a span of keys.

    Attributes:
        queries, keys: the spans.
        causal: whether the keys are the queries' own, and later ones unseen.
        unused: padding among queries, bool [n, L, 1]; None: there is none.
        mask: 0 and, for padding among the keys, minus infinity, float32 [n, 1, 1, K]; None: there is none that
            a query sees.
    """

    queries: _Spans
    keys: _Spans
    causal: bool
    unused: Tensor | None
    mask: Tensor | None

    @classmethod
    def of(cls, queries: _Spans, keys: _Spans, causal: bool) -> "_Call":
        unused = None if queries.real.all() else ~queries.real[..., None]
        masked = not causal and not keys.real.all()
        mask = torch.zeros(keys.real.shape).masked_fill(~keys.real, -torch.inf)[:, None, None] if masked else None
        return cls(queries, keys, causal, unused, mask)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Results [n * L, heads, D] and the log-sum-exp of the scores [n * L, heads]."""
        dtype, heads = self._dtype(query), query.shape[1]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.queries.gather(query, heads, dtype),
            self.keys.gather(key, heads, dtype),
            self.keys.gather(value, heads, dtype),
            is_causal=self.causal,
            attn_mask=self._mask(dtype),
            scale=scale,
        )
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query [n * L, heads, D], key and value [n * K, key-value heads, D]."""
        dtype, heads = self._dtype(query), query.shape[1]
        of_spans = lse.index_select(0, self.queries.tokens.flatten()).view(*self.queries.tokens.shape, heads)
        if self.unused is not None:
            of_spans = of_spans.masked_fill(self.unused, torch.inf)  # of padding: each weight exp(score - lse) is 0
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            self.queries.gather(grad, heads, dtype),
            self.queries.gather(query, heads, dtype),
            self.keys.gather(key, heads, dtype),
            self.keys.gather(value, heads, dtype),
            self.queries.gather(out, heads, dtype),
            of_spans.transpose(1, 2),
            0.0,
            self.causal,
            attn_mask=self._mask(dtype),
            scale=scale,
        )
        of_query, of_key, of_value = (each.transpose(1, 2).flatten(0, 1) for each in grads)
        kept = key.shape[1]
        return of_query, *(each.unflatten(1, (kept, -1)).sum(2) for each in (of_key, of_value))

    def _dtype(self, query: Tensor) -> torch.dtype:
        short = self.keys.tokens.shape[1] <= SHORT_TOKENS
        return torch.float32 if short and query.dtype == torch.bfloat16 else query.dtype

    def _mask(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.mask is None else self.mask.to(dtype)


@dataclass(frozen=True)
class _Calls:
    """Calls that together cover a range of queries and one of keys, and how to bring results into those orders."""

    calls: Sequence[_Call]
    query_order: Tensor
    key_order: Tensor

    @classmethod
    def of(cls, queries: list[tuple[int, int]], keys: list[tuple[int, int]], causal: bool) -> "_Calls":
        """Of spans (start, length) of queries and the keys of each, those of like size in one call."""
        calls = []
        for members in _buckets([(query[1], key[1]) for query, key in zip(queries, keys, strict=True)]):
            calls.append(_Call.of(_spans(queries, members), _spans(keys, members), causal))
        return cls(calls, _order([call.queries for call in calls]), _order([call.keys for call in calls]))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Results [queries, heads, D] and log-sum-exps [queries, heads], in float32 if they are rounded ones."""
        out, lse = zip(*(call.forward(query, key, value, scale) for call in self.calls), strict=True)
        return _ordered(out, self.query_order), _ordered(lse, self.query_order)

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the queries, keys and values of these ranges; arguments as of `_Call.backward`."""
        of_query, of_key, of_value = zip(*(call.backward(*arguments) for call in self.calls), strict=True)
        return (
            _ordered(of_query, self.query_order),
            _ordered(of_key, self.key_order),
            _ordered(of_value, self.key_order),
        )


def _buckets(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Pairs (queries, keys) dealt into calls so that padding to the largest costs little."""
    buckets: list[list[int]] = []
    real = most_queries = most_keys = 0
    for pair in sorted(range(len(sizes)), key=lambda pair: -sizes[pair][0] * sizes[pair][1]):
        queries, keys = sizes[pair]
        padded = max(queries, most_queries) * max(keys, most_keys) * (len(buckets[-1]) + 1 if buckets else 1)
        if buckets and padded <= MOST_PADDING * (real + queries * keys) + FREE_SCORES:
            buckets[-1].append(pair)
            real, most_queries, most_keys = real + queries * keys, max(queries, most_queries), max(keys, most_keys)
        else:
            buckets.append([pair])
            real, most_queries, most_keys = queries * keys, queries, keys
    return buckets


def _spans(ranges: Sequence[tuple[int, int]], members: Sequence[int]) -> _Spans:
    return _Spans.of([ranges[each][0] for each in members], [ranges[each][1] for each in members])


def _order(spans: Sequence[_Spans]) -> Tensor:
    """Where, among the spans' places one after the other, the first, second, ... of their tokens is."""
    tokens = torch.cat([each.tokens[each.real] for each in spans])
    places = torch.cat([each.real.flatten() for each in spans]).nonzero().flatten()
    return places[tokens.argsort()]


def _ordered(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    whole = torch.cat([part.float() if part.dtype == torch.bfloat16 else part for part in parts])
    return whole.index_select(0, order)


@dataclass(frozen=True)
class CpuSharedPrefix:
    """Attention over shared prefixes on a CPU.

    Attributes:
        within: each segment's tokens over themselves, causally.
        behind: all rows of a prefix over it; None where there is no prefix.
        padding: tokens to append to the T; none.
    """

    within: _Calls
    behind: _Calls | None
    padding = 0

    @classmethod
    def of(cls, segments: Segments) -> "CpuSharedPrefix":
        """The calls for these segments."""
        starts, own = segments.starts(), segments.own_starts()
        spans = list(zip(starts[:-1], [*segments.prefixes, *segments.own], strict=True))
        within = _Calls.of(spans, spans, causal=True)
        if not segments.prefixes:
            return cls(within, None)
        ends = [*accumulate(segments.members, initial=len(segments.own) - sum(segments.members))]
        rows = [(own[first], own[end] - own[first]) for first, end in pairwise(ends)]
        return cls(within, _Calls.of(rows, spans[: len(segments.prefixes)], causal=False))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Query [1, heads, T, D], key and value [1, key-value heads, T, D] to results [1, T, heads, D]."""
        states = [each.squeeze(0).transpose(0, 1).contiguous() for each in (query, key, value)]
        return _Attention.apply(*states, self, scale)[None]


class _Attention(Function):
    """query [T, heads, D], key and value [T, key-value heads, D] to results [T, heads, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: CpuSharedPrefix, scale: float) -> Tensor:
        out, lse = layout.within.forward(query, key, value, scale)
        if layout.behind is not None:
            out_prefix, lse_prefix = layout.behind.forward(query, key, value, scale)
            out_own, lse_own = out[-len(out_prefix) :], lse[-len(lse_prefix) :]
            both = torch.logaddexp(lse_own, lse_prefix)
            out_own.mul_((lse_own - both).exp_()[..., None])
            out_own.add_(out_prefix.mul_((lse_prefix - both).exp_()[..., None]))
            lse_own.copy_(both)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        arguments = (grads[0].contiguous(), query, key, value, out, lse, ctx.scale)
        of_query, of_key, of_value = ctx.layout.within.backward(*arguments)
        if ctx.layout.behind is not None:
            query_behind, key_behind, value_behind = ctx.layout.behind.backward(*arguments)
            of_query[-len(query_behind) :] += query_behind
            of_key[: len(key_behind)] += key_behind
            of_value[: len(value_behind)] += value_behind
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None


# -- rows that share prefixes, on a GPU --------------------------------------------------------------------------------
# One call of FlexAttention, with a mask of blocks. Tokens lie as `Segments` says, padded by a segment of their own to
# whole blocks. Within a block, segments and prefixes are in ascending order, so that its first and last token say
# which ones it holds, and whether two blocks see each other.

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
    starts = segments.starts()
    padding = -starts[-1] % BLOCK_TOKENS
    lengths = torch.tensor([end - start for start, end in pairwise(starts)] + [padding])
    alone = len(segments.own) - sum(segments.members)
    members = torch.arange(len(segments.members)).repeat_interleave(torch.tensor(segments.members, dtype=torch.int64))
    none = torch.tensor([-1])
    prefix = torch.cat([none.expand(len(segments.prefixes) + alone), members, none])
    return torch.arange(len(lengths)).repeat_interleave(lengths), prefix.repeat_interleave(lengths)


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


# -- what models are loaded with ---------------------------------------------------------------------------------------

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

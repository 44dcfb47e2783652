"""A micro-batch on a GPU: brought there in one copy, and attention over its shared prefixes by FlexAttention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from trinity_lightning.trainer.layers import Segments
from trinity_lightning.trainer.layout import MicroBatch

ALIGNMENT = 16  # bytes: of where a tensor begins in a buffer of several


def moved(micro: MicroBatch, device: torch.device) -> MicroBatch:
    """The same with all of its tensors on the device."""
    own = {each.name: getattr(micro, each.name) for each in fields(micro)}
    fixed = {name: each for name, each in own.items() if isinstance(each, Tensor)}
    inputs = {name: each for name, each in micro.inputs.items() if isinstance(each, Tensor)}
    tensors = iter(_moved_together([*fixed.values(), *inputs.values(), *micro.columns.values()], device))
    fixed, inputs, columns = (dict(zip(each, tensors, strict=False)) for each in (fixed, inputs, micro.columns))
    return replace(micro, **fixed, inputs=micro.inputs | inputs, columns=columns)


def _moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the CPU, of any shapes and dtypes, on the device: one copy, out of pinned memory if it is a GPU.

    Nobody waits for it: what the device computes next comes after it.
    """
    ends = list(accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors))
    packed = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")

    def places(buffer: Tensor) -> list[Tensor]:
        return [
            buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip([0, *ends], tensors, strict=False)
        ]

    for place, tensor in zip(places(packed), tensors, strict=True):
        place.copy_(tensor)
    return places(packed.to(device, non_blocking=True))


# -- attention over rows that share prefixes ---------------------------------------------------------------------------
# One call of FlexAttention, with a mask of blocks. Tokens lie as `Segments` says, padded by a segment of their own to
# whole blocks. Within a block, segments and prefixes are in ascending order, so that its first and last token say which
# ones it holds, and whether two blocks see each other.

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

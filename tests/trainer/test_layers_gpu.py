"""Attention over shared prefixes as a GPU computes it: tables of blocks, the mask, and a forward pass on the CPU."""

import pytest
import torch
from hypothesis import given, settings
from support.layouts import SCALE, dense, segments, states, visible
from torch.nn.attention.flex_attention import create_mask, flex_attention

from trinity_lightning.trainer import layers
from trinity_lightning.trainer.layers import BLOCK_TOKENS, FlexTables, Segments, block_tables, token_segments

CPU = torch.device("cpu")
LONG = Segments([300, 40], [2, 3], [260, 400, 7, 90, 1, 128])


def check(layout: Segments) -> None:
    """The mask is the dense one within the tokens, and the tables say of each block what the mask shows."""
    segment, prefix = token_segments(layout)
    tables = FlexTables.of(layout)
    flex = tables.attention(tables.tensors)
    tokens = layout.starts()[-1]
    assert len(segment) == tokens + tables.padding
    assert len(segment) % BLOCK_TOKENS == 0
    assert tables.padding < BLOCK_TOKENS or len(segment) == 2 * BLOCK_TOKENS
    mask = create_mask(flex.mask.mask_mod, 1, 1, len(segment), len(segment), CPU)[0, 0]
    assert torch.equal(mask[:tokens, :tokens], visible(layout))
    assert not mask[:tokens, tokens:].any()
    assert mask.any(1).all()  # padding included: no row of the softmax is empty
    blocks = mask.unflatten(0, (-1, BLOCK_TOKENS)).unflatten(2, (-1, BLOCK_TOKENS))
    some, full = block_tables(segment, prefix)
    assert torch.equal(some, blocks.any(3).any(1))
    assert not (full & ~blocks.all(3).all(1)).any()
    assert torch.equal(flex.mask.to_dense()[0, 0].bool(), some)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(segments())
def test_blocks_and_mask_are_those_of_a_dense_mask(layout: Segments) -> None:
    check(layout)


@pytest.mark.parametrize(
    "layout",
    [
        LONG,
        Segments([], [], [1]),
        Segments([], [], [128, 128]),
        Segments([128], [2], [128, 256]),
        Segments([1], [1], [700]),
    ],
)
def test_blocks_at_their_edges(layout: Segments) -> None:
    check(layout)


def test_blocks_that_are_seen_in_full_skip_the_mask() -> None:
    _, full = block_tables(*token_segments(Segments([256], [2], [256, 128])))
    assert full.nonzero().tolist() == [[1, 0], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2], [4, 0], [4, 1]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_forward_pass_is_that_of_a_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_compiled", lambda: flex_attention)  # compiled, it is a GPU's
    tables = FlexTables.of(LONG)
    inputs = states(LONG.starts()[-1], torch.float64)
    with torch.no_grad():
        query, key, value = (torch.nn.functional.pad(tensor, (0, 0, 0, tables.padding)) for tensor in inputs)
        attended = tables.attention(tables.tensors)(query, key, value, SCALE)[:, : LONG.starts()[-1]]
        torch.testing.assert_close(attended, dense(LONG, inputs))

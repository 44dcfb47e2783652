"""Ragged optimizer batches, and what lies where if their prefixes are shared; attention under a dense mask."""

from itertools import pairwise

import torch
from hypothesis import strategies as st

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.trainer.layers import Segments

VOCABULARY = 90
HEADS, KEY_HEADS, SIZE, SCALE = 6, 2, 16, 0.3
token = st.integers(1, VOCABULARY)


@st.composite
def experiences(draw, prompts=None):
    """One ragged experience: any prompt (none too) and mask, advantage 0 too, an engine's log-probabilities or none."""
    prompt = draw(prompts if prompts is not None else st.lists(token, max_size=6))
    response = draw(st.lists(token, min_size=1, max_size=8))
    count = len(response)
    return Experience(
        tokens=prompt + response,
        prompt_length=len(prompt),
        action_mask=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        advantages=[draw(st.sampled_from([-1.0, 0.0, 2.0]))] * count,
        logprobs=draw(st.none() | st.just([-0.5] * count)),
        info={"temperature": draw(st.sampled_from([0.5, 1.0])), "is_expert": draw(st.booleans())},
    )


@st.composite
def groups(draw):
    """The rollouts of a task: of its prompt, of a longer one that begins with it (a later turn), or of another one."""
    prompt = draw(st.lists(token, max_size=9))
    later = st.lists(token, max_size=5).map(lambda turn: prompt + turn)
    prompts = st.just(prompt) | later | st.lists(token, max_size=6)
    return draw(st.lists(experiences(prompts), min_size=1, max_size=5))


@st.composite
def batches(draw):
    """An optimizer batch of one to four groups in any order, with one trained token at least."""
    tasks = draw(st.lists(groups(), min_size=1, max_size=4))
    rows = [e for task in tasks for e in task]
    for number, task in enumerate(tasks):
        for run, experience in enumerate(task):
            experience.eid = EID(batch=1, task=number, run=run)
    first = rows[0]
    if first.response_length == 1 and first.prompt_length == 0:  # nothing precedes its only token
        first.prompt_length, first.tokens = 1, first.tokens.repeat(2)
    first.action_mask[-1] = True
    return OptimizerBatch.of(draw(st.permutations(rows)), explore_step=1)


@st.composite
def segments(draw):
    """A few prefixes, each with some rows, and rows of their own; lengths that do not fit one call."""
    lengths = st.integers(1, 12) | st.integers(60, 90)
    prefixes = draw(st.lists(lengths, max_size=3))
    members = [draw(st.integers(1, 4)) for _ in prefixes]
    alone = draw(st.integers(0 if prefixes else 1, 3))
    return Segments(
        prefixes, members, draw(st.lists(lengths, min_size=alone + sum(members), max_size=alone + sum(members)))
    )


def visible(layout: Segments) -> torch.Tensor:
    """The attention mask, bool [T, T], written out by hand: a row is True at the tokens that its token sees."""
    starts = layout.starts()
    mask = torch.zeros(starts[-1], starts[-1], dtype=torch.bool)
    for start, end in pairwise(starts):
        mask[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
    row = len(layout.rests) - sum(layout.members)
    for prefix, count in enumerate(layout.members):
        for _ in range(count):
            row_tokens = slice(*layout.starts()[len(layout.prefixes) :][row : row + 2])
            mask[row_tokens, starts[prefix] : starts[prefix + 1]] = True
            row += 1
    return mask


def states(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values as transformers has them: [1, heads, T, D], heads beside each other in memory."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(1, tokens, heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def dense(layout: Segments, inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = inputs
    key, value = (heads.repeat_interleave(HEADS // KEY_HEADS, 1) for heads in (key, value))
    scores = (SCALE * query @ key.mT).masked_fill(~visible(layout), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)

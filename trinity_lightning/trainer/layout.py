"""Which rows are computed together: an optimizer batch cut into micro-batches by a budget of computed tokens.

Two layouts of the same rows, both exact. `padded`: rows side by side, padded on the right to the longest; under a
causal mask no real token then attends to padding, and rows sorted by length waste little. `shared_prefix`: what several
prompts begin with is computed once, the rest of each row behind it, and nothing is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.expert import is_expert
from trinity_lightning.common.optimizer_batch import OptimizerBatch, trained_mask
from trinity_lightning.config.training import Layout

# `auto` shares prefixes if that computes at most this share of the padded layout's tokens. Measured on SmolLM2, forward
# and backward: such a token takes 1.0 to 1.1 times a padded one's time in float32, and up to 1.24 in bfloat16, where
# products are quicker and attention counts for more.
WORTH_SHARING = 0.8
# Different prompts that a group looks back over, for the time to grow with their number and not with its square. What
# more of them begin with is computed once for so many.
MOST_PROMPTS = 64


@dataclass(frozen=True)
class PrefixGroup:
    """Rows whose prompts begin alike.

    Attributes:
        rows: rows of the optimizer batch.
        prefix: how many tokens all of their prompts begin with, computed once; 0 if there is only one row.
        tokens: computed tokens: the prefix and what each row has behind it.
    """

    rows: tuple[int, ...]
    prefix: int
    tokens: int


@dataclass(frozen=True)
class Part:
    """What one micro-batch computes.

    Attributes:
        rows: rows of the optimizer batch, in the micro-batch's order.
        tokens: computed tokens, of one forward and backward pass: what its time and memory depend on.
        groups: its rows by shared prefix, those without one first; none in the padded layout.
    """

    rows: tuple[int, ...]
    tokens: int
    groups: tuple[PrefixGroup, ...] = ()


def rows_to_train(batch: OptimizerBatch, skip_zero_advantage: bool) -> list[int]:
    """Rows worth computing: those with a trained token, and (if no other loss term needs them) a non-zero advantage.

    An expert's rows are always worth it: the loss of such rows needs no advantages.
    """
    return [row for row, experience in enumerate(batch.experiences) if _is_trained(experience, skip_zero_advantage)]


def _is_trained(experience: Experience, skip_zero_advantage: bool) -> bool:
    mask = trained_mask(experience)
    if skip_zero_advantage and experience.advantages is not None and not is_expert(experience):
        mask = mask & (experience.advantages != 0)
    return bool(mask.any())


def cut(batch: OptimizerBatch, rows: Sequence[int], max_tokens: int, layout: Layout) -> list[Part]:
    """Rows dealt into micro-batches of at most `max_tokens` computed tokens; a longer row gets one of its own.

    Args:
        batch: the optimizer batch.
        rows: the rows to deal, a subset.
        max_tokens: budget of a micro-batch.
        layout: of `auto`, see `better_layout`.
    """
    if layout is Layout.auto:
        layout = better_layout(batch, rows, max_tokens)
    if layout is Layout.shared_prefix:
        return cut_shared(batch.experiences, rows, max_tokens)
    return cut_padded([len(e.tokens) for e in batch.experiences], rows, max_tokens)


def better_layout(batch: OptimizerBatch, rows: Sequence[int], max_tokens: int) -> Layout:
    """The layout that computes fewer tokens: shared prefixes if they save a fifth. Arguments as of `cut`."""
    padded = cut(batch, rows, max_tokens, Layout.padded)
    shared = cut(batch, rows, max_tokens, Layout.shared_prefix)
    worth_it = computed_tokens(shared) <= WORTH_SHARING * computed_tokens(padded)
    return Layout.shared_prefix if worth_it else Layout.padded


def computed_tokens(parts: Sequence[Part]) -> int:
    """Tokens of all forward passes: padding counts, and a shared prefix once."""
    return sum(part.tokens for part in parts)


def padding_ratio(lengths: Sequence[int], parts: Sequence[Part]) -> float:
    """Computed tokens per real token, by the length of each row: above 1 if padded, below 1 if prefixes are shared."""
    real = sum(lengths[row] for part in parts for row in part.rows)
    return computed_tokens(parts) / max(real, 1)


def cut_padded(lengths: Sequence[int], rows: Sequence[int], max_tokens: int) -> list[Part]:
    """The padded layout, whose computed tokens are rows x longest row: longest rows first.

    Args:
        lengths: tokens of each row of the batch.
        rows: the rows to deal, a subset.
        max_tokens: budget of a micro-batch.
    """
    parts: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [Part(tuple(part), len(part) * lengths[part[0]]) for part in parts]


def cut_shared(experiences: Sequence[Experience], rows: Sequence[int], max_tokens: int) -> list[Part]:
    """The shared-prefix layout: whole groups, if they fit; of those that do not, pieces that repeat the prefix."""
    lengths = [len(e.tokens) for e in experiences]
    pieces: list[PrefixGroup] = []
    for group in prefix_groups(experiences, rows, max_tokens):
        pieces += [group] if group.tokens <= max_tokens else _pieces(group, lengths, max_tokens)
    parts = []
    for part in _first_fit([piece.tokens for piece in pieces], max_tokens):
        groups = sorted((pieces[each] for each in part), key=lambda group: group.prefix > 0)
        rows_of = tuple(row for group in groups for row in group.rows)
        parts.append(Part(rows_of, sum(group.tokens for group in groups), tuple(groups)))
    return parts


def _pieces(group: PrefixGroup, lengths: Sequence[int], max_tokens: int) -> list[PrefixGroup]:
    own = [lengths[row] - group.prefix for row in group.rows]
    return [
        _group([group.rows[each] for each in piece], group.prefix, lengths)
        for piece in _first_fit(own, max_tokens - group.prefix)
    ]


def _group(rows: Sequence[int], prefix: int, lengths: Sequence[int]) -> PrefixGroup:
    prefix = prefix if len(rows) > 1 else 0
    return PrefixGroup(tuple(rows), prefix, prefix + sum(lengths[row] - prefix for row in rows))


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Items dealt into as few bins as first-fit decreasing finds; one larger than the capacity has its own."""
    bins: list[list[int]] = []
    room: dict[int, int] = {}  # of the bins that the smallest item still fits
    smallest = min(sizes, default=0)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        found = next((each for each, free in room.items() if sizes[item] <= free), len(bins))
        if found == len(bins):
            bins.append([])
        bins[found].append(item)
        room[found] = room.get(found, capacity) - sizes[item]
        if room[found] < smallest:
            del room[found]
    return bins


def prefix_groups(experiences: Sequence[Experience], rows: Sequence[int], max_tokens: int) -> list[PrefixGroup]:
    """The rows, grouped by what their prompts begin with, for few tokens to be computed.

    It is the tokens that decide: a task's rollouts share their prompt, unless a workflow gave them different ones;
    an expert's row shares it too if it has the same; and of tasks with one row each, what they begin with in common.

    In sorted order, rows with a common prefix are neighbours, and any two share the least of what neighbours between
    them share. Of all groupings into runs of neighbours this is the best: saved(end) = max over start of saved(start)
    + prefix(start, end) * (rows - 1). (A group around another one might save a little more.) Rows of different prompts
    are grouped only if they fit a micro-batch together, and at most `MOST_PROMPTS` of them.
    """
    lengths = [len(e.tokens) for e in experiences]
    by_prompt: dict[bytes, list[int]] = {}
    for row in rows:
        by_prompt.setdefault(_prompt(experiences[row]).long().numpy().tobytes(), []).append(row)
    alike = [by_prompt[key] for key in sorted(by_prompt)]
    prompts = [_prompt(experiences[same[0]]) for same in alike]
    common = [_common_prefix(one, other) for one, other in pairwise(prompts)]
    tokens = [sum(lengths[row] for row in same) for same in alike]
    best = [(0, 0)]  # of the first prompts: tokens saved, and where the last group starts
    for end in range(len(alike)):
        prefix, members, whole = len(prompts[end]), len(alike[end]), tokens[end]
        choice = (best[end][0] + prefix * (members - 1), end)
        for start in range(end - 1, max(end - MOST_PROMPTS, -1), -1):
            prefix, members, whole = min(prefix, common[start]), members + len(alike[start]), whole + tokens[start]
            saved = prefix * (members - 1)
            if prefix == 0 or whole - saved > max_tokens:
                break
            choice = max(choice, (best[start][0] + saved, start))
        best.append(choice)
    groups: list[PrefixGroup] = []
    end = len(alike)
    while end > 0:
        start = best[end][1]
        prefix = min([len(prompts[start]), *common[start : end - 1]])
        members = [row for same in alike[start:end] for row in same]
        groups += [_group(each, prefix, lengths) for each in ([members] if prefix else [[row] for row in members])]
        end = start
    return groups


def _prompt(experience: Experience) -> Tensor:
    return experience.tokens[: experience.prompt_length]


def _common_prefix(one: Tensor, other: Tensor) -> int:
    shorter = min(len(one), len(other))
    differs = (one[:shorter] != other[:shorter]).nonzero()
    return int(differs[0]) if len(differs) else shorter

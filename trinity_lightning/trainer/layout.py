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
from trinity_lightning.common.optimizer_batch import OptimizerBatch, is_expert, trained_mask
from trinity_lightning.config.training import Layout

# `auto` shares prefixes if that computes at most this share of the padded layout's tokens. Such a token of SmolLM2 took
# 1.0 to 1.1 times a padded one's time in float32, and up to 1.24 in bfloat16.
WORTH_SHARING = 0.8
# Different prompts that a group looks back over, for the time to grow with their number and not with its square.
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
    """These rows of the batch in micro-batches of at most `max_tokens` computed tokens.

    A longer row, or pair of rows, has one of its own. Of the layout `auto`, see `better_layout`.
    """
    if layout is Layout.auto:
        layout = better_layout(batch, rows, max_tokens)
    if layout is Layout.shared_prefix:
        return cut_shared(batch.experiences, rows, max_tokens, batch.unit)
    return cut_padded([len(e.tokens) for e in batch.experiences], rows, max_tokens, batch.unit)


def better_layout(batch: OptimizerBatch, rows: Sequence[int], max_tokens: int) -> Layout:
    """The layout that computes fewer tokens: shared prefixes if they save a fifth. Arguments as of `cut`."""
    padded, shared = (computed_tokens(cut(batch, rows, max_tokens, it)) for it in (Layout.padded, Layout.shared_prefix))
    return Layout.shared_prefix if worth_sharing(padded, shared) else Layout.padded


def worth_sharing(padded: int, shared: int) -> bool:
    """Whether prefixes are shared under `auto`, by the computed tokens of each layout."""
    return shared <= WORTH_SHARING * padded


def computed_tokens(parts: Sequence[Part]) -> int:
    """Tokens of all forward passes: padding counts, and a shared prefix once."""
    return sum(part.tokens for part in parts)


def padding_ratio(lengths: Sequence[int], parts: Sequence[Part]) -> float:
    """Computed tokens per real token, by the length of each row: above 1 if padded, below 1 if prefixes are shared."""
    real = sum(lengths[row] for part in parts for row in part.rows)
    return computed_tokens(parts) / max(real, 1)


def trained_tokens(batch: OptimizerBatch, parts: Sequence[Part], sampled: bool = False) -> int:
    """Trained tokens of the parts; `sampled`: of their rows with an engine's log-probabilities."""
    experiences = [batch.experiences[row] for part in parts for row in part.rows]
    return sum(int(trained_mask(e).sum()) for e in experiences if not sampled or e.logprobs is not None)


def units_of(rows: Sequence[int], lengths: Sequence[int], size: int) -> list[list[int]]:
    """Rows that are not parted, the longest first: each alone, or the two of a pair."""
    units: dict[int, list[int]] = {}
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        units.setdefault(row // size, []).append(row)
    return list(units.values())


def cut_padded(lengths: Sequence[int], rows: Sequence[int], max_tokens: int, unit: int = 1) -> list[Part]:
    """The padded layout, whose computed tokens are rows x longest row: longest rows first, with their pairs."""
    parts: list[list[int]] = []
    for members in units_of(rows, lengths, unit):
        if parts and (len(parts[-1]) + len(members)) * lengths[parts[-1][0]] <= max_tokens:
            parts[-1] += members
        else:
            parts.append(members)
    return [Part(tuple(part), len(part) * lengths[part[0]]) for part in parts]


def cut_shared(experiences: Sequence[Experience], rows: Sequence[int], max_tokens: int, unit: int = 1) -> list[Part]:
    """The shared-prefix layout: whole groups, if they fit; of those that do not, pieces that repeat the prefix."""
    lengths = [len(e.tokens) for e in experiences]
    pieces: list[PrefixGroup] = []
    for group in prefix_groups(experiences, rows, max_tokens):
        pieces += [group] if group.tokens <= max_tokens else pieces_of(group, lengths, max_tokens, unit)
    parts = []
    for part in _first_fit([piece.tokens for piece in pieces], max_tokens):
        groups = sorted((pieces[each] for each in part), key=lambda group: group.prefix > 0)
        rows_of = tuple(row for group in groups for row in group.rows)
        parts.append(Part(rows_of, sum(group.tokens for group in groups), tuple(groups)))
    return parts


def pieces_of(group: PrefixGroup, lengths: Sequence[int], max_tokens: int, unit: int) -> list[PrefixGroup]:
    units = units_of(group.rows, lengths, unit)
    own = [sum(lengths[row] - group.prefix for row in members) for members in units]
    return [
        group_of([row for each in piece for row in units[each]], group.prefix, lengths)
        for piece in _first_fit(own, max_tokens - group.prefix)
    ]


def group_of(rows: Sequence[int], prefix: int, lengths: Sequence[int]) -> PrefixGroup:
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
    Rows of different prompts are grouped only if they fit a micro-batch together, and at most `MOST_PROMPTS` of them.

    Example:
        Rows 0 and 1 have the prompt [5, 6, 7], row 2 has [5, 6, 8], row 3 has [9]; each has a response of one token.
        [5, 6, 7] computed once for rows 0 and 1 saves 3 tokens, [5, 6] computed once for rows 0 to 2 saves 4. So rows
        0 to 2 are a group with a prefix of 2 tokens, which computes 2 + 2 + 2 + 2 tokens; row 3 is one by itself.
    """
    lengths = [len(e.tokens) for e in experiences]
    prompts = _distinct_prompts(experiences, rows)
    common = [_common_prefix(one.tokens, other.tokens) for one, other in pairwise(prompts)]
    groups: list[PrefixGroup] = []
    for start, end in _best_runs(prompts, common, max_tokens):
        prefix = min([len(prompts[start].tokens), *common[start : end - 1]])
        members = [row for prompt in prompts[start:end] for row in prompt.rows]
        groups += [group_of(each, prefix, lengths) for each in ([members] if prefix else [[row] for row in members])]
    return groups


@dataclass
class _Prompt:
    """A prompt, the rows that have it, and how many tokens these have in all."""

    tokens: Tensor
    rows: list[int]
    total: int


def _distinct_prompts(experiences: Sequence[Experience], rows: Sequence[int]) -> list[_Prompt]:
    """Sorted, so that prompts with a common prefix are neighbours, and any two share the least of what neighbours
    between them share.
    """
    found: dict[bytes, _Prompt] = {}
    for row in rows:
        tokens = experiences[row].tokens[: experiences[row].prompt_length]
        prompt = found.setdefault(tokens.long().numpy().tobytes(), _Prompt(tokens, [], 0))
        prompt.rows.append(row)
        prompt.total += len(experiences[row].tokens)
    return [found[key] for key in sorted(found)]


def _best_runs(prompts: Sequence[_Prompt], common: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """All prompts in runs [start, end) of neighbours, the last one first, such that shared prefixes save the most.

    By dynamic programming: saved(end) = max over start of saved(start) + prefix(start, end) * (rows - 1). (A group
    around another one might save a little more.) `common` is what each prompt shares with the next.
    """
    best = [(0, 0)]  # of the first prompts: tokens saved, and where the last run starts
    for end, prompt in enumerate(prompts):
        prefix, rows, total = len(prompt.tokens), len(prompt.rows), prompt.total
        choice = (best[end][0] + prefix * (rows - 1), end)
        for start in range(end - 1, max(end - MOST_PROMPTS, -1), -1):
            prefix = min(prefix, common[start])
            rows, total = rows + len(prompts[start].rows), total + prompts[start].total
            saved = prefix * (rows - 1)
            if prefix == 0 or total - saved > max_tokens:
                break
            choice = max(choice, (best[start][0] + saved, start))
        best.append(choice)
    runs: list[tuple[int, int]] = []
    end = len(prompts)
    while end > 0:
        start = best[end][1]
        runs.append((start, end))
        end = start
    return runs


def _common_prefix(one: Tensor, other: Tensor) -> int:
    shorter = min(len(one), len(other))
    differs = (one[:shorter] != other[:shorter]).nonzero()
    return int(differs[0]) if len(differs) else shorter

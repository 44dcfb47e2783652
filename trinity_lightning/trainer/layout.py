"""Cuts rows of an optimizer batch into micro-batches, and collates them into tensors.

There are two layouts of the same rows, both exact. `padded`: rows lie side by side, padded on the right to the longest.
Under a causal mask no real token attends to padding, and rows sorted by length waste little. `shared_prefix`: the
common beginning of several prompts is computed once, the rest of each row lies behind it, and nothing is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from trinity_lightning.common.experience import Experience, gather_response_attrs, gather_rows
from trinity_lightning.common.optimizer_batch import OptimizerBatch, is_expert, trained_mask
from trinity_lightning.common.pictures.positions import PositionRule, positions_of
from trinity_lightning.common.pictures.states import PICTURES, PictureInputs, picture_inputs
from trinity_lightning.common.pictures.tensors import PictureTensors, identity_of
from trinity_lightning.config.algorithm import Layout
from trinity_lightning.trainer.layers import CpuSharedPrefix, FlexTables, Segments

# -- micro-batches by a budget of computed tokens ----------------------------------------------------------------------

# `auto` shares prefixes if that computes at most this share of the padded layout's tokens: a token takes up to 1.24
# times as long as in the padded layout (SmolLM2 in bfloat16).
WORTH_SHARING = 0.8
# Most different prompts in a group. The bound makes the time of grouping grow with the number of prompts, not with its
# square.
MOST_PROMPTS = 64


@dataclass(frozen=True)
class PrefixGroup:
    """Rows of an optimizer batch whose prompts begin alike.

    Attributes:
        rows: rows of the batch.
        prefix: number of tokens that all of their prompts begin with, computed once; 0 if there is only one row.
        tokens: computed tokens: the prefix, and each row's tokens behind it.
    """

    rows: tuple[int, ...]
    prefix: int
    tokens: int


@dataclass(frozen=True)
class Part:
    """The rows of one micro-batch.

    Attributes:
        rows: rows of the optimizer batch, in the order in which they lie.
        tokens: computed tokens of a forward and backward pass; its time and memory depend on them.
        groups: the rows by shared prefix, rows without one first; empty in the padded layout.
    """

    rows: tuple[int, ...]
    tokens: int
    groups: tuple[PrefixGroup, ...] = ()


def rows_to_train(batch: OptimizerBatch, skip_zero_advantage: bool) -> list[int]:
    """Rows with a trained token; with `skip_zero_advantage` only if one of these has an advantage other than 0.

    Rows of an expert stay even without an advantage: their loss needs none.
    """
    rows = []
    for row, experience in enumerate(batch.experiences):
        mask = trained_mask(experience)
        if skip_zero_advantage and experience.advantages is not None and not is_expert(experience):
            mask = mask & (experience.advantages != 0)
        if mask.any():
            rows.append(row)
    return rows


def cut(batch: OptimizerBatch, rows: Sequence[int], max_tokens: int, layout: Layout) -> list[Part]:
    """Cut rows of the batch into micro-batches of at most `max_tokens` computed tokens.

    A longer row or pair of rows has a micro-batch of its own. The layout is not `auto`: `better_layout` chooses before.
    """
    if layout is Layout.shared_prefix:
        return cut_shared(batch.experiences, rows, max_tokens, batch.unit)
    return cut_padded([len(e.tokens) for e in batch.experiences], rows, max_tokens, batch.unit)


def better_layout(batch: OptimizerBatch, rows: Sequence[int], max_tokens: int) -> Layout:
    """The layout that computes fewer tokens: shared prefixes if they save a fifth. Arguments as in `cut`."""
    padded, shared = (
        computed_tokens(cut(batch, rows, max_tokens, way)) for way in (Layout.padded, Layout.shared_prefix)
    )
    return Layout.shared_prefix if worth_sharing(padded, shared) else Layout.padded


def worth_sharing(padded: int, shared: int) -> bool:
    """True if `auto` shares prefixes, given the computed tokens of each layout."""
    return shared <= WORTH_SHARING * padded


def computed_tokens(parts: Sequence[Part]) -> int:
    """Tokens of all forward passes: padding counts, and a shared prefix counts once."""
    return sum(part.tokens for part in parts)


def trained_tokens(batch: OptimizerBatch, parts: Sequence[Part], sampled: bool = False) -> int:
    """Number of trained tokens in the parts; with `sampled` only in rows that have an engine's log-probabilities."""
    experiences = [batch.experiences[row] for part in parts for row in part.rows]
    return sum(int(trained_mask(e).sum()) for e in experiences if not sampled or e.logprobs is not None)


def deal(batch: OptimizerBatch, rows: Sequence[int], size: int, max_tokens: int, layout: Layout) -> list[list[int]]:
    """Deal rows to `size` ranks so that each computes about as many tokens; other arguments as in `cut`.

    Rows that share a prefix stay together, unless they are too many for one rank; pairs always stay together.
    """
    lengths = [len(e.tokens) for e in batch.experiences]
    groups = [group_of(unit, 0, lengths) for unit in units_of(rows, lengths, batch.unit)]
    if layout is Layout.shared_prefix:
        whole, groups = prefix_groups(batch.experiences, rows, max_tokens), []
        share = -(-sum(group.tokens for group in whole) // size)
        for group in whole:
            most = max(share, group.prefix - (group.prefix - group.tokens) // size)
            groups += [group] if group.tokens <= share else pieces_of(group, lengths, most, batch.unit)
    dealt: list[list[PrefixGroup]] = [[] for _ in range(size)]
    for group in sorted(groups, key=lambda group: -group.tokens):
        min(dealt, key=lambda groups: sum(group.tokens for group in groups)).append(group)
    return [sorted(row for group in rank for row in group.rows) for rank in dealt]


def units_of(rows: Sequence[int], lengths: Sequence[int], size: int) -> list[list[int]]:
    """Rows that stay together, the longest first: single rows (size 1), or the two rows of each pair (size 2)."""
    units: dict[int, list[int]] = {}
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        units.setdefault(row // size, []).append(row)
    return list(units.values())


def cut_padded(lengths: Sequence[int], rows: Sequence[int], max_tokens: int, unit: int = 1) -> list[Part]:
    """Cut for the padded layout, longest rows first; a micro-batch computes rows x longest row."""
    parts: list[list[int]] = []
    for members in units_of(rows, lengths, unit):
        if parts and (len(parts[-1]) + len(members)) * lengths[parts[-1][0]] <= max_tokens:
            parts[-1] += members
        else:
            parts.append(members)
    return [Part(tuple(part), len(part) * lengths[part[0]]) for part in parts]


def cut_shared(experiences: Sequence[Experience], rows: Sequence[int], max_tokens: int, unit: int = 1) -> list[Part]:
    """Cut for the shared-prefix layout: whole groups if they fit, else pieces of them that repeat the prefix."""
    lengths = [len(e.tokens) for e in experiences]
    pieces: list[PrefixGroup] = []
    for group in prefix_groups(experiences, rows, max_tokens):
        pieces += [group] if group.tokens <= max_tokens else pieces_of(group, lengths, max_tokens, unit)
    parts = []
    for members in _first_fit([piece.tokens for piece in pieces], max_tokens):
        groups = sorted((pieces[index] for index in members), key=lambda group: group.prefix > 0)
        rows_of = tuple(row for group in groups for row in group.rows)
        parts.append(Part(rows_of, sum(group.tokens for group in groups), tuple(groups)))
    return parts


def pieces_of(group: PrefixGroup, lengths: Sequence[int], max_tokens: int, unit: int) -> list[PrefixGroup]:
    """Pieces of a group that fit into `max_tokens`, each with the whole prefix."""
    units = units_of(group.rows, lengths, unit)
    behind = [sum(lengths[row] - group.prefix for row in members) for members in units]
    return [
        group_of([row for index in piece for row in units[index]], group.prefix, lengths)
        for piece in _first_fit(behind, max_tokens - group.prefix)
    ]


def group_of(rows: Sequence[int], prefix: int, lengths: Sequence[int]) -> PrefixGroup:
    """The group of these rows; a single row shares no prefix."""
    prefix = prefix if len(rows) > 1 else 0
    return PrefixGroup(tuple(rows), prefix, prefix + sum(lengths[row] - prefix for row in rows))


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Deal items into bins, first-fit decreasing; an item larger than the capacity has a bin of its own."""
    bins: list[list[int]] = []
    room: dict[int, int] = {}  # capacity left in each bin that the smallest item still fits into
    smallest = min(sizes, default=0)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        chosen = next((number for number, free in room.items() if sizes[item] <= free), len(bins))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(item)
        room[chosen] = room.get(chosen, capacity) - sizes[item]
        if room[chosen] < smallest:
            del room[chosen]
    return bins


def prefix_groups(experiences: Sequence[Experience], rows: Sequence[int], max_tokens: int) -> list[PrefixGroup]:
    """Group rows by the beginning of their prompts, so that few tokens are computed.

    Only tokens and pictures decide. A task's rollouts share their prompt, unless a workflow gave them different ones;
    tasks with one row each share the beginning that they have in common. Rows of different prompts are grouped only if
    they fit a micro-batch together, and at most `MOST_PROMPTS` prompts.

    Example:
        Rows 0 and 1 have the prompt [5, 6, 7], row 2 has [5, 6, 8], row 3 has [9]. To compute [5, 6, 7] once for rows 0
        and 1 saves 3 tokens. To compute [5, 6] once for rows 0 to 2 saves 4. So rows 0 to 2 are a group with a prefix
        of 2 tokens; row 3 is a group by itself.
    """
    lengths = [len(e.tokens) for e in experiences]
    prompts = _distinct_prompts(experiences, rows)
    common = [_common_prefix(prompt.tokens, following.tokens) for prompt, following in pairwise(prompts)]
    groups: list[PrefixGroup] = []
    for start, end in _best_runs(prompts, common, max_tokens):
        prefix = min([len(prompts[start].tokens), *common[start : end - 1]])
        members = [row for prompt in prompts[start:end] for row in prompt.rows]
        groups += [group_of(share, prefix, lengths) for share in ([members] if prefix else [[row] for row in members])]
    return groups


@dataclass
class _Prompt:
    """A prompt (see `identity_of`), its rows, and the number of all tokens of these rows."""

    tokens: Tensor
    rows: list[int]
    total: int


def _distinct_prompts(experiences: Sequence[Experience], rows: Sequence[int]) -> list[_Prompt]:
    """The different prompts, sorted: neighbours share most.

    Two prompts share as many tokens as the two neighbours between them that share the fewest.
    """
    prompts: dict[bytes, _Prompt] = {}
    for row in rows:
        tokens = identity_of(experiences[row])[: experiences[row].prompt_length]
        prompt = prompts.setdefault(tokens.numpy().tobytes(), _Prompt(tokens, [], 0))
        prompt.rows.append(row)
        prompt.total += len(experiences[row].tokens)
    return [prompts[key] for key in sorted(prompts)]


def _best_runs(prompts: Sequence[_Prompt], common: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Runs [start, end) of neighbouring prompts whose shared prefixes save the most tokens; the last run comes first.

    Dynamic programming: saved(end) = max over start of saved(start) + prefix(start, end) * (rows - 1). `common` counts
    the tokens that each prompt shares with the next.
    """
    best = [(0, 0)]  # for the first prompts: tokens saved, and where the last run starts
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


def _common_prefix(first: Tensor, second: Tensor) -> int:
    """Number of tokens that both begin with."""
    shorter = min(len(first), len(second))
    differs = (first[:shorter] != second[:shorter]).nonzero()
    return int(differs[0]) if len(differs) else shorter


# -- tensors of a micro-batch: made on the CPU, and moved to a GPU in one copy -----------------------------------------

# Names of special columns. STREAM and a stream's name: the weights of its tokens. CANDIDATES: further ids [response, k]
# whose log-probabilities are wanted.
STREAM, CANDIDATES = "stream:", "candidates"
# transformers uses a mask of four dimensions as it is, and then makes none from positions that start again.
NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@dataclass
class MicroBatch:
    """A part of an optimizer batch: B rows, R tokens of the longest response, n computed tokens in all.

    Attributes:
        inputs: keyword arguments of the model's forward pass: token ids, and more where prefixes are shared; and
            `PICTURES`, which `states.with_states` turns into arguments.
        states: place in the flattened tokens of the state that predicts each computed token, int64 [n].
        targets: the computed tokens' ids, int64 [n]; with candidates, their ids follow, [n, 1 + k].
        rows: the computed tokens' rows, int64 [n].
        places: their places in a flattened column [B * R], int64 [n].
        action_mask: true for response tokens that are trained, bool [B, R].
        computed: true for the n response tokens whose log-probabilities are computed, bool [B, R]: the trained tokens,
            and the tokens of a stream.
        columns: float32 [B, R] by name, 0 where padded: advantages, old_logprobs, the weights of streams, ...; logprobs
            if an engine made any row of the batch; a teacher's top k [B, R, k].
        sampled: true for rows with log-probabilities of an engine (expert data have none), bool [B].
        temperature: sampling temperature of each row, float32 [B].
        expert: true for an expert's rows, bool [B].
        pairs: the two rows of each preference pair, chosen and rejected, int64 [pairs, 2]; None: rows are no pairs.
    """

    inputs: dict[str, Any]
    states: Tensor
    targets: Tensor
    rows: Tensor
    places: Tensor
    action_mask: Tensor
    computed: Tensor
    columns: dict[str, Tensor]
    sampled: Tensor
    temperature: Tensor
    expert: Tensor
    pairs: Tensor | None = None

    def spread(self, values: Tensor) -> Tensor:
        """Values of the computed tokens [n, ...] as [B, R, ...]; 0 elsewhere.

        Places are used in place of the mask, whose true values a GPU would have to count for the CPU first.
        """
        spread = values.new_zeros(self.computed.numel(), *values.shape[1:])
        return spread.index_copy(0, self.places, values).unflatten(0, self.computed.shape)


@dataclass
class _Tokens:
    """Places of the rows' tokens: the first `prefix` [B] lie from `prefix_start` on, the rest from `rest_start` on."""

    inputs: dict[str, Any]
    prefix: Tensor
    prefix_start: Tensor
    rest_start: Tensor

    def place(self, rows: Tensor, index: Tensor) -> Tensor:
        """Places in the flattened tokens of the index-th tokens of these rows, int64 [n]."""
        prefix = self.prefix[rows]
        return torch.where(index < prefix, self.prefix_start[rows] + index, self.rest_start[rows] + index - prefix)


def collate(
    batch: OptimizerBatch, part: Part, device: torch.device, position_rule: PositionRule | None = None
) -> MicroBatch:
    """The micro-batch of a part's rows on the device; each row has a trained token.

    Args:
        batch, part, device: see above.
        position_rule: the model's rule for positions of rows with pictures (`Passes.position_rule`).

    Raises:
        ExperienceError: some experiences have advantages and others have none, or pictures do not fit their places.
    """
    experiences = [batch.experiences[row] for row in part.rows]
    width = max(e.response_length for e in experiences)
    columns = {name: _pad([values[row] for row in part.rows]) for name, values in batch.columns.items()}
    # The whole batch decides whether there is such a column: it must not depend on how the batch is cut.
    if any(e.advantages is not None for e in batch.experiences):
        columns["advantages"] = gather_response_attrs(experiences, "advantages", width).float()
    if any(e.logprobs is not None for e in batch.experiences):
        columns["logprobs"] = _pad([_logprobs(e) for e in experiences])
    pictures = list(map(PictureTensors.of_experience, experiences))
    positions = positions_of([e.tokens for e in experiences], pictures, position_rule)
    if part.groups:
        tokens = _shared(experiences, positions, part, device.type == "cpu")
    else:
        tokens = _padded(experiences, positions)
    if (inputs := picture_inputs(pictures, tokens.place)) is not None:
        tokens.inputs[PICTURES] = inputs
    action_mask = _pad([trained_mask(e) for e in experiences])
    weights = [column != 0 for name, column in columns.items() if name.startswith(STREAM)]
    computed = torch.stack([action_mask, *weights]).any(0) if weights else action_mask
    rows, offsets = computed.nonzero(as_tuple=True)
    index = torch.tensor([e.prompt_length for e in experiences])[rows] + offsets
    targets = tokens.inputs["input_ids"].flatten()[tokens.place(rows, index)]
    if CANDIDATES in columns:
        targets = torch.cat([targets[:, None], columns.pop(CANDIDATES)[computed]], -1)
    micro = MicroBatch(
        inputs=tokens.inputs,
        states=tokens.place(rows, index - 1),
        targets=targets,
        rows=rows,
        places=rows * computed.shape[1] + offsets,
        action_mask=action_mask,
        computed=computed,
        columns=columns,
        sampled=torch.tensor([e.logprobs is not None for e in experiences]),
        temperature=torch.tensor([float(e.info.get("temperature", 1.0)) for e in experiences]),
        expert=torch.tensor([is_expert(e) for e in experiences]),
        pairs=torch.tensor(part.rows).argsort().view(-1, 2) if batch.unit == 2 else None,
    )
    return micro if device.type == "cpu" else moved(micro, device)


def _padded(experiences: Sequence[Experience], positions: Sequence[Tensor]) -> _Tokens:
    """Rows side by side, padded on the right; the model itself counts tokens one by one."""
    tokens = _pad([e.tokens.long() for e in experiences])
    inputs = {"input_ids": tokens}
    if positions[0].dim() > 1:
        inputs["position_ids"] = _pad([row.T for row in positions]).permute(2, 0, 1).contiguous()
    none = torch.zeros(len(tokens), dtype=torch.int64)
    return _Tokens(inputs, none, none, torch.arange(len(tokens)) * tokens.shape[1])


def _shared(experiences: Sequence[Experience], positions: Sequence[Tensor], part: Part, on_cpu: bool) -> _Tokens:
    """All prefixes, then each row's tokens behind its prefix; `on_cpu`: the micro-batch stays on the CPU.

    A prefix has the positions that it has in each of its rows, and the rest of a row those that it has behind it.
    """
    prefixes: list[tuple[Tensor, Tensor]] = []  # tokens, and their positions
    rests: list[tuple[Tensor, Tensor]] = []
    seen: list[tuple[int, int]] = []  # for each row: length of its prefix, and where that starts
    rows, start = zip(experiences, positions, strict=True), 0
    for group in part.groups:
        members = list(islice(rows, len(group.rows)))
        prefixes += [(e.tokens[: group.prefix], row[..., : group.prefix]) for e, row in members[: group.prefix > 0]]
        rests += [(e.tokens[group.prefix :], row[..., group.prefix :]) for e, row in members]
        seen += [(group.prefix, start)] * len(members)
        start += group.prefix
    shared = [group for group in part.groups if group.prefix]
    segments = Segments([g.prefix for g in shared], [len(g.rows) for g in shared], [len(rest) for rest, _ in rests])
    attention = CpuSharedPrefix(segments) if on_cpu else FlexTables.of(segments)
    prefix, prefix_start = torch.tensor(seen).unbind(1)
    tokens, places = (torch.cat(parts, -1) for parts in zip(*prefixes, *rests, strict=True))
    padding = (0, attention.padding)
    inputs = {
        "input_ids": pad(tokens.long(), padding)[None],
        "position_ids": pad(places, padding).unsqueeze(-2),
        "attention_mask": NO_MASK,
        "shared_prefix": attention,
    }
    return _Tokens(inputs, prefix, prefix_start, torch.tensor(segments.starts()[len(shared) : -1]))


def _logprobs(experience: Experience) -> Tensor:
    """The engine's log-probabilities of the response; zeros without an engine."""
    return torch.zeros(experience.response_length) if experience.logprobs is None else experience.logprobs.float()


def _pad(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True) if rows[0].dim() > 1 else gather_rows(rows)


ALIGNMENT = 16  # bytes: each tensor in a buffer begins at a multiple


def moved(micro: MicroBatch, device: torch.device) -> MicroBatch:
    """The micro-batch with all of its tensors on the device, brought there by one copy."""
    values = {field.name: getattr(micro, field.name) for field in fields(micro)}
    fixed = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    inputs = {name: value for name, value in micro.inputs.items() if isinstance(value, Tensor)}
    flex, pictures = micro.inputs.get("shared_prefix"), micro.inputs.get(PICTURES)
    tables = flex.tensors if isinstance(flex, FlexTables) else ()
    of_pictures = pictures.tensors if isinstance(pictures, PictureInputs) else ()
    tensors = [*fixed.values(), *inputs.values(), *micro.columns.values(), *of_pictures, *tables]
    copies = iter(_moved_together(tensors, device))
    fixed, inputs, columns = (dict(zip(names, copies, strict=False)) for names in (fixed, inputs, micro.columns))
    others: dict[str, Any] = {}
    if isinstance(pictures, PictureInputs):
        others[PICTURES] = pictures.with_tensors(list(islice(copies, len(of_pictures))))
    if isinstance(flex, FlexTables):
        others["shared_prefix"] = flex.attention(list(copies))
    return replace(micro, **fixed, inputs=micro.inputs | inputs | others, columns=columns)


def _moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """CPU tensors of any shapes and dtypes on the device, by one copy; to a GPU it goes out of pinned memory.

    Nothing waits for the copy: the device computes only after it.
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

"""How the rows of an optimizer batch are computed: cut into micro-batches, their tensors, and passes through a model.

Two layouts of the same rows, both exact. `padded`: rows side by side, padded on the right to the longest; under a
causal mask no real token then attends to padding, and rows sorted by length waste little. `shared_prefix`: what several
prompts begin with is computed once, the rest of each row behind it, and nothing is padded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trinity_lightning.common.experience import Experience, gather_response_attrs, gather_rows
from trinity_lightning.common.optimizer_batch import OptimizerBatch, is_expert, trained_mask
from trinity_lightning.common.ranks import ALONE, Alone
from trinity_lightning.config.algorithm import Layout
from trinity_lightning.trainer.layers import CpuSharedPrefix, Segments

if TYPE_CHECKING:
    from trinity_lightning.trainer.placement import Whole

# -- micro-batches by a budget of computed tokens ----------------------------------------------------------------------

# `auto` shares prefixes if that computes at most this share of the padded layout's tokens: each takes up to 1.24 times
# a padded one's time (SmolLM2 in bfloat16).
WORTH_SHARING = 0.8
# Different prompts that a group looks back over, for the time to grow with their number and not with its square.
MOST_PROMPTS = 64


@dataclass(frozen=True)
class PrefixGroup:
    """Rows of an optimizer batch whose prompts begin alike.

    Attributes:
        prefix: how many tokens all of their prompts begin with, computed once; 0 if there is only one row.
        tokens: computed tokens: the prefix and what each row has behind it.
    """

    rows: tuple[int, ...]
    prefix: int
    tokens: int


@dataclass(frozen=True)
class Part:
    """What one micro-batch computes: these rows of the optimizer batch, in this order.

    Attributes:
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
    rows = []
    for row, experience in enumerate(batch.experiences):
        mask = trained_mask(experience)
        if skip_zero_advantage and experience.advantages is not None and not is_expert(experience):
            mask = mask & (experience.advantages != 0)
        if mask.any():
            rows.append(row)
    return rows


def cut(batch: OptimizerBatch, rows: Sequence[int], max_tokens: int, layout: Layout) -> list[Part]:
    """These rows of the batch in micro-batches of at most `max_tokens` computed tokens.

    A longer row, or pair of rows, has one of its own. The layout is not `auto`: `better_layout` chooses before.
    """
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

    It is the tokens that decide: a task's rollouts share their prompt, unless a workflow gave them different ones, and
    tasks with one row each what they begin with in common. Rows of different prompts are grouped only if they fit a
    micro-batch together, and at most `MOST_PROMPTS` of them.

    Example:
        Rows 0 and 1 have the prompt [5, 6, 7], row 2 has [5, 6, 8], row 3 has [9]. [5, 6, 7] computed once for rows 0
        and 1 saves 3 tokens, [5, 6] computed once for rows 0 to 2 saves 4. So rows 0 to 2 are a group with a prefix of
        2 tokens; row 3 is one by itself.
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
    """Sorted: prompts with a common prefix are neighbours, and any two share the least of what those between share."""
    found: dict[bytes, _Prompt] = {}
    for row in rows:
        tokens = experiences[row].tokens[: experiences[row].prompt_length]
        prompt = found.setdefault(tokens.long().numpy().tobytes(), _Prompt(tokens, [], 0))
        prompt.rows.append(row)
        prompt.total += len(experiences[row].tokens)
    return [found[key] for key in sorted(found)]


def _best_runs(prompts: Sequence[_Prompt], common: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """All prompts in runs [start, end) of neighbours, the last one first, such that shared prefixes save the most.

    By dynamic programming: saved(end) = max over start of saved(start) + prefix(start, end) * (rows - 1). `common` is
    what each prompt shares with the next.
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


# -- their tensors: made on the CPU, and moved to a GPU in one copy ----------------------------------------------------

# Columns that say more than a number of each token: the weights of a stream, by its name, and further ids [response, k]
# whose log-probabilities are wanted.
STREAM, CANDIDATES = "stream:", "candidates"
# Masks of four dimensions are the caller's own to transformers: it makes none from positions that start again.
NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@dataclass
class MicroBatch:
    """A part of an optimizer batch: B rows, R tokens of the longest response, n computed tokens in all.

    Attributes:
        inputs: keyword arguments of the model's forward pass: token ids, and where prefixes are shared what that needs.
        states: where in the flattened tokens the state is that predicts each computed token, int64 [n].
        targets: the computed tokens' ids, int64 [n]; with candidates those follow, [n, 1 + k].
        rows: the computed tokens' rows, int64 [n].
        action_mask: which response tokens are trained, bool [B, R].
        computed: of which response tokens log-probabilities are computed, bool [B, R], n of them true: the trained
            ones, and those of a stream.
        columns: float32 [B, R] by name, 0 where padded: advantages, old_logprobs, the weights of streams, ... and,
            where an engine made any of the rows, its logprobs; a teacher's top k [B, R, k].
        sampled: which rows have log-probabilities of an engine (expert data have none), bool [B].
        temperature: sampling temperature of each row, float32 [B].
        expert: which rows are an expert's, bool [B].
        pairs: the two rows of each preference pair, chosen and rejected, int64 [pairs, 2]; None: rows are no pairs.
    """

    inputs: dict[str, Any]
    states: Tensor
    targets: Tensor
    rows: Tensor
    action_mask: Tensor
    computed: Tensor
    columns: dict[str, Tensor]
    sampled: Tensor
    temperature: Tensor
    expert: Tensor
    pairs: Tensor | None = None

    def spread(self, values: Tensor) -> Tensor:
        """Values of the computed tokens [n, ...] as [B, R, ...]; 0 elsewhere."""
        spread = values.new_zeros(*self.computed.shape, *values.shape[1:])
        mask = self.computed if values.dim() == 1 else self.computed[..., None]
        return spread.masked_scatter(mask, values)


@dataclass
class _Tokens:
    """Where the rows' tokens are: the first `prefix` [B] from `prefix_start` on, the others from `own_start` on."""

    inputs: dict[str, Any]
    prefix: Tensor
    prefix_start: Tensor
    own_start: Tensor

    def place(self, rows: Tensor, index: Tensor) -> Tensor:
        """Places in the flattened tokens of the index-th tokens of these rows, int64 [n]."""
        prefix = self.prefix[rows]
        return torch.where(index < prefix, self.prefix_start[rows] + index, self.own_start[rows] + index - prefix)


def collate(batch: OptimizerBatch, part: Part, device: torch.device) -> MicroBatch:
    """The micro-batch of these rows, each with a trained token, on the device.

    Raises:
        ExperienceError: some experiences have advantages and some have none; the message names one.
    """
    experiences = [batch.experiences[row] for row in part.rows]
    width = max(e.response_length for e in experiences)
    columns = {name: _pad([values[row] for row in part.rows]) for name, values in batch.columns.items()}
    # Whether there is such a column is a matter of the whole batch: it must not depend on how that is cut.
    if any(e.advantages is not None for e in batch.experiences):
        columns["advantages"] = gather_response_attrs(experiences, "advantages", width).float()
    if any(e.logprobs is not None for e in batch.experiences):
        columns["logprobs"] = _pad([_logprobs(e) for e in experiences])
    tokens = _shared(experiences, part, device) if part.groups else _padded(experiences)
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
        action_mask=action_mask,
        computed=computed,
        columns=columns,
        sampled=torch.tensor([e.logprobs is not None for e in experiences]),
        temperature=torch.tensor([float(e.info.get("temperature", 1.0)) for e in experiences]),
        expert=torch.tensor([is_expert(e) for e in experiences]),
        pairs=torch.tensor(part.rows).argsort().view(-1, 2) if batch.unit == 2 else None,
    )
    if device.type == "cpu":
        return micro

    return moved(micro, device)


def _padded(experiences: Sequence[Experience]) -> _Tokens:
    tokens = _pad([e.tokens.long() for e in experiences])
    none = torch.zeros(len(tokens), dtype=torch.int64)
    return _Tokens({"input_ids": tokens}, none, none, torch.arange(len(tokens)) * tokens.shape[1])


def _shared(experiences: Sequence[Experience], part: Part, device: torch.device) -> _Tokens:
    """All prefixes, then what each row has behind its own."""
    prefixes: list[Tensor] = []
    own: list[Tensor] = []
    behind: list[tuple[int, int]] = []  # of each row: length of its prefix, and where that starts
    rows, start = iter(experiences), 0
    for group in part.groups:
        members = list(islice(rows, len(group.rows)))
        prefixes += [members[0].tokens[: group.prefix]] if group.prefix else []
        own += [e.tokens[group.prefix :] for e in members]
        behind += [(group.prefix, start)] * len(members)
        start += group.prefix
    shared = [group for group in part.groups if group.prefix]
    segments = Segments([g.prefix for g in shared], [len(g.rows) for g in shared], [len(tokens) for tokens in own])
    if device.type == "cuda":
        from trinity_lightning.trainer.layers import FlexSharedPrefix

        attention = FlexSharedPrefix.of(segments, device)
    else:
        attention = CpuSharedPrefix(segments)
    padding = torch.zeros(attention.padding, dtype=torch.int64)
    prefix, prefix_start = torch.tensor(behind).unbind(1)
    positions = [torch.arange(len(tokens)) for tokens in prefixes]
    positions += [torch.arange(skip, skip + len(tokens)) for (skip, _), tokens in zip(behind, own, strict=True)]
    inputs = {
        "input_ids": torch.cat([tokens.long() for tokens in (*prefixes, *own, padding)])[None],
        "position_ids": torch.cat([*positions, padding])[None],
        "attention_mask": NO_MASK,
        "shared_prefix": attention,
    }
    return _Tokens(inputs, prefix, prefix_start, torch.tensor(segments.starts()[len(shared) : -1]))


def _logprobs(experience: Experience) -> Tensor:
    return torch.zeros(experience.response_length) if experience.logprobs is None else experience.logprobs.float()


def _pad(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True) if rows[0].dim() > 1 else gather_rows(rows)


# -- passes through a model --------------------------------------------------------------------------------------------

# (model, inputs, positions [n], targets [n], temperature [n]) -> log-probabilities and entropies, float32 [n]. Inputs
# are arguments of the forward pass, among them `input_ids` [B, S]; a position is the place in the flattened tokens of
# the state that predicts the target. With candidates there are more targets a position, and as many log-probabilities:
# [n, 1 + k].
LogprobFn = Callable[[Any, dict[str, Any], Tensor, Tensor, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Passes:
    """How rows go through the policy, or a model of its architecture: what `auto` stands for on this device.

    Attributes:
        max_tokens: most computed tokens of a micro-batch.
        function: what is computed of trained tokens; log-probabilities first.
        all_rows: whether rows without advantage are computed too.
        as_trained: whether columns are computed with a graph for gradients, too: compiled layers round otherwise
            without one, and the first ratio would not be 1.
    """

    device: torch.device
    layout: Layout
    max_tokens: int
    function: LogprobFn
    all_rows: bool
    as_trained: bool

    def rows(self, batch: OptimizerBatch) -> list[int]:
        return rows_to_train(batch, skip_zero_advantage=not self.all_rows)

    def shares(self, batch: OptimizerBatch, rows: Sequence[int], ranks: int = 1) -> list[list[Part]]:
        """The micro-batches of each rank, which each of them knows."""
        layout, tokens = self.layout, self.max_tokens
        if layout is Layout.auto:
            # That of `columns`, which sees the whole step: in bfloat16 the first ratio would not be 1 otherwise.
            step = replace(batch, experiences=batch.step or batch.experiences)
            layout = better_layout(step, self.rows(step), tokens)
        dealt = [list(rows)]
        if ranks > 1:
            dealt = deal(batch, rows, ranks, tokens, layout)
        return [cut(batch, each, tokens, layout) for each in dealt]

    def through(self, model: Any, micro: MicroBatch, placement: "Whole") -> tuple[Tensor, ...]:
        """What the function yields of the computed tokens, each [B, R] (candidates: [B, R, 1 + k]); 0 elsewhere."""
        given = micro.inputs, micro.states, micro.targets, micro.temperature[micro.rows]
        return tuple(map(micro.spread, placement.logprobs(self.function, model, *given)))

    def columns(
        self, model: Any, batch: OptimizerBatch, placement: "Whole", kept: Sequence[int] = (0,), shared: bool = True
    ) -> list[list[Tensor]]:
        """Of what the function yields, the kept ones (log-probabilities alone), each of every experience's response.

        Each rank computes its share of the rows, and they are added up; or all of them, if not `shared`.
        """
        ranks = placement.ranks if shared else ALONE
        columns = [[torch.zeros(e.response_length) for e in batch.experiences] for _ in kept]
        was_training = model.training
        model.eval()  # dropout would make them another model's
        shares = self.shares(batch, self.rows(batch), ranks.size)
        for part in placement.passes(shares) if ranks.size > 1 else shares[0]:
            if part is None:
                idle(self, model, placement)
                continue
            with torch.set_grad_enabled(self.as_trained):
                found = self.through(model, collate(batch, part, model.device), placement)
            for column, values in zip(columns, (found[each].detach().cpu() for each in kept), strict=True):
                for row, value in zip(part.rows, values, strict=True):
                    column[row] = value[: len(column[row])].clone()
        model.train(was_training)
        if ranks.size > 1:
            columns = added_up(columns, ranks)
        return columns


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


def deal(batch: OptimizerBatch, rows: Sequence[int], size: int, max_tokens: int, layout: Layout) -> list[list[int]]:
    """Rows dealt to `size` ranks for each to compute about as many tokens; arguments as of `cut`.

    Rows that share a prefix stay together, unless there is too much of them for one rank; a pair always does.
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
        min(dealt, key=lambda rank: sum(each.tokens for each in rank)).append(group)
    return [sorted(row for group in rank for row in group.rows) for rank in dealt]


def idle(passes: Passes, model: Any, placement: "Whole") -> Tensor:
    """A pass that counts for nothing, made because the other ranks make one: a sum of log-probabilities."""
    batch = OptimizerBatch.of([Experience(tokens=[0, 0], prompt_length=1)], explore_step=0)
    (part,) = cut(batch, [0], 2, Layout.padded)
    return passes.through(model, collate(batch, part, model.device), placement)[0].sum()


def added_up(columns: Sequence[Sequence[Tensor]], ranks: Alone) -> list[list[Tensor]]:
    """The sum of each column of all ranks, of which each has computed some rows."""
    together = [torch.cat([*column, torch.zeros(0)]) for column in columns]
    ranks.add_up(together)
    lengths = [len(row) for row in columns[0]]
    return [list(each.split(lengths)) for each in together]

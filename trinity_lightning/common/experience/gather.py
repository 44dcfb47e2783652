"""Gathers unpadded experiences into padded tensors. P is the prompt width, R the response width, B the batch size.

Training gathers the per-token fields of responses (`gather_rows`). Tokens, masks and whole batches are gathered for
code written for Trinity-RFT. Rules that all rows must keep are checked in bulk: a loop over thousands of rows takes as
long as the copying.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from trinity_lightning.common.experience.experience import Experience
from trinity_lightning.common.experience.fields import EID, CustomField, ExperienceError

Device = torch.device | str | int | None

# -- per-token fields of the response ----------------------------------------------------------------------------------


def gather_response_attrs(
    experiences: Sequence[Experience],
    attr_name: str,
    max_response_length: int,
    pad_value: float = 0,
    *,
    device: Device = None,
    pin_memory: bool = False,
) -> Tensor:
    """A per-token field of the response, padded on the right: [B, R] in the dtype of the first.

    Args:
        experiences: at least one.
        attr_name: logprobs, advantages, returns, token_level_reward, teacher_logprobs or action_mask.
        max_response_length: R, in tokens.
        pad_value: value of the padding.
        device: device of the result; None: host memory.
        pin_memory: put the result into page-locked memory (ignored without a GPU).

    Raises:
        ExperienceError: empty list, mixed dtypes, a field that is missing, or one that is too long.
    """
    rows = _column_of(experiences, attr_name)
    _check_widths(experiences, _lengths_of(rows), max_response_length, f"a length of {attr_name}")
    return _to_device(gather_rows(rows, max_response_length, pad_value), device, pin_memory)


def gather_rows(rows: list[Tensor], width: int | None = None, pad_value: float = 0) -> Tensor:
    """Vectors padded on the right to one width: [B, R]. Nothing is checked.

    Args:
        rows: at least one, all of one dtype, none longer than `width`.
        width: R; None: the longest row.
        pad_value: value of the padding.
    """
    with torch.no_grad():
        width = max(map(Tensor.numel, rows)) if width is None else width
        if min(map(Tensor.numel, rows)) == width:
            return torch.cat(rows).view(len(rows), width)  # a third of the time that padding takes
        batch = pad_sequence(rows, batch_first=True, padding_value=pad_value)
        return pad(batch, (0, width - batch.shape[1]), value=pad_value) if batch.shape[1] < width else batch


# -- tokens, masks and multi-modal inputs ------------------------------------------------------------------------------


def _pad(rows: list[Tensor], left: np.ndarray, right: np.ndarray, pad_value: float) -> Tensor:
    """Rows with `left[i]` and `right[i]` cells of padding, which makes them equally wide: [B, left + row + right].

    Rows and slices of padding are concatenated flat: the result is allocated and written once. One slice serves as the
    right padding of a row and the left padding of the next.
    """
    gaps = np.append(left, 0) + np.append(0, right)
    pieces = rows
    if gaps.any():
        padding = torch.full((int(gaps.max()),), pad_value, dtype=rows[0].dtype, device=rows[0].device)
        slices = {gap: padding[:gap] for gap in set(gaps.tolist())}
        before, *after = map(slices.__getitem__, gaps.tolist())
        pieces = [before, *chain.from_iterable(zip(rows, after, strict=True))]
    with torch.no_grad():
        return torch.cat(pieces).view(len(rows), -1)


def _token_spans(
    experiences: Sequence[Experience], rows: Sequence[Tensor], max_prompt: int, max_response: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and response lengths in tokens, checked against the widths; `rows` are the experiences' tokens."""
    prompts = np.array([e.prompt_length for e in experiences])
    if not np.can_cast(prompts.dtype, np.int64):  # assigned after construction: a fraction, or beyond 64 bits
        bad = next(e for e in experiences if not np.can_cast(np.array(e.prompt_length).dtype, np.int64))
        raise ExperienceError(
            f"experience {bad.eid.uid}: expected an integer prompt_length, got {bad.prompt_length!r}."
        )
    prompts = prompts.astype(np.int64)
    responses = _lengths_of(rows) - prompts
    _check_widths(experiences, prompts, max_prompt, "a prompt length")
    _check_widths(experiences, responses, max_response, "a response length")
    return prompts, responses


def gather_token_ids(
    experiences: Sequence[Experience],
    max_prompt_length: int,
    max_response_length: int,
    pad_token_id: int,
    *,
    device: Device = None,
    pin_memory: bool = False,
) -> Tensor:
    """Token ids [B, P + R] in the dtype of the first: prompts padded on the left to P, responses on the right to R.

    Args:
        experiences: at least one.
        max_prompt_length, max_response_length: P and R, in tokens.
        pad_token_id: token id of the padding.
        device, pin_memory: as in `gather_response_attrs`.

    Raises:
        ExperienceError: empty list, mixed dtypes, or a prompt or response that is too long.
    """
    rows = _column_of(experiences, "tokens")
    prompts, responses = _token_spans(experiences, rows, max_prompt_length, max_response_length)
    left, right = max_prompt_length - prompts, max_response_length - responses
    return _to_device(_pad(rows, left, right, pad_token_id), device, pin_memory)


def gather_attention_masks(
    experiences: Sequence[Experience],
    max_prompt_length: int,
    max_response_length: int,
    *,
    device: Device = None,
    pin_memory: bool = False,
) -> Tensor:
    """Mask of the cells of `gather_token_ids` that hold tokens, bool [B, P + R]; arguments and errors as there."""
    _first_of(experiences)
    rows = [e.tokens for e in experiences]
    prompts, responses = _token_spans(experiences, rows, max_prompt_length, max_response_length)
    shape = (len(experiences), max_prompt_length + max_response_length)
    masks = torch.empty(shape, dtype=torch.bool, device="cpu")
    starts, ends = max_prompt_length - prompts, max_prompt_length + responses
    if starts.min() == starts.max() and ends.min() == ends.max():
        masks.fill_(True)
        masks[:, : starts[0]] = False
        masks[:, ends[0] :] = False
    else:
        columns = torch.arange(shape[1], device="cpu")  # whatever the default device is
        torch.ge(columns, torch.from_numpy(starts)[:, None], out=masks)
        masks &= columns < torch.from_numpy(ends)[:, None]
    return _to_device(masks, device, pin_memory)


def gather_action_masks(
    experiences: Sequence[Experience], max_response_length: int, *, device: Device = None, pin_memory: bool = False
) -> Tensor:
    """Mask of the response cells that are trained on, bool [B, R]; arguments and errors as in `gather_token_ids`."""
    masks = gather_response_attrs(experiences, "action_mask", max_response_length)
    return _to_device(masks.bool(), device, pin_memory)


def gather_multi_modal_inputs(
    experiences: Sequence[Experience], *, device: Device = None, pin_memory: bool = False
) -> dict[str, Tensor]:
    """The multi-modal tensors by name: rows of all experiences, joined along dimension 0 as processors do.

    Raises:
        ExperienceError: empty list, an experience without them, names that differ, or tensors that do not fit together.
    """
    keys = (_first_of(experiences).multi_modal_inputs or {}).keys()
    inputs: list[dict[str, Tensor]] = []
    for experience in experiences:
        if experience.multi_modal_inputs is None or experience.multi_modal_inputs.keys() != keys:
            got = None if experience.multi_modal_inputs is None else sorted(experience.multi_modal_inputs)
            raise ExperienceError(
                f"experience {experience.eid.uid}: multi_modal_inputs: expected the keys {sorted(keys)} "
                f"as in the first of the batch, got {got}."
            )
        inputs.append(experience.multi_modal_inputs)
    return {key: _concatenate(key, [row[key] for row in inputs], device, pin_memory) for key in keys}


def _concatenate(key: str, tensors: Sequence[Tensor], device: Device, pin_memory: bool) -> Tensor:
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ExperienceError(f"multi_modal_inputs[{key!r}]: expected one dtype, got {[t.dtype for t in tensors]}.")
    try:
        batch = torch.cat(list(tensors))
    except RuntimeError as error:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ExperienceError(f"multi_modal_inputs[{key!r}]: shapes do not fit together: {shapes}.") from error
    return _to_device(batch, device, pin_memory)


# -- whole batches -----------------------------------------------------------------------------------------------------


@dataclass
class Experiences:
    """A padded batch. B experiences, P prompt cells (padded on the left), R response cells (padded on the right).

    Every field, custom ones by their destination name, can be read as an attribute and by key.

    Attributes:
        eids: identities, B of them.
        tokens: [B, P + R].
        rewards: float32 [B].
        token_level_rewards, advantages, returns: [B, R].
        attention_masks: true for cells that hold tokens, bool [B, P + R].
        action_masks: true for response cells that are trained on, bool [B, R].
        prompt_length: P, the longest prompt.
        logprobs, teacher_logprobs: [B, R].
        multi_modal_inputs: by name, concatenated along dimension 0.
        custom_fields: by destination name, [B] each.

    Optional tensors are None if no experience has them.
    """

    eids: list[EID]
    tokens: Tensor
    rewards: Tensor | None
    token_level_rewards: Tensor | None
    advantages: Tensor | None
    returns: Tensor | None
    attention_masks: Tensor
    action_masks: Tensor
    prompt_length: int
    logprobs: Tensor | None
    teacher_logprobs: Tensor | None
    multi_modal_inputs: dict[str, Tensor] | None
    custom_fields: dict[str, Tensor] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.tokens)

    def __getattr__(self, name: str) -> Any:
        custom = vars(self).get("custom_fields", {})  # not an attribute yet while a copy is being made
        if name in custom:
            return custom[name]
        raise AttributeError(f"the batch has no field {name!r}. Custom fields: {sorted(custom) or 'none'}.")

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError as error:
            raise KeyError(str(error)) from error


def gather_experiences(
    experiences: Sequence[Experience],
    pad_token_id: int,
    device: Device = None,
    custom_fields: Sequence[CustomField] | None = None,
) -> Experiences:
    """The padded batch of some experiences; preference pairs are first split into single turns.

    Args:
        experiences: at least one.
        pad_token_id: token id of cells without a token.
        device: device of the tensors; None: host memory.
        custom_fields: columns to take from `info`; None: the experiences' own custom fields.

    Raises:
        ExperienceError: empty list, preference pairs mixed with other types, an optional field that only some have, a
            custom field missing in some `info`, experiences whose own custom fields differ, or mixed dtypes.
    """
    _first_of(experiences)
    pairs = sum(e.experience_type == "dpo" for e in experiences)
    if 0 < pairs < len(experiences):
        raise ExperienceError(
            f"expected preference pairs only or none, got {pairs} among {len(experiences)} experiences."
        )
    if pairs:
        experiences = split_dpo_experience_to_single_turn(experiences)
    if custom_fields is None:
        custom_fields = _common_custom_fields(experiences)
    prompt = max(e.prompt_length for e in experiences)
    response = max(max(len(e.tokens) - e.prompt_length, e.response_length) for e in experiences)

    def per_token(name: str) -> Tensor | None:
        return _if_all(experiences, name, lambda: gather_response_attrs(experiences, name, response, device=device))

    def rewards() -> Tensor:
        return torch.tensor([e.reward for e in experiences], dtype=torch.float32, device=device)

    return Experiences(
        eids=[e.eid for e in experiences],
        tokens=gather_token_ids(experiences, prompt, response, pad_token_id, device=device),
        rewards=_if_all(experiences, "reward", rewards),
        token_level_rewards=per_token("token_level_reward"),
        advantages=per_token("advantages"),
        returns=per_token("returns"),
        attention_masks=gather_attention_masks(experiences, prompt, response, device=device),
        action_masks=gather_action_masks(experiences, response, device=device),
        prompt_length=prompt,
        logprobs=per_token("logprobs"),
        teacher_logprobs=per_token("teacher_logprobs"),
        multi_modal_inputs=_if_all(
            experiences, "multi_modal_inputs", lambda: gather_multi_modal_inputs(experiences, device=device)
        ),
        custom_fields=_custom_columns(experiences, custom_fields, device),
    )


def _if_all(experiences: Sequence[Experience], name: str, make: Callable[[], Any]) -> Any:
    """The result of `make()` if all experiences have the field, None if none has."""
    lacking = [e for e in experiences if getattr(e, name) is None]
    if not lacking:
        return make()
    if len(lacking) == len(experiences):
        return None
    having = next(e for e in experiences if getattr(e, name) is not None)
    raise ExperienceError(
        f"{name}: expected in all experiences or in none; {having.eid.uid} has it, {lacking[0].eid.uid} does not."
    )


def _common_custom_fields(experiences: Sequence[Experience]) -> list[CustomField]:
    fields = experiences[0].custom_fields
    for experience in experiences:
        if experience.custom_fields != fields:
            raise ExperienceError(
                f"experience {experience.eid.uid}: custom_fields: expected {fields} as in the first of the batch, "
                f"got {experience.custom_fields}."
            )
    return fields


def _custom_columns(
    experiences: Sequence[Experience], custom_fields: Sequence[CustomField], device: Device
) -> dict[str, Tensor]:
    columns: dict[str, Tensor] = {}
    for custom in custom_fields:
        source, destination = custom.source_field, custom.destination_field
        if destination in columns or hasattr(Experiences, destination) or destination in Experiences.__annotations__:
            raise ExperienceError(f"custom field {destination!r}: the batch has a field of that name already.")
        for experience in experiences:
            if source not in experience.info:
                raise ExperienceError(
                    f"experience {experience.eid.uid}: custom field {destination!r}: expected the key {source!r} in "
                    f"info, got {sorted(map(str, experience.info))}."
                )
        try:
            columns[destination] = torch.tensor(
                [e.info[source] for e in experiences], dtype=custom.data_type, device=device
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise ExperienceError(f"custom field {destination!r}: info[{source!r}] is not a number: {error}") from error
    return columns


# -- preference pairs --------------------------------------------------------------------------------------------------


def split_dpo_experience_to_single_turn(experiences: Sequence[Experience]) -> list[Experience]:
    """Every preference pair as two single turns: [chosen 0, rejected 0, chosen 1, rejected 1, ...].

    Each has the prompt followed by its response as tokens, the pair's batch, task, run and step with a fresh suffix,
    and the pair's reward, info, metrics, prompt_text, tools, multi_modal_inputs and custom fields; its messages are the
    chosen or the rejected ones.

    Raises:
        ExperienceError: an experience lacks chosen or rejected tokens.
    """
    singles = []
    for pair in experiences:
        for name in ("chosen", "rejected"):
            response = getattr(pair, name)
            if response is None:
                raise ExperienceError(f"experience {pair.eid.uid}: {name}: expected token ids to split, got None.")
            singles.append(
                Experience(
                    eid=EID(batch=pair.eid.batch, task=pair.eid.task, run=pair.eid.run, step=pair.eid.step),
                    tokens=torch.cat([pair.tokens, response]),
                    prompt_length=len(pair.tokens),
                    reward=pair.reward,
                    info=dict(pair.info),  # a copy, so that writing into one half leaves the other alone
                    metrics=dict(pair.metrics),
                    prompt_text=pair.prompt_text,
                    messages=getattr(pair, f"{name}_messages"),
                    tools=pair.tools,
                    multi_modal_inputs=pair.multi_modal_inputs,
                    custom_fields=pair.custom_fields,
                )
            )
    return singles


# -- rows of a batch, checked in bulk ----------------------------------------------------------------------------------


def _first_of(experiences: Sequence[Experience]) -> Experience:
    """The first experience of a list that must not be empty."""
    if not experiences:
        raise ExperienceError("expected at least one experience to gather, got an empty list.")
    return experiences[0]


def _column_of(experiences: Sequence[Experience], name: str) -> list[Tensor]:
    """One field of every experience; all must have it, in the dtype of the first."""
    dtype = getattr(getattr(_first_of(experiences), name, None), "dtype", None)
    try:
        rows: list[Any] = list(map(attrgetter(name), experiences))
        if set(map(attrgetter("dtype"), rows)) == {dtype} and isinstance(dtype, torch.dtype):
            return rows
    except AttributeError:  # an unknown name, or None in place of a tensor
        pass
    raise _no_column(experiences, name, dtype)


def _no_column(experiences: Sequence[Experience], name: str, dtype: torch.dtype | None) -> ExperienceError:
    """The error for a field that some experience lacks, or has in another dtype than the first one's, `dtype`."""
    tensors = [getattr(experience, name, None) for experience in experiences]
    row = next(row for row, tensor in enumerate(tensors) if not isinstance(tensor, Tensor) or tensor.dtype != dtype)
    wrong = tensors[row]
    got = wrong.dtype if isinstance(wrong, Tensor) else type(wrong).__name__
    expected = f"{dtype} as in the first of the batch" if dtype else "a tensor"
    return ExperienceError(f"experience {experiences[row].eid.uid}: {name}: expected {expected}, got {got}.")


def _lengths_of(rows: Sequence[Tensor]) -> np.ndarray:
    """The length of each row, int64 [B]."""
    return np.fromiter(map(Tensor.numel, rows), np.int64, len(rows))


def _check_widths(experiences: Sequence[Experience], lengths: np.ndarray, width: int, name: str) -> None:
    """Refuse lengths beyond the width; the error names the first such experience, and calls the length `name`."""
    wrong = np.flatnonzero((lengths < 0) | (lengths > width))
    if len(wrong):
        uid = experiences[wrong[0]].eid.uid
        raise ExperienceError(f"experience {uid}: expected {name} of at most {width}, got {lengths[wrong[0]]}.")


def _to_device(batch: Tensor, device: Device, pin_memory: bool) -> Tensor:
    """The batch on a device, or in page-locked host memory if `pin_memory` asks for it and there is a GPU."""
    if pin_memory and torch.cuda.is_available() and batch.is_cpu:
        batch = batch.pin_memory()
    return batch if device is None else batch.to(device, non_blocking=pin_memory)

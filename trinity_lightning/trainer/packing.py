"""From one optimizer batch to micro-batches: cut by a token budget, padded on the device.

Rows are padded on the right only. Under a causal mask no real token then attends to padding, so that no attention mask
is needed at all, and rows sorted by length waste little.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trinity_lightning.common.experience import Experience, gather_response_attrs
from trinity_lightning.common.expert import is_expert
from trinity_lightning.common.optimizer_batch import OptimizerBatch, trained_mask


@dataclass
class MicroBatch:
    """A padded part of an optimizer batch. B rows, S tokens a row, R tokens of the longest response.

    Attributes:
        tokens: token ids, padded on the right, int64 [B, S].
        starts: prompt length of each row, where its response starts, int64 [B].
        action_mask: which response tokens are trained, bool [B, R].
        columns: float32 [B, R] by name, 0 where padded: advantages, old_logprobs, ... and, where an engine made any of
            the rows, its logprobs.
        sampled: which rows have log-probabilities of an engine (expert data have none), bool [B].
        temperature: sampling temperature of each row, float32 [B].
        expert: which rows are an expert's, bool [B].
    """

    tokens: Tensor
    starts: Tensor
    action_mask: Tensor
    columns: dict[str, Tensor]
    sampled: Tensor
    temperature: Tensor
    expert: Tensor

    def positions(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each trained token, in order: where the state that predicts it is, what it is, and its row.

        Returns:
            Indices into the flattened [B * S], token ids and row numbers; each int64 [n].
        """
        rows, offsets = self.action_mask.nonzero(as_tuple=True)
        flat = rows * self.tokens.shape[1] + self.starts[rows] + offsets
        return flat - 1, self.tokens.flatten()[flat], rows


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


def cut(lengths: Sequence[int], rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows dealt into micro-batches of at most `max_tokens` padded tokens, longest first.

    A row longer than the budget gets a micro-batch of its own.

    Args:
        lengths: tokens of each row of the batch.
        rows: the rows to deal, a subset.
        max_tokens: budget of rows x longest row.
    """
    parts: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def collate(batch: OptimizerBatch, rows: Sequence[int], device: torch.device) -> MicroBatch:
    """The micro-batch of these rows, each with a trained token, on the device.

    Raises:
        ExperienceError: some experiences have advantages and some have none; the message names one.
    """
    experiences = [batch.experiences[row] for row in rows]
    width = max(e.response_length for e in experiences)
    columns = {name: _pad([values[row] for row in rows], device) for name, values in batch.columns.items()}
    # Whether there is such a column is a matter of the whole batch: it must not depend on how that is cut.
    if any(e.advantages is not None for e in batch.experiences):
        columns["advantages"] = gather_response_attrs(experiences, "advantages", width, device=device).float()
    if any(e.logprobs is not None for e in batch.experiences):
        columns["logprobs"] = _pad([_logprobs(e) for e in experiences], device)
    return MicroBatch(
        tokens=_pad([e.tokens.long() for e in experiences], device),
        starts=torch.tensor([e.prompt_length for e in experiences], device=device),
        action_mask=_pad([trained_mask(e) for e in experiences], device),
        columns=columns,
        sampled=torch.tensor([e.logprobs is not None for e in experiences], device=device),
        temperature=torch.tensor([float(e.info.get("temperature", 1.0)) for e in experiences], device=device),
        expert=torch.tensor([is_expert(e) for e in experiences], device=device),
    )


def _logprobs(experience: Experience) -> Tensor:
    return torch.zeros(experience.response_length) if experience.logprobs is None else experience.logprobs.float()


def _pad(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    return pad_sequence(list(rows), batch_first=True).to(device)


def padding_ratio(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> float:
    """Padded tokens computed per real token."""
    real = sum(lengths[row] for part in parts for row in part)
    return sum(len(part) * max(lengths[row] for row in part) for part in parts) / max(real, 1)

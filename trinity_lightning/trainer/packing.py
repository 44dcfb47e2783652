"""From one optimizer batch to micro-batches: cut by a token budget, padded on the device.

Rows are padded on the right only. Under a causal mask no real token then attends to padding, so that no attention mask
is needed at all, and rows sorted by length waste little.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trinity_lightning.common.experience import Experience, gather_action_masks, gather_response_attrs
from trinity_lightning.common.optimizer_batch import OptimizerBatch


@dataclass
class MicroBatch:
    """A padded part of an optimizer batch. B rows, S tokens a row, R tokens of the longest response.

    Attributes:
        tokens: token ids, padded on the right.
        starts: prompt length of each row: where its response starts.
        action_mask: which response tokens are trained.
        columns: per-token float32 tensors by name, 0 where padded: advantages, logprobs, old_logprobs, ...
        temperature: sampling temperature of each row.
    """

    tokens: Int[Tensor, "B S"]
    starts: Int[Tensor, " B"]
    action_mask: Bool[Tensor, "B R"]
    columns: dict[str, Float[Tensor, "B R"]]
    temperature: Float[Tensor, " B"]

    def positions(self, mask: Bool[Tensor, "B R"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """Flat indices [B * S] of the states that predict the response tokens in `mask`, and those tokens."""
        rows, offsets = mask.nonzero(as_tuple=True)
        flat = rows * self.tokens.shape[1] + self.starts[rows] + offsets
        return flat - 1, self.tokens.flatten()[flat].long()


def trainable_rows(batch: OptimizerBatch, skip_zero_advantage: bool) -> list[int]:
    """Rows worth computing: those with a trained token, and (if no other loss term needs them) a non-zero advantage."""
    return [row for row, experience in enumerate(batch.experiences) if _is_trained(experience, skip_zero_advantage)]


def _is_trained(experience: Experience, skip_zero_advantage: bool) -> bool:
    mask = experience.action_mask
    if mask is None or not bool(mask.any()):
        return False
    advantages = experience.advantages
    return not skip_zero_advantage or advantages is None or bool((advantages * mask).any())


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
    """The micro-batch of these rows, on the device."""
    experiences = [batch.experiences[row] for row in rows]
    width = max(len(e.tokens) - e.prompt_length for e in experiences)
    columns = {}
    for name in ("advantages", "logprobs"):
        if all(getattr(e, name) is not None for e in experiences):
            columns[name] = gather_response_attrs(experiences, name, width, device=device).float()
    for name, values in batch.columns.items():
        columns[name] = torch.nn.utils.rnn.pad_sequence([values[row] for row in rows], batch_first=True).to(device)
    starts = torch.tensor([e.prompt_length for e in experiences], device=device)
    action_mask = gather_action_masks(experiences, width, device=device)
    if (starts == 0).any():
        action_mask[starts == 0, 0] = False  # nothing precedes the very first token, so nothing predicts it
    return MicroBatch(
        tokens=torch.nn.utils.rnn.pad_sequence([e.tokens.long() for e in experiences], batch_first=True).to(device),
        starts=starts,
        action_mask=action_mask,
        columns=columns,
        temperature=torch.tensor([float(e.info.get("temperature", 1.0)) for e in experiences], device=device),
    )


def padding_ratio(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> float:
    """Padded tokens computed per real token."""
    real = sum(lengths[row] for part in parts for row in part)
    return sum(len(part) * max(lengths[row] for row in part) for part in parts) / max(real, 1)

"""A gradient that is not finite: what of the optimizer batch it came from."""

from collections.abc import Sequence

from torch import Tensor

from trinity_lightning.common.optimizer_batch import OptimizerBatch

MAX_NAMED = 5


def describe_fault(
    batch: OptimizerBatch, parts: Sequence[Sequence[int]], losses: Tensor, parameters: Sequence[str]
) -> str:
    """The experiences with values that are not finite, or whose loss is not, and the first parameter at fault.

    `parts` are the rows, and `losses` [parts] the loss of each micro-batch; `parameters`: names of those whose
    gradients are not finite.
    """
    computed = sorted(row for part in parts for row in part)
    wrong = {row: names for row in computed if (names := _not_finite(batch, row))}
    rows = list(wrong) or sorted(
        row for part, loss in zip(parts, losses, strict=True) if not loss.isfinite() for row in part
    )
    named = ", ".join(f"{batch.experiences[row].eid}" for row in rows[:MAX_NAMED])
    more = f" and {len(rows) - MAX_NAMED} more" if len(rows) > MAX_NAMED else ""
    values = sorted({name for names in wrong.values() for name in names})
    found = [f"{' and '.join(values) or 'the loss'} of experiences {named}{more}"] if rows else []
    found += [f"the gradient of {name}" for name in parameters[:1]]
    return f"not finite: {', '.join(found) or 'the norm alone, which overflowed'}"


def _not_finite(batch: OptimizerBatch, row: int) -> list[str]:
    experience = batch.experiences[row]
    values = {"advantages": experience.advantages, "logprobs": experience.logprobs}
    values |= {name: column[row] for name, column in batch.columns.items()}
    return [name for name, value in values.items() if value is not None and not value.isfinite().all()]

"""Where a gradient that is not finite comes from, as far as that is cheaply known."""

from collections.abc import Sequence

from torch import Tensor, nn

from trinity_lightning.common.optimizer_batch import OptimizerBatch

MAX_NAMED = 5


def describe_fault(batch: OptimizerBatch, parts: Sequence[Sequence[int]], losses: Tensor, model: nn.Module) -> str:
    """The experiences with values that are not finite, or whose loss is not, and the first such parameter's gradient.

    Args:
        batch: the optimizer batch.
        parts: rows of each micro-batch.
        losses: loss of each micro-batch [parts].
        model: the policy, with its gradients.
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
    gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    parameter = next((name for name, gradient in gradients if not gradient.isfinite().all()), None)
    found += [f"the gradient of {parameter}"] if parameter is not None else []
    return f"not finite: {', '.join(found) or 'the norm alone, which overflowed'}"


def _not_finite(batch: OptimizerBatch, row: int) -> list[str]:
    experience = batch.experiences[row]
    values = {"advantages": experience.advantages, "logprobs": experience.logprobs}
    values |= {name: column[row] for name, column in batch.columns.items()}
    return [name for name, value in values.items() if value is not None and not value.isfinite().all()]

"""A gradient that is not finite: what of the optimizer batch it came from."""

import logging
from collections.abc import Sequence

from torch import Tensor

from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.errors import TrinityError
from trinity_lightning.trainer.layout import Part
from trinity_lightning.trainer.policy import PolicyModule

logger = logging.getLogger(__name__)
MAX_NAMED = 5


def count_bad_step(
    policy: PolicyModule, batch: OptimizerBatch, norm: float, parts: Sequence[Part], losses: Tensor
) -> None:
    """Count a step without a finite gradient, and log what is at fault.

    Raises:
        TrinityError: too many come in a row.
    """
    faulty = policy.placement.faulty_gradients(policy.policy)
    for part, each in policy.critic.trained.items():
        faulty += [f"{part}.{name}" for name in policy.placement.faulty_gradients(each)]
    fault = describe_fault(batch, [part.rows for part in parts], losses, faulty)
    in_a_row = policy.bad_steps_in_a_row + 1
    what = f"the gradient of explore step {batch.explore_step} has norm {norm} ({fault})"
    if in_a_row >= policy.algorithm.max_bad_steps:
        policy.bad_steps_in_a_row = 0  # a resumed run begins with this item, and may skip as many again
        raise TrinityError(
            f"{what}, optimizer step {in_a_row} of this kind in a row (algorithm.max_bad_steps). "
            "Look at these experiences and at the learning rate; the weights are those of the last good step."
        )
    policy.bad_steps, policy.bad_steps_in_a_row = policy.bad_steps + 1, in_a_row
    logger.warning("%s: no optimizer step was taken, %d so far.", what, policy.bad_steps)


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

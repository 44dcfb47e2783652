"""Identity of an experience: where in the run it came from."""

import secrets
from dataclasses import dataclass, field
from typing import Any


def _random_suffix() -> str:
    """12 random hex digits: two of a million experiences share one with probability 0.002 (6 digits: certainly)."""
    return secrets.token_hex(6)


@dataclass(repr=False)
class EID:
    """Identity of one experience.

    Attributes:
        batch: explore step, or "<step>/<eval taskset>"; set by the workflow runner.
        task: position of the task in the batch; set by the workflow runner.
        run: which of the task's rollouts; set by the workflow, or by the runner where workflows do not repeat.
        step: which step of a rollout of several; set by the workflow.
        suffix: tells experiences apart that agree in everything else.
    """

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=_random_suffix)

    @property
    def uid(self) -> str:
        """Unique identifier, "batch/task/run/step/suffix"."""
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"

    @property
    def sid(self) -> str:
        """Step identifier "batch/task/step": the same step of all runs of a task."""
        return f"{self.batch}/{self.task}/{self.step}"

    @property
    def rid(self) -> str:
        """Run identifier "batch/task/run": all steps of one run of a task."""
        return f"{self.batch}/{self.task}/{self.run}"

    @property
    def tid(self) -> str:
        """Task identifier "batch/task": all runs of a task, the group of GRPO and its relatives."""
        return f"{self.batch}/{self.task}"

    def __str__(self) -> str:
        return self.uid

    def __repr__(self) -> str:
        return f"EID(batch={self.batch}, task={self.task}, run={self.run}, step={self.step}, uuid={self.suffix})"

    def to_dict(self) -> dict[str, Any]:
        """The five fields as a dict; `EID(**eid.to_dict()) == eid`."""
        return dict(vars(self))

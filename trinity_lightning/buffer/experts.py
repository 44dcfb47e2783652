"""Expert data that join the rollouts of an explore step."""

from typing import Any

import torch

from trinity_lightning.buffer.reader import BufferReader
from trinity_lightning.buffer.storage.errors import StorageError
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.expert import marked
from trinity_lightning.config.values import whole_number


class ExpertData:
    """So many expert experiences for every explore step, out of a reader that does not end.

    What was read counts as read when `keep` says that the explore step has taken it: a step cut short reads the same
    again, so that the state always is that of the last whole step.

    Args:
        reader: where they come from, in its order; for data that end a `RepeatingReader`.
        per_step: expert experiences an explore step.

    Raises:
        ConfigError: a number below 1.
    """

    def __init__(self, reader: BufferReader, per_step: int) -> None:
        whole_number("per_step", per_step, least=1)
        self._reader, self._per_step = reader, per_step
        self._taken = reader.state_dict()
        self._ahead = False  # whether the reader stands behind what no step has taken

    def read(self, step: int) -> list[Experience]:
        """Those of explore step `step`: marked as an expert's, without advantage, identities within the step.

        Raises:
            StorageError: the reader has nothing more to give.
        """
        if self._ahead:
            self._reader.load_state_dict(self._taken)
        self._ahead = True
        experiences: list[Experience] = []
        while (missing := self._per_step - len(experiences)) > 0:
            more = self._reader.read(missing)
            if not more:
                raise StorageError("the expert data have ended, or there are none: give more, or let them repeat.")
            experiences += more
        return [_joining(experience, step, number) for number, experience in enumerate(experiences)]

    def keep(self) -> None:
        """The explore step has taken what was read last."""
        self._taken, self._ahead = self._reader.state_dict(), False

    def state_dict(self) -> dict[str, Any]:
        """Where the reader stood after the last step that has taken its share."""
        return self._taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; errors as the reader's."""
        self._reader.load_state_dict(state)
        self._taken, self._ahead = state, False


def _joining(experience: Experience, step: int, number: int) -> Experience:
    """A copy fit to stand among rollouts.

    Its log-probabilities, where it has some, are of another policy: they say nothing of this run's engine, and would
    raise the alarm that watches it.
    """
    joining = marked(experience, expert=True)
    joining.eid = EID(batch=step, task=f"expert-{number}", suffix=experience.eid.suffix)
    joining.logprobs = None
    joining.advantages = torch.zeros(experience.response_length)
    joining.returns = None
    return joining

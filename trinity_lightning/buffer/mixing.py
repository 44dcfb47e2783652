"""Readers made of readers: the same data again and again, and expert data among rollouts."""

from typing import Any

from trinity_lightning.buffer.reader import BufferReader, CursorReader, check_count
from trinity_lightning.buffer.storage.errors import StorageError
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.expert import marked


class RepeatingReader(BufferReader):
    """Starts over where another reader ends; the last read of a pass may be short.

    Attributes:
        passes: how often it has started over.
    """

    def __init__(self, reader: CursorReader) -> None:
        self._reader = reader
        self.passes = 0

    def _try_read(self, count: int | None, whole_groups: bool, last: bool) -> list[Experience] | None:
        got = self._reader.read(count, whole_groups=whole_groups)
        if not got:
            self._reader.rewind()
            got = self._reader.read(count, whole_groups=whole_groups)
            self.passes += bool(got)
        return got if got or last else None

    def state_dict(self) -> dict[str, Any]:
        """Where the reader stands, and in which pass."""
        return {"reader": self._reader.state_dict(), "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; errors as the reader's."""
        self._reader.load_state_dict(state["reader"])
        self.passes = state["passes"]

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()


class MixedReader(BufferReader):
    """Rollouts and expert data in a ratio, held over all reads together as nearly as whole experiences allow.

    The experiences are copies whose `info["is_expert"]` tells one from the other, in a column `expert_mask` of the
    batch. Of each read the rollouts come first. When the rollouts end, so does this reader; while they are short, it
    gives fewer expert experiences too.

    Args:
        rollouts, experts: where they are read from; for few expert data that are to last, a `RepeatingReader`.
        expert_data_ratio: share of expert experiences, in [0, 1).

    Raises:
        ConfigError: a share out of range.
    """

    def __init__(self, rollouts: BufferReader, experts: BufferReader, expert_data_ratio: float) -> None:
        if not 0 <= expert_data_ratio < 1:
            raise ConfigError(f"expert_data_ratio is {expert_data_ratio}; give a number of at least 0 and below 1.")
        self._rollouts, self._experts, self._ratio = rollouts, experts, expert_data_ratio
        self._rollouts_read = self._experts_read = 0

    def _try_read(self, count: int | None, whole_groups: bool, last: bool) -> list[Experience] | None:
        check_count(count)
        if count is None:
            raise ValueError("count: expected a number: two readers have no common next write.")
        total = self._rollouts_read + self._experts_read + count
        share = min(max(round(self._ratio * total) - self._experts_read, 0), count)
        rollouts: list[Experience] = []
        if share < count:
            got = self._rollouts._try_read(count - share, whole_groups, last)
            if not got:
                return got
            rollouts = got
        if len(rollouts) < count - share:
            due = self._ratio / (1 - self._ratio) * (self._rollouts_read + len(rollouts))
            share = min(max(round(due) - self._experts_read, 0), share)
        experts = self._experts.read(share, whole_groups=whole_groups) if share else []
        if share and not experts:
            raise StorageError(
                f"the expert data have ended after {self._experts_read} experiences. Read them through a "
                "RepeatingReader, or give more of them."
            )
        self._rollouts_read += len(rollouts)
        self._experts_read += len(experts)
        return [marked(e, False) for e in rollouts] + [marked(e, True) for e in experts]

    def state_dict(self) -> dict[str, Any]:
        """Where both readers stand, and how many experiences of each were read."""
        return {
            "rollouts": self._rollouts.state_dict(),
            "experts": self._experts.state_dict(),
            "read": [self._rollouts_read, self._experts_read],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; errors as the readers'."""
        self._rollouts.load_state_dict(state["rollouts"])
        self._experts.load_state_dict(state["experts"])
        self._rollouts_read, self._experts_read = state["read"]

    def close(self) -> None:
        """Close both readers."""
        self._rollouts.close()
        self._experts.close()

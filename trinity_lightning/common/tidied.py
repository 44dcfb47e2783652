"""A group of rollouts after operators and filters, before it is weighed."""

from dataclasses import dataclass, field

from trinity_lightning.common.experience import Experience


@dataclass(eq=False)
class TidiedGroup:
    """The experiences of a group whose runs have ended.

    Attributes:
        kept: experiences to weigh; none if operators or a filter left out the whole group.
        left_out: the others, with the reason in their info.
        metrics: of the operators.
    """

    kept: list[Experience]
    left_out: list[Experience] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def experiences(self) -> list[Experience]:
        """All experiences of the group."""
        return [*self.kept, *self.left_out]

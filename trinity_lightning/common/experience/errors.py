"""Error types of experiences; the message alone should be enough to act on."""

from trinity_lightning.errors import TrinityError


class ExperienceError(TrinityError, ValueError):
    """An experience, or a list of them, does not fit what is asked of it."""


class ExperienceFormatError(TrinityError, ValueError):
    """A payload is not one that this library wrote, or is damaged."""

"""What can go wrong with a buffer outside this process; the message names the place and the fix."""

from trinity_lightning.errors import TrinityError


class StorageError(TrinityError):
    """A buffer cannot be opened, read or written."""


class StorageFormatError(StorageError, ValueError):
    """A buffer is not one that this library wrote, or is damaged."""


class StorageLockedError(StorageError):
    """Another writer holds the buffer, for good or for too long."""

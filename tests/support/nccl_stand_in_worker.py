"""Imported by a server's workers, which then have the stand-in for NCCL."""

from support.nccl_stand_in import install

install()


class Extension:
    """Adds nothing to vLLM's worker."""

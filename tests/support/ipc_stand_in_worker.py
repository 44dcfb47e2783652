"""Imported by a server's workers, which then have the stand-in for a GPU's memory."""

from support.ipc_stand_in import install
from trinity_lightning.sync.ipc_worker import Extension

install()
__all__ = ["Extension"]

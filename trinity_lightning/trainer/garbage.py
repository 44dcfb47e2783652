"""Python's garbage collector, which ignores older objects while a policy trains, and looks at them again afterwards."""

import atexit
import gc

import lightning as L


class Thaw(L.Callback):
    """Unfreezes Python's collector when a fit ends, also by an error: Lightning tells callbacks of it, not modules.

    A policy that stays frozen would never be freed, and at the end of the process nanobind would report leaks.
    """

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        gc.unfreeze()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        gc.unfreeze()


atexit.register(gc.unfreeze)  # a second Ctrl-C ends a fit before all callbacks know

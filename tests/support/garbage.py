"""Garbage collections that pass over what is imported: over a million objects, which stay to the end of a process."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_freeze, _unfreeze = gc.freeze, gc.unfreeze
# vLLM freezes what there is when an engine starts, and unfreezes all of it when one ends: every later collection would
# look at what is imported again, and a forked process would have to copy it for that.
gc.freeze = gc.unfreeze = lambda: None
atexit.register(_unfreeze)  # so that nothing is taken for a leak at the end


@contextmanager
def kept() -> Iterator[None]:
    """No collection looks at what is made in here, neither now nor later."""
    gc.disable()
    try:
        yield
        gc.collect()
        _freeze()
    finally:
        gc.enable()

"""Processes forked off one that has imported everything: they are at work after milliseconds instead of seconds."""

import multiprocessing
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def processes():
    """A multiprocessing context for functions of crash_cases."""
    here = Path(__file__).resolve().parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parents[1])]))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["crash_cases"])
        warm_up = context.Process(target=print)
        warm_up.start()
        warm_up.join()
        return context

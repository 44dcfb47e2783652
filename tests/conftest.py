"""The tiers of the tests, and the fixture for whole runs."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

# The models are tiny: two threads win nothing, and wait long for each other where a core is not theirs alone.
# Before torch is imported; the commands that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# Ray lets its workers compute only when nothing else does (15), and the other tests always do.
os.environ.setdefault("RAY_worker_niceness", "0")
# torch asks for the name of each process that connects, and without a network nobody answers.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from support import garbage, installed, tiers

if TYPE_CHECKING:  # imports torch, and the process that deals out the tests has no use for it
    from support.runs import Commands

GUARD = tiers.Guard()
installed.read_once()


def pytest_configure(config: pytest.Config) -> None:
    tiers.only_fast = config.option.markexpr == "fast"


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tiers.mark(item)
    tiers.slow_files_first(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    with garbage.kept():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    GUARD.on = tiers.is_fast(item)
    try:
        return (yield)
    finally:
        GUARD.on = False


@pytest.fixture(scope="session")
def needs_vllm() -> Any:
    """For tests and fixtures that start a vLLM."""
    vllm = pytest.importorskip("vllm")
    from support.warm import OF_ENGINES, import_vllm

    with garbage.kept():
        import_vllm(OF_ENGINES)
    return vllm


@pytest.fixture(scope="session")
def run_train() -> Iterator["Commands"]:
    """Runs `python -m trinity_lightning.train ARGUMENTS` in a folder; stdout and stderr are captured together."""
    from support.runs import Commands

    commands = Commands()
    yield commands
    commands.close()


@pytest.fixture(autouse=True)
def no_run_outlives_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "run_train" in request.fixturenames:
        request.getfixturevalue("run_train").stop()

"""The tiers of tests: `make check` runs the quick ones, and a guard keeps them quick.

Marked `fast` is every test without a mark of SLOW. What uses one of FIXTURES is marked by that; other tests carry the
mark themselves, and the guard fails one that does not and should.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from multiprocessing import util
from typing import Any

import pytest

SLOW = ("engine", "ray", "postgres", "slow")  # what they mean: pyproject.toml
FIXTURES = {
    "needs_vllm": "engine",
    "cluster": "ray",
    "run_train": "slow",
    "processes": "slow",
    "with_workers": "slow",
    "browser": "slow",
}
STARTS_A_PROCESS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
STARTS_A_PROCESS += ("multiprocessing.spawn",)
# Of processes that compare expressions, or clean up after multiprocessing, all tests share one; the others are how
# libraries ask for the platform.
HARMLESS = ("math_verifier", "resource_tracker", "uname", "lsb_release")


only_fast = False  # whether this run is of the fast tier, as `make check` is (conftest.py)


def examples(count: int) -> int:
    """The number of examples that hypothesis tries: a tenth in a run of the fast tier, to be quick enough for it."""
    return count // 10 if only_fast else count


def mark(item: pytest.Item) -> None:
    """Add what the fixtures of a test say, and `fast` to those that nothing makes slow."""
    for fixture in FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
        item.add_marker(FIXTURES[fixture])
    if not any(item.get_closest_marker(name) for name in SLOW):
        item.add_marker("fast")


def is_fast(item: pytest.Item) -> bool:
    return item.get_closest_marker("fast") is not None


def slow_files_first(items: list[pytest.Item]) -> None:
    """Sort files with slow tests first: otherwise a worker would be at a long file when the others are done."""
    slow = {item.path for item in items if not is_fast(item)}
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))


class Guard:
    """Fails a test of the fast tier that starts a program, forks, or imports vLLM."""

    def __init__(self) -> None:
        self.on = False
        sys.addaudithook(self._watch)
        self._spawn = util.spawnv_passfds  # of multiprocessing, which Python does not audit
        util.spawnv_passfds = self._watched_spawn

    def _watched_spawn(self, path: bytes, arguments: Sequence[Any], files: Sequence[int]) -> int:
        self._watch("multiprocessing.spawn", (path, arguments))
        return self._spawn(path, arguments, files)

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        starts = event in STARTS_A_PROCESS and not any(name in str(arguments[:2]) for name in HARMLESS)
        if starts or (event == "import" and arguments[0] == "vllm"):
            action = f"{event} {arguments[:2]}"
            pytest.fail(f"a test of the fast tier must not do this ({action}): mark it, see tests/support/tiers.py")

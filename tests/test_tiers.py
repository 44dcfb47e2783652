"""The fast tier starts nothing, and which tests are in it is seen from their fixtures."""

import multiprocessing
import subprocess
import sys
from typing import Any

import pytest
from support import tiers
from support.tiers import is_fast

RUN_NOTHING = [sys.executable, "-c", ""]


def test_a_fast_test_that_starts_a_process_fails(request: pytest.FixtureRequest) -> None:
    assert is_fast(request.node)
    with pytest.raises(pytest.fail.Exception, match=r"fast tier .*subprocess\.Popen.*mark it"):
        subprocess.run(RUN_NOTHING, check=True)


def test_only_a_run_of_the_fast_tier_tries_fewer_examples(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    assert tiers.only_fast is (request.config.option.markexpr == "fast")
    for only_fast, count in ((False, 60), (True, 6)):
        monkeypatch.setattr(tiers, "only_fast", only_fast)
        assert tiers.examples(60) == count


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_fast_test_that_starts_a_process_by_multiprocessing_fails(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    with pytest.raises(pytest.fail.Exception, match=r"fast tier .*(os\.fork|multiprocessing\.spawn).*mark it"):
        context.Process(target=print).start()


def test_a_fast_test_that_imports_vllm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(pytest.fail.Exception, match=r"fast tier .*import.*mark it"):
        __import__("vllm")


@pytest.mark.slow
def test_a_slow_test_may_start_processes() -> None:
    subprocess.run(RUN_NOTHING, check=True)


def test_a_test_is_marked_by_its_fixtures(request: pytest.FixtureRequest, needs_vllm: Any) -> None:
    assert request.node.get_closest_marker("engine")
    assert not is_fast(request.node)

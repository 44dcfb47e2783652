"""Environment variables that libraries read when they are loaded are set before."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from support.runs import ROOT

pytestmark = pytest.mark.slow

# LD_PRELOAD too: vLLM sets it where an engine ran in this process, and the library is there before Python is.
SET = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE", "CUDA_DEVICE_ORDER", "LD_PRELOAD")


def run(code: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name not in SET} | variables
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ["10000", "1", "PCI_BUS_ID"]),
        (
            {"GOMP_SPINCOUNT": "7", "THP_MEM_ALLOC_ENABLE": "0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"},
            ["7", "0", "FASTEST_FIRST"],
        ),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ["None", "1", "PCI_BUS_ID"]),
    ],
)
def test_importing_the_package_sets_what_the_user_has_not(variables: dict[str, str], expected: list[str]) -> None:
    names = ("GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE", "CUDA_DEVICE_ORDER")
    code = f"import os, trinity_lightning; print(*map(os.environ.get, {names}))"
    assert run(code, **variables).stdout.split() == expected


def test_the_openmp_library_of_torch_takes_the_setting() -> None:
    shown = run("import trinity_lightning, torch; torch.ones(1)", OMP_DISPLAY_ENV="VERBOSE").stderr
    assert "GOMP_SPINCOUNT = '10000'" in shown


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao (extra dev) is not installed")
def test_torchao_says_nothing_when_transformers_imports_it() -> None:
    done = run("import sys, trinity_lightning, transformers.modeling_utils; print('torchao' in sys.modules)")
    assert (done.stdout, done.stderr) == ("True\n", "")

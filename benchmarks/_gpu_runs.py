"""Whole runs of the project, as users start them, and the tests (stages a, f and h)."""

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from _gpu import HERE, Job, refusal_or_end, run

TESTS = HERE.parent / "tests" / "test_on_gpu.py"
METHODS = ("ipc", "checkpoint")
BAD = {"failure", "error"}  # elements of a test that did not pass


def tests(job: Job) -> None:
    """Stage a: tests/test_on_gpu.py, all of which are skipped without a GPU."""
    with tempfile.TemporaryDirectory() as scratch, job.part("tests") as values:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(TESTS), "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(command, cwd=HERE.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        print(done.stdout)  # into the stage's log
        if not report.exists():
            raise RuntimeError(refusal_or_end(done.stdout))
        suite = next(ElementTree.parse(report).iter("testsuite"))
        counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
        values |= counts | {"seconds": round(float(suite.get("time", "0")), 1)}
        failed = [case.get("name") for case in suite.iter("testcase") if {child.tag for child in case} & BAD]
        if failed:
            values["failed_tests"] = failed


def servers(job: Job) -> None:
    """Stage f: a vLLM server on the trainer's GPU that gets its weights by CUDA IPC, and one that reads a folder."""
    for method in METHODS:
        with job.part("run with a server", synchronizer=method) as values:
            values |= run(job, "engine=vllm_server", f"synchronizer={method}")


def float16(job: Job) -> None:
    """Stage h: a run in each dtype; a dtype that the project refuses has the refusal in its line."""
    for dtype in ("bf16", "fp16"):
        with job.part("run in a dtype", dtype=dtype) as values:
            values |= run(job, f"model.dtype={dtype}")

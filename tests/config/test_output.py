"""Printing where nobody reads it."""

import io
import os
import subprocess
import sys

import pytest
from support.runs import environment

from trinity_lightning.config.output import Output, only_shows, outlive_readers


def test_a_run_outlives_whoever_reads_what_it_prints() -> None:
    reader, writer = os.pipe()
    output = Output(io.BufferedWriter(io.FileIO(writer, "wb")), "utf-8")
    print("read", file=output, flush=True)
    assert os.read(reader, 100) == b"read\n"
    os.close(reader)
    for _ in range(3):
        print("not read", file=output, flush=True)
    output.write("x" * 100_000)
    output.close()


@pytest.mark.parametrize("piped", [True, False])
def test_pipes_alone_are_replaced(piped: bool, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe, (tmp_path / "log").open("w") as file:
        stdout = pipe if piped else file
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", file)
        outlive_readers()
        assert isinstance(sys.stdout, Output) == piped
        assert sys.stderr is file
        print("printed", flush=True)
        written = os.read(reader, 100) if piped else (tmp_path / "log").read_bytes()
        assert written == b"printed\n"
    os.close(reader)


ENDS = """
import atexit, os, sys
from trinity_lightning.config.output import end_quickly

class Part:
    def __del__(self):
        os.write(1, b"taken apart")

atexit.register(end_quickly)
atexit.register(print, "at the end", file=sys.stderr)
part = Part()
part.itself = part
print("printed")
sys.exit(3)
"""


@pytest.mark.slow
def test_a_process_ends_with_its_output_and_exit_code_and_takes_nothing_apart() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "printed\n", "at the end\n")


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (["--help"], True),
        (["+recipe=grpo", "--cfg", "job"], True),
        (["--cfg=job", "+recipe=grpo"], True),
        (["-cjob"], True),
        (["-c", "job"], True),
        (["--info=all"], True),
        (["--hydra-help"], True),
        (["-h"], True),
        (["+recipe=grpo", "name=-h"], False),
        (["--config-dir", "my_conf", "+recipe=mine"], False),
        (["-cd", "my_conf", "+recipe=mine"], False),
        (["--multirun", "seed=1,2"], False),
        ([], False),
    ],
)
def test_commands_that_only_show_something_are_known(arguments: list[str], shows: bool) -> None:
    assert only_shows(arguments) == shows

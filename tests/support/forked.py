"""Processes forked off the warm one, see `support/warm.py`, in the place of ranks, servers and sides of benchmarks."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from lightning.pytorch.strategies.launchers import subprocess_script
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from support.process import Forked
from trinity_lightning.explorer.models import server


def fork_ranks(address: str) -> None:
    """From now on, ranks that Lightning or torchrun starts for this process are forked off the warm one there."""

    def popen(args: Sequence[str], env: Mapping[str, str], cwd: str | None = None, **_: Any) -> Forked:
        with os.fdopen(1, closefd=False) as output:
            return Forked(address, args[args.index("-m") + 1 :], Path(cwd or Path.cwd()), env, output)

    subprocess_script.subprocess = SimpleNamespace(Popen=popen)  # type: ignore[assignment]
    subprocess_handler.Popen = popen  # type: ignore[misc]


def fork_sides(address: str, turns: Any) -> None:
    """From now on, sides of a comparison (benchmarks/_turns.py) are forked off the warm one that listens there."""

    def popen(command: Sequence[str], env: Mapping[str, str] | None, stderr: IO[Any], **_: Any) -> Forked:
        return read_from(address, command, env or {}, stderr, asked=True)

    turns.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": popen})


def fork_stages(address: str, gpu: Any) -> None:
    """From now on, stages of a GPU's benchmark (benchmarks/_gpu.py) are forked off the warm one that listens there."""
    gpu.started = lambda command, errors: read_from(address, command, {}, errors, leads=True)


def read_from(
    address: str, command: Sequence[str], environment: Mapping[str, str], errors: IO[Any], **kind: bool
) -> Forked:
    """A forked process, in the place of an interpreter with this command line, whose output is read from `stdout`."""
    answers, output = os.pipe()
    with os.fdopen(output, "w") as file:
        process = Forked(address, command[1:], Path.cwd(), environment, file, errors=errors, **kind)
    process.stdout = os.fdopen(answers)
    return process


def fork_servers(address: str, patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on, vLLM servers of this process are forked off the warm one that listens there."""

    def popen(command: Sequence[str], env: Mapping[str, str], stdout: IO[Any], **_: Any) -> Forked:
        arguments = command[command.index(str(server.MAIN)) :]
        return Forked(address, arguments, Path.cwd(), env, stdout, serves=True)

    patch(server, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))

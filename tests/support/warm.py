"""A process that has imported what commands import, and forks one off for each line of JSON that it reads.

Importing torch, Lightning and vLLM takes longer than a run of the tiny model. What a forked process does is what
`python -m PROGRAM ARGUMENTS` would do, or `python PROGRAM.py ARGUMENTS`; only the imports are behind it.
Answered are two lines for each: the id of the process, and its exit code once it has ended.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

OF_THE_PACKAGE = ("build", "explorer.models.vllm_engine", "explorer.models.transformers_engine", "monitor.csv_logger")
OF_VLLM = (
    "v1.engine.llm_engine",
    "v1.core.sched.scheduler",
    "v1.worker.cpu_worker",
    "v1.attention.backends.cpu_attn",
    "model_executor.model_loader",
    "model_executor.models.llama",
    "model_executor.layers.quantization.online.base",
)


def import_early() -> None:
    """What most commands import; the environment is left as the package alone sets it."""
    for name in OF_THE_PACKAGE:
        importlib.import_module(f"trinity_lightning.{name}")
    importlib.import_module("hydra.main")
    before = dict(os.environ)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # as an engine sets it: before vLLM is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in OF_VLLM:
            importlib.import_module(f"vllm.{name}")
    os.environ.clear()
    os.environ.update(before)
    gc.freeze()  # an engine collects garbage eight times, which need not look at all this


def next_command() -> dict[str, Any]:
    """Returns in a forked process, with what it is to run; in this one, at the end of the input, not at all."""
    while line := sys.stdin.readline():
        if (process := os.fork()) == 0:
            return json.loads(line)
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    os._exit(0)


def become(command: dict[str, Any]) -> None:
    """Take on a command's folder, environment, arguments, and files for what it reads and prints."""
    os.chdir(command["folder"])
    os.environ.update(command["environment"])
    output = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for module in filter(None, [sys.modules.get("wandb.sdk.data_types._private")]):
        Path(module.MEDIA_TMP.name).mkdir(exist_ok=True)  # made at its import, and deleted at the end of any run
    atexit.register(gc.unfreeze)  # so that nothing is taken for a leak at the end
    sys.argv = command["arguments"]


if __name__ == "__main__":
    import_early()
    command = next_command()
    become(command)
    program = sys.argv[0]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path[0] = command["folder"]
        runpy.run_module(program, run_name="__main__", alter_sys=True)

"""A process that has imported what commands import, and forks one off for each request that it gets.

Importing torch, Lightning and vLLM takes longer than a run of the tiny model. What a forked process does is what
`python -m PROGRAM ARGUMENTS` would do, or `python PROGRAM.py ARGUMENTS`; only the imports are behind it. Requests come
over the Unix socket of the first argument, from `support/process.py`.
"""

import atexit
import importlib.util
import json
import multiprocessing
import os
import pkgutil
import runpy
import select
import socket
import sys
import threading
import warnings
from contextlib import suppress
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from hydra._internal.hydra import Hydra
from hydra.core.plugins import Plugins
from lightning.fabric.utilities import registry

import trinity_lightning
from support import garbage, installed
from support.compose import composed, register_once
from support.forked import fork_ranks, fork_servers, fork_sides, fork_stages
from trinity_lightning.common.hardware import ON_A_CPU, TORCH_DTYPES, product_flops, timed_product
from trinity_lightning.config import hydra
from trinity_lightning.explorer.models import vllm_engine
from trinity_lightning.monitor.report.texts import ENVIRONMENT

OF_RUNS = ("hydra.main", "transformers.models.llama.modeling_llama", "transformers.optimization")
NOT_BEFORE = "trinity_lightning.sync.ipc_worker"  # changes vLLM in a server that is told to import it
OF_ENGINES = (
    "v1.engine.llm_engine",
    "v1.core.sched.scheduler",
    "v1.worker.cpu_worker",
    "v1.attention.backends.cpu_attn",
    "model_executor.model_loader",
    "model_executor.models.llama",
    "model_executor.layers.quantization.online.base",
    "plugins.lora_resolvers.filesystem_resolver",
    "renderers.hf",
    "v1.pool.flash_maxsim",
)
OF_SERVERS = (
    "entrypoints.launchers.api_server.entry",
    "entrypoints.openai.api_server",
    "v1.engine.async_llm",
    "v1.executor.multiproc_executor",
)
# Choices of the commands that most tests start, in the order in which they have them.
CHOSEN = (("+recipe=grpo", "model=tiny", "logger=csv"), ("+recipe=sft", "model=tiny", "logger=csv"))


def import_early() -> None:
    """Import what commands import, and prepare what is the same in each."""
    installed.read_once(registry)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # as an engine sets it: before vLLM is imported
    modules = (module.name for module in pkgutil.walk_packages(trinity_lightning.__path__, "trinity_lightning."))
    for name in (*OF_RUNS, *modules):
        if name != NOT_BEFORE:
            importlib.import_module(name)
    Plugins.instance()  # of Hydra, which looks for them
    hydra.register = register_once
    register_once("")
    register_once()  # as the run itself does it once more
    Hydra.get_mode = lambda *_, **__: None  # it composes all to see whether a configuration says, and here none does
    import_vllm(OF_ENGINES + OF_SERVERS)
    configure_vllm()
    del os.environ["VLLM_LOGGING_LEVEL"]
    vllm_engine.CPU_CACHE_GB = 0.1  # engines start by filling it with zeros
    prepare()
    for dtype in ON_A_CPU:
        product_flops(TORCH_DTYPES[dtype], torch.get_num_threads())  # timed once a process: commands have it from here
    timed_product()  # the same


def prepare() -> None:
    """Make what each process of a command would make for itself, and keep: patterns, templates, parsed files."""
    for choices in CHOSEN:
        composed(*choices, "sampling.max_tokens=8", "optimizer.lr=1e-3", "steps=2")
    for template in ("run.html", "pictures.html"):
        ENVIRONMENT.get_template(template)
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    # One of the interpreters that a cluster starts: it asks for more machines where there are too few.
    importlib.import_module("ray._private.node").Node.start_monitor = lambda node: None


def import_vllm(names: tuple[str, ...]) -> None:
    """Import what vLLM imports when an engine or a server starts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            importlib.import_module(f"vllm.{name}")
        platform = importlib.import_module("vllm.platforms").current_platform
        platform.register_triton_kernel_overrides()  # looks through all modules, for each engine again
        platform.register_triton_kernel_overrides = lambda: None


def configure_vllm() -> None:
    """Do the rest of what is the same at every start of an engine."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())  # slow, with as many loggers as there are here


def next_command(address: str) -> tuple[dict[str, Any], list[int]]:
    """Returns in a forked process, with what it is to run and its files; in this one, at the end of the input, not."""
    asking: dict[int, tuple[int, socket.socket]] = {}  # forked processes and who asked for them, by a file of each
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        sources: list[Any] = [listener, sys.stdin]
        while sources or asking:  # those that are at work at the end of the input are waited for
            ready = select.select([*sources, *asking], [], [])[0]
            for ended in asking.keys() & {source for source in ready if isinstance(source, int)}:
                answer(ended, *asking.pop(ended))
            if listener in ready:
                connection, _ = listener.accept()
                message, files, *_ = socket.recv_fds(connection, 2**20, 3)
                if (process := os.fork()) == 0:
                    forget(connection, asking)
                    return json.loads(message), files
                for file in files:
                    os.close(file)
                connection.sendall(f"{process}\n".encode())
                asking[os.pidfd_open(process)] = process, connection
            if sys.stdin in ready:
                sources.clear()
    os._exit(0)


def answer(ended: int, process: int, connection: socket.socket) -> None:
    """Tell who asked for a process its exit code, if they still listen."""
    os.close(ended)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with connection, suppress(OSError):
        connection.sendall(f"{code}\n".encode())


def forget(connection: socket.socket, asking: dict[int, tuple[int, socket.socket]]) -> None:
    """Close what only the process that forks needs: connections, and files of other processes."""
    connection.close()
    for other, (_, its_connection) in asking.items():
        os.close(other)
        its_connection.close()


def become(command: dict[str, Any], files: list[int]) -> None:
    """Take on a command's folder, environment, arguments, and files for what it reads and prints."""
    os.chdir(command["folder"])
    os.environ.update(command["environment"])
    # Ray sets it in a process that starts a cluster, and reads it when it is imported, which was before the fork.
    os.environ.pop("RAY_AUTH_MODE", None)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.argv = command["arguments"]


def become_a_command(address: str) -> None:
    """Set up what differs between a forked command and one that was started."""
    for module in filter(None, [sys.modules.get("wandb.sdk.data_types._private")]):
        Path(module.MEDIA_TMP.name).mkdir(exist_ok=True)  # made at its import, and deleted at the end of any run
    fork_servers(address)
    fork_ranks(address)


def become_a_server() -> None:
    """Take on what vLLM reads from the environment when it is imported; what it starts is forked, too."""
    from torch.compiler import set_stance
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.logger import _configure_vllm_root_logger

    # For 1 s after each message its processes ask for the next without a pause, and other tests want the cores.
    SpinCondition.__init__ = partialmethod(SpinCondition.__init__, busy_loop_s=0.01)  # type: ignore[assignment]
    _configure_vllm_root_logger()  # VLLM_LOGGING_LEVEL
    set_stance("force_eager")  # TORCHDYNAMO_DISABLE
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)


def run(program: str, folder: str, address: str) -> int:
    """Run a module, or a file; the exit code that Python would end with."""
    try:
        if program.endswith(".py"):
            sys.path[0] = str(Path(program).parent)
            if importlib.util.find_spec("_turns"):  # a benchmark
                fork_sides(address, importlib.import_module("_turns"))
                fork_stages(address, importlib.import_module("_gpu"))
            runpy.run_path(program, run_name="__main__")
        else:
            sys.path[0] = folder
            for name in (program, f"{program}.__main__"):
                sys.modules.pop(name, None)  # a process is its program, and has not imported it as a module
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def end(code: int) -> None:
    """End as Python does, except that nothing is torn down that was imported: that takes longer than most commands."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    with garbage.kept():
        import_early()
    address = sys.argv[1]
    command, files = next_command(address)
    become(command, files)
    if command["serves"] or command["leads"]:
        os.setsid()
    if command["serves"]:
        become_a_server()
    else:
        become_a_command(address)
    end(run(sys.argv[0], command["folder"], address))

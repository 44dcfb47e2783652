"""Trains on several devices, each with the whole policy in its own process: `trainer=ddp`."""

import itertools
import os
import signal
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore  # pyright: ignore

from trinity_lightning.common.ranks import ALONE, Alone, Ranks, add_up_gradients, watch_passes
from trinity_lightning.common.words import how_it_ended
from trinity_lightning.config.trainer import STARTED_BY
from trinity_lightning.errors import ConfigError, RankError
from trinity_lightning.trainer.placement import WHOLE, Whole

POLL_SECONDS, CONNECT_SECONDS = 0.02, 5.0
LOOPBACK = "127.0.0.1"
_MEETINGS = itertools.count()  # counts the Trainers of this process, alike on all ranks


class ReplicaStrategy(DDPStrategy):
    """A whole policy on every device; gradients are added up by `ranks`.

    There is no DistributedDataParallel: its reducer averages, after every backward pass, in the weights' dtype.

    Args:
        timeout: seconds that a rank waits for another within a step; for rollouts it waits as long as they take.
        settings: further settings of DDPStrategy.
    """

    passes_together = False  # true if each pass of the policy takes all ranks

    def __init__(self, timeout: float = 1800.0, **settings: Any) -> None:
        super().__init__(timeout=timedelta(seconds=timeout), **settings)
        self.ranks: Alone = ALONE
        self.placement = WHOLE

    def _configure_launcher(self) -> None:
        if self.cluster_environment is not None:
            self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_distributed(self) -> None:
        """Meet the other ranks. Ctrl-C reaches all of them, and rank 0 alone decides what follows."""
        reset_seed()
        self.set_world_ranks()
        environment, timeout, launcher = self.cluster_environment, self._timeout, self.launcher
        if self.world_size == 1 or environment is None or timeout is None or not isinstance(launcher, _Launcher):
            return
        if self.global_rank > 0 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        unconnected = Ranks(self.global_rank, self.world_size, lost=launcher.lost, terminated=self._terminated)
        address, near = (environment.main_address, environment.main_port), self.num_nodes == 1
        self.ranks = join(address, unconnected, self.root_device, timeout, next(_MEETINGS), near, self.passes_together)
        self.placement = Replicas(self.ranks)
        self._check_folder()

    def _check_folder(self) -> None:
        """Refuse ranks that do not see rank 0's folder: they would miss checkpoints, or read another run's.

        Raises:
            ConfigError: some ranks do not see it, or rank 0 cannot write to it.
        """
        module = self.lightning_module
        if module is None:
            return
        folder = Path(module.trainer.default_root_dir)
        with _marker_file(folder) if self.is_global_zero else nullcontext() as mark:
            name = self.ranks.broadcast("" if mark is None else Path(mark.name).name)
            folders = self.ranks.exchange((str(folder), (folder / name).exists()))
        others = [f"{path} on rank {rank}" for rank, (path, seen) in enumerate(folders) if not seen]
        if others:
            raise ConfigError(
                f"the run's folder is {folders[0][0]} on rank 0, and another one, {', '.join(others)}",
                key="output_dir",
                fix="give every process the same folder, which all machines share, such as "
                "hydra.run.dir=/shared/outputs/first",
            )

    def _terminated(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.received_sigterm

    def configure_ddp(self) -> None:
        """Give all ranks the weights of rank 0: a folder may hold other weights on another machine.

        A PolicyModule's reference is included: its weights are not the module's own, and perhaps on the host. Tied
        weights are sent once.
        """
        module = self.lightning_module
        for model in (module, getattr(module, "reference", None)):
            if isinstance(model, nn.Module):
                weights = list({weight.data_ptr(): weight for weight in model.state_dict().values()}.values())
                for weight in weights if self.global_rank > 0 else []:
                    weight.zero_()
                self.ranks.add_up(weights)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._together.exchange(None, patient=True, at="a barrier")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src`."""
        return self._together.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, stacked; without gradients."""
        return torch.stack(self._together.exchange(tensor.detach().cpu())).to(tensor.device)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, sum, max or min of all ranks' tensors; other objects are returned unchanged."""
        if not isinstance(tensor, Tensor):
            return tensor
        operation = getattr(reduce_op, "name", str(reduce_op)).lower()
        name = {"avg": "mean", "max": "amax", "min": "amin"}.get(operation, operation)
        gathered = self.all_gather(tensor)
        whole = name == "mean" and not tensor.is_floating_point()
        return getattr(gathered.float() if whole else gathered, name)(0)

    @property
    def _together(self) -> Alone:
        """The ranks; or this rank alone once the run has failed: each rank then ends by itself, and rank 0 saves."""
        module = self.lightning_module
        return ALONE if module is not None and module.trainer.interrupted else self.ranks

    def on_exception(self, exception: BaseException) -> None:
        """End the other ranks, once the callbacks have saved a checkpoint; kill them if one hangs."""
        self.ranks.end(exception)
        if self.ranks.hangs and isinstance(self.launcher, _Launcher):
            self.launcher.kill(signal.SIGKILL)


class Replicas(Whole):
    """Several ranks with all weights each, whose gradients are added up."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks: Ranks = ranks  # pyright: ignore[reportIncompatibleVariableOverride]

    def seed_noise(self) -> None:
        """Set another seed on each rank, drawn from rank 0's random state, which is saved in checkpoints."""
        seed = self.ranks.exchange(int(torch.randint(2**62, ())))[0]
        torch.manual_seed(seed + self.ranks.rank)

    def from_all_ranks(self, losses: list[Any], metrics: list[Any]) -> tuple[list[Any], list[Any]]:
        on_cpu = [loss.cpu() for loss in losses], [{name: v.cpu() for name, v in part.items()} for part in metrics]
        shares = self.ranks.exchange(on_cpu)
        return [loss for losses, _ in shares for loss in losses], [part for _, metrics in shares for part in metrics]

    def add_up_gradients(self, model: Any) -> None:
        add_up_gradients(model.parameters(), self.ranks)


# -- how the ranks start, and meet -------------------------------------------------------------------------------------


class _Launcher(_SubprocessScriptLauncher):
    """Starts ranks without Lightning's observer, which kills all five seconds after one has died: too early to save."""

    def launch(self, function: Any, *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[STARTED_BY] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                del os.environ[STARTED_BY]  # a process started later is not part of the run
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def lost(self) -> str | None:
        """The processes started here that have ended, and how; None: all run.

        Processes ended by a signal come first: the others may have ended because of them. A process that was itself
        started by rank 0 only knows whether its parent has ended.
        """
        environment, parent = self.cluster_environment, str(os.getppid())  # changes once the parent has ended
        started = isinstance(environment, LightningEnvironment) and environment.local_rank() > 0  # not by hand
        if started and os.environ.get(STARTED_BY, parent) != parent:
            return "the process that started this one has ended."
        ended = [(rank, code) for rank, process in enumerate(self.procs, start=1) if (code := process.poll())]
        ended.sort(key=lambda rank_and_code: rank_and_code[1] > 0)
        words = "; ".join(f"the process of rank {rank} {how_it_ended(code)}" for rank, code in ended)
        return f"{words}." if words else None


def _marker_file(folder: Path) -> Any:
    """A temporary file in the folder, which is made if it is missing; closing removes the file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.NamedTemporaryFile(dir=folder)
    except OSError as error:
        raise ConfigError(
            f"the folder of the run cannot be written to ({error})",
            key="output_dir",
            fix="give another one, such as hydra.run.dir=FOLDER",
        ) from error


def follows() -> bool:
    """True if Lightning will find a rank other than 0 for this process; errors as in `ranks_here`."""
    return ranks_here() != (0, 0)


def ranks_here() -> tuple[int, int]:
    """The rank of this process on its machine, and that of the machine, as Lightning will find them.

    They come from torchrun, srun, or the process that started this one.

    Raises:
        ConfigError: the environment has a rank that is no number, or comes from an srun that Lightning refuses.
    """
    kinds = (TorchElasticEnvironment, SLURMEnvironment, LightningEnvironment)
    try:
        environment = next(kind for kind in kinds if kind.detect())()
        return environment.local_rank(), environment.node_rank()
    except RuntimeError as error:
        raise ConfigError(str(error)) from error
    except ValueError as error:
        raise ConfigError(
            f"the environment gives this process a rank that is no number ({error})",
            fix="unset LOCAL_RANK and NODE_RANK, or give numbers",
        ) from error


def join(
    address: tuple[str, int],
    ranks: Ranks,
    device: torch.device,
    timeout: timedelta,
    meeting: int = 0,
    near: bool = True,
    passes_together: bool = False,
) -> Ranks:
    """Connect the ranks at the address of rank 0 or torchrun, for tensors on the CPU and on the device that trains.

    torch's default process group is left alone: an engine within rank 0 uses it, as a world of one.

    Args:
        address: host and port where the ranks meet.
        ranks: this process's rank, not connected yet.
        device: the device that trains.
        timeout: how long ranks wait for each other.
        meeting: a number that these processes have not used at this address before.
        near: all ranks are on one machine, and other machines cannot reach the ports that they open.
        passes_together: connect the ranks for passes of a model in shards, too.

    Raises:
        RankError: another process ended before it joined, or did not join in time; or rank 0 was not reached.
    """
    rank, size = ranks.rank, ranks.size
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = rank == 0 and not of_torchrun
    if near and not of_torchrun:
        address = (LOOPBACK, address[1])
    listening = _listening(address) if near and hosts else None
    deadline = time.monotonic() + timeout.total_seconds()

    def wait_while(lacking: Callable[[], str | None]) -> None:
        while (lack := lacking()) is not None:
            if (reason := ranks.lost()) is not None or time.monotonic() > deadline:
                raise RankError(reason or f"within {timeout} {lack}.")
            time.sleep(POLL_SECONDS)

    def absent() -> str | None:
        come = store.check([f"here/{number}" for number in range(size)])
        return None if come else f"not all of {size} processes have come"

    if not hosts:
        wait_while(partial(_unreached, address))
    store: Any = TCPStore(
        *address, size, hosts, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=listening
    )
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives the processes
    store = PrefixStore(f"trinity_lightning/{start}/{meeting}", store)
    store.set(f"here/{rank}", b"")
    wait_while(absent)
    options = _gloo_options(timeout) if near else timeout
    group = pass_group = _with_gloo("cpu", store, ranks, options)
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL  # not in torch's builds for CPUs

        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        nccl = ProcessGroupNCCL(PrefixStore("cuda", store), rank, size, nccl_options)
        nccl.eager_connect_single_device(device)
        group._register_backend(device, ProcessGroup.BackendType.NCCL, nccl)
    elif passes_together:
        pass_group = _with_gloo("pass", store, ranks, options)
    pass_group = pass_group if passes_together else None
    connected = replace(ranks, group=group, store=store, timeout=timeout, pass_group=pass_group)
    if passes_together and device.type == "cuda":
        threading.Thread(target=watch_passes, args=[weakref.ref(connected)], name="passes", daemon=True).start()
    return connected


def _with_gloo(name: str, store: Any, ranks: Ranks, options: Any) -> ProcessGroup:
    """A process group with connections of gloo between CPUs, which the ranks make under that name of the store."""
    group = ProcessGroup(store, ranks.rank, ranks.size)
    gloo = ProcessGroupGloo(PrefixStore(name, store), ranks.rank, ranks.size, options)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    return group


def _listening(address: tuple[str, int]) -> int | None:
    """A socket for the store: torch's own listens on all interfaces. None: an earlier store still has this port."""
    try:
        return socket.create_server(address).detach()
    except OSError:
        return None


def _unreached(address: tuple[str, int]) -> str | None:
    """The reason why rank 0 was not reached; None if it was. (torch's own wait goes on after rank 0 has ended.)"""
    try:
        socket.create_connection(address, CONNECT_SECONDS).close()
        return None
    except OSError as error:
        host, port = address
        return f"rank 0 was not reached at {host}:{port} ({error}): see MASTER_ADDR and MASTER_PORT"


def _gloo_options(timeout: timedelta) -> Any:
    """Gloo's options for ranks on one machine."""
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout, options._devices = timeout, [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return options

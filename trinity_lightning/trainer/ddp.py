"""Several devices, each with the whole policy in a process of its own: `trainer=ddp`."""

import itertools
import signal
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import Tensor, nn

from trinity_lightning.common.ranks import Ranks, join

ALONE = Ranks()
_MEETINGS = itertools.count()  # of the Trainers of this process, the same on all ranks


def ranks_of(trainer: L.Trainer) -> Ranks:
    """The processes that this Trainer trains with; one of another strategy is alone."""
    return getattr(trainer.strategy, "ranks", ALONE)


def strategy_setting(trainer: L.Trainer) -> Any:
    """What `trainer.strategy` would say of this Trainer."""
    kind = type(trainer.strategy)
    return "auto" if issubclass(kind, SingleDeviceStrategy) else {"_target_": f"{kind.__module__}.{kind.__qualname__}"}


class ReplicaStrategy(DDPStrategy):
    """The same policy on every device; whoever computes gradients adds them up by `ranks`.

    There is no DistributedDataParallel: its reducer averages, after every backward pass, in the weights' dtype. What
    Lightning itself decides together goes by `ranks`, too. Within a step a rank waits `timeout` seconds for another,
    for rollouts however long they take; further settings are those of DDPStrategy.
    """

    def __init__(self, timeout: float = 1800.0, **settings: Any) -> None:
        super().__init__(timeout=timedelta(seconds=timeout), **settings)
        self.ranks = ALONE

    def _configure_launcher(self) -> None:
        if self.cluster_environment is not None:
            self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_distributed(self) -> None:
        """Meet the other ranks. Ctrl-C reaches all of them, and rank 0 alone decides what comes of it."""
        reset_seed()
        self.set_world_ranks()
        where, timeout, launcher = self.cluster_environment, self._timeout, self.launcher
        if self.world_size == 1 or where is None or timeout is None or not isinstance(launcher, _Launcher):
            return
        if self.global_rank > 0 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        apart = Ranks(self.global_rank, self.world_size, lost=launcher.lost)
        self.ranks = join((where.main_address, where.main_port), apart, self.root_device, timeout, next(_MEETINGS))

    def configure_ddp(self) -> None:
        """Begin with the weights of rank 0, tied ones once: a folder may hold others on another machine."""
        if self.lightning_module is not None:
            weights = list({each.data_ptr(): each for each in self.lightning_module.state_dict().values()}.values())
            for each in weights if self.global_rank > 0 else []:
                each.zero_()
            self.ranks.add_up(weights)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all; not when the run has failed: rank 0 saves alone then."""
        if self.lightning_module is None or not self.lightning_module.trainer.interrupted:
            self.ranks.exchange(None, patient=True)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What rank `src` has."""
        return self.ranks.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, stacked; without gradients."""
        return torch.stack(self.ranks.exchange(tensor.detach().cpu())).to(tensor.device)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, sum, max or min of all ranks' tensors; other things are as they are."""
        if not isinstance(tensor, Tensor):
            return tensor
        given = getattr(reduce_op, "name", str(reduce_op)).lower()
        name = {"avg": "mean", "max": "amax", "min": "amin"}.get(given, given)
        return getattr(self.all_gather(tensor), name)(0)

    def on_exception(self, exception: BaseException) -> None:
        """After the callbacks have saved what is whole: the other ranks end too."""
        self.ranks.end(exception)


class _Launcher(_SubprocessScriptLauncher):
    """Without Lightning's observer, which kills all five seconds after one has died, before a checkpoint is written."""

    def launch(self, function: Any, *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def lost(self) -> str | None:
        """Which of the processes started here has ended by an error or a signal, in words."""
        ended = ((rank, process.poll()) for rank, process in enumerate(self.procs, start=1))
        return next((f"the process of rank {rank} ended with code {code}." for rank, code in ended if code), None)


def add_up_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Make gradients those of all ranks together, after the last micro-batch; a rank without rows joins with zeros.

    The loss of each is its rows' share of the whole optimizer batch's. Without a gradient on any rank there is none.
    """
    parameters = list(parameters)
    found = ranks.exchange([each.grad is not None for each in parameters])
    trained = [parameter for parameter, *has in zip(parameters, *found, strict=True) if any(has)]
    for each in trained:
        if each.grad is None:
            each.grad = torch.zeros_like(each, dtype=each.grad_dtype)
    ranks.add_up([each.grad for each in trained if each.grad is not None])

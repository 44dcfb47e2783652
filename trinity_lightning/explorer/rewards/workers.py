"""Reward functions in processes of their own, with time-outs: pebble's pool, and the code in its workers."""

import asyncio
import atexit
import ctypes
import functools
import inspect
import logging
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Iterable
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

from pebble import ProcessExpired, ProcessPool

from trinity_lightning.common.threads import is_async, run_in_thread
from trinity_lightning.config.registry import import_object
from trinity_lightning.errors import ConfigError, RewardError, RolloutError
from trinity_lightning.explorer.rewards import (
    REWARDS,
    Reward,
    resolve_rewards,
    reward_error,
    with_arguments,
    worth,
    worth_here,
)
from trinity_lightning.explorer.tasks.task import Task

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
_PR_SET_PDEATHSIG = 1  # of prctl(2)


class RewardWorkers:
    """Processes that call reward functions, so that pure Python takes no time from torch in this process.

    They are spawned and not forked, because threads of this process hold locks, and they import the reward functions. A
    process that exceeds its time is ended, and replaced. All end with this process, even if it is killed.

    Args:
        count: number of processes.
        timeout: seconds that one call may take.
    """

    def __init__(self, count: int, timeout: float) -> None:
        self._count = count
        self._timeout = timeout
        self._started = False
        self._pool: ProcessPool | None = None

    async def start(self) -> None:
        """Start the processes, if they do not run yet.

        Raises:
            ConfigError: they end at once, because they import the user's script, which starts a run.
        """
        if self._started:
            return
        self._started = True
        self._repairing = asyncio.Lock()  # a new one at each start, since it belongs to the present event loop
        # Registered after multiprocessing's function, and so called before it: that one waits for idle processes, too.
        atexit.register(self._end)
        pool = await self._running()
        try:
            await asyncio.wrap_future(pool.schedule(os.getpid, timeout=START_SECONDS))
        except (ProcessExpired, BrokenProcessPool, FutureTimeoutError) as error:
            await self.stop()
            raise ConfigError(
                f"the processes of explorer.reward_workers do not start ({type(error).__name__}: {error}; what they "
                "wrote is above). They import your script: what starts the run belongs under "
                "`if __name__ == '__main__':`.",
                key="explorer.reward_workers",
            ) from error

    async def stop(self) -> None:
        """End the processes, even in the middle of a call; rollouts that wait for them must be cancelled before."""
        self._started = False
        atexit.unregister(self._end)
        await run_in_thread(self._end)

    async def worth(self, reward: Reward, response: str, task: Task) -> tuple[float, dict[str, float]]:
        """The reward of a response by one function, before weighting, and its metrics; see `check_importable`.

        Raises:
            ConfigError: the function cannot be imported, or the task cannot be sent.
            RewardError: the function raised or returned no finite number, took too long, or ended its process.
            RolloutError: the processes ended before they called it.
        """
        if (path := check_importable(reward)) is None:
            return await worth_here(reward, response, task)
        args = None if reward.source is None else pickle.dumps(dict(reward.args))
        arguments = (reward.name, path, args, response, _sendable(reward, task))
        pool = await self._running()
        try:
            future = pool.schedule(_call, args=arguments, timeout=self._timeout)
        except RuntimeError as error:  # the pool broke after `_running` returned it
            raise RolloutError(f"reward function '{reward.name}' was not called: {error}") from error
        try:
            return await asyncio.wrap_future(future)
        except FutureTimeoutError:
            raise _lost(
                f"reward function '{reward.name}' took longer than {self._timeout:g} s (explorer.reward_timeout); its "
                "process was ended"
            ) from None
        except ProcessExpired as error:
            raise _lost(f"reward function '{reward.name}' ended its process with exit code {error.exitcode}") from error
        except BrokenProcessPool as error:
            raise RolloutError(f"reward function '{reward.name}' was not called: the processes ended") from error

    async def _running(self) -> ProcessPool:
        """The pool, made anew if it broke, as pebble's pools do when an idle process ends."""
        if not self._started:
            raise RolloutError("the processes of explorer.reward_workers do not run")
        async with self._repairing:
            if self._pool is not None and not self._pool.active:
                logger.warning("the processes of explorer.reward_workers ended; others are started.")
                await run_in_thread(self._end)
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPool(self._count, initializer=_prepare, context=context)
            return self._pool

    def _end(self) -> None:
        """End the pool and wait for its end: its thread may be replacing a process, which would be left over."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()


def _lost(message: str) -> RewardError:
    """The error of a call whose process was ended; a retry may succeed, with more time or memory."""
    error = RewardError(message)
    error.may_pass = True
    return error


def _sendable(reward: Reward, task: Task) -> bytes:
    """A pickle of the task for a reward, without the fields that may hold functions of this process alone."""
    try:
        return pickle.dumps(replace(task, workflow="", reward_fn=None))
    except ConfigError:  # of a picture whose file is lost
        raise
    except Exception as error:
        raise ConfigError(
            f"task {task.batch_id}/{task.task_id} cannot be sent to the process of reward function '{reward.name}': "
            f"{type(error).__name__}: {error}",
            key="explorer.reward_workers",
            fix="set explorer.reward_workers=0",
        ) from error


def check_all_importable(reward_fns: Iterable[Any]) -> None:
    """Check the reward functions of several tasks by `check_importable`; errors as there."""
    for reward_fn in reward_fns:
        for reward in resolve_rewards(reward_fn):
            check_importable(reward)


def check_importable(reward: Reward) -> str | None:
    """The dotted path at which other processes find a reward function.

    None for a function that is called in this process: a judge that asks the run's models, or a coroutine function.

    Raises:
        ConfigError: other processes do not find the function.
    """
    function = reward.source or reward.function
    if reward.given is None or is_async(reward.function):
        return None
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    path = f"{named.__module__}.{named.__qualname__}"  # leads to no lambda, say
    if isinstance(reward.given, str) and reward.given not in REWARDS:
        path = reward.given
    try:
        is_importable = import_object(path) is function
    except ValueError:
        is_importable = False
    in_a_notebook = path.startswith("__main__.") and not hasattr(sys.modules["__main__"], "__file__")
    if not is_importable or in_a_notebook:
        raise ConfigError(
            f"reward function '{reward.name}' cannot be imported as '{path}', which explorer.reward_workers needs",
            key="reward",
            fix="write it at the top level of a module, or set explorer.reward_workers=0",
        )
    return path


# -- in a worker ------------------------------------------------------------------------------------------------------


def _prepare() -> None:
    """Have the kernel end this process with its parent, even if the parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _call(name: str, path: str, args: bytes | None, response: str, task: bytes) -> tuple[float, dict[str, float]]:
    try:
        function: Any = import_object(path) if args is None else _made(path, args)
        returned = function(response, pickle.loads(task))  # noqa: S301 - from the process that started this one
        if inspect.isawaitable(returned):
            returned = _loop().run_until_complete(returned)
    except BaseException as error:  # nothing that a reward raises, exit() included, may end the run
        raise reward_error(name, error) from None
    return worth(Reward(name, function), returned)


@functools.cache
def _made(path: str, args: bytes) -> Any:
    """The reward function made from the object at a path with these pickled arguments, the same for all calls."""
    return with_arguments(path, import_object(path), pickle.loads(args))  # noqa: S301 - as the task


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all calls: one, because a reward may keep an HTTP client, which belongs to one loop."""
    return asyncio.new_event_loop()

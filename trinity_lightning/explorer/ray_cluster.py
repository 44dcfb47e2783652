"""Where Ray runners live: a cluster that is there already, or one on this machine for as long as they run."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.config.engines import require_ray
from trinity_lightning.config.schema import ExplorerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.in_process import InProcessEngine
from trinity_lightning.explorer.ray_runner import RayRunner

# Experiences larger than 100 kB travel through it, and leave it as soon as they were read.
OBJECT_STORE_BYTES = 256 * 2**20
# For somebody to listen at the address of a cluster.
CONNECT_SECONDS = 10.0
LOCAL_SETTINGS = {
    "address": "local",
    "include_dashboard": False,
    "object_store_memory": OBJECT_STORE_BYTES,
    "_node_ip_address": "127.0.0.1",
}
# Of Ray and its processes: nothing is sent to its makers; and a cluster of this machine alone listens on the loopback
# interface only (without the second, Ray turns 127.0.0.1 into the machine's address).
LOCAL_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class RayCluster:
    """Starts Ray if it does not run in this program yet, and ends what it started.

    Args:
        address: of a cluster to join, HOST:PORT of its head, or "auto" for the one on this machine; None starts one
            here, which ends with this program at the latest.
    """

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._connected = False
        self._runners: list[RayRunner] = []
        self._thread: ThreadPoolExecutor | None = None

    def check(self) -> None:
        """ConfigError unless somebody listens at the address of the cluster."""
        if self._address not in (None, "auto"):
            _check_reachable(self._address)

    async def start(self, runners: Sequence[RayRunner]) -> None:
        """Start or join the cluster, and start the workers of these runners.

        Raises:
            ConfigError: no cluster answers at the address, or a model cannot be sent to workers.
            RolloutError: a worker does not start.
        """
        # One thread, which lives as long as the cluster: Linux ends Ray's processes with the thread that started them.
        self._thread = ThreadPoolExecutor(1, "ray")
        self._runners = list(runners)
        try:
            await self._in_thread(self._connect)
            for runner in runners:
                await self._in_thread(runner.launch)
            outcomes = await asyncio.gather(*(runner.ready() for runner in runners), return_exceptions=True)
            for error in outcomes:
                if error is not None:
                    raise error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the workers, and the cluster where it was started here; one that was joined goes on. Twice is allowed."""
        if self._thread is None:
            return
        try:
            await self._in_thread(self._disconnect)
        finally:
            self._thread.shutdown(wait=False)
            self._thread = None

    async def _in_thread(self, function: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _connect(self) -> None:
        self.check()
        with _local() if self._address is None else nullcontext():
            import ray

            if ray.is_initialized():
                return
            settings = LOCAL_SETTINGS if self._address is None else {"address": self._address}
            try:
                # Its warnings tell that SIGTERM is left to this program, and that the cluster asks for a token.
                ray.init(**settings, logging_level=logging.ERROR)  # type: ignore[arg-type]
            except Exception as error:
                where = "Ray does not start" if self._address is None else f"explorer.ray_address={self._address}"
                raise ConfigError(f"{where}: {type(error).__name__}: {' '.join(str(error).split())}") from error
            self._connected = True

    def _disconnect(self) -> None:
        import ray

        if ray.is_initialized():
            for runner in self._runners:
                runner.kill()
        if self._connected:
            self._connected = False
            ray.shutdown()


def check_ray(config: ExplorerConfig, models: Sequence[InferenceModel]) -> None:
    """Refuse what Ray runners cannot work with.

    Raises:
        ConfigError: Ray is not installed, or an engine computes in this process.
    """
    require_ray()
    for model in models:
        config.check_runners(type(model).__name__, isinstance(model, InProcessEngine))


def _check_reachable(address: str) -> None:
    """ConfigError where nobody listens: Ray would go on asking for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"explorer.ray_address={address}: {error}; give HOST:PORT of the cluster's head, or null to start one here."
        ) from error


@contextmanager
def _local() -> Iterator[None]:
    """LOCAL_ENVIRONMENT, where the user did not set the variables, for as long as Ray starts."""
    added = {name: value for name, value in LOCAL_ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    from ray._private import ray_constants

    # The second variable is read when Ray is imported, and others import it (vLLM does).
    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        for name in added:
            del os.environ[name]

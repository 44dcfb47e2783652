"""Weights over NCCL: two real servers and a trainer, also when one of them fails.

Only NCCL is not real here: it needs GPUs, and a stand-in takes its place.
"""

import asyncio
import base64
import ctypes
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import nccl_stand_in
from support.errors import refuses
from support.forked import fork_servers
from support.nccl_stand_in import Communicator, join
from support.runs import Commands
from support.tiny_model import logprobs, tiny_model
from torch import Tensor

from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.config.engines import EngineDtype
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import WeightSyncError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.models.server import ServerClient
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine
from trinity_lightning.sync.nccl import NCCLGroup, WeightGroup, _once
from trinity_lightning.sync.servers import announcement, check_device
from trinity_lightning.sync.stream import WeightStream, weight_stream

SETTINGS: dict[str, Any] = {"dtype": EngineDtype.fp32, "max_model_len": 64, "max_num_seqs": 4, "kv_cache_gb": 0.1}
TEXT = [7, 30, 41, 12, 5, 97, 58]


@pytest.fixture(scope="module")
def driver(needs_vllm: Any, run_train: Commands) -> Iterator[Driver]:
    with pytest.MonkeyPatch.context() as patch:
        fork_servers(run_train.address, patch.setattr)
        nccl_stand_in.install_in_trainer(patch.setattr)
        driver = Driver()
        yield driver
        driver.close()


@pytest.fixture(scope="module")
def servers(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VLLMServerEngine]]:
    logs = tmp_path_factory.mktemp("servers")
    cores = sorted(os.sched_getaffinity(0))
    engines = [
        VLLMServerEngine("tiny", sync_method="nccl", cores=[cores[i % len(cores)]], log=logs / f"{i}.log", **SETTINGS)
        for i in range(2)
    ]

    async def on_all(act: Callable[[VLLMServerEngine], Any]) -> None:
        await asyncio.gather(*map(act, engines))

    driver.run(on_all(VLLMServerEngine.load))
    yield engines
    driver.run(on_all(VLLMServerEngine.shutdown))


def connected(servers: Sequence[VLLMServerEngine], stream: Callable[[], WeightStream]) -> Explorer:
    explorer = Explorer(ExplorerConfig(), servers, None)
    explorer.engines.source = stream
    return explorer


async def joined(explorer: Explorer, **meta: Any) -> None:
    await explorer.setup_weight_sync_group(**meta)


async def scores(servers: list[VLLMServerEngine]) -> list[list[float]]:
    return list(await asyncio.gather(*(server.logprobs(TEXT) for server in servers)))


def assert_hold(driver: Driver, servers: list[VLLMServerEngine], model: Any) -> None:
    for server_logprobs in driver.run(scores(servers)):
        assert server_logprobs == pytest.approx(logprobs(model, TEXT), abs=1e-3)


# -- what arrives -----------------------------------------------------------------------------------------------------


def test_every_server_takes_what_the_trainer_sends(servers: list[VLLMServerEngine], driver: Driver) -> None:
    model = tiny_model()
    assert model.config.tie_word_embeddings
    explorer = connected(servers, lambda: weight_stream(model))
    meta = [(name, "float32", list(tensor.shape)) for name, tensor in weight_stream(model)]
    driver.run(joined(explorer, state_dict_meta=meta))
    for version, scale in ((1, 1.5), (2, 0.5)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        driver.run(explorer.sync_weight(version))
        assert [server.model_version for server in servers] == [version, version]
        assert_hold(driver, servers, model)
    by_group = driver.run(scores(servers))
    for server in servers:
        driver.run(server.sync_weights(weight_stream(model), 3))
    assert driver.run(scores(servers)) == by_group  # bit for bit what a folder brings
    explorer.engines.leave()


def test_weights_that_do_not_fit_leave_every_server_untouched(servers: list[VLLMServerEngine], driver: Driver) -> None:
    whole, sent = tiny_model(), {}
    explorer = connected(servers, lambda: WeightStream.of(sent.items()))
    sent |= {name: tensor for name, tensor in weight_stream(whole) if "layers.1" not in name}
    with pytest.raises(WeightSyncError, match=r"missing: .*layers\.1"):
        driver.run(joined(explorer))
    meta = [(name, torch.float32, (*tensor.shape, 1)) for name, tensor in weight_stream(whole)]
    with pytest.raises(WeightSyncError, match=r"\.weight' \([\d, ]+, 1\), expected"):
        driver.run(joined(explorer, state_dict_meta=meta))
    sent |= dict(weight_stream(whole))
    driver.run(joined(explorer))
    before = driver.run(scores(servers)), [server.model_version for server in servers]
    sent["model.norm.weight"] = torch.ones(3)
    with pytest.raises(WeightSyncError, match=r"'model\.norm\.weight' \(3,\)"):
        driver.run(explorer.sync_weight(9))
    assert (driver.run(scores(servers)), [server.model_version for server in servers]) == before
    sent["model.norm.weight"] = whole.model.norm.weight.detach()
    driver.run(explorer.sync_weight(10))  # nothing was touched, the group neither
    assert_hold(driver, servers, whole)
    explorer.engines.leave()


# -- what goes wrong --------------------------------------------------------------------------------------------------


class Receiver(VLLMServerEngine):
    """Stands in for a server, which vLLM cannot mend once a sync was cut off: a thread that joins and receives."""

    def __init__(self) -> None:
        super().__init__("tiny", sync_method="nccl", **SETTINGS)
        self._weight_shapes, self._dtype = dict(weight_stream(tiny_model()).shapes), torch.float32
        self.received: list[Tensor] = []
        self.ended: BaseException | None = None

    link: Communicator | None = None
    dead = False
    resend: Callable[[], Awaitable[None]]

    async def load(self) -> None:
        """There is nothing to start; where `dead`, what it had is sent again."""
        if self.dead:
            self.dead = False
            self.received.clear()
            await self.resend()

    async def workers(self) -> int:
        return 1

    async def join_group(self, invitation: Mapping[str, Any]) -> None:
        self.leave()
        name, rank = base64.b64decode(invitation["nccl_unique_id_b64"]), invitation["rank_offset"]
        self.link = await run_in_thread(lambda: join(name, rank, invitation["world_size"]))

    def leave(self) -> None:
        if self.link is not None:
            self.link.destroy()

    async def receive_weights(
        self, updates: AsyncIterator[dict[str, Any]], version: int, resend: Callable[[], Awaitable[None]]
    ) -> None:
        self.resend = resend
        link, [announced] = self.link, [update async for update in updates]
        assert link is not None

        def receive() -> None:
            try:
                for shape in announced["shapes"]:
                    link.broadcast(tensor := torch.empty(shape), src=0)
                    self.received.append(tensor)
            except BaseException as error:
                self.ended = error
                raise

        await run_in_thread(receive)


def test_a_sync_that_is_cut_off_breaks_the_group(driver: Driver) -> None:
    model, go_on = tiny_model(), threading.Event()
    receivers = [Receiver(), Receiver()]

    def halting() -> Iterator[tuple[str, Tensor]]:
        for i, named in enumerate(weight_stream(model)):
            if i == 5:
                go_on.wait(60)
            yield named

    explorer = connected(receivers, lambda: weight_stream(model))
    driver.run(joined(explorer))
    driver.run(explorer.sync_weight(3))
    assert [len(receiver.received) for receiver in receivers] == [len(weight_stream(model).shapes)] * 2
    explorer.engines.source = lambda: WeightStream(weight_stream(model).shapes, halting)
    with pytest.raises(TimeoutError):
        driver.run(asyncio.wait_for(explorer.sync_weight(4), 1.0))
    go_on.set()
    with pytest.raises(WeightSyncError, match="earlier"):  # the group broke in the sync before
        driver.run(explorer.sync_weight(4))
    wait_for_the_end(receivers)  # none is left waiting for the rest
    explorer.engines.source = lambda: weight_stream(model)
    driver.run(joined(explorer))  # a new group is whole again
    driver.run(explorer.sync_weight(5))
    assert explorer.engines.version == 5
    end(explorer, receivers)


def end(explorer: Explorer, receivers: list[Receiver]) -> None:
    explorer.engines.leave()
    for receiver in receivers:
        receiver.leave()


def wait_for_the_end(receivers: list[Receiver]) -> None:
    limit = time.monotonic() + 30
    while any(receiver.ended is None for receiver in receivers):
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_an_error_of_the_trainers_ends_the_sync_at_once(driver: Driver) -> None:
    model, receivers = tiny_model(), [Receiver(), Receiver()]

    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from list(weight_stream(model))[:3]
        raise MemoryError("no room for a copy")

    explorer = connected(receivers, lambda: weight_stream(model))
    driver.run(joined(explorer))
    explorer.engines.source = lambda: WeightStream(weight_stream(model).shapes, failing)
    with pytest.raises(MemoryError, match="no room for a copy"):
        driver.run(explorer.sync_weight(6))
    wait_for_the_end(receivers)
    end(explorer, receivers)


def test_servers_that_died_at_once_are_sent_what_they_had_and_join_again(driver: Driver) -> None:
    model, receivers = tiny_model(), [Receiver(), Receiver()]
    tensors = len(weight_stream(model).shapes)
    explorer = connected(receivers, lambda: weight_stream(model))
    driver.run(joined(explorer))
    driver.run(explorer.sync_weight(1))

    async def both() -> None:
        await asyncio.gather(*(receiver.load() for receiver in receivers))

    for receiver in receivers:
        receiver.dead = True
    driver.run(both())
    assert [len(receiver.received) for receiver in receivers] == [tensors] * 2
    receivers[1].dead = True  # it is found so by the next sync
    driver.run(explorer.sync_weight(2))
    assert [len(receiver.received) for receiver in receivers] == [2 * tensors] * 2
    end(explorer, receivers)


async def joined_by(kind: type[ServerClient], there: VLLMServerEngine) -> None:
    """A group with that server, asked by another kind of client."""
    assert there._address is not None
    other = VLLMServerEngine("tiny", sync_method="nccl", **SETTINGS)
    other._client, other._weight_shapes = kind(there._address), there.weight_shapes
    try:
        await joined(connected([other], lambda: weight_stream(tiny_model())))
    finally:
        await other.shutdown()


class NotStartedForIt(ServerClient):
    async def post(self, path: str, body: Any) -> Any:
        raise ValueError(f"{path}: Weight transfer not configured")


class WithoutDevMode(ServerClient):
    async def get(self, path: str) -> Any:
        raise ValueError(f"{path}: status 404: Not Found")


@pytest.mark.parametrize("client", [NotStartedForIt, WithoutDevMode])
def test_a_server_that_does_not_join_is_an_error_of_the_sync(
    client: type[ServerClient], servers: list[VLLMServerEngine], driver: Driver
) -> None:
    with pytest.raises(WeightSyncError, match=r"not configured|404"):
        driver.run(joined_by(client, servers[0]))


@pytest.mark.parametrize("methods", [["checkpoint"], ["nccl", "checkpoint"], ["ipc"], []])
def test_servers_that_take_weights_in_different_ways(methods: list[str]) -> None:
    engines = [VLLMServerEngine("tiny", sync_method=method, **SETTINGS) for method in methods]
    with refuses("synchronizer"):
        WeightGroup(engines, torch.device("cuda"))


@pytest.mark.parametrize("method", ["nccl", "ipc"])
def test_nothing_is_sent_from_a_cpu(method: str) -> None:
    with refuses("synchronizer"):
        check_device(torch.device("cpu"), method)


@pytest.mark.usefixtures("needs_vllm")
def test_vllm_understands_what_its_own_backend_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of NCCL's path that needs no GPU: the requests, read by vLLM's own classes."""
    from vllm.distributed.device_communicators import pynccl_wrapper
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    told: list[tuple[str, dict[str, Any]]] = []

    class Listening(ServerClient):
        async def post(self, path: str, body: Any) -> Any:
            told.append((path.partition("?")[0], dict(body)))
            return {"success": True}

    async def talk() -> None:
        engine = VLLMServerEngine("tiny", sync_method="nccl", **SETTINGS)
        engine._client = Listening(str(tmp_path / "socket"))
        await engine.join_group(group.invitation(2))
        update = announcement({"a.weight": (2, 3), "b": (4,)}, torch.bfloat16)
        await engine.receive_weights(_once(update), 8, resend=engine.load)
        assert engine.model_version == 8
        await engine.shutdown()

    class Library:
        def ncclGetUniqueId(self) -> Any:  # noqa: N802
            return ncclUniqueId((ctypes.c_byte * 128)(*range(-64, 64)))

    monkeypatch.setattr(pynccl_wrapper, "NCCLLibrary", Library)
    group = NCCLGroup(4, torch.device("cuda", 0))
    assert group.invitation(2)["rank_offset"] == 1  # of the first server, whose workers are ranks 1 and 2
    asyncio.run(talk())
    assert [path for path, _ in told] == [
        "/shutdown_weight_transfer_engine",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
    ]
    init = NCCLWeightTransferInitInfo(**told[1][1]["init_info"])
    assert (init.master_address, init.rank_offset, init.world_size) == (None, 3, 5)
    assert init.nccl_unique_id_bytes == bytes(byte % 256 for byte in range(-64, 64))
    assert not init.packed  # tensors come one by one
    update = NCCLWeightTransferUpdateInfo(**told[3][1]["update_info"])
    assert (update.names, update.shapes) == (["a.weight", "b"], [[2, 3], [4]])
    assert [getattr(torch, name) for name in update.dtype_names] == [torch.bfloat16] * 2


def test_a_server_that_dies_is_sent_again_what_it_had_not_what_the_trainer_has(
    servers: list[VLLMServerEngine], driver: Driver
) -> None:
    sent, present = tiny_model(1.5), tiny_model(0.5)
    explorer = Explorer(ExplorerConfig(sync_interval=2), servers, None)
    trained = tiny_model(1.5)
    explorer.engines.source = lambda: weight_stream(trained)
    driver.run(joined(explorer))
    driver.run(explorer.sync_weight(20))
    trained.load_state_dict(present.state_dict())
    kill(servers[1])
    assert_hold(driver, servers, sent)
    assert [(server.restarts, server.model_version) for server in servers] == [(0, 20), (1, 20)]
    driver.run(explorer.sync_weight(21))
    assert_hold(driver, servers, present)
    explorer.engines.leave()


def kill(server: VLLMServerEngine) -> None:
    assert server._process is not None
    os.killpg(server._process._process.pid, signal.SIGKILL)
    server._process._process.wait()


def test_a_server_that_dies_ends_the_sync_at_once(
    servers: list[VLLMServerEngine], driver: Driver
) -> None:  # the last one
    model = tiny_model()

    def killing() -> Iterator[tuple[str, Tensor]]:
        for i, named in enumerate(weight_stream(model)):
            if i == 5:
                kill(servers[1])
            yield named

    explorer = connected(servers, lambda: WeightStream(weight_stream(model).shapes, killing))
    driver.run(joined(explorer))
    with pytest.raises(WeightSyncError, match="does not answer"):
        driver.run(asyncio.wait_for(explorer.sync_weight(7), 30))  # bounds a hang, not the speed
    kill(servers[0])  # it has half of the weights, and would end slowly

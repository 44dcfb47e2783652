"""Weights by memory that trainer and server share: with a real server, and its parts without one.

Only CUDA's shared memory is not real here: it needs a GPU, and a stand-in takes its place.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from support import ipc_stand_in
from support.forked import fork_servers
from support.runs import Commands
from support.tiny_model import logprobs, tiny_model
from torch import Tensor

from trinity_lightning.config.engines import EngineDtype
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import WeightSyncError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.models.server import ServerClient
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine
from trinity_lightning.sync import ipc
from trinity_lightning.sync.ipc import SharedBuffer, buckets, handle_as_json, rebuild_arguments
from trinity_lightning.sync.stream import WeightStream, weight_stream

SETTINGS: dict[str, Any] = {"dtype": EngineDtype.fp32, "max_model_len": 64, "max_num_seqs": 4, "kv_cache_gb": 0.1}
TEXT = [7, 30, 41, 12, 5, 97, 58]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def driver(needs_vllm: Any, run_train: Commands) -> Iterator[Driver]:
    with pytest.MonkeyPatch.context() as patch:
        fork_servers(run_train.address, patch.setattr)
        ipc_stand_in.install_in_trainer(patch.setattr)
        patch.setattr(ipc, "BUCKET_BYTES", 100_000)  # several buckets, one of a tensor that is larger
        driver = Driver()
        yield driver
        driver.close()


@pytest.fixture(scope="module")
def server(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServerEngine]:
    log = tmp_path_factory.mktemp("server") / "log"
    cores = sorted(os.sched_getaffinity(0))
    engine = VLLMServerEngine("tiny", sync_method="ipc", cores=cores[:1], log=log, **SETTINGS)
    driver.run(engine.load())
    yield engine
    driver.run(engine.shutdown())


def connected(server: VLLMServerEngine, model: Any) -> Explorer:
    explorer = Explorer(ExplorerConfig(), [server], None)
    explorer.engines.source = lambda: weight_stream(model)
    return explorer


# -- what arrives ------------------------------------------------------------------------------------------------------


def test_a_server_takes_what_the_trainer_writes(server: VLLMServerEngine, driver: Driver) -> None:
    model = tiny_model()
    explorer = connected(server, model)
    driver.run(explorer.setup_weight_sync_group())
    for version, scale in ((1, 1.5), (2, 0.5)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        driver.run(explorer.sync_weight(version))
        assert server.model_version == version
        assert driver.run(server.logprobs(TEXT)) == pytest.approx(logprobs(model, TEXT), abs=1e-3)
    shared = driver.run(server.logprobs(TEXT))
    driver.run(server.sync_weights(weight_stream(model), 3))
    assert driver.run(server.logprobs(TEXT)) == shared  # bit for bit what a folder brings
    explorer.engines.leave()


def test_weights_that_do_not_fit_leave_the_server_untouched(server: VLLMServerEngine, driver: Driver) -> None:
    explorer, version = connected(server, tiny_model()), server.model_version
    driver.run(explorer.setup_weight_sync_group())
    wrong = WeightStream.of([(name, tensor[:1]) for name, tensor in weight_stream(tiny_model())])
    explorer.engines.source = lambda: wrong
    with pytest.raises(WeightSyncError, match=r"\.weight' \(1,.*expected"):
        driver.run(explorer.sync_weight(9))
    assert server.model_version == version
    explorer.engines.leave()


def test_a_server_that_dies_is_given_again_what_it_had(server: VLLMServerEngine, driver: Driver) -> None:
    model = tiny_model(1.5)
    explorer = connected(server, model)
    explorer.engines._keeps_copy = True
    driver.run(explorer.setup_weight_sync_group())
    driver.run(explorer.sync_weight(5))
    model.load_state_dict(tiny_model(0.5).state_dict())
    assert server._process is not None
    server._process._process.kill()
    server._process._process.wait()
    assert driver.run(server.logprobs(TEXT)) == pytest.approx(logprobs(tiny_model(1.5), TEXT), abs=1e-3)
    assert (server.restarts, server.model_version) == (1, 5)
    explorer.engines.leave()


# -- requests, without a server ----------------------------------------------------------------------------------------


Answer = Callable[[str, Any], Awaitable[None]]


async def at_once(path: str, body: Any) -> None:
    """Answer without looking at the request."""


def asked_of(stream: WeightStream, monkeypatch: pytest.MonkeyPatch, answer: Answer = at_once) -> list[str]:
    """The requests of a sync to a server that holds weights of these shapes in bfloat16, each answered by `answer`."""
    ipc_stand_in.install_in_trainer(monkeypatch.setattr)
    asked: list[str] = []

    class Listening(ServerClient):
        async def post(self, path: str, body: Any) -> Any:
            asked.append(path.partition("?")[0])
            await answer(path, json.loads(json.dumps(body)))
            return {"success": True}

    async def sync() -> None:
        engine = VLLMServerEngine("tiny", sync_method="ipc", **SETTINGS)
        client = Listening("nowhere")
        engine._client, engine._weight_shapes, engine._dtype = client, dict(stream.shapes), torch.bfloat16
        explorer = Explorer(ExplorerConfig(), [engine], None)
        explorer.engines.source = lambda: stream
        await explorer.setup_weight_sync_group()
        try:
            await explorer.sync_weight(4)
        finally:
            await engine.shutdown()

    asyncio.run(sync())
    return asked


@pytest.mark.usefixtures("needs_vllm")
def test_vllm_reads_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.packed_tensor import PackedBufferImporter, packed_ipc_consumer

    from trinity_lightning.sync.ipc_worker import Receiver

    monkeypatch.setattr(ipc, "BUCKET_BYTES", 14)
    sent = {"a": torch.randn(3, 2).T, "b": torch.randn(()), "c": torch.randn(4), "d": torch.randn(0, 3)}
    received: list[tuple[str, Tensor]] = []
    receiver, importer = Receiver.__new__(Receiver), PackedBufferImporter()

    async def read(path: str, body: Any) -> None:
        if path == "/update_weights":
            info = receiver.parse_update_info(body["update_info"])
            assert isinstance(info.ipc_handles, dict)
            assert info.tensor_sizes is not None
            arguments = (info.ipc_handles, info.names, info.shapes, info.dtype_names, info.tensor_sizes)
            received.extend(packed_ipc_consumer(*arguments, device_index=0, importer=importer))

    assert asked_of(WeightStream.of(sent.items()), monkeypatch, read) == [
        "/start_weight_update",
        "/update_weights",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
    ]
    assert {name: tensor.tolist() for name, tensor in received} == {
        name: tensor.bfloat16().tolist() for name, tensor in sent.items()
    }


def test_memory_that_cannot_be_shared_is_an_error_of_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: Tensor) -> Any:
        raise RuntimeError("invalid argument")

    monkeypatch.setattr(ipc_stand_in, "export", refuse)
    with pytest.raises(WeightSyncError, match="invalid argument"):
        asked_of(WeightStream.of({"a": torch.ones(2)}.items()), monkeypatch)


def test_a_server_that_was_not_started_for_it_is_an_error_of_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(path: str, body: Any) -> None:
        raise ValueError(f"{path}: Weight transfer not configured")

    with pytest.raises(WeightSyncError, match="not configured"):
        asked_of(WeightStream.of({"a": torch.ones(2)}.items()), monkeypatch, refuse)


# -- buckets and handles -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([], 10, []),
        ([4], 10, [[0]]),
        ([4, 6], 10, [[0, 1]]),
        ([4, 7], 10, [[0], [1]]),
        ([40, 1, 1], 10, [[0], [1, 2]]),
        ([1, 40, 1], 10, [[0], [1], [2]]),
        ([5, 5, 5, 5, 5], 10, [[0, 1], [2, 3], [4]]),
        ([0, 10, 0], 10, [[0, 1, 2]]),
    ],
)
def test_buckets_keep_the_order_and_the_size(sizes: list[int], most: int, expected: list[list[int]]) -> None:
    shapes = {str(i): (size, 1) for i, size in enumerate(sizes)}
    assert buckets(shapes, 2, 2 * most) == [[str(i) for i in names] for names in expected]


def test_a_handle_is_the_same_behind_json() -> None:
    where = (5, b"\x00\xff handle", 4096, 512, False, b"\x01counter", 77, bytes(range(64)), True)
    kinds = (Tensor, torch.Size([4096]), (1,), 0, torch.storage.TypedStorage, torch.uint8)
    back = rebuild_arguments(json.loads(json.dumps(handle_as_json((*kinds, *where)))))
    assert back[:6] == kinds
    assert back[7:] == where[1:]  # vLLM sets the device to the receiver's: "Index 6 of the args" there
    hash(back)  # vLLM's PackedBufferImporter asks by it


def test_a_handle_has_what_torch_asks_for() -> None:
    """The names are torch's own: another release that asks for others is noticed here."""
    known = {"tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device"}
    assert set(ipc._ARGUMENTS) == known | {"requires_grad", *ipc._BYTES, *ipc._NUMBERS}
    assert ipc._ARGUMENTS.index("storage_device") == 6  # which vLLM sets


def test_a_buffer_has_tensors_one_after_the_other_in_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    ipc_stand_in.install_in_trainer(monkeypatch.setattr)
    buffer = SharedBuffer(16, CPU)
    [handle] = buffer.handles.values()
    tensors = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T, torch.tensor(5.0), torch.empty(0, 3)]
    assert buffer.fill(tensors, torch.bfloat16) == [8, 2, 0]
    shared = ipc_stand_in.rebuild(*rebuild_arguments(handle))
    assert shared[:10].view(torch.bfloat16).tolist() == [1.0, 3.0, 2.0, 4.0, 5.0]
    buffer.fill([torch.tensor([7.0])], torch.bfloat16)
    assert shared[:2].view(torch.bfloat16).tolist() == [7.0]  # the same memory
    buffer.free()

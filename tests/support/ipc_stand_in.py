"""Memory that processes without a GPU share, in the place of a GPU's: a file that both map.

Everything else is the real thing: the requests, this package's two ends, and the backend of vLLM that it is made of.
"""

import os
import tempfile
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

TESTS = Path(__file__).resolve().parents[1]
GPU = "GPU-1b7a"
PREFIX = "ipc-stand-in-"


def export(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """In the place of torch's `reduce_tensor`: bytes are mapped from a file, whose path is the handle."""
    descriptor, path = tempfile.mkstemp(prefix=PREFIX)
    os.close(descriptor)
    mapped = torch.from_file(path, shared=True, size=tensor.numel(), dtype=torch.uint8)
    tensor.set_(mapped.untyped_storage(), 0, tensor.shape, tensor.stride())
    storage, size = type(tensor._typed_storage()), tensor.numel()
    where = (0, path.encode(), size, 0, False, b"counter", 3, b"event", False)
    return rebuild, (type(tensor), tensor.size(), tensor.stride(), 0, storage, tensor.dtype, *where)


def rebuild(kind: Any, size: Any, stride: Any, offset: int, storage: Any, dtype: Any, *where: Any) -> Tensor:
    """In the place of torch's `rebuild_cuda_tensor`; the file is not needed any more once it is mapped here."""
    _, path, *_ = where
    mapped = torch.from_file(path.decode(), shared=True, size=size[0], dtype=dtype)
    Path(path.decode()).unlink()
    return mapped


def install(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put this in CUDA's place, in the trainer or a worker."""
    patch(reductions, "reduce_tensor", export)
    patch(reductions, "rebuild_cuda_tensor", rebuild)
    patch(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=GPU))
    patch(torch.cuda, "device", lambda device: nullcontext())
    patch(torch.cuda, "synchronize", lambda device=None: None)
    patch(torch.cuda, "ipc_collect", lambda: None)


def install_in_trainer(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put this in CUDA's place, in this process and in servers that are started here."""
    from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine
    from trinity_lightning.sync import servers as weight_servers
    from trinity_lightning.sync.ipc import SharedMemory

    install(patch)
    original = VLLMServerEngine._environment

    def environment(engine: VLLMServerEngine, flags: Collection[str]) -> dict[str, str]:
        variables = original(engine, flags)
        before = (os.environ | variables).get("PYTHONPATH")
        return variables | {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), before]))}

    worker = {"worker_extension_cls": "support.ipc_stand_in_worker.Extension"}
    patch(SharedMemory, "server_arguments", {**SharedMemory.server_arguments, **worker})
    patch(VLLMServerEngine, "_environment", environment)
    patch(weight_servers, "check_device", lambda device, method: None)

"""Checkpoints: a file, or a folder of shards in the format of `torch.distributed.checkpoint`.

A folder has three parts. `*.distcp` holds the tensors that several ranks have shares of, and `.metadata` says where in
those files each of them lies. REST is the checkpoint as one device writes it, with a tensor on the meta device in place
of each sharded tensor; it also has the hash of `.metadata`. A sharded tensor is named by its place in REST, such as
"state_dict.model.norm.weight". Each process writes and reads its own rows.
"""

import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import DTensor

from trinity_lightning.common.files import replacing
from trinity_lightning.common.ranks import Ranks
from trinity_lightning.config.checkpoints import METADATA, REST, check_metadata
from trinity_lightning.errors import ConfigError


def contents(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint; nothing of it is run as code.

    Tensors stay on disk until they are used: the file is mapped into memory. Sharded tensors are on the meta device;
    `filled` reads them.
    """
    path = Path(path)
    file = path / REST if path.is_dir() else path
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def whole(path: str | Path, part: dict[str, Any]) -> dict[str, Any]:
    """A part of a checkpoint's contents, such as {"state_dict": ...}, with all of its tensors.

    Raises:
        ConfigError: the shards are damaged.
    """
    return part if Path(path).is_file() else filled(Path(path), part)


# -- shards ------------------------------------------------------------------------------------------------------------


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A new folder to write to, which takes the target's place at the end; errors as in `replacing`."""
    with replacing(target) as temporary:
        temporary.mkdir()
        yield temporary


def write(folder: Path, shares: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write this rank's shares of tensors, by their places; all ranks call it.

    Raises:
        RankError: another rank could not write its shares.
        OSError: this rank could not.
    """
    planner, writer = DefaultSavePlanner(), _Writer(folder)
    planner.set_up_planner(dict(shares), is_coordinator=ranks.rank == 0)
    plans = ranks.exchange(writer.prepare_local_plan(planner.create_local_plan()), at="a checkpoint")
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[ranks.rank])
    at = "the end of a checkpoint"
    try:
        results = writer.write_data(plan, planner).wait()
    except Exception:
        ranks.exchange(None, at=at)  # others may still write to the folder, which is about to be removed
        raise
    written = ranks.exchange(results, at=at)
    if None in written:
        ranks.exchange(None, at=at)  # raises the error of the rank that failed
    if ranks.rank == 0:
        writer.finish(metadata, written)


@torch.no_grad()
def read(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill each tensor, or this rank's share of it, with the numbers at its place, in the tensor's own dtype.

    Raises:
        ConfigError: something is missing, damaged, or of another shape.
    """
    planner, reader = DefaultLoadPlanner(), _Reader(folder)
    try:
        check_metadata(folder)
        with (folder / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        planner.set_up_planner(dict(targets), metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        reader.read_data(planner.create_local_plan(), planner).wait()
    except Exception as error:  # damaged files may provoke any
        raise ConfigError(
            f"the checkpoint '{folder}' cannot be read, choose another one: {type(error).__name__}: {error}",
            key="ckpt_path",
        ) from error


def filled(folder: Path, checkpoint: Any, into: Mapping[str, Tensor] | None = None) -> Any:
    """A checkpoint, or a part of it, with all of its tensors.

    Args:
        folder: the checkpoint's folder.
        checkpoint: the result of `contents`, or a part of it.
        into: tensors to fill, by place; sharded tensors at other places are made anew on the CPU.

    Raises:
        ConfigError: as in `read`.
    """
    places = places_of(checkpoint)
    tensors = {
        place: into[place] if into and place in into else torch.empty_like(tensor, device="cpu")
        for place, tensor in places.items()
    }
    read(folder, tensors)
    return _replaced(checkpoint, {id(tensor): tensors[place] for place, tensor in places.items()})


def without_shards(checkpoint: Any) -> Any:
    """The checkpoint with a tensor on the meta device in place of each sharded one."""
    shares = places_of(checkpoint).values()
    return _replaced(checkpoint, {id(t): torch.empty(t.shape, dtype=t.dtype, device="meta") for t in shares})


def places_of(checkpoint: Any) -> dict[str, Tensor]:
    """The sharded tensors by their places; a tensor at several places (tied weights) by the first of them."""
    first_places: dict[int, tuple[str, Tensor]] = {}
    for place, tensor in _tensors(checkpoint):
        if isinstance(tensor, DTensor) or tensor.is_meta:
            first_places.setdefault(id(tensor), (place, tensor))
    return dict(first_places.values())


def _tensors(node: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        yield place, node
    elif isinstance(node, Mapping | list | tuple):
        for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _tensors(child, f"{place}.{key}" if place else str(key))


def _replaced(node: Any, tensors: Mapping[int, Tensor]) -> Any:
    if isinstance(node, Mapping):
        return {key: _replaced(child, tensors) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return type(node)([_replaced(child, tensors) for child in node])
    return tensors.get(id(node), node)


# -- the files of shards -----------------------------------------------------------------------------------------------


class _Writer(FileSystemWriter):
    def storage_meta(self) -> None:
        """Write no path into `.metadata`: a folder may be moved, and its path is nobody's business."""


class _Reader(FileSystemReader):
    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        """The bytes of a tensor, a zip file: its checksums are tested here, as `torch.load` does not look at them."""
        data = io.BytesIO(super()._slice_file(file, sinfo).read())
        if (damaged := zipfile.ZipFile(data).testzip()) is not None:
            raise ValueError(f"{sinfo.relative_path} is damaged ({damaged})")
        data.seek(0)
        return data


# The only names that `.metadata`, a pickle, may import: they describe tensors' names, shapes and places in files.
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata")),
    *((_METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    (_FILES, "_StorageInfo"),
    ("torch", "Size"),
    *(("torch", name) for name in ("float32", "float16", "bfloat16", "float64", "int64")),
    ("torch.serialization", "_get_layout"),
}


class _Unpickler(pickle.Unpickler):
    """Refuses all other names: torch itself would run any code that the pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f".metadata may not name {module}.{name}")
        return super().find_class(module, name)

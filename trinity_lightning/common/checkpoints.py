"""What a checkpoint holds: a file, or a folder of shards in the format of `torch.distributed.checkpoint`.

Such a folder has the tensors in `*.distcp`, where they are in `.metadata`, and in REST the hash of `.metadata` and the
checkpoint as one device writes it, with a tensor on the meta device in place of each of those. They are found by their
places in it, such as "state_dict.model.norm.weight". Each process writes and reads its own rows.
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
    """All of a checkpoint, nothing of which is run as code; its tensors stay on disk until they are used.

    Those of a file are mapped into memory. Those that are in shards are on the meta device: `filled` reads them.
    """
    path = Path(path)
    file = path / REST if path.is_dir() else path
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def whole(path: str | Path, part: dict[str, Any]) -> dict[str, Any]:
    """A part of the contents of that checkpoint, such as {"state_dict": ...}, with all of its tensors.

    Raises:
        ConfigError: its shards are damaged.
    """
    return part if Path(path).is_file() else filled(Path(path), part)


# -- shards ------------------------------------------------------------------------------------------------------------


# All that `.metadata`, a pickle, may import: tensors' names, shapes and places in files.
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata")),
    *((_METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    (_FILES, "_StorageInfo"),
    ("torch", "Size"),
    *(("torch", name) for name in ("float32", "float16", "bfloat16", "float64", "int64")),
    ("torch.serialization", "_get_layout"),
}


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, as `replacing`."""
    with replacing(target) as temporary:
        temporary.mkdir()
        yield temporary


def write(folder: Path, shares: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write tensors by their places, of which each rank has a share; all ranks call it.

    Raises:
        RankError: another rank could not write its own.
        OSError: this one could not.
    """
    planner, writer = DefaultSavePlanner(), _Writer(folder)
    planner.set_up_planner(dict(shares), is_coordinator=ranks.rank == 0)
    plans = ranks.exchange(writer.prepare_local_plan(planner.create_local_plan()), at="a checkpoint")
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[ranks.rank])
    at = "the end of a checkpoint"
    try:
        own = writer.write_data(plan, planner).wait()
    except Exception:
        ranks.exchange(None, at=at)  # others may still write to the folder, which is removed next
        raise
    written = ranks.exchange(own, at=at)
    if None in written:
        ranks.exchange(None, at=at)  # raises what that rank has failed by
    if ranks.rank == 0:
        writer.finish(metadata, written)


@torch.no_grad()
def read(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill each tensor, or this rank's share of it, with what is at its place; a dtype of its own rounds.

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
    except Exception as error:  # whatever damaged files provoke
        raise ConfigError(
            f"the checkpoint '{folder}' cannot be read, choose another one: {type(error).__name__}: {error}"
        ) from error


def filled(folder: Path, checkpoint: Any, into: Mapping[str, Tensor] | None = None) -> Any:
    """A checkpoint, or a part of it, with all of its tensors: those in shards in `into` by their places, or new ones.

    Raises:
        ConfigError: as `read`.
    """
    places = places_of(checkpoint)
    tensors = {
        place: into[place] if into and place in into else torch.empty_like(each, device="cpu")
        for place, each in places.items()
    }
    read(folder, tensors)
    return _replaced(checkpoint, {id(each): tensors[place] for place, each in places.items()})


def without_shards(checkpoint: Any) -> Any:
    """The checkpoint with a tensor on the meta device for each that ranks have shares of."""
    shares = places_of(checkpoint).values()
    return _replaced(checkpoint, {id(t): torch.empty(t.shape, dtype=t.dtype, device="meta") for t in shares})


def places_of(checkpoint: Any) -> dict[str, Tensor]:
    """The tensors in shards by their places; one of several names (tied weights) by the first."""
    found: dict[int, tuple[str, Tensor]] = {}
    for place, each in _tensors(checkpoint):
        if isinstance(each, DTensor) or each.is_meta:
            found.setdefault(id(each), (place, each))
    return dict(found.values())


def _tensors(node: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        yield place, node
    elif isinstance(node, Mapping | list | tuple):
        for key, each in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _tensors(each, f"{place}.{key}" if place else str(key))


def _replaced(node: Any, tensors: Mapping[int, Tensor]) -> Any:
    if isinstance(node, Mapping):
        return {key: _replaced(each, tensors) for key, each in node.items()}
    if isinstance(node, list | tuple):
        return type(node)([_replaced(each, tensors) for each in node])
    return tensors.get(id(node), node)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> None:
        """Nothing: a folder may be moved, and its path is nobody's business."""


class _Reader(FileSystemReader):
    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        """The bytes of a tensor: a zip file, whose checksums `torch.load` would not look at."""
        data = io.BytesIO(super()._slice_file(file, sinfo).read())
        if (damaged := zipfile.ZipFile(data).testzip()) is not None:
            raise ValueError(f"{sinfo.relative_path} is damaged ({damaged})")
        data.seek(0)
        return data


class _Unpickler(pickle.Unpickler):
    """Refuses everything but what torch writes of tensors: torch itself would run whatever the pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f".metadata may not name {module}.{name}")
        return super().find_class(module, name)

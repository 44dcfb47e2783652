"""Checkpoints that several ranks write their shares of, and that any number of them reads."""

import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refuses
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from trinity_lightning.common.checkpoints import contents, new_folder, places_of, read, whole, without_shards, write
from trinity_lightning.common.ranks import Ranks
from trinity_lightning.config.checkpoints import HASH, METADATA, REST, check_whole, checkpoints_in, hash_of
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.fsdp import Mesh


class Meeting:
    """A place for threads of one process to exchange values as ranks do."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def ranks(self) -> "list[Ranks]":
        return [Thread(rank=rank, size=len(self.values), group=self) for rank in range(len(self.values))]


class Thread(Ranks):
    """A rank of a Meeting."""

    def exchange(self, value: Any, patient: bool = False, at: str = "") -> list[Any]:
        self.group.values[self.rank] = value
        self.group.barrier.wait(30)
        values = list(self.group.values)
        self.group.barrier.wait(30)
        return values


def share(tensor: Tensor, rank: int, size: int) -> Tensor:
    """The rows of that rank, as `fully_shard` deals them."""
    most = -(-len(tensor) // size)
    rows, mesh = tensor[rank * most : (rank + 1) * most].clone(), Mesh(Ranks(rank, size), torch.device("cpu"))
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def checkpoint_of(tensors: list[Tensor], rank: int, size: int) -> dict[str, Any]:
    """A checkpoint with shares of tensors, the first of them under two names, and with other things."""
    weights = {f"model.{number}": share(tensor, rank, size) for number, tensor in enumerate(tensors)}
    moments = {
        number: {"step": torch.tensor(3.0), "exp_avg": share(tensor * 2, rank, size)}
        for number, tensor in enumerate(tensors)
    }
    tied = {"model.tied": weights["model.0"], "model.buffer": torch.arange(3)}
    return {"state_dict": weights | tied, "optimizer_states": [{"state": moments, "betas": (0.9, 0.95)}], "epoch": 2}


def save(target: Path, tensors: list[Tensor], size: int) -> None:
    """Write a checkpoint as so many ranks do."""
    with new_folder(target) as folder:

        def work(ranks: Ranks) -> None:
            write(folder, places_of(checkpoint_of(tensors, ranks.rank, size)), ranks)

        with ThreadPoolExecutor(size) as pool:
            list(pool.map(work, Meeting(size).ranks()))
        torch.save(without_shards(checkpoint_of(tensors, 0, size)) | {HASH: hash_of(folder)}, folder / REST)


def some_tensors() -> list[Tensor]:
    return [torch.randn(7, 4), torch.randn(3).bfloat16(), torch.randn(1, 2, 2)]


@given(
    st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 5),
)
@settings(deadline=None, max_examples=20)  # files are synced, however busy the disk is
def test_any_number_of_ranks_reads_what_any_number_wrote(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], writers: int, readers: int
) -> None:
    path = tmp_path_factory.mktemp("shards") / "it.ckpt"
    tensors = [torch.randn(shape) for shape in shapes]
    save(path, tensors, writers)
    checkpoint = contents(path)
    assert checkpoint["state_dict"]["model.tied"] is checkpoint["state_dict"]["model.0"]
    for rank in range(readers):
        empty = checkpoint_of([torch.zeros_like(tensor) for tensor in tensors], rank, readers)
        targets = places_of(empty)
        read(path, targets)
        expected = places_of(checkpoint_of(tensors, rank, readers))
        assert targets.keys() == expected.keys() == places_of(checkpoint).keys()
        for place, target in targets.items():
            assert torch.equal(target.to_local(), expected[place].to_local()), place  # type: ignore[attr-defined]


def test_one_process_reads_all_of_it_or_a_part(tmp_path: Path) -> None:
    tensors = some_tensors()
    save(tmp_path / "it.ckpt", tensors, 2)
    checkpoint = contents(tmp_path / "it.ckpt")
    everything = whole(tmp_path / "it.ckpt", checkpoint)
    for number, tensor in enumerate(tensors):
        assert torch.equal(everything["state_dict"][f"model.{number}"], tensor)
        assert torch.equal(everything["optimizer_states"][0]["state"][number]["exp_avg"], tensor * 2)
    assert everything["state_dict"]["model.buffer"].tolist() == [0, 1, 2]
    assert (everything["optimizer_states"][0]["betas"], everything["epoch"]) == ((0.9, 0.95), 2)
    weights = whole(tmp_path / "it.ckpt", {"state_dict": checkpoint["state_dict"]})["state_dict"]
    torch.testing.assert_close(weights["model.1"], tensors[1], rtol=0, atol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it.ckpt"]
    assert str(tmp_path).encode() not in (tmp_path / "it.ckpt" / ".metadata").read_bytes()


def fill_half(target: Path) -> None:
    with new_folder(target) as folder:
        (folder / "__0_0.distcp").write_bytes(b"half of it")
        raise OSError("disk full")


@pytest.mark.parametrize("before", ["nothing", "a file", "a folder"])
def test_what_fails_on_the_way_leaves_what_was_there(tmp_path: Path, before: str) -> None:
    target = tmp_path / "it.ckpt"
    if before == "a file":
        torch.save({"epoch": 1}, target)
    elif before == "a folder":
        save(target, some_tensors(), 1)
    (tmp_path / ".it.ckpt.tmp").write_bytes(b"of a file that a kill left")
    with pytest.raises(OSError, match="disk full"):
        fill_half(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ([] if before == "nothing" else ["it.ckpt"])
    save(target, some_tensors(), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["it.ckpt"]
    assert contents(target)["epoch"] == 2


def test_a_folder_that_was_not_written_to_its_end_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("first", "last"):
        save(tmp_path / f"{name}.ckpt", some_tensors(), 2)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["first.ckpt", "last.ckpt"]
    (tmp_path / "last.ckpt" / REST).unlink()
    assert [path.name for path in checkpoints_in(tmp_path)] == ["first.ckpt"]


@pytest.mark.parametrize(
    ("cut_short", "left"), [("pathlib.Path.replace", 0), ("trinity_lightning.common.files.sync_folder", 1)]
)
def test_a_kill_while_one_takes_the_place_of_another_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_short: str, left: int
) -> None:
    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "it.ckpt"
    save(path, [torch.zeros(3)], 1)
    with monkeypatch.context() as patch:
        patch.setattr(cut_short, kill)
        with pytest.raises(KeyboardInterrupt):
            save(path, [torch.ones(3)], 1)
    [left_there] = checkpoints_in(tmp_path)
    assert whole(left_there, contents(left_there))["state_dict"]["model.0"].tolist() == [left] * 3
    save(path, [torch.full((3,), 2.0)], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["it.ckpt"]
    assert whole(path, contents(path))["state_dict"]["model.0"].tolist() == [2.0] * 3


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("print('it runs')",))  # print itself may be another library's by now


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.find(b"data/0") + 200  # within a tensor's bytes, which torch aligns to 64
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))


def forge(folder: Path) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(Evil()))
    torch.save(torch.load(folder / REST) | {HASH: hash_of(folder)}, folder / REST)


DAMAGE = {
    "a flipped byte": lambda folder: flip(folder / "__1_0.distcp"),
    "a file that ends early": lambda folder: (folder / "__0_0.distcp").write_bytes(b"short"),
    "a file that is gone": lambda folder: (folder / "__1_0.distcp").unlink(),
    "no metadata": lambda folder: (folder / ".metadata").write_bytes(b""),
    "code": forge,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_and_no_code_is_run(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "it.ckpt"
    save(path, [torch.zeros(400, 8)], 2)
    DAMAGE[damage](path)
    with refuses("ckpt_path") as refused:
        whole(path, contents(path))
    assert str(path) in str(refused.value)
    assert not capsys.readouterr().out


def test_a_byte_of_the_metadata_that_was_flipped_is_found(tmp_path: Path) -> None:
    path = tmp_path / "it.ckpt"
    save(path, some_tensors(), 2)
    check_whole(path)
    metadata, checkpoint = (path / METADATA).read_bytes(), contents(path)
    for at in range(0, len(metadata), 7):
        (path / METADATA).write_bytes(metadata[:at] + bytes([metadata[at] ^ 1]) + metadata[at + 1 :])
        for use in (check_whole, lambda path: whole(path, checkpoint)):
            with pytest.raises(ConfigError, match=r"\.metadata"):
                use(path)


def test_what_cannot_be_removed_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank still writes to the folder."""

    def refused(path: Path) -> NoReturn:
        raise OSError("Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", refused)
    with pytest.raises(OSError, match="disk full"):
        fill_half(tmp_path / "it.ckpt")

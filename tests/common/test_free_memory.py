"""Free memory in a container, by files of control groups."""

from pathlib import Path

import pytest

from trinity_lightning.common import free_memory as module
from trinity_lightning.common.free_memory import free_memory

MIB = 1 << 20


@pytest.fixture(params=range(2), ids=["version 2", "version 1"])
def limit(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the limit of a container that uses 100 MiB, 60 of them for files that it read."""
    _, _, cache = module._CONTAINER[request.param]
    limit, used = tmp_path / "limit", tmp_path / "used"
    used.write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {40 * MIB}\n{cache} {60 * MIB}\nactive_file 0\n")
    monkeypatch.setattr(module, "_CONTAINER", [(str(limit), str(used), cache)])
    return limit


def test_a_container_has_less_memory_than_its_machine_and_files_that_it_read_take_none(limit: Path) -> None:
    machine = free_memory()
    limit.write_text(f"{300 * MIB}\n")
    assert free_memory() == 260 * MIB
    limit.write_text("max\n")
    assert free_memory() > min(machine, 260 * MIB)
    limit.write_text("1\n")
    assert free_memory() == 0

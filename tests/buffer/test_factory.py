"""Storages and readers by name: each pair carries experiences, and what cannot work is refused by its key."""

import subprocess
import sys

import pytest
from buffer_cases import make_group

from trinity_lightning.buffer.memory import MemoryStorage
from trinity_lightning.buffer.reader import create_reader, create_storage
from trinity_lightning.buffer.step_files import keep_step
from trinity_lightning.errors import ConfigError


@pytest.mark.parametrize("name", ["file", "sql"])
def test_what_a_storage_takes_its_reader_gives(tmp_path, name):
    group = make_group(0, 3)
    storage = create_storage(name, path=tmp_path / "buffer")
    storage.write(group)
    reader = create_reader(name, path=tmp_path / "buffer")
    assert reader.read() == group
    reader.close()


def test_a_database_goes_by_its_url_and_has_other_orders(tmp_path):
    url = f"sqlite:///{tmp_path}/buffer.db"
    create_storage("sql", url=url).write(make_group(0, 3))
    for order in ("priority", "random"):
        with create_reader("sql", url=url, order=order, reuse_limit=None) as reader:
            assert len(reader.read(2)) == 2


def test_memory_and_kept_steps(tmp_path):
    group = make_group(0, 3)
    assert isinstance(create_storage("memory"), MemoryStorage)
    assert create_reader("memory", experiences=group).read(9) == group
    keep_step(tmp_path, 1, group)
    assert create_reader("file", path=tmp_path).read() == group


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fiel", {}, "Did you mean 'file'"),
        ("file", {}, "buffer.path=FILE"),
        ("file", {"path": "a", "url": "b"}, "no buffer.url"),
        ("sql", {}, "buffer.path=FILE .SQLite. or buffer.url"),
        ("sql", {"path": "a", "url": "b"}, "either"),
        ("memory", {"path": "a"}, "no buffer.path"),
    ],
)
@pytest.mark.parametrize("create", [create_storage, create_reader])
def test_what_cannot_work_is_refused_by_its_key(create, name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        create(name, **arguments)


def test_readers_refuse_orders_they_do_not_have():
    with pytest.raises(ConfigError, match=r"buffer\.order 'newest'"):
        create_reader("sql", path="a", order="newest")
    with pytest.raises(ConfigError, match=r"buffer\.storage=sql"):
        create_reader("file", path="a", order="priority")
    with pytest.raises(ConfigError, match="without an explorer"):
        create_reader("memory")


def test_without_sqlalchemy_the_extra_is_named(tmp_path):
    code = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "from trinity_lightning.buffer.reader import create_storage\n"
        f"create_storage('file', path={str(tmp_path / 'buffer')!r})\n"
        "create_storage('sql', path='x')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError: buffer.storage=sql needs SQLAlchemy" in done.stderr
    assert "trinity-lightning[sql]" in done.stderr
    assert (tmp_path / "buffer").exists()

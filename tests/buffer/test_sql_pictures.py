"""Pictures in a database, SQLite or, where it is installed, PostgreSQL: each is there once, as long as it is used."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.buffer import make_group
from support.experiences import pictured
from support.postgres import postgres_url  # noqa: F401  # a fixture

from trinity_lightning.buffer import sql
from trinity_lightning.buffer.database import PICTURES, ROWS, USES, Database, sa
from trinity_lightning.buffer.sql import ReplayReader, SqlReader, SqlStorage, keep_step
from trinity_lightning.common.experience import Experience, ExperienceError, ExperienceFormatError
from trinity_lightning.errors import StorageFormatError

PLACES = 1  # tensors that all pictures of `pictured` have in common, beside one of pixels for each


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for one buffer: nothing is there yet."""
    if request.param == "sqlite":
        return str(tmp_path / "buffer.db")
    return request.getfixturevalue("postgres_url")()


def write(place: str, *writes: list[Experience]) -> None:
    with SqlStorage(place) as storage:
        for experiences in writes:
            storage.write(experiences)


def execute(place: str, *statements: Any) -> Any:
    """The rows that the last statement gives, if it gives any."""
    database = Database(place, create=False)

    def work(connection: sa.Connection, _again: bool) -> Any:
        results = [connection.execute(statement) for statement in statements]
        return results[-1].all() if results[-1].returns_rows else None

    rows = database.transact(work, write=True)
    database.close()
    return rows


def tables(place: str) -> set[str]:
    database = Database(place, create=False)
    names = database.transact(lambda connection, _: sa.inspect(connection).get_table_names())
    database.close()
    return set(names)


def stored(place: str) -> int:
    """Number of tensors in the table of pictures, all of which some write uses."""
    hashes = {row.hash for row in execute(place, sa.select(PICTURES.c.hash))}
    assert hashes == {row.hash for row in execute(place, sa.select(USES.c.hash))}
    return len(hashes)


@pytest.mark.parametrize("kind", [SqlReader, ReplayReader])
def test_pictures_are_there_once_and_are_read_shared(place: str, kind: Any) -> None:
    experiences = [*pictured(groups=2, pixels=10_000), *make_group(7, 2)]
    write(place, experiences, pictured(groups=2, pixels=10_000))
    assert stored(place) == 2 + PLACES
    assert max(len(row.payload) for row in execute(place, sa.select(ROWS))) < 2_000
    with kind(place) as reader:
        again = reader.read(100)
    assert again == [*experiences, *experiences[:6]]
    dicts = [id(e.multi_modal_inputs) for e in again if e.multi_modal_inputs]
    assert dicts == [dicts[0]] * 3 + [dicts[3]] * 3 + [dicts[0]] * 3 + [dicts[3]] * 3
    assert dicts[0] != dicts[3]


def test_pictures_of_a_group_that_was_fetched_in_parts_are_shared(place: str) -> None:
    write(place, pictured(groups=3, size=2))
    with SqlReader(place) as reader:
        assert [len(reader.read(3, whole_groups=True)) for _ in range(1)] == [2]
        first, second = reader.read(3, whole_groups=True)  # the first of them was fetched by the read before
        assert first.eid.tid == second.eid.tid
        assert first.multi_modal_inputs is second.multi_modal_inputs


def test_a_step_done_again_leaves_no_picture_that_nothing_uses(place: str) -> None:
    first, second, third = (pictured(groups=3)[start : start + 3] for start in (0, 3, 6))
    keep_step(place, "run", 1, [*first, *second])
    keep_step(place, "run", 2, second)
    assert stored(place) == 2 + PLACES
    keep_step(place, "run", 1, third)
    assert stored(place) == 2 + PLACES  # those of the first group are gone, the second step's are not
    keep_step(place, "run", 1, third)
    with SqlReader(place) as reader:
        assert reader.read(100) == [*second, *third]
    keep_step(place, "run", 2, make_group(0, 2))
    keep_step(place, "run", 1, [])
    assert stored(place) == 0


def test_a_database_of_text_has_no_tables_of_pictures(place: str) -> None:
    write(place, make_group(0, 2))
    keep_step(place, "run", 1, make_group(1, 2))
    keep_step(place, "run", 1, make_group(1, 2))
    assert tables(place) == {"experiences", "experiences_info", "experiences_reads"}
    assert {row.payload[4] for row in execute(place, sa.select(ROWS))} == {2}


def test_a_database_of_an_earlier_version_is_read_and_takes_pictures(place: str) -> None:
    """Its rows have their pictures within them, and it has no other tables."""
    old = Path(__file__).with_name("version_2_picture.bin").read_bytes()
    write(place, make_group(0, 1))
    execute(place, ROWS.update().values(payload=old))
    with SqlReader(place) as reader:
        assert reader.read(9) == pictured()[:1]
    keep_step(place, "run", 1, pictured(groups=2))
    assert stored(place) == 2 + PLACES
    with SqlReader(place) as reader:
        again = reader.read(9)
    assert again == [pictured()[0], *pictured(groups=2)]
    assert again[0].multi_modal_inputs is again[1].multi_modal_inputs


def test_all_or_nothing_is_written(place: str) -> None:
    with SqlStorage(place) as storage:
        bad = pictured()[0]
        bad.multi_modal_inputs = {"pixels": torch.eye(2).to_sparse()}
        with pytest.raises(ExperienceError, match=r"1/0/0/0/p: multi_modal_inputs\['pixels'\]: .*sparse"):
            storage.write([*pictured(), bad])
        with SqlReader(place) as reader:
            assert reader.read(9) == []
        assert "experiences_pictures" not in tables(place)


def test_more_pictures_than_a_query_can_name(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "_AT_ONCE", 2)
    experiences = pictured(groups=7, size=1)
    for batch in (experiences, experiences[:3]):
        keep_step(place, "run", 1, batch)
        assert stored(place) == len(batch) + PLACES
        with SqlReader(place) as reader:
            assert reader.read(100) == batch


def test_a_step_that_is_replaced_between_two_queries_of_a_reader(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite shows the step as it was; PostgreSQL the rows of one state and the pictures of another."""
    before, after = pictured(groups=2)[:3], pictured(groups=2)[3:]
    keep_step(place, "run", 1, before)
    pictures_of, replaced = sql._pictures_of, []

    def replace_once(payload: bytes) -> list[str]:
        if not replaced:
            replaced.append(True)
            keep_step(place, "run", 1, after)
        return pictures_of(payload)

    monkeypatch.setattr(sql, "_pictures_of", replace_once)
    with SqlReader(place) as reader:
        assert reader.read(3) == (before if place.endswith(".db") else after)


def test_runs_that_replace_their_steps_at_the_same_time_keep_the_pictures_of_each_other(place: str) -> None:
    """A picture that one run no longer uses may be taken up by another at that moment."""
    groups = [pictured(groups=2)[:3], pictured(groups=2)[3:]]
    SqlStorage(place).close()

    def work(run: int) -> None:
        for number in range(10):
            keep_step(place, str(run), 1, groups[(number + run) % 2])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    with SqlReader(place) as reader:
        assert len(reader.read(100)) == 9
    assert stored(place) == 2 + PLACES


def test_missing_and_damaged_pictures_are_errors_that_name_the_place(place: str) -> None:
    write(place, [*make_group(0, 1), *pictured()])
    hashed = execute(place, sa.select(PICTURES.c.hash))[0].hash
    execute(place, PICTURES.update().where(PICTURES.c.hash == hashed).values(payload=b"TRXP"))
    with SqlReader(place) as reader, pytest.raises(StorageFormatError, match=f"picture {hashed}: .*shorter"):
        reader.read(9)
    execute(place, PICTURES.delete().where(PICTURES.c.hash == hashed))
    with SqlReader(place) as reader:
        assert len(reader.read(1)) == 1
        with pytest.raises(StorageFormatError, match=f"position 2: .*{hashed}, is not in the payload"):
            reader.read(1)


# A test of both databases comes last: the server of the tests ends with it, which no fast test may do.
def test_a_row_alone_is_refused_without_its_pictures(place: str) -> None:
    write(place, pictured())
    (payload, *_) = (row.payload for row in execute(place, sa.select(ROWS.c.payload)))
    with pytest.raises(ExperienceFormatError, match=r"multi_modal_inputs, \w{32}, is not in the payload"):
        Experience.deserialize(payload)

"""SqlStorage and its readers, on SQLite and, where it is installed, PostgreSQL."""

import asyncio
import itertools
import sqlite3
import threading
import time
from typing import Any

import pytest
from support.buffer import make_group, through_a_file
from support.crashes import count_up, processes  # noqa: F401  # a fixture
from support.errors import refuses
from support.postgres import postgres_url  # noqa: F401  # a fixture

from trinity_lightning.buffer import database
from trinity_lightning.buffer.sql import ReplayReader, SqlReader, SqlStorage, keep_step
from trinity_lightning.common.experience import ExperienceError
from trinity_lightning.errors import StorageError, StorageFormatError, StorageLockedError


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def place(request, tmp_path):
    """A place for one buffer: nothing is there yet."""
    if request.param == "sqlite":
        return str(tmp_path / "folder" / "buffer.db")
    return request.getfixturevalue("postgres_url")()


def make_prioritized(priorities, batch=1):
    """One experience of a task of its own for each priority."""
    experiences = []
    for task, priority in enumerate(priorities):
        (experience,) = make_group(task, 1, batch)
        experience.info["priority"] = priority
        experiences.append(experience)
    return experiences


def write(place, *writes):
    with SqlStorage(place) as storage:
        for experiences in writes:
            storage.write(experiences)


def tasks(experiences):
    return [experience.eid.task for experience in experiences]


def test_what_was_written_is_read_in_order(place):
    groups = [make_group(task, size) for task, size in enumerate([3, 1, 4])]
    write(place, *groups)
    experiences = [*groups[0], *groups[1], *groups[2]]
    with SqlReader(place) as reader:
        assert reader.read(2) == experiences[:2]
        assert reader.read(100) == experiences[2:]
        assert reader.read(100) == []
        with SqlStorage(place) as storage:  # tables are there: nothing is made anew
            more = make_group(9, 2)
            asyncio.run(storage.write_async(more))
        assert reader.read(100) == more


def test_a_reader_goes_on_from_its_state(place):
    experiences = make_group(0, 3) + make_group(1, 2)
    write(place, experiences[:3], experiences[3:])
    reader = SqlReader(place)
    assert reader.read(2) == experiences[:2]
    resumed = SqlReader(place)
    resumed.load_state_dict(through_a_file(reader.state_dict()))
    assert resumed.read(10) == experiences[2:]
    for opened in (reader, resumed):
        opened.close()


def test_the_position_in_another_database_is_refused(tmp_path):
    for name in ("one.db", "two.db"):
        write(tmp_path / name, make_group(0, 1))
    with SqlReader(tmp_path / "one.db") as one:
        state = one.state_dict()
    with SqlReader(tmp_path / "two.db") as two, pytest.raises(StorageError, match="another buffer"):
        two.load_state_dict(state)


def test_all_or_nothing_is_written(place):
    with SqlStorage(place) as storage, SqlReader(place) as reader:
        storage.write([])
        (bad,) = make_group(5, 1)
        bad.info["what"] = object()
        with pytest.raises(ExperienceError, match="info"):
            storage.write([*make_group(0, 2), bad])
        for priority in (-1.0, float("nan"), float("inf"), "high"):
            with pytest.raises(ExperienceError, match="priority"):
                storage.write(make_prioritized([1.0, priority]))
        assert reader.read(9) == []


def test_a_step_done_again_takes_the_place_of_the_first_attempt(place):
    """For a reader that comes later; other steps, and another run's step of that number, stay."""
    for run, step, size in (("a", 1, 2), ("b", 2, 1), ("a", 2, 3), ("a", 2, 2), ("a", 3, 1)):
        keep_step(place, run, step, make_group(size, size, batch=step))
    keep_step(place, "a", 3, [])
    with SqlReader(place) as reader:
        assert [(e.eid.batch, e.eid.task) for e in reader.read(100)] == [(1, 2), (1, 2), (2, 1), (2, 2), (2, 2)]


def test_the_highest_priority_comes_first_and_zero_never(place):
    write(place, make_prioritized([1.0, 5.0, 0.0, 3.0, 3.0]))
    with ReplayReader(place) as reader:
        assert tasks(reader.read(2)) == [1, 3]
        assert tasks(reader.read(9)) == [4, 0]
        assert reader.read(9) == []


def test_old_experiences_lose_priority(place):
    """Scores at decay 0.5: 4 * 0.5**2 = 1 of step 1, 1.5 * 0.5 = 0.75 of step 2, 0.9 of step 3."""
    write(place, make_prioritized([4.0], batch=1), make_prioritized([1.5], batch=2), make_prioritized([0.9], batch=3))
    with ReplayReader(place, decay=0.5) as reader:
        assert [e.eid.batch for e in reader.read(3)] == [1, 3, 2]
    write(place, make_prioritized([4.0], batch=1), make_prioritized([0.1], batch=9))
    with ReplayReader(place, decay=0.1) as reader:
        assert [e.eid.batch for e in reader.read(2)] == [9, 1]


def test_used_experiences_lose_priority_and_leave_at_the_limit(place):
    write(place, make_prioritized([4.0, 1.5, 1.0]))
    with ReplayReader(place, use_decay=0.5, reuse_limit=3) as reader:
        # scores: 4 1.5 1 | 2 1.5 1 | 1 1.5 1 | 1 .75 1 (used less first) | 1 .75 .5 | - .75 .5 ...
        assert [tasks(reader.read(1))[0] for _ in range(9)] == [0, 0, 1, 2, 0, 1, 2, 1, 2]
        assert reader.read(1) == []


def test_a_reuse_limit_holds_for_all_readers_together(place):
    write(place, make_prioritized([1.0] * 6))
    with ReplayReader(place, reuse_limit=2) as a, ReplayReader(place, reuse_limit=2) as b:
        read = tasks(a.read(4)) + tasks(b.read(4)) + tasks(a.read(9)) + tasks(b.read(9))
    assert sorted(read) == sorted(list(range(6)) * 2)


def test_random_order_is_seeded_and_takes_each_once_a_read(place):
    write(place, make_prioritized([1.0] * 12))

    def reads(seed):
        with ReplayReader(place, order="random", reuse_limit=None, seed=seed) as reader:
            return [tasks(reader.read(5)) for _ in range(3)]

    first = reads(1)
    assert first == reads(1) != reads(2)
    assert all(len(set(read)) == 5 for read in first)
    assert first[0] != first[1]


@pytest.mark.parametrize("order", ["priority", "random"])
def test_a_resumed_replay_reader_takes_back_what_it_read_since(place, order):
    write(place, make_prioritized([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    arguments = {"order": order, "reuse_limit": 2, "use_decay": 0.4}
    reader = ReplayReader(place, **arguments)
    before = tasks(reader.read(3))
    state = through_a_file(reader.state_dict())
    after = [tasks(reader.read(2)) for _ in range(3)]
    reader.close()
    rest = []
    for _ in range(2):
        with ReplayReader(place, **arguments) as resumed:
            resumed.load_state_dict(state)
            assert [tasks(resumed.read(2)) for _ in range(3)] == after
            rest = tasks(resumed.read(12)) + tasks(resumed.read(12))
    assert sorted([*before, *itertools.chain(*after), *rest]) == sorted(list(range(6)) * 2)


def test_a_replay_reader_keeps_groups_whole(place):
    groups = [make_group(task, 3) for task in range(4)]
    for group, priority in zip(groups, [1.0, 2.0, 4.0, 3.0], strict=True):
        group[1].info["priority"] = priority
        for other in (group[0], group[2]):
            other.info["priority"] = 0.5
    write(place, *groups)
    with ReplayReader(place) as reader:
        assert reader.read(7, whole_groups=True) == groups[2] + groups[3]
        assert reader.read(2, whole_groups=True) == groups[1]  # larger than asked for, but whole
        assert reader.read(7, whole_groups=True) == groups[0]


@pytest.mark.parametrize("reader", [SqlReader, ReplayReader])
def test_a_task_of_two_runs_is_two_groups(place, reader):
    groups = [make_group(0, 3), make_group(0, 3)]
    for run, group in zip("ab", groups, strict=True):
        keep_step(place, run, 1, group)
    with reader(place) as opened:
        assert [opened.read(4, whole_groups=True) for _ in range(3)] == [*groups, []]


def test_two_replay_readers_of_one_state_are_found_out(place):
    write(place, make_prioritized([1.0] * 4))
    with ReplayReader(place) as one, ReplayReader(place) as two:
        two.load_state_dict(one.state_dict())
        one.read(1)
        with pytest.raises(StorageError, match="has read meanwhile"):
            two.read(1)


@pytest.mark.slow
def test_a_reader_waits_for_what_another_writes(place):
    with SqlStorage(place) as storage, SqlReader(place) as reader, ReplayReader(place) as replay:
        groups = [make_group(0, 2), make_group(1, 2)]
        later = threading.Timer(0.3, lambda: [storage.write(group) for group in groups])
        later.start()
        assert reader.read(4, wait=20) == groups[0] + groups[1]
        later.join()
        assert len(replay.read(5, wait=0.1)) == 4


def test_several_writers_and_no_row_is_skipped_or_parted(place, processes):  # noqa: F811
    """The reader looks all the time: an experience that appeared behind its cursor would be lost."""
    SqlStorage(place).close()
    writers = [processes.Process(target=count_up, args=(place, writer, 30)) for writer in range(3)]
    for process in writers:
        process.start()
    seen = []
    with SqlReader(place) as reader:
        deadline = time.monotonic() + 100
        while len(seen) < 90 and time.monotonic() < deadline:
            if got := reader.read(3, whole_groups=True, wait=1.0):
                seen.append(got)
        assert reader.read(9) == []
    for process in writers:
        process.join()
        assert process.exitcode == 0
    assert all(len(write) == 3 and len({e.eid.tid for e in write}) == 1 for write in seen)
    for writer in range(3):
        assert [write[0].eid.task for write in seen if write[0].eid.batch == writer] == list(range(30))


def test_who_writes_later_is_not_seen_earlier(place, monkeypatch):
    """A write that has its positions and is not committed holds up those after it, as autoincrement would not."""
    with SqlStorage(place) as slow, SqlStorage(place) as fast, SqlReader(place) as reader:
        slow_group, fast_group = make_group(0, 2), make_group(1, 2)
        holding, go_on = threading.Event(), threading.Event()
        take = slow._database.take

        def take_and_wait(*arguments):
            position = take(*arguments)
            holding.set()
            assert go_on.wait(20)
            return position

        monkeypatch.setattr(slow._database, "take", take_and_wait)
        writers = [threading.Thread(target=slow.write, args=(slow_group,))]
        writers[0].start()
        assert holding.wait(20)
        writers.append(threading.Thread(target=fast.write, args=(fast_group,)))
        writers[1].start()
        time.sleep(0.3)
        assert reader.read(9) == []
        go_on.set()
        for writer in writers:
            writer.join()
        assert reader.read(9) == slow_group + fast_group


def test_a_write_whose_acknowledgement_was_lost_is_not_repeated(place, monkeypatch):
    """The connection breaks after the commit: the storage cannot know, asks, and finds the write there."""
    with SqlStorage(place) as storage, SqlReader(place) as reader:
        dialect: Any = storage._database._engine.dialect
        commit, broken = dialect.do_commit, []

        def break_once(connection):
            commit(connection)
            if not broken:
                broken.append(True)
                raise dialect.loaded_dbapi.OperationalError("the connection is gone")

        monkeypatch.setattr(dialect, "do_commit", break_once)
        monkeypatch.setattr(storage._database, "_is_transient", lambda error: True)
        group = make_group(0, 3)
        storage.write(group)
        assert broken
        assert reader.read(9) == group


@pytest.mark.slow
def test_a_locked_database_is_waited_for_and_then_an_error(tmp_path, monkeypatch):
    place = str(tmp_path / "buffer.db")
    with SqlStorage(place) as impatient, SqlStorage(place) as patient:
        other = sqlite3.connect(place, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for storage in (impatient, patient):  # fail at once instead of after SQLite's own five seconds
            with storage._database._engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA busy_timeout=1")
        monkeypatch.setattr(database, "RETRY_FOR", 0.5)
        with pytest.raises(StorageLockedError, match=r"buffer\.db.*busy"):
            impatient.write(make_group(0, 1))
        monkeypatch.undo()
        waiting = threading.Thread(target=patient.write, args=(make_group(1, 1),))
        waiting.start()
        time.sleep(0.2)
        other.execute("ROLLBACK")
        waiting.join()
        other.close()
    with SqlReader(place) as reader:
        assert tasks(reader.read(9)) == [1]


def test_foreign_and_damaged_databases_are_errors(tmp_path):
    path = tmp_path / "notes.csv"
    path.write_text("step,loss\n" * 100)
    for kind in (SqlStorage, SqlReader):
        with pytest.raises(StorageFormatError, match=r"notes\.csv.*not a database"):
            kind(path)
    assert path.read_text() == "step,loss\n" * 100
    tables = {"experiences (a)": "another kind", "experiences_info (key, number)": "not of format"}
    for number, (table, message) in enumerate(tables.items()):
        other = sqlite3.connect(tmp_path / f"{number}.db")
        other.execute(f"CREATE TABLE {table}")
        other.close()
        with pytest.raises(StorageFormatError, match=message):
            SqlStorage(tmp_path / f"{number}.db")


def test_a_damaged_row_is_an_error_that_names_it(tmp_path):
    place = str(tmp_path / "buffer.db")
    write(place, make_group(0, 3))
    other = sqlite3.connect(place)
    other.execute("UPDATE experiences SET payload = x'00' WHERE position = 2")
    other.commit()
    other.close()
    with SqlReader(place) as reader:
        assert len(reader.read(1)) == 1
        with pytest.raises(StorageFormatError, match=r"buffer\.db.*position 2"):
            reader.read(1)


@pytest.mark.parametrize("url", ["sqlite://", "://", "nonsense://host/name"])
def test_urls_that_cannot_work_are_refused(url):
    with refuses(".url"):
        SqlStorage(url)


def test_passwords_stay_out_of_messages(monkeypatch):
    monkeypatch.setattr(database, "RETRY_FOR", 0)
    with pytest.raises(StorageError) as caught:
        SqlStorage("postgresql://me:secret@127.0.0.1:1/none")
    assert "secret" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


@pytest.mark.parametrize("arguments", [{"order": "newest"}, {"reuse_limit": 0}, {"decay": 0.0}, {"use_decay": 1.5}])
def test_arguments_out_of_range_are_refused(tmp_path, arguments):
    with refuses(next(iter(arguments))):
        ReplayReader(tmp_path / "buffer.db", **arguments)


# A test of both databases comes last: the server of the tests ends with it, which no fast test may do.
def test_what_is_not_there_is_an_error_and_is_not_made(tmp_path, place):
    for kind in (SqlReader, ReplayReader):
        with pytest.raises(StorageError, match="there is no such"):
            kind(place)
        with pytest.raises(StorageError, match="there is no such file"):
            kind(tmp_path / "nowhere.db")
    assert not (tmp_path / "nowhere.db").exists()

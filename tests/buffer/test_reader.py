"""What all readers share: whole groups, waiting, positions that go through a checkpoint."""

import asyncio
import threading
import time

import pytest
from buffer_cases import make_group, through_a_file
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_lightning.buffer.reader import MemoryReader
from trinity_lightning.common.experience import EID, Experience


def groups_of(sizes):
    return [experience for task, size in enumerate(sizes) for experience in make_group(task, size)]


@settings(deadline=None, max_examples=80)
@given(sizes=st.lists(st.integers(1, 6), max_size=8), count=st.integers(1, 8))
def test_whole_groups_are_never_parted_and_fill_what_they_can(sizes, count):
    experiences = groups_of(sizes)
    reader = MemoryReader(experiences)
    reads = []
    while got := reader.read(count, whole_groups=True):
        reads.append(got)
    assert [e for read in reads for e in read] == experiences
    for index, read in enumerate(reads):
        tasks = {e.eid.task for e in read}
        assert len(read) == sum(sizes[task] for task in tasks)
        assert len(read) <= count or len(tasks) == 1
        if index + 1 < len(reads):
            assert len(read) + sizes[reads[index + 1][0].eid.task] > count


def test_experiences_of_no_task_are_no_group():
    experiences = [Experience(eid=EID(suffix=str(n)), tokens=[1, 2], prompt_length=1) for n in range(5)]
    assert MemoryReader(experiences).read(2, whole_groups=True) == experiences[:2]


def test_a_state_goes_through_a_checkpoint_and_back():
    experiences = groups_of([2, 3])
    reader = MemoryReader(experiences)
    reader.read(3, whole_groups=True)
    resumed = MemoryReader(experiences)
    resumed.load_state_dict(through_a_file(reader.state_dict()))
    assert resumed.read(9) == reader.read(9) == experiences[2:]
    reader.rewind()
    assert reader.read(1) == experiences[:1]


def test_a_reader_waits_for_what_is_missing_and_then_takes_what_there_is():
    experiences = groups_of([2])
    reader = MemoryReader(experiences)
    threading.Timer(0.2, lambda: experiences.extend(make_group(1, 2))).start()
    assert len(reader.read(4, wait=20)) == 4
    experiences.extend(make_group(2, 1))
    start = time.monotonic()
    assert len(reader.read(4, wait=0.2)) == 1
    assert time.monotonic() - start >= 0.2
    assert reader.read(4) == []


def test_waiting_leaves_the_event_loop_to_others():
    experiences = groups_of([1])
    reader = MemoryReader(experiences)

    async def run():
        reading = asyncio.create_task(reader.read_async(3, wait=20))
        await asyncio.sleep(0.1)
        assert not reading.done()
        experiences.extend(make_group(1, 2))
        return await reading

    assert len(asyncio.run(run())) == 3


def test_a_read_that_is_cancelled_has_read_nothing():
    experiences = groups_of([2])
    reader = MemoryReader(experiences)

    async def run():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read_async(5, wait=20), 0.1)
        return await reader.read_async(5)

    assert asyncio.run(run()) == experiences


def test_a_count_below_one_is_refused():
    with pytest.raises(ValueError, match="count"):
        MemoryReader([]).read(0)

"""Repeated data: where they end they begin again, also in a resumed run."""

from buffer_cases import make_group, through_a_file

from trinity_lightning.buffer.reader import MemoryReader, RepeatingReader


def repeated(number):
    return RepeatingReader(MemoryReader([experience for task in range(number) for experience in make_group(task, 1)]))


def test_repeated_data_start_over():
    reader = repeated(3)
    assert [[e.eid.task for e in reader.read(2)] for _ in range(4)] == [[0, 1], [2], [0, 1], [2]]
    assert reader.passes == 1
    resumed = repeated(3)
    resumed.load_state_dict(through_a_file(reader.state_dict()))
    assert [e.eid.task for e in resumed.read(2)] == [0, 1]
    assert resumed.passes == 2


def test_nothing_repeated_is_nothing():
    assert repeated(0).read(2) == []

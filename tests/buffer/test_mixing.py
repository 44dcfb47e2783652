"""Readers made of readers: repeated data, and expert data among rollouts in a ratio."""

import pytest
import torch
from buffer_cases import make_group, through_a_file
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_lightning.buffer.mixing import MixedReader, RepeatingReader
from trinity_lightning.buffer.reader import MemoryReader
from trinity_lightning.buffer.storage.errors import StorageError
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.experience import CustomField, gather_experiences


def rollouts(number, batch=1):
    return [experience for task in range(number) for experience in make_group(task, 1, batch)]


ROLLOUTS, EXPERTS = rollouts(110), rollouts(110, 9)


def experts_in(experiences):
    return sum(experience.info["is_expert"] for experience in experiences)


def mixed(ratio, number=1000, experts=3):
    return MixedReader(MemoryReader(rollouts(number)), RepeatingReader(MemoryReader(rollouts(experts, 9))), ratio)


def test_repeated_data_start_over():
    reader = RepeatingReader(MemoryReader(rollouts(3)))
    assert [[e.eid.task for e in reader.read(2)] for _ in range(4)] == [[0, 1], [2], [0, 1], [2]]
    assert reader.passes == 1
    resumed = RepeatingReader(MemoryReader(rollouts(3)))
    resumed.load_state_dict(through_a_file(reader.state_dict()))
    assert [e.eid.task for e in resumed.read(2)] == [0, 1]
    assert resumed.passes == 2
    assert RepeatingReader(MemoryReader([])).read(2) == []


@settings(deadline=None, max_examples=60)
@given(ratio=st.floats(0, 0.9), counts=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_the_ratio_holds_over_all_reads(ratio, counts):
    reader = MixedReader(MemoryReader(ROLLOUTS), MemoryReader(EXPERTS), ratio)
    taken = [reader.read(count) for count in counts]
    assert [len(got) for got in taken] == counts
    assert sum(map(experts_in, taken)) == round(ratio * sum(counts))


def test_a_read_cut_short_by_the_end_of_a_pass_is_made_up_for():
    reader = mixed(0.5, experts=3)
    taken = [reader.read(4) for _ in range(30)]
    total = sum(map(len, taken))
    assert total < 4 * 30
    assert sum(map(experts_in, taken)) == pytest.approx(total / 2, abs=2)


def test_each_says_whether_it_is_an_experts_and_the_source_is_left_alone():
    source = rollouts(4)
    source[0].info["is_expert"] = "what"
    source[0].custom_fields = [CustomField("x", "expert_mask", torch.float32), CustomField("y", "y", torch.float32)]
    got = MixedReader(MemoryReader(source), MemoryReader(rollouts(4, 9)), 0.5).read(4)
    assert [experience.info["is_expert"] for experience in got] == [False, False, True, True]
    assert [experience.eid.batch for experience in got] == [1, 1, 9, 9]
    assert [field.destination_field for field in got[0].custom_fields] == ["y", "expert_mask"]
    assert source[0].info["is_expert"] == "what"
    assert len(source[0].custom_fields) == 2
    assert source[1].custom_fields == []


def test_the_batch_has_a_column():
    batch = gather_experiences(mixed(0.25).read(8), pad_token_id=0)
    assert batch.expert_mask.tolist() == [False] * 6 + [True] * 2
    assert batch.expert_mask.dtype == torch.bool


def test_while_rollouts_are_short_there_are_fewer_experts_too():
    reader = mixed(0.5, number=3, experts=10)
    assert experts_in(reader.read(4)) == 2
    last = reader.read(8)
    assert (len(last), experts_in(last)) == (2, 1)
    assert reader.read(8) == []


def test_a_state_goes_through_a_checkpoint():
    reader = mixed(0.4)
    reader.read(7)
    resumed = mixed(0.4)
    resumed.load_state_dict(through_a_file(reader.state_dict()))
    names = [[(e.eid.batch, e.eid.task) for e in r.read(7)] for r in (reader, resumed)]
    assert names[0] == names[1]


def test_expert_data_that_end_are_an_error():
    reader = MixedReader(MemoryReader(rollouts(20)), MemoryReader(rollouts(2, 9)), 0.5)
    reader.read(4)
    with pytest.raises(StorageError, match=r"ended after 2 .*RepeatingReader"):
        reader.read(4)


@pytest.mark.parametrize("ratio", [-0.1, 1.0])
def test_a_share_out_of_range_is_refused(ratio):
    with pytest.raises(ConfigError, match="expert_data_ratio"):
        mixed(ratio)
    with pytest.raises(ValueError, match="common next write"):
        mixed(0.5).read()

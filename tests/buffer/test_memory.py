"""MemoryStorage: a step appears all at once, and goes through a checkpoint unchanged."""

import pytest
import torch
from support.buffer import filled, make_group, through_a_file

from trinity_lightning.buffer.loader import MemoryStorage
from trinity_lightning.common.experience import ExperienceFormatError


def test_what_was_written_is_held_in_order_once_committed():
    storage = MemoryStorage()
    assert (storage.batch, storage.experiences, storage.columns) == (0, [], {})
    first, second = make_group(0, 3), make_group(1, 2)
    storage.begin()
    storage.write(first)
    storage.write(second)
    assert (storage.batch, storage.experiences) == (0, [])
    storage.commit(1)
    assert (storage.batch, storage.is_ready(1)) == (0, True)
    storage.advance(1)
    assert (storage.batch, storage.is_ready(1)) == (1, False)
    assert storage.experiences == first + second


def test_the_next_step_replaces_the_last_and_its_columns():
    storage = filled([2, 2], batch=1, columns=True)
    storage.begin()
    storage.write(make_group(7, 1, batch=2))
    storage.commit(2)
    storage.advance(2)
    assert (storage.batch, len(storage.experiences), storage.columns) == (2, 1, {})


def test_a_filling_cut_short_leaves_the_step_before_and_is_forgotten():
    storage = filled([2], batch=1, columns=True)
    before, columns = list(storage.experiences), storage.columns
    storage.begin()
    storage.write(make_group(3, 4, batch=2))
    assert (storage.batch, storage.experiences, storage.columns) == (1, before, columns)
    storage.begin()
    again = make_group(3, 1, batch=2)
    storage.write(again)
    storage.commit(2)
    storage.advance(2)
    assert storage.experiences == again


def test_steps_wait_their_turn_while_another_is_trained_on_and_go_through_a_checkpoint():
    storage = filled([2], batch=1, columns=True)
    trained = list(storage.experiences)
    waiting = {step: make_group(step, 2, batch=step) for step in (2, 3)}
    for step, experiences in waiting.items():
        storage.begin()
        storage.write(experiences)
        storage.commit(step)
    assert (storage.batch, storage.experiences, len(storage.columns)) == (1, trained, 1)
    other = MemoryStorage()
    other.load_state_dict(through_a_file(storage.state_dict()))
    assert other.experiences == trained
    for step, experiences in waiting.items():
        assert other.is_ready(step)
        other.advance(step)
        assert other.experiences == experiences
        assert (other.batch, other.columns) == (step, {})
    assert not other.is_ready(2)


def test_state_goes_through_a_checkpoint():
    storage, other = filled([3, 1], batch=4, columns=True), filled([2])
    other.load_state_dict(through_a_file(storage.state_dict()))
    assert other.batch == 4
    assert other.experiences == storage.experiences
    assert other.columns.keys() == storage.columns.keys()
    for mine, theirs in zip(storage.columns["old_logprobs"], other.columns["old_logprobs"], strict=True):
        assert torch.equal(mine, theirs)


def test_an_empty_storage_has_a_state_too():
    other = filled([2])
    other.load_state_dict(through_a_file(MemoryStorage().state_dict()))
    assert (other.batch, other.experiences, other.columns) == (0, [], {})


def test_a_damaged_payload_is_an_error_and_changes_nothing():
    state = filled([2], batch=5).state_dict()
    payload = bytearray(state["payload"])
    payload[len(payload) // 2] ^= 1
    storage = filled([3], batch=4)
    with pytest.raises(ExperienceFormatError):
        storage.load_state_dict(state | {"payload": bytes(payload)})
    assert (storage.batch, len(storage.experiences)) == (4, 3)

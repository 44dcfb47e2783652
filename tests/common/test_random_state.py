"""Random states survive a file that holds only tensors and plain containers."""

import io
import random

import numpy as np
import pytest
import torch

from trinity_lightning.common.random_state import random_state, restore_random_state


def draw():
    return [random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_draws_repeat_after_a_state_went_through_a_file():
    before = random_state()
    try:
        draw()  # the second of a pair of normal numbers is now kept by Python and NumPy: part of the state
        file = io.BytesIO()
        torch.save(random_state(), file)
        expected = [draw() for _ in range(2)]
        file.seek(0)
        restore_random_state(torch.load(file, weights_only=True))
        assert [draw() for _ in range(2)] == expected
        assert expected[0] != expected[1]
    finally:
        restore_random_state(before)


def test_states_of_more_gpus_than_there_are_now(monkeypatch: pytest.MonkeyPatch):
    before, restored = random_state(), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.extend)
    restore_random_state(before | {"cuda": [torch.tensor([gpu]) for gpu in range(4)]})
    assert [int(state) for state in restored] == [0, 1]

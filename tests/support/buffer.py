"""Helpers of the buffer's tests."""

import io

import torch

from trinity_lightning.buffer.datamodule import MemoryStorage
from trinity_lightning.common.experience import EID, Experience


def make_group(task, size, batch=1, rewards=None):
    """A group of rollouts of one task, told apart by their tokens."""
    rewards = rewards or [float(run % 2) for run in range(size)]
    return [
        Experience(
            eid=EID(batch=batch, task=task, run=run),
            tokens=[1, 10 + task, 20 + run, 2],
            prompt_length=2,
            reward=reward,
            logprobs=[-0.5, -1.5],
        )
        for run, reward in zip(range(size), rewards, strict=True)
    ]


def filled(sizes, batch=1, columns=False):
    """A storage that holds one group of each size."""
    storage = MemoryStorage()
    storage.ready[batch] = [
        experience for task, size in enumerate(sizes) for experience in make_group(task, size, batch)
    ]
    storage.advance(batch)
    if columns:
        storage.columns = {
            "old_logprobs": [torch.tensor([float(row), -float(row)]) for row in range(len(storage.experiences))]
        }
    return storage


def through_a_file(state):
    """A state as a checkpoint gives it back: read without pickle."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def names(batch):
    """The experiences of an optimizer batch, in order."""
    return [experience.eid.uid for experience in batch.experiences]

"""ExperienceDataModule with real GRPO: in come rewards, out go weighed optimizer batches."""

import asyncio
import statistics

import pytest
import torch
from support.buffer import make_group, names, through_a_file

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.common.experience import gather_response_attrs

WEIGHED = [0.0, 1.0, 1.0, 1.0]


def fill(data, experiences, step):
    metrics = asyncio.run(data.fill(experiences, step))
    data.advance(step)
    return metrics


def test_grpo_weighs_each_group_and_the_loader_hands_it_out():
    data = ExperienceDataModule("grpo")
    assert data.batch == 0
    rollouts = make_group(0, 4, rewards=WEIGHED) + make_group(1, 4, rewards=[2.0] * 4)
    metrics = fill(data, rollouts, 1)
    assert data.batch == 1
    assert metrics["experience_pipeline/written"] == 8
    assert metrics["time/add_strategy"] > 0
    (item,) = data.train_dataloader()
    assert sorted(names(item)) == sorted(e.eid.uid for e in rollouts)
    advantages = {e.eid.uid: gather_response_attrs([e], "advantages", 2)[0].tolist() for e in item.experiences}
    mean, std = statistics.mean(WEIGHED), statistics.stdev(WEIGHED)
    for experience, reward in zip(rollouts[:4], WEIGHED, strict=True):
        assert advantages[experience.eid.uid] == pytest.approx([(reward - mean) / std] * 2, abs=1e-4)
    assert all(advantages[e.eid.uid] == pytest.approx([0.0, 0.0], abs=1e-4) for e in rollouts[4:])


def test_several_strategies_with_arguments_follow_each_other():
    strategies = [("reward_variance", {"variance_threshold": 0.0}), ("grpo", {})]
    data = ExperienceDataModule(strategies, optimizer_steps=2)
    fill(data, make_group(0, 4, rewards=WEIGHED) + make_group(1, 4, rewards=[2.0] * 4), 1)
    assert {e.eid.task for e in data.experiences} == {0}
    assert sorted(len(item.experiences) for item in data.train_dataloader()) == [0, 4]


def test_one_loader_follows_the_buffer_from_step_to_step():
    data = ExperienceDataModule("grpo", optimizer_steps=2, inner_epochs=2)
    loader = data.train_dataloader()
    for step in (1, 2):
        fill(data, make_group(0, 2, batch=step) + make_group(1, 2, batch=step), step)
        items = list(loader)
        assert len(items) == len(loader) == 4
        assert all(name.startswith(f"{step}/") for item in items for name in names(item))
        assert [item.explore_step for item in items] == [step] * 4


def test_nothing_left_is_an_empty_step():
    data = ExperienceDataModule([("reward_variance", {}), ("grpo", {})])
    fill(data, make_group(0, 4, rewards=[1.0] * 4), 3)
    assert (data.batch, data.experiences) == (3, [])
    (item,) = data.train_dataloader()
    assert (item.num_tokens, list(item.experiences)) == (0, [])


def test_state_survives_a_checkpoint_with_advantages_and_columns():
    data = ExperienceDataModule("grpo", optimizer_steps=2, seed=3)
    fill(data, make_group(0, 4, rewards=WEIGHED) + make_group(1, 3), 2)
    data.storage.columns = {"old_logprobs": [torch.randn(2) for _ in range(7)]}
    other = ExperienceDataModule("grpo", optimizer_steps=2, seed=3)
    other.load_state_dict(through_a_file(data.state_dict()))
    assert other.batch == 2
    assert other.experiences == data.experiences
    for mine, theirs in zip(data.train_dataloader(), other.train_dataloader(), strict=True):
        assert names(mine) == names(theirs)
        for a, b in zip(mine.columns["old_logprobs"], theirs.columns["old_logprobs"], strict=True):
            assert torch.equal(a, b)


def test_batches_stay_where_they_are():
    data = ExperienceDataModule("grpo")
    item = object()
    assert data.transfer_batch_to_device(item, torch.device("cpu"), 0) is item


def test_unknown_strategies_and_arguments_are_errors():
    with pytest.raises(ValueError, match="grop"):
        ExperienceDataModule("grop")
    with pytest.raises(TypeError, match="epsilo"):
        ExperienceDataModule([("grpo", {"epsilo": 1.0})])

"""ExperienceDataModule with real GRPO: in come rewards, out go weighed optimizer batches.

Its loader deals whole groups, is sized and lazy, and goes on where it stood.
"""

import asyncio
import statistics
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.buffer import filled, make_group, names, through_a_file
from support.errors import refuses
from support.experiences import pictured

from trinity_lightning.algorithm.add_strategy import AddStrategy
from trinity_lightning.buffer.datamodule import ExperienceDataModule, ExperienceLoader, MemoryStorage
from trinity_lightning.common.experience import ExperienceFormatError, gather_response_attrs

WEIGHED = [0.0, 1.0, 1.0, 1.0]


def fill(data, experiences, step):
    metrics = asyncio.run(data.fill(experiences, step))
    data.storage.advance(step)
    return metrics


def test_grpo_weighs_each_group_and_the_loader_hands_it_out():
    data = ExperienceDataModule("grpo")
    assert data.storage.batch == 0
    rollouts = make_group(0, 4, rewards=WEIGHED) + make_group(1, 4, rewards=[2.0] * 4)
    metrics = fill(data, rollouts, 1)
    assert data.storage.batch == 1
    assert metrics["experience_pipeline/written"] == 8
    assert metrics["time/add_strategy"] > 0
    (item,) = data.train_dataloader()
    assert sorted(names(item)) == sorted(e.eid.uid for e in rollouts)
    advantages = {e.eid.uid: gather_response_attrs([e], "advantages", 2)[0].tolist() for e in item.experiences}
    mean, std = statistics.mean(WEIGHED), statistics.stdev(WEIGHED)
    for experience, reward in zip(rollouts[:4], WEIGHED, strict=True):
        assert advantages[experience.eid.uid] == pytest.approx([(reward - mean) / std] * 2, abs=1e-4)
    assert all(advantages[e.eid.uid] == pytest.approx([0.0, 0.0], abs=1e-4) for e in rollouts[4:])


def test_pictures_are_one_object_in_the_buffer_and_in_its_checkpoint():
    """Rollouts of several workers come with pictures that are equal, and not the same objects."""
    data, rollouts = ExperienceDataModule("grpo"), pictured(groups=2, size=4, pixels=10_000)
    assert len({id(experience.multi_modal_inputs) for experience in rollouts}) == 8
    fill(data, rollouts, 1)
    data.storage.ready[2] = pictured(groups=1)
    state = through_a_file(data.state_dict())
    assert len(state["payload"]) < 100_000
    resumed = ExperienceDataModule("grpo")
    resumed.load_state_dict(state)
    for module in (data, resumed):
        inputs = [experience.multi_modal_inputs for experience in module.storage.experiences]
        assert [id(of_one) for of_one in inputs] == [id(inputs[0])] * 4 + [id(inputs[4])] * 4
        assert inputs[0] is not inputs[4]
    assert resumed.storage.experiences == data.storage.experiences
    assert resumed.storage.ready == data.storage.ready


def test_the_step_of_rank_0_comes_to_other_ranks_with_its_pictures():
    """Each rank has a Lightning strategy, which broadcasts what rank 0 hands in."""
    sent, step = [], pictured(size=8, pixels=10_000)

    class Strategy:
        def broadcast(self, payload):
            sent.append(payload)
            return sent[0]

    class Ranked:
        world_size, strategy = 2, Strategy()

        def __init__(self, rank):
            self.is_global_zero = rank == 0

    modules = [ExperienceDataModule("grpo") for _ in range(2)]
    for rank, module in enumerate(modules):
        module.trainer = Ranked(rank)  # type: ignore[assignment]
    modules[0].storage.ready[1] = step
    first, second = (module.share(1) for module in modules)
    assert len(sent[0]) < 50_000
    assert first is step
    assert second == step
    assert len({id(experience.multi_modal_inputs) for experience in second}) == 1


def test_several_strategies_with_arguments_follow_each_other():
    strategies = [("reward_variance", {"variance_threshold": 0.0}), ("grpo", {})]
    data = ExperienceDataModule(strategies, optimizer_steps=2)
    fill(data, make_group(0, 4, rewards=WEIGHED) + make_group(1, 4, rewards=[2.0] * 4), 1)
    assert {e.eid.task for e in data.storage.experiences} == {0}
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
    assert (data.storage.batch, data.storage.experiences) == (3, [])
    (item,) = data.train_dataloader()
    assert (item.num_tokens, list(item.experiences)) == (0, [])


def test_state_survives_a_checkpoint_with_advantages_and_columns():
    data = ExperienceDataModule("grpo", optimizer_steps=2, seed=3)
    fill(data, make_group(0, 4, rewards=WEIGHED) + make_group(1, 3), 2)
    data.storage.columns = {"old_logprobs": [torch.randn(2) for _ in range(7)]}
    other = ExperienceDataModule("grpo", optimizer_steps=2, seed=3)
    other.load_state_dict(through_a_file(data.state_dict()))
    assert other.storage.batch == 2
    assert other.storage.experiences == data.storage.experiences
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


# -- the buffer in memory --------------------------------------------------------------------------------------------


def test_a_step_waits_until_it_takes_the_place_of_the_one_before():
    storage = MemoryStorage()
    assert (storage.batch, storage.experiences, storage.columns) == (0, [], {})
    experiences = make_group(0, 3) + make_group(1, 2)
    storage.ready[1] = experiences
    assert (storage.batch, storage.experiences, storage.is_ready(1)) == (0, [], True)
    storage.advance(1)
    assert (storage.batch, storage.is_ready(1)) == (1, False)
    assert storage.experiences == experiences


def test_the_next_step_replaces_the_last_and_its_columns():
    storage = filled([2, 2], batch=1, columns=True)
    storage.ready[2] = make_group(7, 1, batch=2)
    storage.advance(2)
    assert (storage.batch, len(storage.experiences), storage.columns) == (2, 1, {})


class CutShort(AddStrategy):
    """Is cut short in a step of one run."""

    async def add(self, experiences, step):
        await self.writer.write_async(experiences)
        if len(experiences) == 1:
            raise KeyboardInterrupt
        return len(experiences), {}

    @classmethod
    def default_args(cls):
        return {}


def test_a_filling_cut_short_leaves_the_step_before_and_is_forgotten():
    data = ExperienceDataModule(f"{__name__}.CutShort")
    fill(data, make_group(0, 2), 1)
    before = list(data.storage.experiences)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(data.fill(make_group(3, 1, batch=2), 2))
    assert (data.storage.batch, data.storage.experiences, data.storage.is_ready(2)) == (1, before, False)
    fill(data, again := make_group(3, 4, batch=2), 2)
    assert data.storage.experiences == again


def test_steps_wait_their_turn_while_another_is_trained_on_and_go_through_a_checkpoint():
    storage = filled([2], batch=1, columns=True)
    trained = list(storage.experiences)
    waiting = {step: make_group(step, 2, batch=step) for step in (2, 3)}
    for step, experiences in waiting.items():
        storage.ready[step] = experiences
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


# -- the loader --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 5), max_size=8),
    steps=st.integers(1, 4),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_each_pass_deals_every_group_once_and_whole(sizes, steps, epochs, seed):
    storage = filled(sizes, columns=True)
    loader = ExperienceLoader(storage, steps, epochs, seed)
    items = list(loader)
    assert len(items) == len(loader) == steps * epochs
    everything = [e.eid.uid for e in storage.experiences]
    for start in range(0, len(items), steps):
        dealt = [names(item) for item in items[start : start + steps]]
        assert sorted(name for item in dealt for name in item) == sorted(everything)
        for task in range(len(sizes)):
            holders = [item for item in dealt if any(name.startswith(f"1/{task}/") for name in item)]
            assert len(holders) == 1
    for item in items:
        assert item.explore_step == 1
        assert item.num_tokens == 2 * len(item.experiences)
        for experience, column in zip(item.experiences, item.columns["old_logprobs"], strict=True):
            row = everything.index(experience.eid.uid)
            assert column.tolist() == [row, -row]


def test_batches_are_evened_out_by_size():
    sizes = [len(item.experiences) for item in ExperienceLoader(filled([4] * 6), optimizer_steps=3)]
    assert sizes == [8, 8, 8]


def test_the_longest_response_is_the_runs_or_if_unknown_the_batchs():
    assert [item.max_response_length for item in ExperienceLoader(filled([4]), max_response_length=50)] == [50]
    assert [item.max_response_length for item in ExperienceLoader(filled([4]))] == [2]


def test_the_length_is_constant_and_items_without_experiences_are_items_too():
    storage = MemoryStorage()
    loader = ExperienceLoader(storage, optimizer_steps=3, inner_epochs=2)
    assert len(loader) == 6
    storage.ready[1] = make_group(0, 4)
    storage.advance(1)
    assert len(loader) == 6
    items = list(loader)
    assert sorted(len(item.experiences) for item in items) == [0, 0, 0, 0, 4, 4]
    assert {item.num_tokens for item in items} == {0, 8}


def test_the_buffer_is_read_only_at_the_first_next():
    storage = filled([2], batch=1)
    iterator = iter(ExperienceLoader(storage))
    storage.ready[2] = make_group(5, 3, batch=2)
    storage.advance(2)
    item = next(iterator)
    assert item.explore_step == 2
    assert len(item.experiences) == 3


def test_the_dealing_is_a_function_of_seed_step_and_pass():
    def dealt(seed=0, batch=1):
        storage = filled([1] * 12, batch=batch)
        return [[e.eid.task for e in item.experiences] for item in ExperienceLoader(storage, 2, 2, seed)]

    assert dealt() == dealt()
    assert dealt()[:2] != dealt()[2:]
    assert dealt(seed=1) != dealt()
    assert dealt(batch=2) != dealt()


def test_dealing_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    list(ExperienceLoader(filled([2, 2]), 2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("done", range(7))
def test_a_resumed_epoch_yields_exactly_the_remaining_items(done):
    storage = filled([2, 3, 1, 2], batch=3)
    loader = ExperienceLoader(storage, optimizer_steps=3, inner_epochs=2, seed=5)
    expected = [names(item) for item in ExperienceLoader(storage, 3, 2, 5)]
    seen = [names(item) for item in islice(loader, done)]
    state = through_a_file(loader.state_dict())

    restored = MemoryStorage()
    restored.load_state_dict(through_a_file(storage.state_dict()))
    resumed = ExperienceLoader(restored, 3, 2, seed=5)
    resumed.load_state_dict(state)
    remaining = [names(item) for item in resumed]
    assert seen + remaining == (expected if done < 6 else expected * 2)  # after the last item comes another epoch


def test_a_new_explore_step_starts_at_its_first_item():
    storage = filled([1, 1, 1], batch=1)
    loader = ExperienceLoader(storage, optimizer_steps=3)
    next(iter(loader))
    storage.ready[2] = make_group(0, 2, batch=2)
    storage.advance(2)
    assert [item.explore_step for item in loader] == [2, 2, 2]


@pytest.mark.parametrize("arguments", [{"optimizer_steps": 0}, {"inner_epochs": -1}])
def test_numbers_below_one_are_refused(arguments):
    with refuses(next(iter(arguments))):
        ExperienceLoader(MemoryStorage(), **arguments)
    with refuses(next(iter(arguments))):
        ExperienceDataModule(**arguments)


def test_batches_of_a_step_know_all_of_it():
    storage = filled([2, 3])
    assert all(batch.step is storage.experiences for batch in ExperienceLoader(storage, optimizer_steps=2))
    assert [batch.step for batch in ExperienceLoader(storage)] == [None]

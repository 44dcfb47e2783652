"""Loaders of optimizer batches: sized, lazy, stateful; groups stay whole, and a resumed run goes on where it stood."""

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from support.buffer import filled, make_group, names, through_a_file

from trinity_lightning.buffer.loader import ExperienceLoader, MemoryStorage
from trinity_lightning.buffer.offline import OfflineExperienceDataModule, OfflineLoader
from trinity_lightning.buffer.reader import MemoryReader, RepeatingReader
from trinity_lightning.buffer.step_files import StepReader, keep_step
from trinity_lightning.errors import ConfigError, StorageError


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
    storage.begin()
    storage.write(make_group(0, 4))
    storage.commit(1)
    storage.advance(1)
    assert len(loader) == 6
    items = list(loader)
    assert sorted(len(item.experiences) for item in items) == [0, 0, 0, 0, 4, 4]
    assert {item.num_tokens for item in items} == {0, 8}


def test_the_buffer_is_read_only_at_the_first_next():
    storage = filled([2], batch=1)
    iterator = iter(ExperienceLoader(storage))
    storage.begin()
    storage.write(make_group(5, 3, batch=2))
    storage.commit(2)
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
    storage.begin()
    storage.write(make_group(0, 2, batch=2))
    storage.commit(2)
    storage.advance(2)
    assert [item.explore_step for item in loader] == [2, 2, 2]


@pytest.mark.parametrize("arguments", [{"optimizer_steps": 0}, {"inner_epochs": -1}])
def test_numbers_below_one_are_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        ExperienceLoader(MemoryStorage(), **arguments)


def test_batches_of_a_step_know_all_of_it():
    storage = filled([2, 3])
    assert all(batch.step is storage.experiences for batch in ExperienceLoader(storage, optimizer_steps=2))
    assert [batch.step for batch in ExperienceLoader(storage)] == [None]


# -- without an explorer: an epoch is so many reads -------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Step files with groups of 2, 3, 1, 2, 2 and 4 experiences."""
    for task, size in enumerate([2, 3, 1, 2, 2, 4]):
        keep_step(tmp_path / "steps", task, make_group(task, size))
    return tmp_path / "steps"


def test_each_read_becomes_a_batch_of_whole_groups(folder):
    loader = OfflineLoader(StepReader(folder), batch_size=4, steps_per_epoch=2)
    assert len(loader) == 2
    first, second = list(loader), list(loader)
    tasks = [[e.eid.task for e in item.experiences] for item in first + second]
    assert tasks == [[0, 0], [1, 1, 1, 2], [3, 3, 4, 4], [5, 5, 5, 5]]
    assert [item.explore_step for item in first + second] == [1, 1, 2, 2]
    assert [item.num_tokens for item in first] == [4, 8]


def test_groups_may_be_parted(folder):
    loader = OfflineLoader(StepReader(folder), batch_size=7, steps_per_epoch=2, whole_groups=False)
    assert [len(item.experiences) for item in loader] == [7, 7]


def test_nothing_is_read_before_it_is_asked_for(folder):
    reader = StepReader(folder)
    state = reader.state_dict()
    iterator = iter(OfflineLoader(reader, batch_size=4, steps_per_epoch=2))
    assert reader.state_dict() == state
    next(iterator)
    assert reader.state_dict() != state


@pytest.mark.parametrize("done", range(7))
def test_a_resumed_run_reads_exactly_what_is_left(folder, done):
    def start():
        reader = RepeatingReader(StepReader(folder))
        return OfflineExperienceDataModule(reader, batch_size=4, steps_per_epoch=3)

    def batches(data, number):
        """So many, over as many epochs as it takes."""
        got = []
        while len(got) < number:
            got += [(names(item), item.explore_step) for item in islice(data.train_dataloader(), number - len(got))]
        return got

    whole = batches(start(), 9)
    data = start()
    before = batches(data, done)
    states = through_a_file([data.state_dict(), data.train_dataloader().state_dict()])
    resumed = start()
    resumed.load_state_dict(states[0])
    resumed.train_dataloader().load_state_dict(states[1])
    assert before + batches(resumed, 9 - done) == whole


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's own use of torch
def test_lightning_resumes_in_the_middle_of_an_epoch(folder, tmp_path):
    class Recorder(LightningModule):
        def __init__(self, save_at=None):
            super().__init__()
            self.automatic_optimization = False
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.seen, self.save_at = [], save_at

        def training_step(self, batch, _index):
            self.seen.append(names(batch))

        def on_train_batch_end(self, *_arguments, **_named):
            if len(self.seen) == self.save_at:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(model, ckpt_path=None):
        data = OfflineExperienceDataModule(RepeatingReader(StepReader(folder)), batch_size=4, steps_per_epoch=3)
        trainer = Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
        return model.seen

    whole = run(Recorder(save_at=4))
    assert len(whole) == 6
    assert run(Recorder(), tmp_path / "middle.ckpt") == whole[4:]


def test_data_that_end_are_an_error(folder):
    loader = OfflineLoader(StepReader(folder), batch_size=4, steps_per_epoch=9)
    with pytest.raises(StorageError, match=r"step 5 of 9 in epoch 1.*RepeatingReader"):
        list(loader)


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"steps_per_epoch": 0}, {"wait": -1.0}])
def test_numbers_that_cannot_work_are_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        OfflineLoader(MemoryReader([]), **({"batch_size": 1, "steps_per_epoch": 1} | arguments))

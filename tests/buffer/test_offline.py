"""Training on stored experiences: their loader, and expert data that join a step."""

import asyncio
from itertools import islice

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from support.buffer import make_group, names, through_a_file
from support.errors import refuses

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.buffer.offline import ExpertData, OfflineExperienceDataModule, OfflineLoader, marked
from trinity_lightning.buffer.reader import MemoryReader, RepeatingReader
from trinity_lightning.buffer.sql import ReplayReader, SqlStorage
from trinity_lightning.buffer.step_files import StepReader, keep_step, read_experiences
from trinity_lightning.common.experience import CustomField
from trinity_lightning.common.optimizer_batch import is_expert
from trinity_lightning.errors import StorageError


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


def test_data_that_end_are_an_error_that_names_what_helps(folder):
    loader = OfflineLoader(StepReader(folder), batch_size=4, steps_per_epoch=9)
    with pytest.raises(StorageError, match=r"step 5 of 9 in epoch 1.*fewer steps or buffer.repeat=true\."):
        list(loader)
    with pytest.raises(StorageError, match=r"Give more data or fewer steps\."):
        list(OfflineLoader(RepeatingReader(MemoryReader([])), batch_size=4, steps_per_epoch=1))
    with SqlStorage(folder / "buffer.db") as storage:
        storage.write(make_group(0, 4))
    with (
        ReplayReader(folder / "buffer.db") as reader,
        pytest.raises(StorageError, match=r"step 2 of 2 .*reuse_limit\."),
    ):
        list(OfflineLoader(reader, batch_size=4, steps_per_epoch=2))


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"steps_per_epoch": 0}, {"wait": -1.0}])
def test_numbers_that_cannot_work_are_refused(arguments):
    with refuses(next(iter(arguments))):
        OfflineLoader(MemoryReader([]), **({"batch_size": 1, "steps_per_epoch": 1} | arguments))


# -- expert data -------------------------------------------------------------------------------------------------------


ROLLOUTS = make_group(0, 4)


def expert_experiences(number):
    return [experience for task in range(number) for experience in make_group(task, 1, batch=77)]


def data_with(number=5, per_step=2, **settings):
    experts = ExpertData(RepeatingReader(MemoryReader(expert_experiences(number))), per_step)
    return ExperienceDataModule("grpo", experts=experts, **settings)


def fill(data, step):
    metrics = asyncio.run(data.fill(make_group(0, 4, batch=step), step))
    data.storage.advance(step)
    return metrics


def expert_tasks(data):
    """The numbers of the expert tasks whose data the buffer holds; the second token tells them."""
    return [int(e.tokens[1]) - 10 for e in data.storage.experiences if is_expert(e)]


def test_they_join_behind_the_strategies():
    data = data_with()
    metrics = fill(data, 3)
    assert metrics["experience_pipeline/written"] == 4
    assert metrics["experience_pipeline/expert"] == 2
    rollouts, experts = data.storage.experiences[:4], data.storage.experiences[4:]
    assert not any(map(is_expert, rollouts))
    assert all(e.advantages is not None and e.advantages.any() for e in rollouts)
    assert [is_expert(e) for e in experts] == [True, True]
    assert [e.advantages.tolist() for e in experts if e.advantages is not None] == [[0.0, 0.0]] * 2
    assert all(e.logprobs is None for e in experts)
    assert [e.eid.tid for e in experts] == ["3/expert-0", "3/expert-1"]
    (batch,) = data.train_dataloader()
    assert (batch.num_tokens, batch.num_sequences) == (12, 6)
    assert (batch.num_expert_tokens, batch.num_expert_sequences) == (4, 2)


def test_every_step_goes_on_where_the_last_one_ended_and_begins_again_at_the_end():
    data = data_with(number=3, per_step=2)
    seen = []
    for step in (1, 2, 3):
        fill(data, step)
        seen.append(expert_tasks(data))
    assert seen == [[0, 1], [2, 0], [1, 2]]


def test_the_cursor_goes_through_a_checkpoint():
    whole, parts = data_with(), data_with()
    for data in (whole, parts):
        fill(data, 1)
    resumed = data_with()
    resumed.load_state_dict(through_a_file(parts.state_dict()))
    assert resumed.storage.experiences == parts.storage.experiences
    for step in (2, 3, 4):
        fill(whole, step)
        fill(resumed, step)
        assert expert_tasks(resumed) == expert_tasks(whole)


def test_a_step_cut_short_takes_none(tmp_path):
    attempts = []

    def keep(step, experiences):
        attempts.append(step)
        if len(attempts) == 2:
            raise KeyboardInterrupt
        keep_step(tmp_path, step, experiences)

    data = data_with(keep=keep)
    fill(data, 1)
    before = through_a_file(data.state_dict())

    with pytest.raises(KeyboardInterrupt):
        fill(data, 2)
    assert data.state_dict()["experts"] == before["experts"]
    fill(data, 2)
    assert expert_tasks(data) == [2, 3]
    assert [is_expert(e) for e in read_experiences(tmp_path)] == ([False] * 4 + [True] * 2) * 2


def test_expert_data_taken_up_later_begin_at_their_beginning():
    before = ExperienceDataModule("grpo")
    fill(before, 1)
    data = data_with()
    data.load_state_dict(through_a_file(before.state_dict()))
    fill(data, 2)
    assert expert_tasks(data) == [0, 1]
    before.load_state_dict(through_a_file(data.state_dict()))  # and may be left out again


def test_data_that_end_and_numbers_that_cannot_be_are_refused():
    experts = ExpertData(MemoryReader(expert_experiences(3)), 2)
    experts.read(1)
    experts.commit()
    with pytest.raises(StorageError, match="have ended"):
        experts.read(2)
    with refuses("per_step"):
        ExpertData(MemoryReader([]), 0)


def test_a_mark_replaces_an_older_one_and_leaves_the_original_alone():
    [experience] = make_group(0, 1)
    experience.info["is_expert"] = "what"
    experience.custom_fields = [CustomField("x", "expert_mask", torch.float32), CustomField("y", "y", torch.float32)]
    copied = marked(experience, expert=True)
    assert copied.info["is_expert"] is True
    assert [field.destination_field for field in copied.custom_fields] == ["y", "expert_mask"]
    assert experience.info["is_expert"] == "what"
    assert len(experience.custom_fields) == 2

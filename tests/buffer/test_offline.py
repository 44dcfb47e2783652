"""Offline training's loader and data module: an epoch is so many reads, resumed where it stood."""

from itertools import islice

import pytest
import torch
from buffer_cases import make_group, names, through_a_file
from lightning.pytorch import LightningModule, Trainer

from trinity_lightning.buffer.datamodule import OfflineExperienceDataModule
from trinity_lightning.buffer.loader import OfflineLoader
from trinity_lightning.buffer.reader import MemoryReader, RepeatingReader
from trinity_lightning.buffer.storage.file import FileReader, FileStorage
from trinity_lightning.errors import ConfigError, StorageError


@pytest.fixture
def buffer(tmp_path):
    """A file with groups of 2, 3, 1, 2, 2 and 4 experiences."""
    with FileStorage(tmp_path / "buffer") as storage:
        for task, size in enumerate([2, 3, 1, 2, 2, 4]):
            storage.write(make_group(task, size))
    return tmp_path / "buffer"


def test_each_read_becomes_a_batch_of_whole_groups(buffer):
    loader = OfflineLoader(FileReader(buffer), batch_size=4, steps_per_epoch=2)
    assert len(loader) == 2
    first, second = list(loader), list(loader)
    tasks = [[e.eid.task for e in item.experiences] for item in first + second]
    assert tasks == [[0, 0], [1, 1, 1, 2], [3, 3, 4, 4], [5, 5, 5, 5]]
    assert [item.explore_step for item in first + second] == [1, 1, 2, 2]
    assert [item.num_tokens for item in first] == [4, 8]


def test_groups_may_be_parted(buffer):
    loader = OfflineLoader(FileReader(buffer), batch_size=7, steps_per_epoch=2, whole_groups=False)
    assert [len(item.experiences) for item in loader] == [7, 7]


def test_nothing_is_read_before_it_is_asked_for(buffer):
    reader = FileReader(buffer)
    state = reader.state_dict()
    iterator = iter(OfflineLoader(reader, batch_size=4, steps_per_epoch=2))
    assert reader.state_dict() == state
    next(iterator)
    assert reader.state_dict() != state


@pytest.mark.parametrize("done", range(7))
def test_a_resumed_run_reads_exactly_what_is_left(buffer, done):
    def start():
        reader = RepeatingReader(FileReader(buffer))
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
def test_lightning_resumes_in_the_middle_of_an_epoch(buffer, tmp_path):
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
        data = OfflineExperienceDataModule(RepeatingReader(FileReader(buffer)), batch_size=4, steps_per_epoch=3)
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


def test_data_that_end_are_an_error(buffer):
    loader = OfflineLoader(FileReader(buffer), batch_size=4, steps_per_epoch=9)
    with pytest.raises(StorageError, match=r"step 5 of 9 in epoch 1.*RepeatingReader"):
        list(loader)


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"steps_per_epoch": 0}, {"wait": -1.0}])
def test_numbers_that_cannot_work_are_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        OfflineLoader(MemoryReader([]), **({"batch_size": 1, "steps_per_epoch": 1} | arguments))

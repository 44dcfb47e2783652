"""Training without rollouts that an error ends: it goes on as if it had not."""

import signal
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.policy import Items, batch_of, make_experiences, make_policy
from support.trainer import quiet_trainer

from trinity_lightning.buffer.offline import OfflineExperienceDataModule
from trinity_lightning.buffer.reader import MemoryReader
from trinity_lightning.errors import RankError, StorageError
from trinity_lightning.explorer.interruption import StopCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:.*does not have many workers.*")

STEPS, ITEMS = 3, 2


class TornError(OSError):
    """Ends a run in these tests."""


def read():
    """Data that are read, by a loader that rewinds."""
    reader = MemoryReader(make_experiences(count=8 * STEPS * ITEMS))
    return OfflineExperienceDataModule(reader, batch_size=8, steps_per_epoch=ITEMS)


def listed():
    """A stateful loader that cannot rewind."""
    return Items([batch_of(make_experiences(seed=seed)) for seed in range(ITEMS)])


def fit(folder, torn=None, resumed=False, data=read):
    """Six items, of which number `torn` (from 1) fails after its gradient; the weights at the end."""
    lightning.seed_everything(1, verbose=False)
    policy: Any = make_policy()
    count, accumulate = 0, policy.accumulate

    def tearing(*args):
        nonlocal count
        count += 1
        sums = accumulate(*args)
        if count == torn:
            torch.rand(3)  # a resumed run draws for this item again
            raise TornError("torn")
        torch.rand(3)
        return sums

    policy.accumulate = tearing
    stop = StopCheckpoint(folder, lambda: "trinity-lightning +recipe=offline ckpt_path=last")
    trainer = quiet_trainer(folder, stop, max_epochs=STEPS)
    checkpoint = folder / "interrupted.ckpt" if resumed else None
    trainer.fit(policy, datamodule=data(), ckpt_path=checkpoint, weights_only=True)
    assert trainer.global_step == STEPS * ITEMS
    return policy.policy.state_dict() | {"drawn": torch.rand(3)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_wait_for_data_ends_at_once_and_the_run_goes_on_from_there(number, tmp_path):
    stop, there = StopCheckpoint(tmp_path), make_experiences(count=16)

    def trained(count, ckpt_path=None):
        reader, policy = MemoryReader(there[:count]), make_policy()
        attempt = reader._try_read

        def interrupted(count, whole_groups, last):
            got = attempt(count, whole_groups, last)
            if got is None:
                signal.raise_signal(number)
            return got

        reader._try_read = interrupted
        data = OfflineExperienceDataModule(reader, batch_size=8, steps_per_epoch=2, whole_groups=False, wait=1e6)
        trainer = quiet_trainer(tmp_path, stop)
        trainer.fit(policy, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        return policy.policy.state_dict()

    before = {handled: signal.getsignal(handled) for handled in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(SystemExit):
        trained(8)
    for handled, handler in before.items():
        signal.signal(handled, handler)  # Lightning ignores Ctrl-C from then on
    resumed, whole = trained(16, tmp_path / "interrupted.ckpt"), trained(16)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_sigterm_is_the_reason_also_once_the_other_ranks_know_of_it():
    ranks = SimpleNamespace(failure=lambda: RankError("rank 0: SIGTERM"))
    trainer: Any = SimpleNamespace(received_sigterm=True, strategy=SimpleNamespace(ranks=ranks))
    assert isinstance(StopCheckpoint().reason(trainer), SIGTERMException)


def test_nothing_is_saved_of_what_fails_after_training(tmp_path):
    stop, policy = StopCheckpoint(tmp_path), make_policy()
    data = OfflineExperienceDataModule(MemoryReader(make_experiences(count=8)), batch_size=8, steps_per_epoch=1)
    trainer = quiet_trainer(tmp_path, stop)
    trainer.fit(policy, datamodule=data)
    stop.on_exception(trainer, policy, TornError("in a test"))
    assert not stop.wanted
    assert not (tmp_path / "interrupted.ckpt").exists()


class FailsAtFirst(lightning.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        raise TornError("before the first item of this fit")


class StoppedAtFirst(lightning.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        trainer._signal_connector.received_sigterm = True
        raise SIGTERMException


def test_a_run_that_is_told_to_end_before_the_first_item_is_saved(tmp_path):
    data = OfflineExperienceDataModule(MemoryReader(make_experiences(count=16)), batch_size=8, steps_per_epoch=1)
    trainer = quiet_trainer(tmp_path, StopCheckpoint(tmp_path), StoppedAtFirst(), max_epochs=1)
    with pytest.raises((SIGTERMException, SystemExit)):
        trainer.fit(make_policy(), datamodule=data)
    assert (tmp_path / "interrupted.ckpt").exists()


def test_nothing_is_saved_before_the_first_item(tmp_path, caplog):
    """Neither of a new run, nor of a resumed one, whose checkpoint is still as good."""
    data = OfflineExperienceDataModule(MemoryReader(make_experiences(count=16)), batch_size=8, steps_per_epoch=1)
    checkpoint = None
    for words in ("without a checkpoint. ", f"The previous checkpoint is intact. Resume with ckpt_path='{tmp_path}"):
        trainer = quiet_trainer(tmp_path, StopCheckpoint(tmp_path), FailsAtFirst(), max_epochs=2)
        with pytest.raises(TornError):
            trainer.fit(make_policy(), datamodule=data, ckpt_path=checkpoint, weights_only=True)
        assert "stopped before anything new was trained" in caplog.text
        assert words in caplog.text
        assert not (tmp_path / "interrupted.ckpt").exists()
        trainer = quiet_trainer(tmp_path, max_epochs=1)
        trainer.fit(make_policy(), datamodule=data)
        checkpoint = tmp_path / "one.ckpt"
        trainer.save_checkpoint(checkpoint)
        caplog.clear()


@pytest.mark.slow
@pytest.mark.parametrize("data", [read, listed])
@pytest.mark.parametrize("item", [1, 2, STEPS * ITEMS])
def test_an_item_that_failed_is_read_and_trained_on_again(item, data, tmp_path, caplog):
    whole = fit(tmp_path, data=data)
    with pytest.raises(TornError):
        fit(tmp_path, torn=item, data=data)
    assert "Resume with: trinity-lightning +recipe=offline ckpt_path=last" in caplog.text
    resumed = fit(tmp_path, resumed=True, data=data)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_once_the_run_has_ended_nothing_cuts_a_wait_for_data_short(tmp_path):
    stop, reader = StopCheckpoint(tmp_path), MemoryReader(make_experiences(count=8))
    data = OfflineExperienceDataModule(reader, batch_size=8, steps_per_epoch=1, wait=0.1)
    quiet_trainer(tmp_path, stop, max_epochs=1).fit(make_policy(), datamodule=data)
    stop.ctrl_c.count = 1
    with pytest.raises(StorageError):
        next(iter(data.train_dataloader()))

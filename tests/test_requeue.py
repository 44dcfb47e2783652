"""One command to submit and to requeue, ckpt_path=auto; one process in a folder."""

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.compose import composed
from support.runs import SMALL, Commands, only, rolled_out, rows, wait_for

from trinity_lightning.build import checkpoint_of
from trinity_lightning.config.checkpoints import RECORD, folder_of_same_run, settle_auto
from trinity_lightning.config.hydra import sole_writer
from trinity_lightning.config.lightning_objects import check_targets
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.errors import TakenFolderError

STEPS = ("+recipe=grpo", *SMALL, "engine=transformers", "steps=8", "callbacks.checkpoint.every_n_epochs=1")
AUTO = (*STEPS, "ckpt_path=auto")
REFUSED = "another process is at work in"


@pytest.fixture(scope="module")
def whole(run_train: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    done = run_train(folder, *STEPS, "output_dir=run")
    assert done.returncode == 0, done.stdout[-4000:]
    return folder / "run"


def goes_on_as(folder: Path, whole: Path) -> None:
    """All that was rolled out is the same, and so must the weights have been; engine=transformers rounds by load."""
    assert rolled_out(folder) == rolled_out(whole)
    assert [row["explore_step"] for row in rows(folder)] == [row["explore_step"] for row in rows(whole)]
    assert (folder / "model" / "model.safetensors").is_file()


def stopped(run_train: Commands, where: Path, how: signal.Signals, *arguments: str, after: str) -> int:
    """The exit code of the command, ended by a signal once there is such a file."""
    process = run_train.start(where, *arguments)
    wait_for(lambda: any(where.glob(after)), process)
    process.send_signal(how)
    return process.wait(120)


def test_the_command_that_was_terminated_goes_on_when_it_is_submitted_again(
    run_train: Commands, whole: Path, tmp_path: Path
) -> None:
    command = (*AUTO, "output_dir=run")
    assert stopped(run_train, tmp_path, signal.SIGTERM, *command, after="run/completions/step_2.jsonl") == 143
    assert len({row["explore_step"] for row in rows(tmp_path / "run")}) < 8
    assert run_train(tmp_path, *command).returncode == 0
    goes_on_as(tmp_path / "run", whole)
    again = run_train(tmp_path, *command)  # as a requeued job that had finished
    assert again.returncode == 0
    assert "nothing is left to do" in again.stdout
    goes_on_as(tmp_path / "run", whole)


def test_a_killed_run_is_found_by_its_configuration(run_train: Commands, whole: Path, tmp_path: Path) -> None:
    after = "outputs/grpo/*/checkpoints/*.ckpt"
    assert stopped(run_train, tmp_path, signal.SIGKILL, *AUTO, after=after) == -signal.SIGKILL
    killed = only(tmp_path, "outputs/grpo/*")
    done = run_train(tmp_path, *AUTO, "optimizer.lr=1e-3", "steps=1")
    assert done.returncode == 0, done.stdout[-4000:]
    assert len(list(tmp_path.glob("outputs/grpo/*"))) == 2  # another configuration is another run
    done = run_train(tmp_path, *AUTO, "logger.csv.dir=${output_dir}/.")  # loggers do not count
    assert done.returncode == 0, done.stdout[-4000:]
    goes_on_as(killed, whole)


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(
    run_train: Commands, whole: Path, tmp_path: Path
) -> None:
    command = (*STEPS, "callbacks.checkpoint.every_n_epochs=100", "output_dir=run")
    after = "run/completions/step_2.jsonl"
    assert stopped(run_train, tmp_path, signal.SIGKILL, *command, after=after) == -signal.SIGKILL
    assert (tmp_path / "run" / "metrics.csv").is_file()
    assert "holds a run already" in run_train(tmp_path, *command).stdout
    assert run_train(tmp_path, *AUTO, "output_dir=run").returncode == 0
    goes_on_as(tmp_path / "run", whole)


def test_a_run_of_an_earlier_version_goes_on_from_a_checkpoint_named_by_lightnings_epoch(
    run_train: Commands, tmp_path: Path
) -> None:
    names = ("callbacks.checkpoint._target_=lightning.pytorch.callbacks.ModelCheckpoint",)
    names += ("callbacks.checkpoint.filename='{epoch:05d}'", "callbacks.checkpoint.auto_insert_metric_name=true")
    assert run_train(tmp_path, *STEPS, *names, "output_dir=run", "steps=2").returncode == 0
    assert (tmp_path / "run" / "checkpoints" / "epoch=00001.ckpt").is_file()
    assert run_train(tmp_path, *AUTO, "output_dir=run").returncode == 0
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {"epoch=00001.ckpt", "step_00008.ckpt"}  # Lightning keeps the one that a run was resumed from


def test_a_second_process_in_a_folder_is_refused_and_the_first_goes_on(
    run_train: Commands, whole: Path, tmp_path: Path
) -> None:
    command = (*AUTO, "output_dir=run")
    process = run_train.start(tmp_path, *command)
    wait_for((tmp_path / "run" / "completions" / "step_1.jsonl").is_file, process)
    process.send_signal(signal.SIGSTOP)
    record, log = tmp_path / "run" / RECORD, tmp_path / "run" / "train.log"
    before = record.read_text(), log.read_text()
    second = run_train(tmp_path, *STEPS, "seed=7", "output_dir=run")
    evaluated = ("+recipe=grpo", "model=tiny", "output_dir=run")
    evaluation = run_train(tmp_path, *evaluated, program="trinity_lightning.evaluate")
    assert record.read_text() == before[0]  # by which ckpt_path=auto finds the run
    assert "ERROR" not in log.read_text().removeprefix(before[1])
    process.send_signal(signal.SIGCONT)
    for done in (second, evaluation):
        assert (done.returncode, REFUSED in done.stdout) == (2, True), done.stdout[-4000:]
    assert process.wait(120) == 0
    goes_on_as(tmp_path / "run", whole)


HOLD = """
import os, sys, time
from pathlib import Path
from typing import Any
from trinity_lightning.config.hydra import sole_writer
with sole_writer(Path(sys.argv[1])):
    if os.fork():
        print("held", flush=True)
    time.sleep(600)
"""


ASK = """
import sys
from pathlib import Path
from typing import Any
from trinity_lightning.config.hydra import sole_writer
with sole_writer(Path(sys.argv[1])):
    pass
"""


def refused(folder: Path) -> bool:
    """True if another process is refused in the folder."""
    done = subprocess.run([sys.executable, "-c", ASK, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or REFUSED in done.stderr, done.stderr
    return done.returncode != 0


@pytest.mark.slow
def test_the_lock_of_a_process_that_was_killed_is_free_though_its_fork_lives(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert refused(tmp_path)
        holder.kill()
        holder.wait()
        assert not refused(tmp_path)
    finally:
        os.killpg(holder.pid, signal.SIGKILL)  # the fork
        holder.communicate()


@pytest.mark.slow
def test_a_folder_is_free_again_at_the_end_and_after_an_error(tmp_path: Path) -> None:
    with suppress(ZeroDivisionError), sole_writer(tmp_path):
        assert refused(tmp_path)
        raise ZeroDivisionError
    assert not refused(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with caplog.at_level(logging.WARNING), sole_writer(tmp_path):
        assert "could not be locked" in caplog.text


# -- what auto means in a folder ---------------------------------------------------------------------------------------


def settled(folder: Path, leads: bool = True) -> str | None:
    config = OmegaConf.create({"ckpt_path": "auto", "output_dir": str(folder)})
    settle_auto(config, leads)
    return config.ckpt_path


def record(folder: Path) -> Path:
    """The folder, with the records of a run that began there."""
    for name in ("metrics.csv", "config.yaml"):
        (folder / name).write_text("a run's\n")
    return folder


def test_what_ended_before_its_first_checkpoint_is_removed_by_the_process_that_leads_alone(tmp_path: Path) -> None:
    assert settled(record(tmp_path), leads=False) is None
    assert (tmp_path / "metrics.csv").is_file()
    assert checkpoint_of(TrainConfig(), tmp_path, begins=False) is None  # of a rank that is quicker than the first
    assert settled(tmp_path) is None
    assert not any(tmp_path.iterdir())


def test_a_run_that_came_to_its_end_is_not_begun_again_though_its_checkpoints_are_gone(tmp_path: Path) -> None:
    (record(tmp_path) / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    assert settled(tmp_path) is None
    assert (tmp_path / "metrics.csv").is_file()
    with pytest.raises(TakenFolderError):
        checkpoint_of(TrainConfig(), tmp_path)


def test_the_record_of_an_earlier_version_whose_callbacks_lay_elsewhere_is_found(tmp_path: Path) -> None:
    config = composed("+recipe=grpo", "model=tiny")
    folder = tmp_path / "grpo" / "earlier"
    (folder / RECORD).parent.mkdir(parents=True)
    earlier: Any = OmegaConf.merge(
        config, {"callbacks": {"checkpoint": {"every_n_epochs": 3}}, "output_dir": str(folder)}
    )
    earlier.callbacks.checkpoint._target_ = "trinity_lightning.trainer.checkpoint_io.StepCheckpoint"
    OmegaConf.save(earlier, folder / RECORD)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step_00003.ckpt").touch()
    assert folder_of_same_run(folder.parent, config) == folder
    assert folder_of_same_run(folder.parent, composed("+recipe=grpo", "model=tiny", "steps=9")) is None
    check_targets(earlier)  # a recipe that names the earlier path goes on, too

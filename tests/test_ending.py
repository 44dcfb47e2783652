"""The end of a run: weights first, and if something fails, everything else is done and reported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping
from support.compose import composed
from support.runs import SMALL, RunTrain, only
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from trinity_lightning.build import Run, build
from trinity_lightning.config.models import resolve_model
from trinity_lightning.errors import DiskFullError, ModelNotSavedError
from trinity_lightning.trainer.checkpoint import AtomicCheckpointIO

pytestmark = [
    pytest.mark.slow,  # each is a whole run
    pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:Trainer already configured"),
]

MakeRun = Callable[..., Run]


@pytest.fixture
def sft(tmp_path: Path) -> MakeRun:
    """A run of supervised steps in the folder `run`, that is still to be made fit."""
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n{"text": "b c"}\n')

    def make(*overrides: str) -> Run:
        data = ("+recipe=sft", "model=tiny", f"buffer.path={tmp_path}/data.jsonl", "buffer.batch_size=1", "logger=csv")
        return build(composed(*data, "steps=2", f"output_dir={tmp_path}/run", *overrides))

    return make


def fails_at_the_end(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: Exception) -> None:
    """From its second call on: the first one is the trial before training."""
    original, calls = getattr(owner, name), []

    def call(*arguments: Any, **settings: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 1:
            raise error
        return original(*arguments, **settings)

    monkeypatch.setattr(owner, name, call)


def test_a_tokenizer_that_can_no_longer_be_saved_leaves_weights_checkpoint_and_report(
    sft: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_at_the_end(monkeypatch, PreTrainedTokenizerFast, "save_pretrained", FileNotFoundError("vocabulary"))
    with pytest.raises(ModelNotSavedError) as unsaved:
        sft().fit()
    folder = tmp_path / "run"
    for name in ("model", "checkpoints/final.ckpt"):
        assert f"'{folder / name}'" in str(unsaved.value)
    assert "FileNotFoundError: vocabulary" in str(unsaved.value)
    assert AutoModelForCausalLM.from_pretrained(folder / "model").num_parameters() > 0
    assert (folder / "report.html").is_file()


def test_a_disk_that_has_no_room_for_the_checkpoint_takes_the_model(
    sft: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = DiskFullError(28, "No space left on device", "final.ckpt")
    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", lambda *_, **__: (_ for _ in ()).throw(full))
    with pytest.raises(
        ModelNotSavedError, match=r"'final.ckpt' could not be written.*There is no checkpoint"
    ) as unsaved:
        sft().fit()
    assert f"'{tmp_path / 'run' / 'model'}', whole" in str(unsaved.value)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "report.html").is_file()


class FailsAtTheEnd(L.Callback):
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        raise RuntimeError("an engine that does not stop")


def test_what_was_trained_is_saved_though_the_end_of_the_training_fails(sft: MakeRun, tmp_path: Path) -> None:
    run = sft("+callbacks.failing={_target_: test_ending.FailsAtTheEnd}")
    with pytest.raises(RuntimeError, match="an engine that does not stop"):
        run.fit()
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()
    assert (tmp_path / "run" / "checkpoints" / "final.ckpt").is_file()


def test_a_report_that_fails_ends_no_run(
    sft: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trinity_lightning.build.write_report", lambda folder: {}["step"])
    sft().fit()
    assert "report.html was not written" in caplog.text
    assert (tmp_path / "run" / "model").is_dir()


def test_a_run_that_a_callback_ended_says_when_and_why(sft: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    stops = (
        f"{{_target_: {EarlyStopping.__module__}.EarlyStopping, monitor: actor/lr, stopping_threshold: 1, mode: min}}"
    )
    sft(f"+callbacks.stop={stops}").fit()
    assert "training stopped after step 1 of 2: Stopping threshold reached" in caplog.text


def test_a_model_with_settings_that_transformers_refuses_to_save_is_trained_and_saved(
    run_train: RunTrain, tmp_path: Path
) -> None:
    shutil.copytree(resolve_model("tiny"), tmp_path / "m")
    settings = json.dumps({"eos_token_id": 3, "temperature": 0.9, "top_p": 0.6})
    (tmp_path / "m" / "generation_config.json").write_text(settings)
    custom = ("model=custom", f"model.name={tmp_path}/m", "engine=transformers", "steps=1")
    done = run_train(tmp_path, "+recipe=grpo", *SMALL[1:], *custom)
    assert done.returncode == 0, done.stdout[-4000:]
    folder = only(tmp_path, "outputs/grpo/*")
    assert (folder / "model" / "generation_config.json").read_text() == settings
    assert (folder / "report.html").is_file()

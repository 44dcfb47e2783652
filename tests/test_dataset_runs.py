"""Whole runs on the examples of a dataset, without rollouts: SFT and DPO."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.compose import composed
from support.errors import refuses
from support.pictures import experience, prompt_of, random_picture
from support.runs import TRAINERS, Commands, RunTrain, alike, equal, finished, rows, same_model

from trinity_lightning.buffer.offline import OfflineExperienceDataModule, offline_data_module
from trinity_lightning.buffer.step_files import keep_step
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.pictures.prompt import PLACES
from trinity_lightning.config.run import typed_config
from trinity_lightning.errors import ConfigError, StorageError
from trinity_lightning.resume import check_resumed_data
from trinity_lightning.trainer.objective import Objective

TINY = ("model=tiny", "model.dtype=fp32", "logger=csv", "buffer.batch_size=8")


def write(file: Path, lines: list[dict]) -> str:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"buffer.path={file}"


def sums() -> list[dict]:
    """Prompts and completions that no other rule fits: the digit itself."""
    return [{"prompt": f"{digit}=", "completion": f"{digit}"} for digit in range(10)]


def preferences() -> list[dict]:
    """A digit is better than a letter."""
    return [{"prompt": f"{digit}=", "chosen": f"{digit}", "rejected": "abcdefghij"[digit]} for digit in range(10)]


def train(run_train: Commands, folder: Path, *arguments: str) -> Path:
    folder.mkdir(exist_ok=True)
    return finished(run_train, folder, *arguments, *TINY)


def column(run: Path, name: str) -> list[float]:
    return [float(row[name]) for row in rows(run) if row.get(name)]


def test_sft_learns_and_its_resume_is_exact(run_train: Commands, tmp_path: Path) -> None:
    arguments = ("+recipe=sft", write(tmp_path / "sums.jsonl", sums()), "optimizer.lr=3e-3")
    run = train(run_train, tmp_path / "whole", *arguments, "steps=24")
    losses = column(run, "actor/pg_loss")
    assert len(losses) == 24  # over two passes, though a pass is no multiple of a batch
    assert losses[0] > 4
    assert losses[-1] < 1.5
    train(run_train, tmp_path / "parts", *arguments, "steps=7")
    resumed = train(run_train, tmp_path / "parts", *arguments, "steps=24", "ckpt_path=last")
    same_model(resumed, run)


def test_pairs_with_pictures_are_learned_and_their_resume_is_exact(run_train: Commands, tmp_path: Path) -> None:
    """Two colours: the better answer is the number of the colour that is shown."""
    lines = []
    for place, colour in enumerate(("red", "blue") * 4):
        Image.new("RGB", (64, 64), colour).save(tmp_path / f"{place}.png")
        good, bad = ("1", "2") if colour == "red" else ("2", "1")
        lines.append({"prompt": "Colour?", "images": [f"{place}.png"], "chosen": good, "rejected": bad})
    path = write(tmp_path / "pairs.jsonl", lines)
    arguments = ("+recipe=dpo", path, "model=tiny_vision", "model.dtype=fp32", "logger=csv", "buffer.batch_size=8")
    arguments += ("optimizer.lr=3e-3",)
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    run = finished(run_train, tmp_path / "whole", *arguments, "steps=10")
    assert column(run, "actor/pg_loss")[0] == pytest.approx(0.6931472, rel=1e-6)
    assert column(run, "actor/pg_loss")[-1] < 0.6
    finished(run_train, tmp_path / "parts", *arguments, "steps=4")
    equal(finished(run_train, tmp_path / "parts", *arguments, "steps=10", "ckpt_path=last"), run)


@pytest.mark.parametrize(("recipe", "examples", "trainer"), [("sft", sums, "ddp"), ("dpo", preferences, "fsdp2")])
def test_two_processes_train_as_one(
    recipe: str, examples: Callable[[], list[dict]], trainer: str, run_train: Commands, tmp_path: Path
) -> None:
    """The other two pairs of objective and trainer: tests/trainer/test_equivalence.py, without the command."""
    arguments = (f"+recipe={recipe}", write(tmp_path / "data.jsonl", examples()), "optimizer.lr=1e-3", "steps=3")
    arguments += (
        "buffer.dataset.held_out.share=0.1",
        "buffer.dataset.held_out.interval=2",
    )  # one example: one process has none
    one = train(run_train, tmp_path / "one", *arguments)
    two = train(run_train, tmp_path / "two", *arguments, *TRAINERS[trainer])
    alike(two, one)
    for name in ("eval/loss", *(PAIRS if recipe == "dpo" else ())):
        assert column(two, name) == pytest.approx(column(one, name), rel=1e-4, abs=1e-6)
        assert len(column(two, name)) == 2


def test_dpo_learns_what_is_preferred(run_train: Commands, tmp_path: Path) -> None:
    arguments = ("+recipe=dpo", write(tmp_path / "pairs.jsonl", preferences()), "optimizer.lr=1e-3")
    run = train(run_train, tmp_path, *arguments, "steps=12")
    assert column(run, "actor/pg_loss")[0] == pytest.approx(0.6931472, rel=1e-6)
    assert column(run, "actor/rewards/margins")[0] == 0.0
    assert column(run, "actor/pg_loss")[-1] < 0.5
    assert column(run, "actor/rewards/accuracies")[-1] == 1.0


def better(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    action_mask: torch.Tensor,
    advantages: torch.Tensor,
    *,
    pairs: torch.Tensor,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    max_response_length: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss of pairs of one's own."""
    chosen, rejected = logprobs.masked_fill(~action_mask, 0.0).sum(-1)[pairs].unbind(1)
    loss = (rejected - chosen).mean()
    return loss, {"pg_loss": loss.detach()}


def data_of(path: str, loss: str, follower: bool = False) -> OfflineExperienceDataModule:
    config = typed_config(composed("+recipe=dpo", path, f"algorithm.policy_loss={loss}", *TINY))
    return offline_data_module(config, Objective(config.algorithm).pairs, follower, 64)


def test_a_loss_of_pairs_of_ones_own_is_given_pairs(tmp_path: Path) -> None:
    data = data_of(write(tmp_path / "pairs.jsonl", preferences()), "test_dataset_runs.better")
    assert {experience.experience_type for experience in data.reader.read(10)} == {"dpo"}


def test_ranks_that_follow_read_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", sums())
    with refuses("algorithm.policy_loss") as refused:
        data_of(path, "dpo")
    assert "line 1" in str(refused.value)
    data = data_of(path, "dpo", follower=True)
    data.load_state_dict({"reader": {"source": "of rank 0", "cursor": [3]}})
    assert data.reader.read(8) == []


@pytest.mark.parametrize(
    ("recipe", "lines", "words"),
    [
        (
            "dpo",
            sums(),
            "data.jsonl: algorithm.policy_loss=dpo learns from prompt, chosen and rejected, or from whole "
            "conversations in the latter two; it has completion",
        ),
        ("sft", preferences(), "data.jsonl: algorithm.policy_loss=sft learns from prompt and completion"),
    ],
)
def test_data_of_the_other_kind_are_refused(
    recipe: str, lines: list[dict], words: str, run_train: RunTrain, tmp_path: Path
) -> None:
    done = run_train(tmp_path, f"+recipe={recipe}", write(tmp_path / "data.jsonl", lines), "steps=1", *TINY)
    assert done.returncode == 2
    assert words in done.stdout


def test_a_resume_with_other_data_is_refused_by_the_key_before_anything_is_loaded(tmp_path: Path) -> None:
    runs = [
        typed_config(composed("+recipe=sft", write(tmp_path / f"{name}.jsonl", sums()[first:]), *TINY))
        for first, name in enumerate(("old", "new"))
    ]
    before, after = (offline_data_module(run, False, False, 64) for run in runs)
    checkpoint, key = str(tmp_path / "it.ckpt"), type(before).__qualname__
    torch.save({key: before.state_dict()}, checkpoint)
    check_resumed_data(before, checkpoint, runs[0].buffer, tmp_path)
    with refuses("buffer.path"):
        check_resumed_data(after, checkpoint, runs[1].buffer, tmp_path)
    (tmp_path / "config.yaml").write_text("model: {name: tiny}\nbuffer: {path: old.jsonl}")
    with refuses("buffer.path") as refused:
        check_resumed_data(after, checkpoint, runs[1].buffer, tmp_path)
    assert "buffer.path=old.jsonl" in str(refused.value)
    runs[0].buffer.dataset.shuffle = False
    unshuffled = offline_data_module(runs[0], False, False, 64)
    with refuses("buffer.path"):
        check_resumed_data(unshuffled, checkpoint, runs[0].buffer, tmp_path)


def test_columns_beside_those_that_are_learned_from_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [{"text": "once"}, {"prompt": "1=", "completion": "1", "text": "twice"}]
    data_of(write(tmp_path / "data.jsonl", lines), "sft")
    [warning] = [message for message in caplog.messages if "no effect" in message]
    assert "learned from is prompt and completion; text beside it has no effect" in warning


@pytest.mark.parametrize(("third", "words"), [("3", ""), ("", "line 4 of .*sums.csv: .*no completion")])
def test_a_column_of_numbers_in_csv_is_text(third: str, words: str, tmp_path: Path) -> None:
    rows = "".join(f"{digit}=,{third if digit == 3 else digit}\n" for digit in range(1, 5))
    (tmp_path / "sums.csv").write_text("prompt,completion\n" + rows)
    path = f"buffer.path={tmp_path / 'sums.csv'}"
    if words:
        with pytest.raises(ConfigError, match=words):
            data_of(path, "sft")
    else:
        assert len(data_of(path, "sft").reader.read(4)) == 4


def test_stored_experiences_are_no_pairs_and_stay_to_be_read(tmp_path: Path) -> None:
    keep_step(tmp_path, 1, [Experience(tokens=[1, 2], prompt_length=1) for _ in range(2)])
    run = typed_config(composed("+recipe=offline", f"buffer.path={tmp_path}", *TINY))
    with refuses("algorithm.policy_loss"):
        offline_data_module(run, True, False, 64)
    assert len(offline_data_module(run, False, False, 64).reader.read(2)) == 2


def test_stored_pictures_have_as_many_places_as_the_model_has_states(tmp_path: Path) -> None:
    """They may be another program's, or of a model with other tokens a picture."""

    def data_of_step(folder: str, *steps: list[Experience]) -> OfflineExperienceDataModule:
        for number, experiences in enumerate(steps, start=1):
            keep_step(tmp_path / folder, number, experiences)
        settings = ("buffer.batch_size=2", "model=tiny_vision", f"buffer.path={tmp_path / folder}")
        return offline_data_module(typed_config(composed("+recipe=offline", *TINY, *settings)), False, False, 64)

    *whole, wrong = [experience(prompt_of("<image>?", [random_picture(1)]), [5], task=task) for task in range(3)]
    assert wrong.multi_modal_inputs is not None
    wrong.multi_modal_inputs = {**wrong.multi_modal_inputs, PLACES: wrong.multi_modal_inputs[PLACES][1:]}
    refused = pytest.raises(StorageError, match=f"experience {wrong.eid}, .* 15 places.* 16 states")
    data = data_of_step("second", whole, [wrong])
    (batch,) = data.train_dataloader()
    assert len(batch.experiences) == 2
    before = data.reader.state_dict()
    with refused:
        list(data.train_dataloader())
    assert data.reader.state_dict() == before  # a run that is resumed with mended data reads them again
    with refused:
        data_of_step("first", [wrong])  # at the start


@pytest.mark.parametrize(("batch_size", "warned"), [(10, False), (11, True)])
def test_a_batch_larger_than_the_dataset_is_warned_of(
    batch_size: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "sums.jsonl", sums())
    config = typed_config(composed("+recipe=sft", path, *TINY, f"buffer.batch_size={batch_size}"))
    offline_data_module(config, False, False, 64)
    assert ("buffer.batch_size=11 repeats some of 10 examples" in caplog.text) == warned


def test_examples_that_are_read_once_and_end_before_the_run_are_refused(tmp_path: Path) -> None:
    once = (write(tmp_path / "sums.jsonl", sums()), *TINY, "buffer.repeat=false")
    with refuses("steps") as refused:
        offline_data_module(typed_config(composed("+recipe=sft", *once, "steps=3")), False, False, 64)
    assert "steps=2" in str(refused.value.fix)
    data = offline_data_module(typed_config(composed("+recipe=sft", *once, "steps=2")), False, False, 64)
    assert [len(data.reader.read(8)) for _ in range(3)] == [8, 2, 0]


# -- examples that are not trained on ----------------------------------------------------------------------------------


PAIRS = {"eval/accuracy": "actor/rewards/accuracies", "eval/margin": "actor/rewards/margins"}


@pytest.mark.parametrize(("recipe", "lines", "more"), [("sft", sums(), {}), ("dpo", preferences(), PAIRS)])
def test_held_out_examples_are_measured_as_those_that_are_trained_on(
    recipe: str, lines: list[dict], more: dict[str, str], run_train: Commands, tmp_path: Path
) -> None:
    """Every third step and after the last one. They are those of each step: the next begins with the same weights."""
    file = tmp_path / "examples.jsonl"
    held_out = [f"buffer.dataset.held_out.path={file}", "buffer.dataset.held_out.interval=3"]
    run = train(
        run_train, tmp_path, f"+recipe={recipe}", write(file, lines[:8]), *held_out, "optimizer.lr=1e-3", "steps=5"
    )
    measured = {int(float(row["explore_step"])): row for row in rows(run) if row.get("eval/loss")}
    assert list(measured) == [3, 5]
    for name, of_training in {"eval/loss": "actor/pg_loss", **more}.items():
        assert float(measured[3][name]) == pytest.approx(column(run, of_training)[3], rel=1e-5)
        assert name in (run / "report.html").read_text()
    log = (run / "train.log").read_text()
    assert f"loss {column(run, 'actor/pg_loss')[0]:.4g}" in log
    assert f"held-out loss {float(measured[5]['eval/loss']):.4g}" in log


@pytest.mark.slow
def test_a_share_is_drawn_by_the_seed_and_parted_from_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", sums())
    drawn = []
    for seed in (1, 1, 2):
        config = typed_config(composed("+recipe=sft", path, f"seed={seed}", "buffer.dataset.held_out.share=0.4", *TINY))
        data = offline_data_module(config, False, False, 64)
        held = {experience.eid.suffix for experience in data.held_out}
        trained = {experience.eid.suffix for experience in data.reader.read(6)}
        assert (len(held), len(trained)) == (4, 6)
        assert not held & trained
        drawn.append(held)
    assert drawn[0] == drawn[1] != drawn[2]


def test_held_out_examples_that_are_trained_on_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "sums.jsonl", sums())
    for held_out, warned in (("train[6:]", True), ("train[80%:]", False)):
        caplog.clear()
        split = ("buffer.dataset.split='train[:8]'", f"buffer.dataset.held_out.split='{held_out}'")
        offline_data_module(typed_config(composed("+recipe=sft", path, *split, *TINY)), False, False, 64)
        assert ("2 of 4 held-out examples (buffer.dataset.held_out) are trained on, too" in caplog.text) == warned


def test_a_held_out_file_is_read_whole_whatever_slice_is_trained_on(tmp_path: Path) -> None:
    path, other = (write(tmp_path / f"{name}.jsonl", sums()) for name in ("sums", "others"))
    held_out = other.replace("buffer.path", "buffer.dataset.held_out.path")
    for split in ("train[:2]", "train[:2]+train[50%:]"):
        config = composed("+recipe=sft", path, held_out, f"buffer.dataset.split='{split}'", *TINY)
        assert len(offline_data_module(typed_config(config), False, False, 64).held_out) == 10


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["share=0.2", "split=test"], "buffer.dataset.held_out"),
        (["share=1.0"], "buffer.dataset.held_out.share"),
        (["split=train"], "buffer.dataset.held_out.split"),
        (["path=no.jsonl"], "buffer.dataset.held_out.path"),
        (["interval=5"], "buffer.dataset.held_out.interval"),
        (["share=0.01"], "buffer.dataset.held_out.share"),
        (["split='train[:2]'"], "buffer.dataset.held_out.split"),
        (["split=test"], "buffer.dataset.held_out.split"),
    ],
)
def test_held_out_examples_that_are_none_are_refused(overrides: list[str], key: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", sums())
    overrides = [f"buffer.dataset.held_out.{override}" for override in overrides]
    with refuses(key):
        offline_data_module(typed_config(composed("+recipe=sft", path, *overrides, *TINY)), False, False, 64)

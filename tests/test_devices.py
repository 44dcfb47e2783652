"""A whole run on two processes: it trains as one does, and what cannot be is refused before anything is loaded."""

from pathlib import Path

import pytest
from support.runs import SMALL, RunTrain, only, rows, start

RUN = ("+recipe=grpo", *SMALL, "steps=2", "algorithm.optimizer_steps=2", "algorithm.kl.coef=0.01", "save_model=false")
TWO = ("trainer.accelerator=cpu", "trainer.devices=2")
SAME = ("reward/mean", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/trained_rows")


@pytest.fixture(scope="module")
def one(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run on one device."""
    folder = tmp_path_factory.mktemp("one")
    done = run_train(folder, *RUN, "name=one")
    assert done.returncode == 0, done.stdout[-4000:]
    return only(folder, "outputs/one/*")


@pytest.mark.parametrize("trainer", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(one: Path, trainer: str, tmp_path: Path) -> None:
    """Commands of their own, from their imports to their end."""
    run = start(tmp_path, *RUN, f"trainer={trainer}", *TWO, "name=two")
    assert run.wait(timeout=240) == 0, (tmp_path / "stdout").read_text()[-4000:]
    assert (tmp_path / "stdout").read_text().count("step 2/2") == 1
    found = rows(only(tmp_path, "outputs/two/*"))
    for expected, row in zip(rows(one), found, strict=True):
        named, wanted = ({name for name, value in each.items() if value} for each in (row, expected))
        assert named >= wanted - {"perf/other_cores"}  # there if other programs were at work
        for name in SAME:
            if expected.get(name):
                assert float(row[name]) == pytest.approx(float(expected[name]), rel=1e-4, abs=1e-7), name
    assert any(float(row["actor/trained_rows"] or 0) > 0 for row in found)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("--multirun", "optimizer.lr=1e-5,1e-4"), {}, "without --multirun"),
        ((), {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "need one folder for the run"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    message: str,
    run_train: RunTrain,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = run_train(tmp_path, *arguments, *RUN, "trainer=ddp", *TWO)
    assert done.returncode == 2, done.stdout[-2000:]
    assert message in done.stdout
    assert "Traceback" not in done.stdout

"""`trinity-lightning-report`: runs write one at their end, and a browser shows it as it is meant."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runs import SMALL, RunTrain

from trinity_lightning.buffer.step_files import keep_step
from trinity_lightning.build import checkpoint_of
from trinity_lightning.common.experience import Experience
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.errors import TakenFolderError
from trinity_lightning.report import main, write_report

QUICK = ("+recipe=grpo", *SMALL, "engine=transformers", "steps=2", "buffer.keep=true")
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def test_a_run_ends_with_its_report(run_train: RunTrain, tmp_path: Path) -> None:
    done = run_train(tmp_path, *QUICK)
    assert done.returncode == 0, done.stdout[-4000:]
    [run] = tmp_path.glob("outputs/grpo/*")
    page = (run / "report.html").read_text()
    for part in (f"grpo {run.name}", "Curves", "Where the time went", "Completions", "Experiences kept", "torch"):
        assert part in page
    assert str(tmp_path) not in page.partition("config.yaml</summary>")[0]


def test_a_report_that_cannot_be_written_does_not_fail_the_run(run_train: RunTrain, tmp_path: Path) -> None:
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    done = run_train(tmp_path, *QUICK, f"hydra.run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "report.html was not written" in done.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    record = (tmp_path / "run" / "config.yaml").read_text()
    again = run_train(tmp_path, *QUICK, "steps=3", f"hydra.run.dir={tmp_path / 'run'}")
    assert again.returncode == 2
    assert "holds a run already: give another folder, or go on with it (ckpt_path=last)." in again.stdout
    assert (tmp_path / "run" / "config.yaml").read_text() == record


def test_a_folder_whose_run_left_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(TakenFolderError, match="delete this one"):
        checkpoint_of(TrainConfig(), tmp_path)


def write_run(folder: Path, steps: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    rows = [f"{step},{step},{step / 10},{step}" for step in range(steps)]
    (folder / "metrics.csv").write_text("\n".join(["step,explore_step,reward/mean,time/train", *rows, ""]))
    (folder / "completions").mkdir(exist_ok=True)
    for step in (0, 5):
        record = {"task": 0, "prompt": f"{EVIL} " + "w" * 500, "completion": EVIL * 3 + "\ud800", "reward": 1.0}
        (folder / "completions" / f"eval_held_step_{step}.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "config.yaml").write_text(f"name: {EVIL}\n")
    return folder


def test_the_command_writes_one_for_each_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    main([str(run) for run in runs])
    assert capsys.readouterr().out.split() == [str(run / "report.html") for run in runs]
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "missing")])
    assert stop.value.code == 2
    assert "is no run's folder" in capsys.readouterr().err


def test_a_folder_with_little_in_it_has_a_report_too(tmp_path: Path) -> None:
    assert "No metrics" in write_report(tmp_path).read_text()


def test_what_a_failing_operator_left_is_not_what_the_run_kept(tmp_path: Path) -> None:
    keep_step(tmp_path / "rejected", 3, [Experience(tokens=[1, 2], prompt_length=1)])
    assert "Experiences kept" not in write_report(tmp_path).read_text()


def test_kept_experiences_are_counted_of_some_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for step in range(1, 101):
        experience = Experience(tokens=[1, 2, 3], prompt_length=1, reward=float(step), info={"is_expert": step == 1})
        keep_step(run / "experiences", step, [experience])
    page = write_report(run).read_text()
    assert "24 of 100 steps" in page
    cells = [f'<td class="n">{value}</td>' for value in (100, 1, 0, 2, 100)]
    assert "<tr>" + "".join(cells) in page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, where playwright and it are installed: `pip install playwright && playwright install chromium`."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        downloaded = Path(started.chromium.executable_path)
        program = str(downloaded) if downloaded.exists() else shutil.which("chromium") or shutil.which("google-chrome")
        if program is None:
            pytest.skip("no chromium is installed")
        chromium = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.parametrize("width", [320, 375, 1200])
def test_in_a_browser_it_fits_asks_for_nothing_and_runs_nothing(browser: Any, width: int, tmp_path: Path) -> None:
    page = browser.new_context(viewport={"width": width, "height": 700}, offline=True).new_page()
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.on("request", lambda request: told.append(request.url))
    path = write_report(write_run(tmp_path / "run", steps=30))
    page.goto(path.as_uri())
    assert told == [path.as_uri()]
    assert page.title() == f"{tmp_path.name} run"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg").count() == 2
    assert page.locator("svg polyline").first.bounding_box()["width"] > 200
    assert page.locator("pre").first.inner_text().startswith(EVIL)
    assert page.locator("script, img").count() == 0
    columns = page.evaluate("getComputedStyle(document.querySelector('.pair')).gridTemplateColumns.split(' ').length")
    assert columns == (2 if width > 640 else 1)

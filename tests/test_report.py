"""`trinity-lightning report`: runs write one at their end, and a browser shows it as it is meant."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.browser import browser as browser
from support.runs import SMALL, RunTrain

from trinity_lightning.buffer.step_files import keep_step
from trinity_lightning.build import checkpoint_of
from trinity_lightning.common.experience import Experience
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.errors import TakenFolderError
from trinity_lightning.report import main, write_comparison, write_report

QUICK = ("+recipe=grpo", *SMALL, "engine=transformers", "steps=2", "buffer.keep=true")
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def test_a_run_ends_with_its_report(run_train: RunTrain, tmp_path: Path) -> None:
    done = run_train(tmp_path, *QUICK)
    assert done.returncode == 0, done.stdout[-4000:]
    [run] = tmp_path.glob("outputs/grpo/*")
    page = (run / "report.html").read_text()
    for part in (
        f"grpo {run.name}",
        "Curves",
        "Where the time went",
        "Completions",
        "Tokens",
        "Experiences kept",
        "torch",
    ):
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


def test_the_command_writes_one_for_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a")
    main([str(run)])
    assert capsys.readouterr().out.split() == [str(run / "report.html")]
    with pytest.raises(SystemExit) as stop:
        main([str(run), str(tmp_path / "missing")])
    assert stop.value.code == 2
    assert re.match("trinity-lightning report: '.*' is no run's folder", capsys.readouterr().err)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.startswith("usage: trinity-lightning report ")


@pytest.mark.parametrize("typed", ["x=", "=", "=a"])
def test_half_a_name_is_refused_as_it_was_typed(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_run(tmp_path / "a"))
    with pytest.raises(SystemExit) as stop:
        main([typed])
    assert stop.value.code == 2
    assert f"'{typed}' is no run's folder" in capsys.readouterr().err


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


# -- in a browser ------------------------------------------------------------------------------------------------------


def write_tokens(run: Path) -> None:
    (run / "completions" / "tokens").mkdir()
    line = {"tokens": ["a", EVIL, "c"], "trained": [1, 1, 1], "advantages": [0.5, -1.0, 1.0], "prompt": EVIL, "task": 1}
    line |= {"engine": [-1.0, -2.0, -2.0], "trainer": [-1.3, -2.0, -1.0], "length": 3, "reward": 1.0}
    (run / "completions" / "tokens" / "step_1.jsonl").write_text(json.dumps(line) + "\n")


def opened(browser: Any, path: Path, width: int, scheme: str = "light") -> tuple[Any, list[str]]:
    """The page in a window of that width, and what it has asked for or written to the console."""
    page = browser.new_context(viewport={"width": width, "height": 700}, offline=True, color_scheme=scheme).new_page()
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.on("request", lambda request: told.append(request.url))
    page.goto(path.as_uri())
    return page, told


@pytest.mark.parametrize("width", [320, 375, 1200])
def test_in_a_browser_it_fits_asks_for_nothing_and_runs_nothing(browser: Any, width: int, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=30)
    write_tokens(run)
    path = write_report(run)
    page, told = opened(browser, path, width)
    assert told == [path.as_uri()]
    assert page.title() == f"{tmp_path.name} run"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg").count() == 2
    assert page.locator("svg polyline").first.bounding_box()["width"] > 200
    assert page.locator("pre").first.inner_text().startswith(EVIL)
    assert page.locator("script, img").count() == 0
    columns = page.evaluate("getComputedStyle(document.querySelector('.pair')).gridTemplateColumns.split(' ').length")
    assert columns == (2 if width > 640 else 1)


def contrast(first: str, second: str) -> float:
    """The contrast of two colours `rgb(r, g, b)`, as WCAG 2 has it."""
    lights = []
    for colour in (first, second):
        values = [float(value) / 255 for value in re.findall(r"[\d.]+", colour)[:3]]
        red, green, blue = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_are_coloured_by_what_is_chosen_and_can_be_read(browser: Any, scheme: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_tokens(run)
    page, _ = opened(browser, write_report(run), 800, scheme)
    style = "(name) => [...document.querySelectorAll('.tokens span')].map(span => getComputedStyle(span)[name])"
    by_advantage = page.evaluate(style, "backgroundColor")
    assert len({*by_advantage}) == 3
    assert page.evaluate(style, "textDecorationLine") == ["none", "underline", "none"]
    page.get_by_label("log-probability difference").check()
    assert page.evaluate(style, "textDecorationLine") == ["none", "none", "underline"]
    assert page.evaluate(style, "backgroundColor") not in (by_advantage, ["rgba(0, 0, 0, 0)"] * 3)
    page.get_by_label("nothing").check()
    assert page.evaluate(style, "backgroundColor") == ["rgba(0, 0, 0, 0)"] * 3
    colours = "(of) => getComputedStyle(document.querySelector(of[0]))[of[1]]"
    text, page_colour, box = (
        page.evaluate(colours, of)
        for of in (("body", "color"), ("body", "backgroundColor"), (".fact", "backgroundColor"))
    )
    quiet = page.evaluate(colours, (".quiet", "color"))
    assert min(contrast(text, page_colour), contrast(text, box)) > 7
    assert min(contrast(quiet, page_colour), contrast(quiet, box)) > 4.5
    assert (contrast("rgb(0, 0, 0)", page_colour) > 7) == (scheme == "light")
    page.emulate_media(media="print")
    assert page.evaluate(colours, ("body", "backgroundColor")) == "rgb(255, 255, 255)"  # no dark paper


@pytest.mark.parametrize("width", [320, 1200])
def test_runs_side_by_side_can_be_hidden_by_keyboard_without_a_script(browser: Any, width: int, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps=steps) for name, steps in (("a", 3), ("b", 30))]
    (runs[0] / "config.yaml").write_text(f"optimizer: {{lr: 0.1}}\nname: '{EVIL}'\n")
    (runs[1] / "config.yaml").write_text("optimizer: {lr: 0.2}\n")
    path = write_comparison(*runs, output=tmp_path / "page.html")
    page, told = opened(browser, path, width)
    assert told == [path.as_uri()]
    assert page.locator("script, img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    lines = page.locator("svg g.run-1")
    assert lines.count() == 2  # a curve, and the parallel coordinates
    assert lines.first.is_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "show-1":
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    page.keyboard.press("Space")
    assert (outline, page.evaluate("document.activeElement.id")) == ("solid", "show-1")
    assert not any(line.is_visible() for line in lines.all())
    assert page.locator("svg g.run-2").first.is_visible()

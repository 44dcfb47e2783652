"""The picture of a run: every line fits a terminal of any size, and nothing that a model writes steers it."""

import io
import json
import random
import re
import time
import unicodedata
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from trinity_lightning.monitor.csv_logger import MetricsCSVLogger
from trinity_lightning.monitor.live import RunFolder, State, View
from trinity_lightning.monitor.progress import Progress
from trinity_lightning.monitor.terminal import frame, frame_of_runs, harmless, number, sparkline

EVIL = "\x1b[2J\x1b]0;owned\x07[red]m[/]\u202e\r\x9b31m\ud800\u2028 漢字 é 👩\u200d🔬 \t\n"


def drawn(picture: RenderableType, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(picture)
    return console.export_text().splitlines()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of twelve steps, whose texts are all evil."""
    folder = tmp_path / "grpo" / "2026-01-01_00-00-00"
    logger, draw = MetricsCSVLogger(folder), random.Random(1)
    for step in range(1, 13):
        metrics = {"reward/mean": step / 12, "response_length/mean": 20.0, "response_length/clip_ratio": 0.5}
        metrics |= {"frac_reward_zero_std": draw.random(), "actor/logprob_diff/mean": 1e-7, "actor/entropy": 1e6}
        metrics |= {"actor/grad_norm": draw.random(), "time/rollout": 3.0, "time/train": 1.0, "time/step": 4.5}
        logger.log_metrics({"explore_step": step, "eval/held/mean@4": 0.1, **metrics}, step=step)
    (folder / "completions").mkdir()
    line = {"prompt": EVIL * 9, "completion": EVIL * 40, "advantage": None, "truncated": True, "reason": EVIL}
    rewards = (0.25, 1.0, None, -1.0)
    (folder / "completions" / "step_12.jsonl").write_text("\n".join(json.dumps(line | {"reward": r}) for r in rewards))
    (folder / "config.yaml").write_text(json.dumps({"steps": 24, "model": {"name": EVIL}, "engine": {"name": "vllm"}}))
    text = EVIL.replace("\n", " ").encode(errors="replace").decode()
    (folder / "train.log").write_text(f"[2026-01-01 00:00:01,5] WARNING x: {text} \n")
    return folder


@pytest.mark.parametrize("width", [20, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [None, 5, 24, 60])
def test_every_line_fits_and_is_harmless(run: Path, width: int, height: int | None) -> None:
    view = RunFolder(run).look()
    view.state = State("died", EVIL)
    lines = drawn(frame(view, width, height), width)
    assert all(cell_len(line) <= width for line in lines)
    assert height is None or len(lines) <= height
    written = "".join(lines)
    assert not [c for c in written if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl")]
    if width >= 60 and height != 5:
        assert "[red]m[/]" in written  # no markup


def test_the_picture_has_everything(run: Path) -> None:
    view = RunFolder(run).look()
    view.state = State("running")
    now = time.time()
    view.progress = Progress("training", now - 65, 12, "13", 3, 8, now - 2), now
    picture = "\n".join(drawn(frame(view, 100), 100))
    for part in ("grpo/2026-01-01_00-00-00", "step 12 of 24", "54s left", "4.5 s a step"):
        assert part in picture
    assert "now: training of step 12 for 1m 5s  tasks of step 13: 3 of 8 ended, 5 in flight, the last 2s ago" in picture
    for label in ("reward", "held-out", "length", "cut off", "equal rewards", "logprob diff", "entropy", "grad norm"):
        assert f"\n{label} " in picture
    assert "█ rollout 3s 67%  ▓ train 1s 22%  ░ other 0.5s 11%" in picture
    assert picture.index("reward 1  ") < picture.index("reward -  ") < picture.index("reward 0.25  ")
    reward = next(line for line in picture.splitlines() if line.startswith("reward "))
    assert reward.split()[1:] == ["▁▂▂▃▄▄▅▅▆▇▇█", "0.08333", "1", "0.08333", "1"]


@pytest.mark.parametrize(("part", "batch"), [("rollout", "13"), ("evaluation", "12/held")])
def test_no_number_in_flight_where_groups_of_later_steps_are_too(part: str, batch: str, tmp_path: Path) -> None:
    now = time.time()
    view = View(tmp_path, settings={"explorer": {"max_staleness": 1}}, state=State("running"))
    view.progress = Progress(part, now - 65, 13, batch, 3, 8, now - 2), now
    picture = "\n".join(drawn(frame(view, 100), 100))
    assert "3 of 8 ended" in picture
    assert ("5 in flight" in picture) == (part == "evaluation")


def test_every_part_of_a_step_has_a_sign_of_its_own(tmp_path: Path) -> None:
    parts = ("rollout", "operators", "add_strategy", "train", "sync_weight")
    seconds = {f"time/{part}": 1.0 for part in parts} | {"time/step": 7.0, "eval/held/seconds": 1.0}
    MetricsCSVLogger(tmp_path).log_metrics({"explore_step": 1, **seconds}, step=0)
    lines = drawn(frame(RunFolder(tmp_path).look(), 140), 140)
    signs = re.findall(r"(\S) [a-z ]+ [12]s", next(line for line in lines if "rollout 1s" in line))
    assert len(set(signs)) == len(signs) == 7


def test_a_run_that_has_written_nothing_yet(tmp_path: Path) -> None:
    lines = drawn(frame(View(tmp_path, state=State("starting")), 60, 24), 60)
    assert lines[0].startswith("◌ starting")
    assert "no step has ended yet" in "".join(lines)


def test_a_line_for_each_run(run: Path) -> None:
    views = [RunFolder(run).look(completions=False), View(run.parent / "other\x1b", state=State("ended"))]
    views[0].overrides = {"seed": "1"}
    for width in (30, 60, 120):
        lines = drawn(frame_of_runs(views, width), width)
        assert len(lines) == 3
        assert all(cell_len(line) <= width for line in lines)
        assert "\x1b" not in "".join(lines)
    assert "12/24" in lines[1]
    assert "seed=1" in lines[1]
    assert drawn(frame_of_runs(views * 9, 60, 6), 60)[-1].strip() == "… and 14 more runs"


def test_curves() -> None:
    assert sparkline([], 9) == ""
    assert sparkline([2.0, 2.0], 9) == "▄▄"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 0, 0, 9, 9, 9, 9], 2) == "▁█"
    assert len(sparkline([float(n % 7) for n in range(10_001)], 33)) == 33


def test_numbers_are_short() -> None:
    for value in (0.0, 1.0, -0.123456, 12345.678, 1e-9, -1.5e300, 123456.0):
        assert len(number(value)) <= 9
        assert float(number(value)) == pytest.approx(value, rel=0.05)


def test_signs_take_the_place_of_what_steers_a_terminal() -> None:
    assert harmless("a\x1b[0m\n\tb\u202e") == "a␛[0m⏎→b·"

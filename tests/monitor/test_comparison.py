"""A folder of runs as a table: what differs between them, what they reached, and how those ended that did not."""

import re
from pathlib import Path

import pytest

from trinity_lightning.errors import ConfigError
from trinity_lightning.monitor.report.comparison import compare, jobs_of
from trinity_lightning.report import main, write_comparison

EVIL = "<script>document.title='owned'</script>"


def job(folder: Path, *overrides: str, scores: tuple[float, ...] = (), log: str = "", **config: str) -> Path:
    """A run of three steps with these overrides, and these scores before the first step and after each."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(
        "".join(f"- {override}\n" for override in ("+recipe=grpo", *overrides))
    )
    (folder / "config.yaml").write_text("".join(f"{key}: {value}\n" for key, value in ({"steps": 3} | config).items()))
    rows = [f"{step},{step},{score},{score / 2},1" for step, score in enumerate(scores)]
    columns = "step,explore_step,eval/sums/mean@2,reward/mean,eval/sums/failed_tasks"
    if scores:
        (folder / "metrics.csv").write_text("\n".join([columns, *rows, ""]))
    (folder / "train.log").write_text(log)
    return folder


def test_runs_are_compared_by_their_held_out_score_the_best_first(tmp_path: Path) -> None:
    job(tmp_path / "0", "optimizer.lr=1e-5", "seed=1", scores=(0.1, 0.2, 0.3, 0.25))
    job(tmp_path / "1", "optimizer.lr=1e-4", "seed=1", scores=(0.1, 0.4, 0.4, 0.5))
    job(tmp_path / "10", "optimizer.lr=1e-3", "seed=1", scores=(0.1, 0.3, 0.2, 0.1))
    comparison = compare(jobs_of(tmp_path))
    assert comparison.metric == "eval/sums/mean@2"
    assert comparison.head == ["run", "optimizer.lr", "steps", "final", "best"]
    assert comparison.rows == [
        ["1", "1e-4", "3", "0.5", "0.5 (step 3)"],
        ["0", "1e-5", "3", "0.25", "0.3 (step 2)"],
        ["10", "1e-3", "3", "0.1", "0.3 (step 1)"],
    ]


def test_a_run_that_failed_or_goes_on_is_there_and_says_so(tmp_path: Path) -> None:
    job(tmp_path / "0", "seed=1", scores=(0.1, 0.2, 0.3, 0.4))
    log = (
        "[2026-01-31 12:00:00,000] INFO x: fine\n[2026-01-31 12:00:01,000] ERROR trinity_lightning: it diverged.\nTrace"
    )
    job(tmp_path / "1", "seed=2", scores=(0.1, 0.6), log=log)
    job(tmp_path / "2", "seed=3", scores=(0.1,))
    job(tmp_path / "3", "seed=4", log=log)
    comparison = compare(jobs_of(tmp_path))
    assert comparison.head[-1] == "ended by"
    assert {row[0]: (row[2], row[-1]) for row in comparison.rows} == {
        "0": ("3", ""),
        "1": ("1 of 3", "it diverged."),
        "2": ("0 of 3", "not finished"),
        "3": ("0 of 3", "it diverged."),
    }
    assert [row[0] for row in comparison.rows] == ["0", "1", "2", "3"]


def test_an_error_before_a_resume_that_finished_is_forgotten(tmp_path: Path) -> None:
    job(tmp_path / "0", scores=(0.1, 0.2, 0.3, 0.4), log="[2026] ERROR trinity_lightning: stopped.\n")
    assert compare(jobs_of(tmp_path)).head[-1] == "best"


@pytest.mark.parametrize(
    ("config", "metric"),
    [
        ({"sweep": "{metric: reward/mean}"}, "reward/mean"),
        ({"sweep": "{metric: nothing}"}, "eval/sums/mean@2"),
        ({"sweep": "[1]", "eval_tasksets": "{other: {}, sums: {}}"}, "eval/sums/mean@2"),
    ],
)
def test_the_metric_is_the_sweeps_own_or_the_usual_one(config: dict[str, str], metric: str, tmp_path: Path) -> None:
    job(tmp_path / "0", scores=(0.1, 0.2), **config)
    assert compare(jobs_of(tmp_path)).metric == metric


def test_of_a_loss_the_smallest_is_the_best(tmp_path: Path) -> None:
    for name, losses in (("0", (3.0, 1.0, 2.0)), ("1", (3.0, 2.5, 1.5))):
        folder = job(tmp_path / name, f"seed={name}")
        rows = "".join(f"{step},{step},{loss}\n" for step, loss in enumerate(losses, start=1))
        (folder / "metrics.csv").write_text(f"step,explore_step,eval/loss\n{rows}")
    assert [row[3:] for row in compare(jobs_of(tmp_path)).rows] == [["1.5", "1.5 (step 3)"], ["2", "1 (step 2)"]]


def test_the_command_prints_the_table_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("0", "1"):
        job(
            tmp_path / name,
            f"+x={EVIL}{name}",
            "auxiliary_models.judge.api_key=abc" + name,
            scores=(0.1, 0.2, 0.3, 0.4),
        )
    (tmp_path / "1" / "report.html").touch()
    (tmp_path / "multirun.yaml").touch()
    main([str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(tmp_path / "report.html")
    for part in ("final and best eval/sums/mean@2", "0.4 (step 3)", "script"):
        assert part in printed
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "abc" not in page + printed
    assert re.findall(r'href="([^"]*)"', page) == ["1/report.html"]
    assert "default-src 'none'" in page


def test_damaged_files_of_a_run_do_not_stop_the_table(tmp_path: Path) -> None:
    folder = job(tmp_path / "0", scores=(0.5,))
    (folder / "config.yaml").write_text("a: [")
    (folder / ".hydra" / "overrides.yaml").write_text("3")
    assert compare(jobs_of(tmp_path)).rows == [["0", "0", "0.5", "0.5 (step 0)"]]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=re.escape(str(folder))):
            write_comparison(folder)

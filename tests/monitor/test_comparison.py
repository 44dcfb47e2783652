"""Several runs as a table and a page: what differs, what they reached, and how those ended that did not."""

import fcntl
import re
import struct
from pathlib import Path

import pytest

from trinity_lightning.config.explain import LOCK
from trinity_lightning.errors import ConfigError
from trinity_lightning.monitor.report.axes import axis_of, chosen_axes
from trinity_lightning.monitor.report.comparison import compare, jobs_of
from trinity_lightning.monitor.report.differences import differing, flattened
from trinity_lightning.monitor.report.groups import groups_of
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
    job(tmp_path / "0", "optimizer.lr=1e-5", "seed=1", "output_dir=x", scores=(0.1, 0.2, 0.3, 0.25))
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


def test_a_value_is_the_configurations_where_a_command_has_none(tmp_path: Path) -> None:
    job(tmp_path / "0", "optimizer.lr=2e-5", "n=3", "x=a", scores=(0.1,), optimizer="{lr: 2.0e-05}", n="3")
    job(tmp_path / "1", scores=(0.2,), optimizer="{lr: 3.0e-05}", n="3")
    comparison = compare(jobs_of(tmp_path))
    assert comparison.head[1:3] == ["optimizer.lr", "x"]  # n is the same
    assert [row[1:3] for row in comparison.rows] == [["3e-5", ""], ["2e-5", "a"]]


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
    assert [link for link in re.findall(r'href="([^"]*)"', page) if link[0] != "#"] == ["1/report.html"]
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


def test_several_folders_are_one_page_in_the_folder_that_holds_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = job(tmp_path / "one" / "a", "seed=1", scores=(0.1, 0.2))
    job(tmp_path / "sweep" / "0", "seed=2", scores=(0.1, 0.3))
    b = job(tmp_path / "one" / "b", "seed=3", scores=(0.1, 0.4))
    (a / "report.html").touch()
    main([str(a), str(tmp_path / "sweep"), f"best & last={b}", str(a)])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert 'href="one/a/report.html"' in page
    for name in ("one/a</a>", "sweep/0", "best &amp; last"):
        assert name in page
    main([str(a), str(b), "-o", str(tmp_path / "sweep" / "x.html")])
    assert 'href="../one/a/report.html"' in (tmp_path / "sweep" / "x.html").read_text()
    assert "<h1>" in (tmp_path / "sweep" / "x.html").read_text()


def test_its_path_is_relative_if_those_of_the_runs_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("0", "1"):
        job(tmp_path / "sweep" / name, scores=(0.1,))
    monkeypatch.chdir(tmp_path)
    for folders in (["sweep"], ["x=sweep/0", "sweep/1"]):
        main(folders)
        assert capsys.readouterr().out.splitlines()[-1] == "sweep/report.html"
    main(["sweep/0", str(tmp_path / "sweep" / "1")])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "sweep" / "report.html")
    monkeypatch.chdir(tmp_path / "sweep")
    main(["."])
    assert capsys.readouterr().out.splitlines()[-1] == "report.html"
    assert f"<title>{tmp_path.name} sweep" in Path("report.html").read_text()


def test_two_runs_do_not_have_one_name(tmp_path: Path) -> None:
    a, b = (job(tmp_path / name, scores=(0.1,)) for name in ("a", "b"))
    with pytest.raises(ConfigError, match="named 'x'"):
        write_comparison(f"x={a}", f"x={b}")


def test_links_to_runs_elsewhere_stay_in_the_folder_that_has_the_links(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("a", "b"):
        (tmp_path / "mine" / name).symlink_to(job(tmp_path / "elsewhere" / name / "run", scores=(0.1,)))
    assert write_comparison(tmp_path / "mine") == tmp_path / "mine" / "report.html"


def test_a_folder_with_an_equals_sign_is_a_folder(tmp_path: Path) -> None:
    folders = [job(tmp_path / name, scores=(0.1,)) for name in ("lr=1", "lr=2")]
    assert "lr=1" in write_comparison(*folders).read_text()


def test_a_run_within_another_does_not_cost_it_its_report(tmp_path: Path) -> None:
    outer = job(tmp_path / "run", scores=(0.1,))
    inner = [job(outer / name, scores=(0.1,)) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="--output"):
        write_comparison(*inner)
    assert write_comparison(*inner, output=tmp_path / "page.html").is_file()


def test_one_run_can_go_to_another_file(tmp_path: Path) -> None:
    main([str(job(tmp_path / "run", scores=(0.1, 0.2))), "--output", str(tmp_path / "page.html")])
    assert "Curves" in (tmp_path / "page.html").read_text()
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_run_that_goes_on_says_so(tmp_path: Path) -> None:
    folder = job(tmp_path / "0", scores=(0.1, 0.2))
    with (folder / LOCK).open("w") as lock:
        # As another process has it: a lock of the file's description, not of the process.
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0))
        assert compare(jobs_of(tmp_path)).rows[0][-1] == "goes on"
    assert compare(jobs_of(tmp_path)).rows[0][-1] == "not finished"


def test_a_score_that_ends_in_nan_says_so(tmp_path: Path) -> None:
    job(tmp_path / "0", scores=(0.1, 0.2, float("nan"), float("nan")))
    assert compare(jobs_of(tmp_path)).rows == [["0", "3", "0.2, then not finite", "0.2 (step 1)"]]


# -- groups ------------------------------------------------------------------------------------------------------------


def test_runs_that_differ_in_seeds_alone_are_one_line(tmp_path: Path) -> None:
    for number, (rate, seed, final) in enumerate([(1, 1, 0.4), (1, 2, 0.6), (2, 1, 0.9), (2, 2, 0.7)]):
        scores = (0.1, 0.2, 0.3, final)
        job(tmp_path / str(number), f"optimizer.lr={rate}", f"seed={seed}", scores=scores, lr=str(rate), seed=str(seed))
    job(tmp_path / "4", "optimizer.lr=1", "seed=3", scores=(0.1, 0.0), lr="1", seed="3")  # has not reached its score
    first, second = groups_of(compare(jobs_of(tmp_path)))
    assert (first.name, first.result, first.number) == ("lr=2 (2 runs)", "0.8 ± 0.14", 1)
    assert (second.name, second.result) == ("lr=1 (3 runs)", "0.5 ± 0.14")
    line = second.line("eval/sums/mean@2")
    assert line is not None
    assert line.points[-1] == (3.0, 0.5)
    assert line.band[-1] == (3.0, 0.4, 0.6)
    assert line.band[1] == (1.0, 0.0, 0.2)
    assert first.line("actor/kl") is None


def test_if_only_seeds_differ_or_runs_have_names_each_is_a_line(tmp_path: Path) -> None:
    runs = [job(tmp_path / str(seed), f"seed={seed}", scores=(0.1, 0.2), seed=str(seed)) for seed in range(3)]
    assert [group.name for group in groups_of(compare(jobs_of(tmp_path)))] == ["0", "1", "2"]
    other = job(tmp_path / "other", "optimizer.lr=3", scores=(0.1,), lr="3")
    page = write_comparison(f"base={runs[0]}", runs[1], runs[2], other).read_text()
    assert re.findall(r"</span>([\w= ()]+) <span", page) == ["base", "1 (2 runs)", "other"]


def test_without_any_metrics_there_is_a_page(tmp_path: Path) -> None:
    for name in ("0", "1"):
        job(tmp_path / name, f"seed={name}")
    page = write_comparison(tmp_path).read_text()
    assert "without metrics yet" in page
    assert "<svg" not in page


def test_a_large_sweep_has_a_page_of_a_reasonable_size(tmp_path: Path) -> None:
    for number in range(100):
        scores = tuple(number / 100 + step / 1e4 for step in range(300))
        job(tmp_path / str(number), f"optimizer.lr={number + 1}e-6", scores=scores, lr=f"{number + 1}e-6", steps="299")
    page = write_comparison(tmp_path).read_text()
    assert len(page) < 400_000
    assert page.count("<polyline") == 300  # two curves and the parallel coordinates
    assert page.count('class="mark"') == 20  # the best ten have numbers
    assert "100 different values" in page


# -- settings ----------------------------------------------------------------------------------------------------------


def test_only_keys_that_differ_are_compared_without_secrets_and_places() -> None:
    settings = [
        flattened(
            {"a": {"b": rate / 1e5, "c": [1, "x"], "d": {}}, "output_dir": str(rate), "api_key": str(rate), "e": None}
        )
        for rate in (1, 2)
    ]
    assert settings[0] == {"a.b": "1e-5", "a.c": '[1, "x"]', "a.d": "{}", "api_key": "***", "e": "null"}
    assert differing(settings) == ["a.b"]
    assert differing([{"a": "1"}, {}]) == ["a"]


def test_an_axis_has_even_places_for_few_values_and_a_scale_for_many_numbers() -> None:
    assert axis_of("lr", ["1e-4", "1e-6", "1e-5"]).places == {"1e-6": 0.0, "1e-5": 0.5, "1e-4": 1.0}
    assert axis_of("name", ["b", "a", "b"]).places == {"b": 0.0, "a": 1.0}
    scale = axis_of("lr", [f"1e-{power}" for power in range(9)])
    assert scale.is_logarithmic
    assert scale.places["1e-4"] == pytest.approx(0.5)
    assert [*scale.ticks.values()] == ["1.0e-8", "1.0e-4", "1"]
    linear = axis_of("n", [str(number) for number in range(10, 20)])
    assert not linear.is_logarithmic
    assert linear.places["19"] == 1.0


def test_a_setting_that_differs_exactly_as_another_has_no_axis() -> None:
    axes = chosen_axes(
        {"seed": ["1", "2", "1"], "taskset.seed": ["1", "2", "1"], "same": ["x"] * 3, "n": ["1", "1", "2"]}
    )
    assert [axis.name for axis in axes] == ["seed", "n"]

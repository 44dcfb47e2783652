"""Names of metrics, one line for each step and evaluation, and small tables."""

import pytest
from rich.console import Console

from trinity_lightning.monitor import presentation
from trinity_lightning.monitor.presentation import (
    METRICS,
    find_metric,
    format_evaluation,
    format_seconds,
    format_step_line,
    headline_metrics,
    metric_globs,
    step_seconds,
    summary_table,
)


def test_no_name_stands_twice() -> None:
    patterns = [metric.pattern for metric in METRICS]
    assert sorted(set(patterns)) == sorted(patterns)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("response_length/clip_ratio", "response_length/clip_ratio"),
        ("prompt_length/max", "prompt_length/{mean,max,min}"),
        ("reward/math/mean", "reward/<function>/mean"),
        ("reward/mean", "reward/mean"),
        ("eval/heldout/pass@4", "eval/<taskset>/pass@<m>"),
        ("eval/heldout/mean@4", "eval/<taskset>/mean@<k>"),
        ("eval/heldout/reward/accuracy/worst@2", "eval/<taskset>/<metric>/{mean,std,best,worst}@<m>"),
        ("time/operator/0_RewardFilter", "time/operator/<index>_<class>"),
        ("group_advantages/group_size/min", "group_advantages/<statistic>/{mean,max,min}"),
        ("experience_pipeline/untrained/filtered_by_my.Operator", "experience_pipeline/untrained/<reason>"),
        ("experience_pipeline/judge_2/score/mean", "experience_pipeline/<operator>/score/mean"),
        ("experience_pipeline/my.Operator/kept", "experience_pipeline/<operator>/<metric>"),
        ("actor/is_weight/clipfrac", "actor/is_weight/clipfrac"),
        ("actor/my_own", "actor/<metric>"),
    ],
)
def test_a_name_is_found_by_its_pattern(name: str, pattern: str) -> None:
    metric = find_metric(name)
    assert metric is not None
    assert metric.pattern == pattern


@pytest.mark.parametrize("name", ["reward", "prompt_length/median", "explore_step/mean", "loss", "xactor/lr"])
def test_other_names_are_not_documented(name: str) -> None:
    assert find_metric(name) is None


def test_globs_cover_every_metric_but_the_axis() -> None:
    globs = metric_globs()
    assert {"rollout/*", "actor/*", "frac_reward_zero_std"} < set(globs)
    assert "explore_step" not in globs
    assert not [glob for glob in globs if "<" in glob or "{" in glob]


def test_what_is_evaluated_beside_the_reward_is_no_headline() -> None:
    names = ["reward/mean", "eval/org/set/mean@2", "eval/org/set/pass@2", "eval/org/set/accuracy/mean@2"]
    assert headline_metrics(names) == names[:3]


def test_without_pass_at_k_the_reward_is_the_headline_all_the_same() -> None:
    names = ["eval/org/set/mean@2", "eval/org/set/right/mean@2", "eval/org/set/failed_tasks", "eval/org/set/seconds"]
    assert headline_metrics(names) == [names[0], *names[2:]]


def test_an_evaluation_has_a_line_for_each_taskset() -> None:
    sums = {"mean@4": 0.45, "best@4": 0.9, "pass@2": 0.6, "pass@4": 0.8, "x/mean@4": 7.0, "failed_tasks": 2.0}
    metrics = {f"eval/org/sums/{name}": value for name, value in sums.items()} | {"eval/org/sums/seconds": 5.2}
    metrics |= {
        "eval/org/mean@1": -3.0,
        "eval/org/failed_tasks": 0.0,
        "eval/org/seconds": 61.0,
        "time/sync_weight": 1.0,
    }
    assert format_evaluation(metrics, 12, 24, {"org/sums": "math at 1"}) == [
        "evaluated at step 12/24  org/sums mean@4 0.45  pass@4 0.8 (math at 1)  2 tasks failed  5s",
        "evaluated at step 12/24  org mean@1 -3  1m 1s",
    ]
    assert format_evaluation({"eval/loss": 1.0}, 1, 2, {}) == []


def test_the_line_has_what_people_look_at() -> None:
    metrics = {
        "reward/mean": 0.421,
        "reward/std": 0.49,
        "frac_reward_zero_std": 0.25,
        "response_length/mean": 11.4,
        "actor/logprob_diff/mean": 0.0212,
        "actor/grad_norm": 1.304,
        "time/rollout": 2.8,
        "time/train": 8.0,
        "time/sync_weight": 0.3,
        "time/collate": 1.0,  # within training: not counted twice
        "custom": 1.0,
    }
    assert format_step_line(metrics, 3, 30, pace=step_seconds(metrics)) == (
        "step 3/30  reward 0.42 ± 0.49  equal rewards 25%  length 11.4  logprob diff 0.021  grad norm 1.30  "
        "rollout 2.8s  train 8.0s  sync 0.3s  left 5m 0s"
    )


AHEAD = {"time/rollout": 7.0, "time/operators": 1.0, "time/wait_for_rollout": 0.5, "time/train": 8.0}


@pytest.mark.parametrize(("metrics", "left"), [(AHEAD, "1m 25s"), (AHEAD | {"time/step": 9.0}, "1m 30s")])
def test_rollouts_that_overlap_training_take_no_time_of_their_own(metrics: dict[str, float], left: str) -> None:
    line = format_step_line(metrics, 20, 30, pace=step_seconds(metrics))
    assert line == f"step 20/30  rollout 7.0s  waited 0.5s  train 8.0s  left {left}"


def test_what_was_not_measured_is_left_out() -> None:
    assert format_step_line({}, 1, 2, pace=0) == "step 1/2"
    assert format_step_line({"reward/mean": 1.0}, 2, 2, pace=0) == "step 2/2  reward 1.00"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.4, "59s"), (59.6, "1m 0s"), (3599, "59m 59s"), (12000, "3h 20m"), (187200, "2d 4h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_the_table_is_plain_text_outside_a_terminal() -> None:
    long = "/a/folder/" * 12
    lines = summary_table([("prompts", "8"), ("output [bold]", long)]).splitlines()
    assert [line.split() for line in lines] == [["prompts", "8"], ["output", "[bold]", long]]


def test_the_table_has_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        presentation, "Console", lambda **_: Console(force_terminal=True, color_system="standard", width=80)
    )
    assert "\x1b[1m" in summary_table([("prompts", "8")])

import pytest

from trinity_lightning.monitor.metric_names import METRICS, find_metric, headline_metrics, metric_globs


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
        ("actor/is_weight/clipfrac", "actor/<metric>"),
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

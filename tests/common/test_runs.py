"""Mean, maximum and minimum of metrics."""

from trinity_lightning.common.runs import spread, spread_of_each


def test_spread_of_one_metric_and_of_several() -> None:
    assert spread("x", []) == {}
    assert spread_of_each([{"a": 1.0, "b": 2.0}, {"a": 3.0}], "rollout") == {
        "rollout/a/mean": 2.0, "rollout/a/max": 3.0, "rollout/a/min": 1.0,
        "rollout/b/mean": 2.0, "rollout/b/max": 2.0, "rollout/b/min": 2.0,
    }  # fmt: skip

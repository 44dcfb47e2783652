"""Operators out of a config: every key optional, wrong ones refused."""

import pytest

from trinity_lightning.config.buffer import OnError, OperatorConfig, operator_configs
from trinity_lightning.errors import ConfigError


def test_every_key_is_optional_and_order_is_kept():
    operators = {
        "reward_filter": {"args": {"x": 7}},
        "mine": {"name": "my_module.Mine", "on_error": "skip"},
        "judge": None,
        "filters.Own": {"name": None, "args": None},
        "bare": "my_module.Mine",
        "chosen": {"name": "judge", "on_error": OnError.skip},
    }
    configs = operator_configs(operators)
    assert configs == {
        "reward_filter": OperatorConfig("reward_filter", {"x": 7}),
        "mine": OperatorConfig("my_module.Mine", {}, OnError.skip),
        "judge": OperatorConfig("judge"),
        "filters.Own": OperatorConfig("filters.Own"),
        "bare": OperatorConfig("my_module.Mine"),
        "chosen": OperatorConfig("judge", {}, OnError.skip),
    }
    assert list(configs) == list(operators)
    assert operator_configs(configs) == configs


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"arg": {}},
            r"unknown key 'operators.x.arg'.*Did you mean 'operators.x.args'.*Arguments go into",
        ),
        ({"name": "judge", "on_error": "skipp"}, r"unknown operators.x.on_error 'skipp'.*Did you mean 'skip'"),
        ({"args": [1]}, r"operators.x.args is \[1\]"),
        ({"name": 5}, "operators.x.name is 5: give a registered name, or a dotted path"),
        (3, "operators.x is 3: give {name, args, on_error}"),
        ({"name": "judg"}, "unknown operator 'judg'.*Did you mean 'judge'"),
    ],
)
def test_wrong_entries_are_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        operator_configs({"x": entry})

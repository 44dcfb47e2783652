"""Operators out of a config: every key optional, wrong ones refused."""

import pytest
from omegaconf import OmegaConf

from trinity_lightning.config.parts import OnError, OperatorConfig, operator_configs
from trinity_lightning.errors import ConfigError


def test_every_key_is_optional_and_order_is_kept():
    text = """
    length: 7
    operators:
      b: {args: {x: "${length}"}}
      mine: {name: my_module.Mine, on_error: skip}
      a:
      c: {name: null, args: null}
      bare: my_module.Mine
    """
    expected = [
        OperatorConfig("b", {"x": 7}),
        OperatorConfig("my_module.Mine", {}, OnError.skip),
        OperatorConfig("a"),
        OperatorConfig("c"),
        OperatorConfig("my_module.Mine"),
    ]
    config = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    assert isinstance(config, dict)
    assert operator_configs(config["operators"]) == expected


@pytest.mark.parametrize("nothing", [None, {}])
def test_nothing(nothing):
    assert operator_configs(nothing) == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"arg": {}},
            r"unknown key 'operators.x.arg'.*Did you mean 'operators.x.args'.*Arguments go into",
        ),
        ({"on_error": "skipp"}, r"unknown operators.x.on_error 'skipp'.*Did you mean 'skip'"),
        ({"args": [1]}, r"operators.x.args is \[1\]"),
        (3, "operators.x is 3; give {name, args, on_error}"),
    ],
)
def test_wrong_entries_are_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        operator_configs({"x": entry})

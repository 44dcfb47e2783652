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
    config = OmegaConf.create(text)
    assert operator_configs(config.operators) == expected
    plain = OmegaConf.to_container(config.operators, resolve=True)
    assert isinstance(plain, dict)
    assert operator_configs({str(key): value for key, value in plain.items()}) == expected


@pytest.mark.parametrize("nothing", [None, {}, OmegaConf.create({})])
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
        ({"name": 5}, "operators.x.name is 5; give a registered name, or a dotted path"),
        (3, "operators.x is 3; give {name, args, on_error}"),
    ],
)
def test_wrong_entries_are_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        operator_configs({"x": entry})
    with pytest.raises(ConfigError, match=message):
        operator_configs(OmegaConf.create({"x": entry}))


def test_a_choice_may_be_given_as_such():
    [operator] = operator_configs({"x": {"on_error": OnError.skip}})
    assert operator.on_error is OnError.skip


def test_a_value_that_has_no_default_is_refused():
    config = OmegaConf.create({"x": {"args": {"length": "???"}}})
    with pytest.raises(ConfigError, match=r"operators.x.args.length has no default: give it a value"):
        operator_configs(config)

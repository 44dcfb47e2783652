"""The key of a ConfigError is completed where its section is known."""

import pytest
from support.errors import refuses

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.config.buffer import OperatorConfig
from trinity_lightning.config.sections import PartConfig
from trinity_lightning.errors import ConfigError, TrinityError, configured_at


@pytest.mark.parametrize(
    ("key", "whole"),
    [
        (None, "tasksets.sums.path"),
        (".split", "tasksets.sums.split"),
        (".args.low", "tasksets.sums.args.low"),
        ("low", "tasksets.sums.low"),
        ("low[0].name", "tasksets.sums.low[0].name"),
        ("lower", "lower"),
        ("model.name", "model.name"),
    ],
)
def test_a_key_gets_the_section_that_it_stands_in(key, whole):
    with refuses(whole) as refused, configured_at("tasksets.sums.path", section="tasksets.sums", names=("low",)):
        raise ConfigError("it is wrong", key=key, fix="change it")
    assert (str(refused.value), refused.value.fix) == ("it is wrong: change it.", "change it")


def test_the_innermost_context_completes_a_key():
    with refuses("inner.name"), configured_at("outer"), configured_at("inner"):
        raise ConfigError("it is wrong", key=".name")
    with refuses("outer.name"), configured_at("outer"), configured_at(None):
        raise ConfigError("it is wrong", key=".name")


def test_other_errors_pass_unchanged():
    with pytest.raises(TrinityError) as error, configured_at("outer"):
        raise TrinityError("it is wrong")
    assert not hasattr(error.value, "key")


def test_parts_of_a_configuration_are_refused_by_their_names_there():
    operators = {"strict": OperatorConfig("reward_filter", {"threshold": "high"})}
    with refuses("operators.strict.args.threshold"):
        ExperienceDataModule("grpo", operators=operators)
    with refuses("operators.reward_filter.args.threshold"):
        ExperienceDataModule("grpo", operators=list(operators.values()))
    with refuses("add_strategy.mine.args.epsilon"):
        ExperienceDataModule({"mine": PartConfig("grpo", {"epsilon": -1})})

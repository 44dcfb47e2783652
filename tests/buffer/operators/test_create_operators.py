"""From configurations to operators: names, dotted paths, arguments, the older kind."""

import asyncio
import functools

import pytest
from support.operators import HERE, AddOne, Old, OldWithModels, step_of

from trinity_lightning.buffer.operators import (
    EXPERIENCE_OPERATORS,
    ExperienceOperator,
    ExperienceOperatorV1,
    LegacyOperator,
    OperatorConfig,
    create_operators,
)
from trinity_lightning.buffer.operators.filters import RewardFilter
from trinity_lightning.errors import ConfigError

NAMES = """dapo_dynamic_sampling invalid_reward_filter judge mask_response_truncated overlong_penalty
pass_rate_calculator reward_filter reward_shaping_mapper reward_std_filter teacher_top_k"""


def test_built_in_names():
    assert sorted(EXPERIENCE_OPERATORS) == NAMES.split()


def test_nothing_gives_nothing():
    assert create_operators([]) == []


def test_order_and_arguments_are_kept_and_paths_are_imported():
    operators = create_operators(
        [
            OperatorConfig("reward_filter", {"threshold": 0.5}),
            OperatorConfig(f"{HERE}.AddOne", {"amount": 2.0}),
            OperatorConfig("reward_filter"),
        ]
    )
    assert [type(operator) for operator in operators] == [RewardFilter, AddOne, RewardFilter]
    assert [vars(operator).get("threshold") for operator in operators] == [0.5, None, 0.0]
    assert vars(operators[1])["amount"] == 2.0


@pytest.mark.parametrize("name", list(EXPERIENCE_OPERATORS))
def test_built_in_operators_need_no_experiences(name):
    args = {"overlong_penalty": {"max_length": 4, "cache_length": 2}, "judge": {"model": "m", "prompt": "{response}"}}
    (operator,) = create_operators([OperatorConfig(name, args.get(name, {}))])
    if name not in ("judge", "teacher_top_k"):  # they look for their models first
        passed, metrics = asyncio.run(operator.process([]))
        assert passed == []
        assert all(value in (0, {}) for value in metrics.values())
    asyncio.run(operator.close())


def test_the_older_kind_is_wrapped():
    models: dict[str | int, list] = {"judge": []}
    plain, taking = create_operators([OperatorConfig(f"{HERE}.Old"), OperatorConfig(f"{HERE}.OldWithModels")], models)
    assert isinstance(plain, LegacyOperator)
    assert isinstance(taking, LegacyOperator)
    exps = step_of([0, 1, 2])
    asyncio.run(plain.prepare())
    assert asyncio.run(plain.process(exps)) == (exps[::2], {"kept": 2})
    asyncio.run(plain.close())
    assert isinstance(plain.operator, Old)
    assert plain.operator.closed
    assert isinstance(taking.operator, OldWithModels)
    assert taking.operator.models is models


def test_auxiliary_models_are_kept_and_none_is_an_empty_dict():
    models: dict[str | int, list] = {"judge": [], 0: []}
    (operator,) = create_operators([OperatorConfig("reward_filter")], models)
    assert operator.auxiliary_models is models
    operator.set_auxiliary_model(None)
    assert operator.auxiliary_models == {}
    assert RewardFilter().auxiliary_models == {}


def timed(method):
    @functools.wraps(method)
    def call(*arguments):
        return method(*arguments)

    return call


class Decorated(ExperienceOperatorV1):
    @timed
    async def process(self, exps):
        return exps, {"kept": len(exps)}


def test_a_decorator_may_hide_that_a_method_is_async():
    (operator,) = create_operators([OperatorConfig(f"{__name__}.Decorated")])
    assert asyncio.run(operator.process([])) == ([], {"kept": 0})


def test_only_process_is_abstract():
    assert ExperienceOperatorV1.__abstractmethods__ == {"process"}
    assert ExperienceOperator.__abstractmethods__ == {"process"}


@pytest.mark.parametrize(
    ("name", "args", "error", "message"),
    [
        ("reward_filtr", {}, ValueError, r"Did you mean 'reward_filter'\?.*Known: .*judge.*reward_std_filter"),
        ("", {}, ValueError, "unknown experience operator ''"),
        ("nowhere.Operator", {}, ValueError, "no module 'nowhere'"),
        (f"{HERE}.AdOne", {}, ValueError, "Did you mean 'AddOne'"),
        ("collections.OrderedDict", {}, TypeError, "'collections.OrderedDict' is no experience operator"),
        (f"{HERE}.make", {}, TypeError, f"'{HERE}.make' is no experience operator"),
        (f"{HERE}.ExperienceOperatorV1", {}, TypeError, "'ExperienceOperatorV1' does not define process"),
        (
            f"{HERE}.Plain",
            {},
            TypeError,
            f"operator '{HERE}.Plain': write `async def process`.*list of experiences, dict",
        ),
        ("reward_filter", {"treshold": 1}, TypeError, "operator 'reward_filter'.*'treshold'.*Did you mean 'threshold'"),
        (
            "overlong_penalty",
            {"max_length": 4},
            TypeError,
            r"args\.cache_length is missing: operator 'overlong_penalty'.*max_length: int",
        ),
        ("reward_filter", {"threshold": "high"}, ConfigError, "operator 'reward_filter': threshold is 'high': give"),
        ("reward_std_filter", {"threshold": None}, ConfigError, "threshold is None: give a finite number"),
        ("reward_std_filter", {"metric": 1}, ConfigError, "metric is 1: give some text"),
        ("dapo_dynamic_sampling", {"metric_key": None}, ConfigError, "metric_key is None: give some text"),
        (
            "overlong_penalty",
            {"max_length": None, "cache_length": 1},
            ConfigError,
            "max_length is None: give a whole number of 1 or more",
        ),
        ("judge", {"model": "judge", "prompt": None}, ConfigError, "prompt is None: give some text"),
        ("judge", {"model": "j", "prompt": "{response}", "sampling": [1]}, ConfigError, "sampling must be"),
        ("reward_shaping_mapper", {"reward_shaping_configs": 3}, ConfigError, "must be a list of rules, not 3"),
    ],
)
def test_wrong_configurations_are_told(name, args, error, message):
    with pytest.raises(error, match=message):
        create_operators([OperatorConfig("invalid_reward_filter"), OperatorConfig(name, args)])


def test_what_is_no_operator_is_never_called(monkeypatch):
    calls = []

    class Impostor:
        def __init__(self):
            calls.append("class")

    monkeypatch.setattr("support.operators.Impostor", Impostor, raising=False)
    monkeypatch.setattr("support.operators.impostor", lambda: calls.append("function"), raising=False)
    for name in ("Impostor", "impostor"):
        with pytest.raises(TypeError, match="is no experience operator"):
            create_operators([OperatorConfig(f"{HERE}.{name}")])
    assert calls == []

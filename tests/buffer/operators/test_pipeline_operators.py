"""Operators within a pipeline: order, names, times, numbers, and what becomes of a step in which one fails."""

import asyncio
import copy
import logging
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operators import HERE, AddOne, chain_of, make, operators_of, rewards, step_of

from trinity_lightning.buffer.operators import ExperienceOperatorV1, OnError, OperatorConfig
from trinity_lightning.buffer.operators.experience_operator import snapshot
from trinity_lightning.buffer.pipeline import ExperiencePipeline
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.errors import ConfigError, OperatorError


def traced(*groups):
    exps = step_of(*groups)
    for exp in exps:
        exp.info["trace"] = []
    return exps


def pipeline_of(*configs, folder=None, strategy="reinforce"):
    return ExperiencePipeline(strategy, configs, folder=folder)


def process(pipeline, exps, step=1):
    return asyncio.run(pipeline.process(exps, step))


def configured(name, on_error: Any = OnError.stop, **args):
    return OperatorConfig(f"{HERE}.{name}", args, on_error)


def test_operators_run_in_order_before_the_strategy():
    pipeline = pipeline_of(OperatorConfig("reward_filter", {"threshold": 1.0}), configured("AddOne", amount=5.0))
    written, metrics = process(pipeline, traced([0, 1], [2, 0.5]))
    assert rewards(written) == [6.0, 7.0]
    assert metrics["experience_pipeline/reward_filter/filtered_count"] == 2
    assert metrics[f"experience_pipeline/{HERE}.AddOne/sum"] == 13
    assert metrics["experience_pipeline/written"] == 2
    assert metrics["group_advantages/reward_mean/max"] == 7
    assert all(isinstance(value, float) for value in metrics.values())


def test_operators_have_names_and_times_of_their_own():
    filters = [OperatorConfig("reward_filter", {"threshold": t}) for t in (0.0, 1.0, 2.0)]
    pipeline = pipeline_of(*filters, OperatorConfig(f"{HERE}.Old"))
    _, metrics = process(pipeline, step_of([-1, 0, 1, 2]))
    assert [metrics[f"experience_pipeline/reward_filter{end}/filtered_count"] for end in ("", "_2", "_3")] == [1, 1, 1]
    times = [key for key in metrics if key.startswith("time/operator/")]
    assert times == [*(f"time/operator/{i}_RewardFilter" for i in range(3)), "time/operator/3_Old"]
    assert metrics["time/operators"] >= sum(metrics[key] for key in times) > 0


def test_without_operators_nothing_is_timed_or_copied():
    pipeline = pipeline_of()
    exps = step_of([0, 1])
    written, metrics = process(pipeline, exps)
    assert written[0] is exps[0]
    assert not [key for key in metrics if "operator" in key]
    assert pipeline.chain is None


def test_the_caller_s_list_stays_as_it_is():
    pipeline = pipeline_of(configured("Fails", where="nowhere"))
    exps = step_of([0, 1])
    written, _ = process(pipeline, exps)
    assert len(exps) == 2
    assert written == []


def test_any_real_number_is_a_metric(caplog):
    numbers = {
        "int": 2,
        "bool": True,
        "float": 0.5,
        "fraction": Fraction(1, 4),
        "numpy": np.float32(0.25),
        "numpy_int": np.int64(3),
        "numpy_bool": np.bool_(True),
        "array": np.array(1.5),
        "tensor": torch.tensor(2.5),
        "integer_tensor": torch.tensor([4]),
    }
    with_gradient = torch.tensor(3.5, requires_grad=True)
    others = {"text": "a", "complex": 1j, "list": [1], "tensors": torch.ones(2), "arrays": np.ones(0), "nothing": None}
    pipeline = pipeline_of(configured("Numbers", metrics=numbers | others | {"with_gradient": with_gradient}))
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            _, metrics = process(pipeline, step_of([0, 1]), step)
    prefix = f"experience_pipeline/{HERE}.Numbers/"
    reported = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    assert reported == {key: float(value) for key, value in numbers.items()} | {"with_gradient": 3.5}
    assert {type(value) for value in reported.values()} == {float}
    for name in others:
        assert caplog.text.count(f"metric '{prefix}{name}' is no number") == 1


def test_the_selector_s_metric_is_not_logged(caplog):
    exps = step_of([0, 1])
    for exp in exps:
        exp.info["task_index"] = {"taskset_id": "sums", "index": 5}
    pipeline = pipeline_of(OperatorConfig("pass_rate_calculator"))
    with caplog.at_level(logging.WARNING):
        _, metrics = process(pipeline, exps)
    assert metrics["experience_pipeline/pass_rate_calculator/selection/pass_rate/mean"] == 0.5
    assert not [name for name in metrics if "selector_metric" in name]
    assert "selector_metric" not in caplog.text


def test_operators_are_prepared_once_and_closed():
    pipeline = pipeline_of(configured("AddOne"))
    (operator,) = operators_of(pipeline)
    assert isinstance(operator, AddOne)

    async def live():
        await pipeline.process(traced([0]), 1)
        await pipeline.prepare()
        await pipeline.process(traced([0]), 2)
        await chain_of(pipeline).close()
        await chain_of(pipeline).close()

    asyncio.run(live())
    assert operator.diary == ["prepare", "process", "process", "close"]


def test_a_failed_preparation_closes_the_others_and_names_the_operator():
    pipeline = pipeline_of(configured("AddOne"), configured("Fails", where="prepare"))
    with pytest.raises(
        OperatorError, match=r"operator 'support.operators.Fails' \(Fails\) could not be prepared: Runtime"
    ):
        process(pipeline, traced([0]))
    assert vars(operators_of(pipeline)[0])["diary"] == ["prepare", "close"]


def test_a_failed_close_closes_the_others_and_names_the_operator():
    pipeline = pipeline_of(configured("AddOne"), configured("Fails", where="close"), configured("AddOne"))

    async def live():
        await pipeline.prepare()
        await chain_of(pipeline).close()

    with pytest.raises(
        OperatorError, match=r"'support.operators.Fails'.*could not be closed: RuntimeError: no close today"
    ):
        asyncio.run(live())
    assert [vars(operators_of(pipeline)[i])["diary"] for i in (0, 2)] == [["prepare", "close"]] * 2


def test_a_failing_operator_stops_and_leaves_the_step_as_it_came(tmp_path):
    exps = traced([0, 1], [2, 3])
    before = copy.deepcopy(exps)
    pipeline = pipeline_of(configured("AddOne"), configured("AddOne", fail_at=2), folder=tmp_path)
    with pytest.raises(
        OperatorError, match=r"operator 'support.operators.AddOne_2' \(AddOne\) failed at explore step 7"
    ) as e:
        process(pipeline, exps, step=7)
    assert isinstance(e.value.__cause__, RuntimeError)
    path = tmp_path / "rejected" / "step_7.trxp"
    assert "RuntimeError: half-way" in str(e.value)
    assert str(path) in str(e.value)
    assert Experience.deserialize_many(path.read_bytes()) == before
    assert [file.name for file in path.parent.iterdir()] == ["step_7.trxp"]


def test_without_a_folder_the_error_says_that_nothing_was_saved():
    pipeline = pipeline_of(configured("Fails"))
    with pytest.raises(OperatorError, match="no folder was given"):
        process(pipeline, step_of([0]))


def test_a_step_that_cannot_be_saved_is_told_with_the_operator_s_error(tmp_path):
    (tmp_path / "rejected").write_text("in the way")
    pipeline = pipeline_of(configured("Fails"), folder=tmp_path)
    with pytest.raises(
        OperatorError,
        match=r"no process today \(.*py:\d+ in _at\)\n.*could not be saved: (FileExists|NotADirectory)Error",
    ):
        process(pipeline, step_of([0]))
    exps = step_of([0])
    exps[0].info["odd"] = {1, 2}
    pipeline = pipeline_of(configured("Fails"), folder=tmp_path / "other")
    with pytest.raises(OperatorError, match="could not be saved: ExperienceError"):
        process(pipeline, exps)


@pytest.mark.parametrize(
    ("result", "description"),
    [
        (None, "NoneType"),
        ([], "list"),
        (step_of([0]), "list"),
        ([1], "list with int"),
        ((step_of([0]), {}, 1), "(list, dict, int)"),
        (([*step_of([0]), 1], {}), "(list with int, dict)"),
        (("", 3), "(str, int)"),
        (({}, {}), "(dict, dict)"),
    ],
)
def test_what_an_operator_returns_is_checked_and_not_quoted(result, description):
    pipeline = pipeline_of(configured("Returns", result=result))
    with pytest.raises(OperatorError, match=r"\(Returns\) failed .*TypeError: process must return") as failed:
        process(pipeline, step_of([0]))
    assert f"(list of experiences, dict of metrics), not {description}\n" in str(failed.value)


def test_no_metrics_at_all_are_allowed():
    exps = tuple(step_of([0, 1]))
    pipeline = pipeline_of(configured("Returns", result=(exps, None)))
    written, _ = process(pipeline, step_of([3]))
    assert written == list(exps)


def test_a_skipped_operator_leaves_no_trace(caplog):
    """It has changed two experiences in place before it failed; what the operator before did to them stays."""
    exps = traced([0, 1], [2, 3])
    pipeline = pipeline_of(
        OperatorConfig("reward_shaping_mapper", {"reward_shaping_configs": [{"stats_key": "bonus"}]}),
        configured("AddOne", OnError.skip, fail_at=2),
        OperatorConfig("reward_filter", {"threshold": 1.0}),
    )
    for exp in exps:
        exp.info["bonus"] = 0.5
    with caplog.at_level(logging.WARNING):
        written, metrics = process(pipeline, exps)
    assert rewards(written) == [1.5, 2.5, 3.5]
    assert rewards(exps) == [0.5, 1.5, 2.5, 3.5]  # what observers have is what is trained on
    assert exps[0].info["trace"] == []
    for exp in written:
        assert exp.info == {"bonus": 0.5, "trace": []}
        assert exp.action_mask is not None
        assert exp.action_mask.tolist() == [True, True]
    assert metrics["experience_pipeline/support.operators.AddOne/failed"] == 1
    assert "time/operator/1_AddOne" in metrics
    assert "operator 'support.operators.AddOne' (AddOne) failed at explore step 1 and is skipped" in caplog.text
    assert "half-way" in caplog.text


def test_on_error_may_be_given_by_its_name():
    """In code as in a configuration; it counted as `stop` unless it was the enum's member."""
    pipeline = pipeline_of(configured("AddOne", "skip", fail_at=1))
    written, metrics = process(pipeline, traced([0, 1]))
    assert metrics["experience_pipeline/support.operators.AddOne/failed"] == 1
    assert rewards(written) == [0, 1]
    with pytest.raises(ConfigError, match=r"unknown operators\..*on_error 'skipp'.*Did you mean 'skip'"):
        pipeline_of(configured("AddOne", "skipp"))


def test_a_skippable_operator_that_works_says_so():
    pipeline = pipeline_of(configured("AddOne", OnError.skip))
    written, metrics = process(pipeline, traced([0, 1]))
    assert metrics["experience_pipeline/support.operators.AddOne/failed"] == 0
    assert rewards(written) == [1, 2]


def test_a_cancelled_step_is_no_failure(tmp_path):
    class Waits(AddOne):
        async def process(self, exps):
            await asyncio.sleep(60)
            return exps, {}

    pipeline = pipeline_of(configured("AddOne", OnError.skip), folder=tmp_path)
    operators_of(pipeline)[0].__class__ = Waits

    async def live():
        task = asyncio.ensure_future(pipeline.process(traced([0]), 1))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(live())
    assert not (tmp_path / "rejected").exists()


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=3),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
        ),
        max_size=3,
    )
)
def test_snapshots_are_equal_and_out_of_reach(info):
    exps = [make(run=i, info=copy.deepcopy(info), metrics={"a": 1.0}, logprobs=[0.0, 1.0]) for i in range(2)]
    exps[0].custom_fields, exps[0].messages = [], [{"role": "user", "content": "hi"}]
    before = copy.deepcopy(exps)
    copies = snapshot(exps)
    assert copies == before
    for exp in exps:
        exp.info["new"] = exp.metrics["b"] = 1.0
        exp.eid.task = 99
        exp.custom_fields.append(None)  # type: ignore[arg-type]
        for tensor in (exp.tokens, exp.logprobs, exp.action_mask):
            assert tensor is not None
            tensor.zero_()
        if exp.messages:
            exp.messages[0]["content"] = "ho"
    assert copies == before


def test_what_experiences_share_their_snapshots_share():
    image = torch.ones(4)
    exps = [make(run=i, multi_modal_inputs={"pixels": image}) for i in range(2)]
    first, second = (exp.multi_modal_inputs for exp in snapshot(exps))
    assert first is not None
    assert second is not None
    assert first["pixels"] is second["pixels"]
    assert first["pixels"] is not image


def test_what_cannot_be_copied_is_told(tmp_path):
    exps = step_of([0])
    exps[0].info["loop"] = (i for i in range(3))
    pipeline = pipeline_of(OperatorConfig("reward_filter"), folder=tmp_path)
    with pytest.raises(ExperienceError, match=r"experience 1/0/0/0/\w+: info cannot be copied"):
        process(pipeline, exps)


class SetsInfo(ExperienceOperatorV1):
    """Forgets that info is a dict."""

    async def process(self, exps):
        for exp in exps:
            exp.info = None  # pyright: ignore[reportAttributeAccessIssue]
        return exps, {}


def test_an_operator_that_breaks_a_field_is_named_with_it():
    pipeline = pipeline_of(OperatorConfig(f"{__name__}.SetsInfo"))
    with pytest.raises(OperatorError, match=r"SetsInfo.*info of an Experience was set to None.*info=\{\}"):
        process(pipeline, step_of([0, 1]))

"""Operators in the ExperienceDataModule: filled on one loop, closed from another thread, as Lightning calls it."""

import asyncio
import logging
import threading

import pytest
from support.operators import HERE, AddOne, chain_of, operators_of, rewards, step_of

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.buffer.operators import ExperienceOperatorV1, OperatorConfig, experience_operator
from trinity_lightning.errors import OperatorError


class KnowsItsLoop(ExperienceOperatorV1):
    def __init__(self):
        self.loops = []

    async def prepare(self):
        self.loops.append(asyncio.get_running_loop())

    async def process(self, exps):
        self.loops.append(asyncio.get_running_loop())
        return exps, {}

    async def close(self):
        self.loops.append(asyncio.get_running_loop())


def with_operator(operator):
    data = ExperienceDataModule("reinforce", operators=[OperatorConfig("invalid_reward_filter")])
    operators_of(data.pipeline)[0].__class__ = type(operator)
    vars(operators_of(data.pipeline)[0]).update(vars(operator))
    return data


@pytest.fixture
def loop():
    """A loop that runs in a thread of its own, as the host's does; no task may be left on it in the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    try:
        asyncio.run_coroutine_threadsafe(left_alone(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def left_alone():
    """Wait until no other task is on the loop; TimeoutError: one stays."""
    async with asyncio.timeout(5):
        while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_operators_tidy_what_fills_the_buffer():
    operators = [OperatorConfig("reward_filter", {"threshold": 1.0}), OperatorConfig("reward_filter")]
    data = ExperienceDataModule("reinforce", operators=operators)
    metrics = asyncio.run(data.fill(step_of([0, 1], [2]), 1))
    data.storage.advance(1)
    assert rewards(data.storage.experiences) == [1, 2]
    assert metrics["experience_pipeline/reward_filter/filtered_count"] == 1
    assert metrics["experience_pipeline/reward_filter_2/filtered_count"] == 0


def test_a_failing_operator_leaves_the_buffer_as_it_was_and_the_step_on_disk(tmp_path):
    data = ExperienceDataModule("reinforce", operators=[OperatorConfig(f"{HERE}.Fails")], folder=tmp_path)
    with pytest.raises(OperatorError, match=rf"{HERE}\.Fails.*explore step 3"):
        asyncio.run(data.fill(step_of([0, 1]), 3))
    assert (data.storage.batch, data.storage.is_ready(3)) == (0, False)
    assert (tmp_path / "rejected" / "step_3.trxp").is_file()


def test_auxiliary_models_reach_the_operators():
    models: dict[str | int, list] = {"judge": []}
    data = ExperienceDataModule(operators=[OperatorConfig("reward_filter")], auxiliary_models=models)
    assert operators_of(data.pipeline)[0].auxiliary_models is models


@pytest.mark.parametrize("end", ["teardown", "on_exception"])
def test_operators_are_closed_on_the_loop_that_they_live_on(loop, end):
    data = with_operator(KnowsItsLoop())
    asyncio.run_coroutine_threadsafe(data.fill(step_of([0]), 1), loop).result(10)
    for _ in range(2):
        data.teardown("fit") if end == "teardown" else data.on_exception(RuntimeError())
    assert vars(operators_of(data.pipeline)[0])["loops"] == [loop] * 3


def test_operators_are_closed_when_their_loop_is_gone_and_in_a_notebook():
    data = with_operator(KnowsItsLoop())
    asyncio.run(data.fill(step_of([0]), 1))
    data.teardown("fit")
    assert len(vars(operators_of(data.pipeline)[0])["loops"]) == 3

    async def notebook():
        await data.fill(step_of([0]), 2)
        data.teardown("fit")

    asyncio.run(notebook())
    assert len(vars(operators_of(data.pipeline)[0])["loops"]) == 6


def test_an_operator_that_cannot_be_closed_is_told_and_hides_no_other_error(caplog):
    data = ExperienceDataModule(operators=[OperatorConfig(f"{HERE}.Fails", {"where": "close"})])
    asyncio.run(data.prepare())
    with pytest.raises(OperatorError, match="no close today"):
        data.teardown("fit")
    asyncio.run(data.prepare())
    with caplog.at_level(logging.WARNING):
        data.on_exception(RuntimeError("another"))
    assert "no close today" in caplog.text


@pytest.mark.parametrize("end", ["teardown", "on_exception"])
def test_closing_has_an_end(loop, end, monkeypatch, caplog):
    for name in ("WAIT_SECONDS", "CLOSE_SECONDS"):
        monkeypatch.setattr(experience_operator, name, 0.05)
    data = with_operator(AddOne())
    monkeypatch.setattr(operators_of(data.pipeline)[0], "close", lambda: asyncio.sleep(60))
    asyncio.run_coroutine_threadsafe(data.prepare(), loop).result(10)
    if end == "teardown":
        with pytest.raises(OperatorError, match=r"not closed within 0\.05 s"):
            data.teardown("fit")
    else:
        data.on_exception(RuntimeError("another"))
        assert "not closed within 0.05 s" in caplog.text


def test_prepare_comes_before_the_first_step_where_it_is_called():
    data = with_operator(AddOne())
    operators_of(data.pipeline)[0].__class__ = AddOne

    async def live():
        await data.prepare()
        await chain_of(data.pipeline).close()

    asyncio.run(live())
    assert vars(operators_of(data.pipeline)[0])["diary"] == ["prepare", "close"]


def test_unknown_operators_and_arguments_are_errors():
    with pytest.raises(ValueError, match="Did you mean 'reward_filter'"):
        ExperienceDataModule(operators=[OperatorConfig("reward_filtre")])
    with pytest.raises(TypeError, match="treshold"):
        ExperienceDataModule(operators=[OperatorConfig("reward_filter", {"treshold": 1})])

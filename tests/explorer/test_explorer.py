"""The explorer with a fake model, and the real scheduler, runners and workflows."""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.errors import refuses
from support.fake_model import FakeModel, LeapingLoop
from support.pictures import prompt_of, random_picture

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion
from trinity_lightning.common.pictures.thumbnails import CARRIED
from trinity_lightning.config.engines import SynchronizerConfig
from trinity_lightning.config.explorer import ExplorerConfig, SamplingConfig
from trinity_lightning.errors import ConfigError, RewardError, RolloutError
from trinity_lightning.explorer.callback import ExplorerCallback
from trinity_lightning.explorer.explorer import NOBODY, Explorer, StepRollouts, Watcher, report_tasks
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.taskset import Taskset
from trinity_lightning.explorer.workflow_runner import Status
from trinity_lightning.sync.stream import WeightStream

Reward = Callable[[str, Any], float | dict[str, float]]


def index_of(task: Any) -> int:
    return task.raw_task["task_index"]["index"]


def by_index(response: str, task: Any) -> float:
    return float(index_of(task))


def failing_at(*indices: int) -> Reward:
    def reward(response: str, task: Any) -> float:
        if index_of(task) in indices:
            raise ArithmeticError(f"cannot judge {index_of(task)}")
        return float(index_of(task))

    return reward


def source(size: int = 6, name: str = "sums", reward: Reward = by_index, **fields: Any) -> TaskSource:
    entries = [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(size)]
    taskset = Taskset(entries, name=name, order="sequential", epochs=1)
    return TaskSource(taskset, workflow="simple", reward_fn=reward, **fields)


class Sink:
    """Takes experiences, unless told to fail."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[Experience]]] = []
        self.error: Exception | None = None

    async def __call__(self, experiences: list[Experience], step: int, more: Any) -> dict[str, float]:
        if self.error is not None:
            raise self.error
        self.steps.append((step, experiences))
        return {"experience_pipeline/taken": float(len(experiences))}


WEIGHTS = {"model.embed_tokens.weight": torch.arange(4.0), "lm_head.weight": torch.ones(3)}


def explorer(train: TaskSource | None = None, **fields: Any) -> Explorer:
    """2 tasks a step, 3 runs a task, no retries."""
    settings: dict[str, Any] = {"batch_size": 2, "repeat_times": 3, "runner_per_model": 2, "max_retry_times": 0}
    settings["eval_on_startup"] = False
    rest = {key: fields.pop(key) for key in ("models", "evals", "auxiliary_models") if key in fields}
    return Explorer(ExplorerConfig(**(settings | fields)), rest.pop("models", [FakeModel()]), train or source(), **rest)


def running(
    explorer: Explorer,
    body: Callable[[], Coroutine[Any, Any, Any]],
    sink: Any = None,
    weights: dict[str, torch.Tensor] = WEIGHTS,
    watcher: Watcher = NOBODY,
) -> Any:
    """Run `body` while the explorer is prepared."""

    async def main() -> Any:
        await explorer.prepare(sink or Sink(), lambda: WeightStream.of(weights.items()), watcher)
        try:
            return await body()
        finally:
            await explorer.shutdown()

    return asyncio.run(main())


def indices(sink: Sink) -> list[list[float]]:
    return [sorted({e.reward for e in experiences if e.reward is not None}) for _, experiences in sink.steps]


# -- explore steps ----------------------------------------------------------------------------------------------------


def test_a_step_hands_every_experience_to_the_sink() -> None:
    sink = Sink()
    explored = explorer()
    assert running(explored, explored.explore_step, sink) is True
    [(step, experiences)] = sink.steps
    assert (step, explored.step) == (1, 1)
    assert {(e.eid.batch, e.eid.task, e.eid.run) for e in experiences} == {(1, t, r) for t in (0, 1) for r in range(3)}
    metrics = explored.metrics
    assert metrics["rollout/tasks"] == 2
    assert metrics["rollout/failed_tasks"] == 0
    assert metrics["rollout/experiences"] == metrics["experience_pipeline/taken"] == 6
    assert metrics["reward/mean"] == 0.5
    assert metrics["frac_reward_zero_std"] == 1.0
    assert metrics["rollout/tokens_per_second"] > 0
    assert metrics["time/rollout"] > 0


def test_steps_go_through_the_taskset_until_it_is_exhausted() -> None:
    sink = Sink()
    explored = explorer(source(5))

    async def body() -> list[bool]:
        return [await explored.explore_step() for _ in range(5)]

    assert running(explored, body, sink) == [True, True, True, False, False]
    assert indices(sink) == [[0, 1], [2, 3], [4]]
    assert explored.step == 3


def test_a_step_counts_only_once_the_sink_has_taken_it() -> None:
    sink = Sink()
    explored = explorer()

    async def body() -> None:
        await explored.explore_step()
        before = explored.state_dict()
        sink.error = OSError("disk full")
        with pytest.raises(OSError, match="disk full"):
            await explored.explore_step()
        assert explored.state_dict() == before
        sink.error = None
        await explored.explore_step()

    running(explored, body, sink)
    assert indices(sink) == [[0, 1], [2, 3]]  # the failed step was done again, with its own tasks
    assert [step for step, _ in sink.steps] == [1, 2]


def test_failed_tasks_are_counted_and_told_and_the_step_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    explored = explorer(source(reward=failing_at(1)))
    with caplog.at_level(logging.WARNING, logger="trinity_lightning"):
        assert running(explored, explored.explore_step, sink)
    assert (explored.metrics["rollout/failed_tasks"], explored.metrics["rollout/experiences"]) == (1, 3)
    assert indices(sink) == [[0]]
    told = [r.getMessage() for r in caplog.records if "explore step" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("explore step 1: 1 of 2 tasks failed (1): ")
    assert "ArithmeticError" in told[0]
    assert "cannot judge 1" in told[0]


def test_all_tasks_that_failed_alike_are_named_by_one_line(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter(range(100))

    def unreadable(response: str, task: Any) -> float:
        return 1.0 if index_of(task) == 1 else float(f"answer {next(answers)}")

    explored = explorer(source(reward=unreadable), batch_size=4)
    with caplog.at_level(logging.WARNING, logger="trinity_lightning"):
        assert running(explored, explored.explore_step)
    why = r"3 of 3 runs failed: 3 x RewardError: reward function 'unreadable' raised ValueError: .*, and the like"
    warnings = [r.getMessage() for r in caplog.records if "explore step 1" in r.getMessage()]
    assert len(warnings) == 1
    assert re.fullmatch(rf"explore step 1: 3 of 4 tasks failed \(0, 2, 3\): {why}", warnings[0])
    assert caplog.text.count("3 of 3 runs failed") == 2  # of the first task at once, of all of them at the end
    assert caplog.text.count("It was raised at") == 1


def test_of_many_tasks_that_failed_alike_the_first_are_named(caplog: pytest.LogCaptureFixture) -> None:
    failed = [Status(False, {}, "the verifier is down", task_id=number) for number in range(60)]
    report_tasks("explore step 1", failed, 80, nothing=False)
    [record] = caplog.records
    assert record.getMessage().startswith("explore step 1: 60 of 80 tasks failed (0, 1, 2, ")
    assert record.getMessage().endswith(", 48, 49 and 10 more): the verifier is down")


def test_when_nothing_succeeds_the_error_says_why() -> None:
    sink = Sink()
    explored = explorer(source(reward=failing_at(0, 1)))
    with pytest.raises(RolloutError, match=r"explore step 1: none of its 2 tasks .*cannot judge 0.*cannot judge 1"):
        running(explored, explored.explore_step, sink)
    assert (sink.steps, explored.step) == ([], 0)


def test_when_nothing_is_done_in_time_the_error_says_so() -> None:
    explored = explorer(models=[FakeModel(latency=30.0)], max_timeout=0.05)
    with pytest.raises(RolloutError, match="explore step 1"):
        running(explored, explored.explore_step)


def test_sampling_settings_reach_the_model() -> None:
    model = FakeModel()
    explored = explorer(source(sampling=SamplingConfig(temperature=0.7, max_tokens=5, stop=["x"])), models=[model])

    async def body() -> list[dict[str, Any]]:
        await explored.explore_step()
        return list(model.calls)

    calls = running(explored, body)
    assert len(calls) == 2  # one request a task, with all its samples
    for call in calls:
        assert (call["temperature"], call["max_tokens"], call["stop"], call["n"]) == (0.7, 5, ["x"], 3)
    assert calls[0]["seed"] != calls[1]["seed"]


class Notes(Watcher):
    """Keeps all that a watcher is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, str | None]] = []
        self.tasks: list[tuple[int | str, int, int]] = []

    def keep_completions(self, experiences: list[Experience], step: int, taskset: str | None) -> None:
        self.seen.append((len(experiences), step, taskset))

    def show_tasks(self, batch: int | str, done: int, total: int) -> None:
        self.tasks.append((batch, done, total))


def test_a_watcher_is_shown_experiences_and_tasks() -> None:
    notes = Notes()
    explored = explorer(evals=[source(3, name="held")])

    async def body() -> None:
        await explored.explore_step()
        await explored.eval()

    running(explored, body, watcher=notes)
    assert notes.seen == [(6, 1, None), (3, 1, "held")]
    assert notes.tasks == [(1, d, 2) for d in range(3)] + [("1/held", d, 3) for d in range(4)]


def test_a_watcher_gets_thumbnails_before_completions_and_nobody_else_gets_them() -> None:
    class Pictures(Notes):
        def keep_thumbnails(self, thumbnails: Mapping[str, bytes]) -> None:
            self.seen.append((len(thumbnails), 0, None))

    class Shown(FakeModel):
        async def chat(self, messages: list[dict[str, Any]], *args: Any, **settings: Any) -> list[Completion]:
            made = await super().chat(messages, *args, **settings)
            return [
                replace(completion, prompt_token_ids=prompt_of("<image>?", [random_picture(1)])) for completion in made
            ]

    notes, sink = Pictures(), Sink()
    explored = explorer(models=[Shown()], evals=[source(3, name="held")])

    async def body() -> None:
        await explored.explore_step()
        await explored.eval()

    running(explored, body, sink, watcher=notes)
    assert notes.seen == [(1, 0, None), (6, 1, None), (1, 0, None), (3, 1, "held")]
    assert all(CARRIED not in experience.info for _, experiences in sink.steps for experience in experiences)


def test_unprepared_it_does_not_explore() -> None:
    lonely = explorer()
    joined = lonely.setup_weight_sync_group("127.0.0.1", 1234)
    for call in (lonely.explore_step(), lonely.sync_weight(), lonely.get_weight("w"), joined):
        with pytest.raises(RuntimeError, match=r"prepare\(\)"):
            asyncio.run(call)


# -- evaluation -------------------------------------------------------------------------------------------------------


def by_seed(response: str, task: Any) -> float:
    """Right in about every other run of an even entry, never in an odd one."""
    return float(index_of(task) % 2 == 0 and int(response) % 2 == 0)


def test_an_evaluation_measures_every_task_and_trains_on_none() -> None:
    sink = Sink()
    held = source(4, name="held", reward=by_seed, repeat_times=2)
    explored = explorer(evals=[held, source(2, name="other")])
    metrics = running(explored, explored.eval, sink)
    # Two seeds that follow each other: one of the two runs of an even entry is right.
    assert metrics["eval/held/mean@2"] == 0.25
    assert metrics["eval/held/best@2"] == metrics["eval/held/pass@2"] == 0.5
    assert metrics["eval/held/worst@2"] == 0.0
    assert metrics["eval/held/failed_tasks"] == 0
    assert metrics["eval/other/mean@1"] == 0.5
    assert sink.steps == []
    assert explored.state_dict()["step"] == 0


async def awaited_one(response: str, task: Any) -> float:
    return 1.0


def test_an_evaluation_takes_as_long_as_its_attempts() -> None:
    """100 tasks of 5 s by 8 runners take longer than the 18 s of all attempts at one of them."""
    held: Any = source(100, name="held", reward=awaited_one)  # type: ignore[arg-type]
    models = [FakeModel(latency=5.0)]
    explored = explorer(models=models, evals=[held], max_timeout=6.0, max_retry_times=2, runner_per_model=8)

    async def main() -> float:
        await explored.prepare()
        begun = asyncio.get_running_loop().time()
        metrics = await explored.eval()
        assert metrics["eval/held/failed_tasks"] == 0
        taken = asyncio.get_running_loop().time() - begun
        await explored.shutdown()
        return taken

    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        assert runner.run(main()) == pytest.approx(65.0)


def seeds_of(model: FakeModel) -> list[int]:
    seeds = sorted(call["seed"] for call in model.calls)
    model.calls.clear()
    return seeds


def test_an_evaluation_that_is_done_again_has_the_same_seeds() -> None:
    model = FakeModel()
    explored = explorer(models=[model], evals=[source(4, name="held", reward=by_seed, repeat_times=2)])

    async def body() -> None:
        first, seeds = await explored.eval(10), seeds_of(model)
        again = await explored.eval(10)
        assert seeds_of(model) == seeds
        assert again["eval/held/mean@2"] == first["eval/held/mean@2"]

    running(explored, body)


@pytest.mark.parametrize("refilled", [False, True])
def test_a_step_that_is_done_again_has_the_same_seeds(refilled: bool) -> None:
    model, failing = FakeModel(), [True, False]

    async def sink(experiences: list[Experience], step: int, more: Any) -> dict[str, float]:
        if refilled:
            await more(1)
        if failing.pop(0):
            raise OSError("disk full")
        return {}

    explored = explorer(models=[model])

    async def body() -> None:
        with pytest.raises(OSError, match="disk full"):
            await explored.explore_step()
        seeds = seeds_of(model)
        assert len(seeds) == 2 + refilled
        await explored.explore_step()
        assert seeds_of(model) == seeds

    running(explored, body, sink)


def test_failed_evaluation_tasks_are_counted_and_none_succeeded_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    explored = explorer(evals=[source(4, name="held", reward=failing_at(1, 2))])
    with caplog.at_level(logging.WARNING, logger="trinity_lightning"):
        metrics = running(explored, explored.eval)
    assert metrics["eval/held/failed_tasks"] == 2
    assert metrics["eval/held/mean@1"] == 1.5
    assert "evaluation 'held': 2 of 4 tasks failed (1, 2): 1 of 1 runs failed" in caplog.text
    hopeless = explorer(evals=[source(2, name="held", reward=failing_at(0, 1))])
    with pytest.raises(RolloutError, match=r"evaluation 'held': none of its 2 tasks"):
        running(hopeless, hopeless.eval)


def test_a_reward_that_always_fails_ends_an_evaluation_after_its_first_tasks() -> None:
    answered: list[int] = []
    model = FakeModel(lambda seed: str(answered.append(seed)))
    hopeless = explorer(models=[model], evals=[source(100, name="held", reward=failing_at(*range(100)))])
    why = (
        r"^evaluation 'held': none of its 100 tasks gave an experience: reward function 'reward' raised "
        r"ArithmeticError: cannot judge 0 .*cannot judge 1 .*cannot judge 2 .*; and 1[34] other errors\. "
        r"If these tasks are not for this reward, leave them out: eval_tasksets\.held=null$"
    )
    with pytest.raises(RewardError, match=why):
        running(hopeless, hopeless.eval)
    assert 16 <= len(answered) < 20


@pytest.mark.parametrize(
    "reward", [failing_at(*range(1, 100)), failing_at(*range(99))], ids=["after a success", "before the last"]
)
def test_tasks_that_fail_while_others_succeed_are_all_tried(reward: Reward) -> None:
    async def body() -> dict[str, float]:
        await explored.explore_step()
        return await explored.eval()

    explored = explorer(evals=[source(100, name="held", reward=reward)])
    assert running(explored, body)["eval/held/failed_tasks"] == 99


@pytest.mark.parametrize(("interval", "due"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3])])
def test_an_evaluation_is_due_every_interval(interval: int, due: list[int]) -> None:
    explored = explorer(evals=[source(name="held")], eval_interval=interval)
    evaluated = []
    for step in range(5):
        explored.step = step
        if explored.need_eval():
            evaluated.append(step)
    assert evaluated == due
    assert not explorer(eval_interval=1).need_eval()


@pytest.mark.parametrize(
    ("steps", "due"),
    [(24, [3, 6, 9, 12, 15, 18, 21, 24]), (25, [3, 6, 9, 12, 15, 18, 21, 24, 25]), (4, [1, 2, 3, 4]), (None, [])],
)
def test_by_null_a_tenth_of_the_steps_is_evaluated_and_the_last_one(steps: int | None, due: list[int]) -> None:
    explored = explorer(evals=[source(name="held")], eval_interval=None)
    assert explored.evaluates
    assert [step for step in range(30 if steps is None else steps + 1) if explored.need_eval(step, steps)] == due


def test_the_last_step_is_evaluated_whatever_the_interval_but_zero() -> None:
    for interval, due in ((0, False), (7, True), (None, True)):
        explored = explorer(evals=[source(name="held")], eval_interval=interval)
        assert explored.need_eval(10, 10) == due


def test_without_an_interval_nothing_is_evaluated_at_the_start_either() -> None:
    notes = Notes()
    explored = explorer(source(2), evals=[source(2, name="held")], eval_interval=0, eval_on_startup=True)
    running(explored, explored.explore, watcher=notes)
    assert [taskset for _, _, taskset in notes.seen] == [None]


def parts(response: str, task: Any) -> dict[str, float]:
    return {"right": 0.6, "short": 0.5}


def test_what_counts_as_solved_is_known_or_its_lack_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def held(name: str, **settings: Any) -> TaskSource:
        return source(2, name, parts, **settings)

    explored = explorer(evals=[held("a"), held("b"), held("c", reward_solved={"right": 0.5})])
    with caplog.at_level(logging.WARNING, logger="trinity_lightning"):
        metrics = running(explored, explored.eval)
        running(explored, explored.eval)
    assert explored.solved == {"c": "parts/right at 0.5"}
    assert {name for name in metrics if "pass@" in name} == {"eval/c/pass@1"}
    [warning] = [record.getMessage() for record in caplog.records if "pass@k" in record.getMessage()]
    assert "evaluation 'a'" in warning
    assert "parts/right, parts/short" in warning
    assert "reward_solved={right: 1.0}" in warning


def test_a_component_that_is_not_there_is_said(caplog: pytest.LogCaptureFixture) -> None:
    explored = explorer(evals=[source(2, "held", parts, reward_solved={"rihgt": 1.0})])
    with caplog.at_level(logging.WARNING, logger="trinity_lightning"):
        assert "eval/held/pass@1" not in running(explored, explored.eval)
    assert "reward_solved names rihgt" in caplog.text


def test_a_task_to_evaluate_on_knows_what_is_solved() -> None:
    [task, _] = source(2, reward_solved={"right": 1.0}).all_tasks()
    assert task.reward_solved == {"right": 1.0}


# -- the whole loop ---------------------------------------------------------------------------------------------------


def test_explore_syncs_every_step_and_evaluates_where_due() -> None:
    models = [FakeModel(), FakeModel()]
    sink = Sink()
    notes = Notes()
    explored = explorer(source(7), models=models, evals=[source(2, name="held")], eval_interval=2, eval_on_startup=True)
    reason = running(explored, explored.explore, sink, watcher=notes)
    assert reason == "the taskset 'sums' is exhausted after 4 explore steps"
    assert [(taskset or "train", step) for _, step, taskset in notes.seen] == [
        ("held", 0),
        ("train", 1),
        ("train", 2),
        ("held", 2),
        ("train", 3),
        ("train", 4),
        ("held", 4),
    ]
    assert [model.model_version for model in models] == [4, 4]
    assert [{e.info["model_version"] for e in experiences} for _, experiences in sink.steps] == [{0}, {1}, {2}, {3}]


def test_explore_raises_what_the_sink_raises() -> None:
    sink = Sink()
    sink.error = OSError("disk full")
    explored = explorer()
    with pytest.raises(OSError, match="disk full"):
        running(explored, explored.explore, sink)


def test_shutdown_reaches_auxiliary_models_too() -> None:
    model, judge = FakeModel(), FakeModel()
    judge.calls.append({})  # a fake model forgets its calls when it is shut down
    explored = explorer(models=[model], auxiliary_models=[[judge]])
    running(explored, explored.explore_step)
    assert model.calls == judge.calls == []


def test_shutdown_reaches_every_engine_and_tells_of_every_error(caplog: pytest.LogCaptureFixture) -> None:
    class Ends(FakeModel):
        async def shutdown(self) -> None:
            ended.append(self)
            raise ConnectionError("a server died")

    def leave() -> None:
        raise OSError("the group does not close")

    ended: list[Ends] = []
    models = [Ends(), Ends()]
    explored = explorer(models=models)
    explored.engines.leave = leave  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the group does not close"):
        running(explored, explored.explore_step)
    assert ended == models
    assert not explored._scheduler._started
    assert caplog.text.count("ConnectionError: a server died") == 2


# -- weights ----------------------------------------------------------------------------------------------------------


def test_sync_weight_gives_the_step_as_version() -> None:
    model = FakeModel()
    explored = explorer(models=[model])
    explored.step = 5
    running(explored, explored.sync_weight)
    assert model.model_version == 5
    assert explored.metrics.keys() == {"time/sync_weight"}


def test_get_weight_knows_names_and_nearest_matches() -> None:
    explored = explorer()

    async def body() -> None:
        assert torch.equal(await explored.get_weight("lm_head.weight"), torch.ones(3))
        with pytest.raises(KeyError, match=r"unknown weight 'lm_head.wieght'.*has 2.*Did you mean 'lm_head.weight'"):
            await explored.get_weight("lm_head.wieght")
        with pytest.raises(KeyError, match=r"The first is 'model.embed_tokens.weight'"):
            await explored.get_weight("zzz")

    running(explored, body)


# -- state ------------------------------------------------------------------------------------------------------------


def test_a_restored_explorer_goes_on_with_the_same_tasks_and_seeds() -> None:
    def steps(n: int, state: dict[str, Any] | None) -> tuple[dict[str, Any], list[list[dict[str, Any]]], Sink]:
        model, sink = FakeModel(), Sink()
        explored = explorer(source(8), models=[model])
        if state is not None:
            explored.load_state_dict(state)
        calls: list[list[dict[str, Any]]] = []

        async def body() -> None:
            for _ in range(n):
                model.calls.clear()
                await explored.explore_step()
                calls.append(sorted(model.calls, key=lambda call: call["seed"]))

        running(explored, body, sink)
        return explored.state_dict(), calls, sink

    whole_state, whole_calls, whole = steps(4, None)
    half_state, _, _ = steps(2, None)
    end_state, rest_calls, rest = steps(2, half_state)
    assert end_state == whole_state
    assert rest_calls == whole_calls[2:]
    assert indices(rest) == indices(whole)[2:]
    assert [step for step, _ in rest.steps] == [3, 4]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.9},
        {"top_k": 10},
        {"min_p": 0.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"temperature": 0.0},
    ],
)
def test_training_is_drawn_from_the_whole_distribution(sampling: dict[str, float]) -> None:
    config = SamplingConfig(**sampling)  # pyright: ignore[reportArgumentType]
    with refuses(f"sampling.{next(iter(sampling))}"):
        explorer(source(sampling=config))
    explorer(evals=[source(name="held", sampling=config)])


def test_a_usual_temperature_is_accepted() -> None:
    accepted = source(sampling=SamplingConfig(temperature=0.7, stop=["\n"]))
    explorer(accepted)
    assert accepted.next_tasks(1, 1)[0].rollout_args["temperature"] == 0.7


def test_a_source_gives_tasks_with_its_own_number_of_rollouts_or_another() -> None:
    tasks = source(repeat_times=3)
    assert [task.repeat_times for task in (*tasks.next_tasks(2), *tasks.next_tasks(1, 5))] == [3, 3, 5]


def test_an_engine_in_this_process_cannot_generate_ahead() -> None:
    with refuses("explorer.sync_offset"):
        Explorer(ExplorerConfig(sync_offset=1), [TransformersEngine("tiny")], source())


def test_an_engine_that_shares_the_trainers_weights_has_no_older_ones() -> None:
    engine = TransformersEngine("tiny")
    with refuses("explorer.sync_interval"):
        Explorer(ExplorerConfig(sync_interval=2), [engine], source())
    # A checkpoint of a run with another engine holds the weights that this one had.
    explored = Explorer(ExplorerConfig(), [engine], source())
    explored.load_state_dict(explored.state_dict() | {"engines": {"version": 1, "weights": {"w": torch.zeros(2)}}})
    assert asyncio.run(explored.engines.restore()) is False


def test_syncs_are_due_by_interval_and_offset() -> None:
    def due(**fields: Any) -> list[int]:
        explored = explorer(**fields)
        steps = []
        for explored.step in range(9):
            steps += [explored.step] * explored.need_sync()
        return steps

    assert due() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert due(sync_interval=3) == [3, 6]
    assert due(sync_offset=1) == [2, 3, 4, 5, 6, 7, 8]
    assert due(sync_interval=2, sync_offset=1) == [3, 5, 7]


def test_the_weights_that_engines_were_given_are_kept_where_the_trainer_moves_on() -> None:
    trainers = {"w": torch.zeros(2)}
    model = FakeModel()
    explored = Explorer(ExplorerConfig(sync_interval=2), [model], source())

    async def body() -> None:
        await explored.sync_weight(2)
        trainers["w"] += 1
        assert (await explored.get_weight("w")).tolist() == [0, 0]

    running(explored, body, weights=trainers)
    state = explored.state_dict()
    again = Explorer(ExplorerConfig(sync_interval=2), [fresh := FakeModel()], source())
    again.load_state_dict(state)
    asyncio.run(again.engines.restore())
    assert fresh.model_version == 2
    assert asyncio.run(again.get_weight("w")).tolist() == [0, 0]


def test_the_copy_of_the_engines_weights_lacks_frozen_ones_which_the_trainer_has() -> None:
    frozen = WeightStream.of({"f": torch.ones(3)}.items())
    trainers = replace(WeightStream.of({"w": torch.zeros(2)}.items()), rest=frozen)
    explored = Explorer(ExplorerConfig(sync_interval=2), [FakeModel()], source())

    async def body() -> None:
        explored.engines.source = lambda: trainers
        await explored.sync_weight(2)
        assert (await explored.get_weight("f")).tolist() == [1, 1, 1]

    running(explored, body)
    assert explored.state_dict()["engines"]["weights"].keys() == {"w"}
    sent: list[WeightStream] = []
    again = Explorer(ExplorerConfig(sync_interval=2), [fresh := FakeModel()], source())
    again.engines.source = lambda: trainers
    fresh.sync_weights = lambda stream, version: asyncio.sleep(0, sent.append(stream))  # type: ignore[method-assign]
    again.load_state_dict(explored.state_dict())
    assert asyncio.run(again.engines.restore())
    assert sent[0].all_shapes == {"f": (3,), "w": (2,)}


def test_a_copy_without_frozen_weights_is_completed_for_engines_that_are_sent_all_weights() -> None:
    state = {"version": 2, "weights": {"w": torch.zeros(2)}}  # of a run whose engine had the frozen ones
    frozen = torch.ones(3)
    sent: list[WeightStream] = []
    explored = Explorer(ExplorerConfig(sync_interval=2), [fresh := FakeModel()], source())
    explored.engines.source = lambda: WeightStream.of({"f": frozen, "w": torch.ones(2)}.items())
    fresh.sync_weights = lambda stream, version: asyncio.sleep(0, sent.append(stream))  # type: ignore[method-assign]
    explored.engines.load_state_dict(state)
    assert asyncio.run(explored.engines.restore())
    assert (sent[0].shapes, sent[0].rest) == ({"f": (3,), "w": (2,)}, None)
    frozen += 1  # as a later fit may, which trains it
    assert {name: tensor.tolist() for name, tensor in sent[0]} == {"f": [1, 1, 1], "w": [0, 0]}
    assert explored.engines.state_dict()["weights"].keys() == {"f", "w"}


def test_a_copy_is_made_beside_the_event_loop_and_ends_with_the_syncs_time() -> None:
    explored = Explorer(ExplorerConfig(sync_offset=1), [FakeModel()], source())
    threads: list[threading.Thread] = []
    begun, late, read = threading.Event(), threading.Event(), threading.Event()

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        threads.append(threading.current_thread())
        begun.set()
        yield "a", torch.ones(1)
        late.wait(60)
        yield "b", torch.ones(1)
        read.set()

    async def body() -> None:
        explored.engines.source = lambda: WeightStream({"a": (1,), "b": (1,)}, gathered)
        sync = asyncio.create_task(explored.sync_weight(1))
        await asyncio.to_thread(begun.wait, 60)
        sync.cancel()  # as a time-out does
        with pytest.raises(asyncio.CancelledError):
            await sync
        late.set()
        threads[0].join()
        assert not read.is_set()  # what is read after the sync's end might be trained again
        await explored.sync_weight(2)
        assert (await explored.get_weight("b")).tolist() == [1]
        assert len(threads) == 2  # each weight is put together once a sync
        assert threading.current_thread() not in threads

    running(explored, body)


def test_an_engine_that_is_no_server_joins_no_process_group() -> None:
    explored = explorer()
    with pytest.raises(ConfigError, match="engine=vllm_server"):
        running(explored, lambda: explored.setup_weight_sync_group("127.0.0.1", 1234))


def test_evaluation_tasksets_need_names_of_their_own() -> None:
    with refuses("eval_tasksets"):
        explorer(evals=[source(name="held"), source(name="held")])


# -- refills ----------------------------------------------------------------------------------------------------------


def test_the_buffer_can_ask_for_more_tasks_of_the_step() -> None:
    explored = explorer(max_refills=2)
    got: list[int] = []

    async def greedy(experiences: list[Experience], step: int, more: Any) -> dict[str, float]:
        assert more.tasks == 2
        got.append(len(experiences))
        while added := await more(1):
            got.append(len(added))
            for experience in added:
                experience.reward = 100.0  # as an operator would
        return {}

    running(explored, explored.explore_step, greedy)
    assert got == [6, 3, 3]  # and no more than max_refills
    assert explored.metrics["rollout/tasks"] == 4
    assert explored.metrics["rollout/refill_tasks"] == 2
    assert explored.metrics["rollout/experiences"] == 12
    assert explored.metrics["reward/mean"] < 100
    assert explored.state_dict()["taskset"] != explorer().state_dict()["taskset"]


class EndlessTasks:
    """A source that never runs out."""

    def next_tasks(self, tasks: int, repeat_times: int) -> list[object]:
        raise AssertionError("asked for more tasks than allowed")


def test_a_step_without_refills_asks_for_no_more_tasks() -> None:
    rollouts = StepRollouts(1, ExplorerConfig(batch_size=2, max_refills=0), EndlessTasks(), run=None)  # type: ignore[arg-type]
    assert asyncio.run(rollouts(1)) == []


class Source:
    """A source with this number of tasks, and a taskset that learns nothing of them."""

    def __init__(self, tasks: int) -> None:
        self.left = tasks
        self.taskset = self

    def next_tasks(self, tasks: int, repeat_times: int) -> list[object]:
        count, self.left = min(tasks, self.left), self.left - min(tasks, self.left)
        return [object()] * count

    def update(self, pass_rates: object) -> None:
        pass

    def forget_failed(self, tasks: object, experiences: object) -> None:
        pass


def rounds(*succeed: bool) -> Any:
    """Runs tasks: round after round all succeed or all fail."""
    left = list(succeed)

    async def run(tasks: list[Any], step: int) -> tuple[list[Status], list[Experience]]:
        if not left.pop(0):
            return [Status(False, {}, "the verifier is down", task_id=i) for i in range(len(tasks))], []
        made = [
            Experience(eid=EID(batch=1, task=i), tokens=[1, 2], prompt_length=1, reward=1.0) for i in range(len(tasks))
        ]
        return [Status(True, {}) for _ in tasks], made

    return run


def test_a_round_whose_tasks_all_failed_is_followed_by_the_next(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = StepRollouts(1, ExplorerConfig(batch_size=2), Source(20), rounds(True, False, True, False))  # type: ignore[arg-type]

    async def body() -> tuple[int, int]:
        assert len(await rollouts.begin() or []) == 2
        return len(await rollouts(2)), len(await rollouts(2))  # the third refill fails, and is the last

    assert asyncio.run(body()) == (2, 0)
    metrics = rollouts.metrics()
    assert (metrics["rollout/refill_tasks"], metrics["rollout/failed_tasks"]) == (6, 4)
    assert "explore step 1, refill: 2 of 2 tasks failed (0, 1): the verifier is down" in caplog.text


def test_refills_end_with_the_taskset() -> None:
    rollouts = StepRollouts(1, ExplorerConfig(batch_size=2, max_refills=9), Source(3), rounds(True, False))  # type: ignore[arg-type]

    async def body() -> list[Experience]:
        await rollouts.begin()
        return await rollouts(2)

    assert asyncio.run(body()) == []


def test_a_model_that_is_no_engine_is_refused() -> None:
    with refuses("engine.name"):
        Explorer(ExplorerConfig(), [object()], source())  # type: ignore[list-item]


def test_sections_may_be_given_as_mappings() -> None:
    sampled = TaskSource(Taskset.addition(), "simple", "math", {"temperature": 0.5})  # type: ignore[arg-type]
    explored = Explorer({"batch_size": 3}, [FakeModel()], sampled)
    assert (explored.config, sampled.sampling) == (ExplorerConfig(batch_size=3), SamplingConfig(temperature=0.5))
    assert ExplorerCallback(explored, {"drill": False})._synchronizer == SynchronizerConfig(drill=False)
    with refuses("explorer.batch_sizes"):
        Explorer({"batch_sizes": 3}, [FakeModel()], sampled)
    with refuses("synchronizer.drills"):
        ExplorerCallback(explored, {"drills": False})
    with refuses("sampling.temperatures"):
        TaskSource(Taskset.addition(), "simple", "math", {"temperatures": 0.5})  # type: ignore[arg-type]


def test_entries_that_are_no_taskset_are_refused() -> None:
    with pytest.raises(ConfigError, match="TaskSelection"):
        TaskSource([{"prompt": "1 + 1", "answer": "2"}])  # type: ignore[arg-type]

"""Rewards of runs, and the reasons why runs are not trained on: workflows' rewards decide, not shaped ones."""

import asyncio

import pytest
import torch
from support.buffer import make_group
from support.compose import composed

from trinity_lightning.algorithm.add_strategy import AddStrategy
from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.buffer.operators import ExperienceOperatorV1
from trinity_lightning.common.experience import EID, Experience, ExperienceError
from trinity_lightning.common.runs import REASONS, UNTRAINED, Criterion, spread, spread_of_each, what_helps
from trinity_lightning.config.buffer import OperatorConfig
from trinity_lightning.config.run import typed_config
from trinity_lightning.errors import OperatorError
from trinity_lightning.monitor.run_monitor import write_completions

DAPO = (("dapo", {}), ("grpo", {}))


def test_spread_of_one_metric_and_of_several() -> None:
    assert spread("x", []) == {}
    assert spread_of_each([{"a": 1.0, "b": 2.0}, {"a": 3.0}], "rollout") == {
        "rollout/a/mean": 2.0, "rollout/a/max": 3.0, "rollout/a/min": 1.0,
        "rollout/b/mean": 2.0, "rollout/b/max": 2.0, "rollout/b/min": 2.0,
    }  # fmt: skip


# -- experiences that are not trained on -------------------------------------------------------------------------------


class FirstHalf(ExperienceOperatorV1):
    """Keeps copies of the first half, as a user's own operator may."""

    async def process(self, exps):
        return [Experience.deserialize(exp.serialize()) for exp in exps[: len(exps) // 2]], {}


class Lucky(AddStrategy):
    """Writes the experiences of even runs."""

    async def add(self, experiences, step):
        even = [exp for exp in experiences if exp.eid.run % 2 == 0]
        await self.writer.write_async(even)
        return len(even), {}

    @classmethod
    def default_args(cls):
        return {}


def flat(*groups):
    return [experience for group in groups for experience in group]


def shaped(length_rewards):
    """An operator that adds info["bonus"] to the reward."""
    for exp, bonus in length_rewards:
        exp.info["bonus"] = bonus
    return OperatorConfig("reward_shaping_mapper", {"reward_shaping_configs": [{"stats_key": "bonus"}]})


def fill(experiences, strategy=DAPO, operators=(), more=None, all_rows=False):
    data = ExperienceDataModule(strategy, operators=operators)
    metrics = asyncio.run(data.fill(experiences, 1, more, all_rows=all_rows))
    data.storage.advance(1)
    return data, metrics


class More:
    """A refill: the groups of as many tasks, from number 5 on, all at once."""

    def __init__(self, tasks, groups=1):
        self.tasks = tasks
        self.left = [make_group(5 + number, 2, rewards=[0.0, 1.0]) for number in range(groups)]

    async def __call__(self, tasks):
        groups, self.left = self.left, []
        return flat(*groups)


def reasons(experiences):
    return [exp.info.get(UNTRAINED) for exp in experiences]


def answers(task, rewards, lengths, name="math"):
    """Responses of these lengths, with a reward function's value each."""
    return [
        Experience(
            eid=EID(batch=1, task=task, run=run),
            tokens=[1, 2] + [3] * length,
            prompt_length=2,
            reward=reward,
            metrics={f"reward/{name}": reward},
        )
        for run, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]


def test_a_group_of_wrong_answers_is_dropped_however_their_lengths_differ():
    """The penalty for length made a difference between wrong answers, and trained short ones as good."""
    run = typed_config(composed("+recipe=dapo", "model=tiny", "output_dir=x"))
    weighing = [(strategy.name, strategy.args) for strategy in run.add_strategy.values()]
    wrong = answers(0, [0.0] * 8, [4, 8, 12, 20, 24, 28, 30, 32])
    mixed = answers(1, [0.0] * 4 + [1.0] * 4, [4, 8, 12, 20, 24, 28, 30, 32])
    data, metrics = fill(wrong + mixed, weighing, list(run.operators.values()))
    assert len({exp.reward for exp in wrong}) > 1  # as shaped
    assert {exp.eid.task for exp in data.storage.experiences} == {1}
    assert metrics["filtered_count"] == 8
    assert reasons(wrong) == ["filtered by dapo"] * 8
    assert reasons(mixed) == [None] * 8
    assert metrics["experience_pipeline/trained"] == 8
    assert metrics["experience_pipeline/untrained/filtered_by_dapo"] == 8


@pytest.mark.parametrize("operator", ["reward_std_filter", "dapo_dynamic_sampling"])
def test_filters_among_operators_judge_by_the_reward_before_shaping_too(operator):
    wrong, mixed = make_group(0, 2, rewards=[0.0, 0.0]), make_group(1, 2, rewards=[0.0, 1.0])
    bonus = shaped([(exp, float(exp.eid.run)) for exp in wrong + mixed])
    data, _ = fill(wrong + mixed, "grpo", [bonus, OperatorConfig(operator)])
    assert {exp.eid.task for exp in data.storage.experiences} == {1}
    assert reasons(wrong) == [f"filtered by {operator}"] * 2


def test_a_filter_may_judge_by_a_metric_or_an_entry_of_info():
    """Rewards differ by format only: without a right answer, or of one quality, there is nothing to learn."""
    same, other = make_group(0, 2, rewards=[0.0, 0.5]), make_group(1, 2, rewards=[0.5, 0.5])
    for exp in same + other:
        exp.metrics["reward/accuracy"] = float(exp in other and exp.eid.run)
        exp.info["judge_score"] = exp.metrics["reward/accuracy"]
    for metric in ("accuracy", "reward/accuracy", "judge_score"):
        data, _ = fill(same + other, (("dapo", {"metric": metric}), ("grpo", {})))
        assert {exp.eid.task for exp in data.storage.experiences} == {1}


def test_where_the_workflow_gave_no_reward_an_operators_counts():
    exps = make_group(0, 2, rewards=[0.0, 1.0])
    raw = [exp.reward for exp in exps]
    for exp in exps:
        exp.reward = None
    data = ExperienceDataModule(DAPO, operators=[OperatorConfig(f"{__name__}.Grades", {"rewards": raw})])
    asyncio.run(data.fill(exps, 1))
    data.storage.advance(1)
    assert len(data.storage.experiences) == 2


class Grades(ExperienceOperatorV1):
    """Gives rewards where there were none, as a judge does."""

    def __init__(self, rewards):
        self.rewards = rewards

    async def process(self, exps):
        for exp, reward in zip(exps, self.rewards, strict=True):
            exp.reward = reward
        return exps, {}


def test_a_refill_counts_the_survivors_by_their_rewards_before_shaping():
    wrong, more = make_group(0, 2, rewards=[0.0, 0.0]), More(tasks=1, groups=2)
    refills = flat(*more.left)
    bonus = shaped([(exp, float(exp.eid.run)) for exp in wrong + refills])
    data, metrics = fill(wrong, DAPO, [bonus], more)
    assert {exp.eid.task for exp in data.storage.experiences} == {5}
    assert metrics["experience_pipeline/surplus_groups"] == 1
    assert reasons(wrong + refills) == ["filtered by dapo"] * 2 + [None] * 2 + ["surplus"] * 2


def test_experiences_that_share_their_metrics_keep_their_own_reward():
    shared: dict = {}
    exps = make_group(0, 2, rewards=[0.0, 1.0])
    for exp in exps:
        exp.metrics = shared
    fill(exps, "grpo", [shaped([])])
    assert Criterion().values({"0": exps}) == {"0": [0.0, 1.0]}
    assert Criterion().values({"0": [Experience.deserialize(exps[1].serialize())]}) == {"0": [1.0]}


def test_every_reason():
    equal, middle = make_group(0, 2, rewards=[1.0, 1.0]), make_group(1, 3, rewards=[0.0, 0.5, 1.0])
    invalid, cut = make_group(2, 2, rewards=[0.0, float("nan")]), make_group(3, 2, rewards=[0.0, 1.0])
    cut[0].truncate_status = "response_truncated"
    cut[1].action_mask = torch.zeros(2, dtype=torch.bool)
    exps = flat(equal, middle, invalid, cut)
    _, metrics = fill(exps, "grpo", [OperatorConfig("mask_response_truncated")])
    assert reasons(equal) == ["equal rewards"] * 2
    assert reasons(middle) == [None, "zero advantage", None]
    assert reasons(invalid) == ["invalid reward"] * 2
    assert reasons(cut) == ["truncated", "no trained tokens"]
    counts = {name: value for name, value in metrics.items() if name.startswith("experience_pipeline/untrained/")}
    assert counts == {
        "experience_pipeline/untrained/equal_rewards": 2,
        "experience_pipeline/untrained/zero_advantage": 1,
        "experience_pipeline/untrained/invalid_reward": 2,
        "experience_pipeline/untrained/truncated": 1,
        "experience_pipeline/untrained/no_trained_tokens": 1,
    }
    assert metrics["experience_pipeline/trained"] == 2


def test_operators_and_strategies_of_ones_own_are_named():
    exps = flat(make_group(0, 4, rewards=[0.0, 1.0, 1.0, 1.0]))
    strategies = ((f"{__name__}.Lucky", {}), ("reinforce", {}))
    _, metrics = fill(exps, strategies, [OperatorConfig(f"{__name__}.FirstHalf")])
    dropped = f"filtered by {__name__}.FirstHalf"
    assert reasons(exps) == ["zero advantage", f"filtered by {__name__}.Lucky", dropped, dropped]
    assert metrics["experience_pipeline/trained"] == 0


def test_copies_of_a_group_are_trained_on_and_its_originals_too():
    equal, mixed = make_group(0, 2, rewards=[1.0, 1.0]), make_group(1, 2, rewards=[0.0, 1.0])
    _, metrics = fill(equal + mixed, (("duplicate_informative", {}), ("grpo", {})))
    assert reasons(equal + mixed) == ["filtered by duplicate_informative"] * 2 + [None] * 2
    assert metrics["experience_pipeline/trained"] == 4


def test_a_step_of_which_nothing_is_trained_on_says_so(caplog):
    fill(flat(make_group(0, 3, rewards=[0.0] * 3), make_group(1, 2, rewards=[1.0, float("inf")])), "grpo")
    assert (
        "explore step 1: none of its 5 responses is trained on: equal rewards (3), invalid reward (2)." in caplog.text
    )
    caplog.clear()
    fill(make_group(0, 2, rewards=[0.0, 1.0]), "grpo")
    assert "trained on" not in caplog.text


def test_what_helps_is_said_once_for_each_reason(caplog):
    data = ExperienceDataModule("grpo", operators=[OperatorConfig("reward_filter", {"threshold": 0.5})])
    for step, rewards in enumerate(([1.0, 1.0], [1.0, 1.0], [0.0, 0.0]), start=1):
        asyncio.run(data.fill(make_group(step, 2, rewards=rewards), step))
    advice = [message for message in caplog.messages if message.startswith("what helps")]
    assert [message.split("'")[1] for message in advice] == ["equal rewards", "filtered by reward_filter"]


def test_every_reason_has_its_help():
    assert [what_helps(reason) for reason in REASONS] == [helps for _, helps in REASONS.values()]
    assert what_helps("invalid judge_score") == what_helps("invalid reward")


def test_a_reward_that_a_judge_gives_is_the_one_before_shaping():
    """The judge gave four wrong answers 0; a penalty for length then made them differ."""
    wrong, mixed = make_group(0, 4, rewards=[0.0] * 4), make_group(1, 2, rewards=[0.0, 1.0])
    exps = wrong + mixed
    judge = OperatorConfig(f"{__name__}.Grades", {"rewards": [exp.reward for exp in exps]})
    for exp in exps:
        exp.reward = None
    data, _ = fill(exps, DAPO, [judge, shaped([(exp, -0.2 * exp.eid.run) for exp in exps])])
    assert {exp.eid.task for exp in data.storage.experiences} == {1}
    assert reasons(wrong) == ["filtered by dapo"] * 4


@pytest.mark.parametrize("operators", [(), [OperatorConfig("invalid_reward_filter")]])
@pytest.mark.parametrize("value", [5.0, "x"])
def test_a_workflow_may_have_a_metric_of_any_name(value, operators):
    exps = make_group(0, 2, rewards=[0.0, 1.0])
    for exp in exps:
        exp.metrics["raw_reward"] = value
    data, _ = fill(exps, DAPO, operators)
    assert len(data.storage.experiences) == 2
    assert all(exp.metrics["raw_reward"] == value for exp in exps)


def test_a_workflow_may_have_an_entry_of_info_named_untrained(tmp_path):
    exps = make_group(0, 2, rewards=[0.0, 1.0])
    for exp in exps:
        exp.info["untrained"] = "words that were never seen"
    fill(exps)
    assert all(row["trained"] for row in write_completions(tmp_path, 1, exps))
    assert all(exp.info["untrained"] == "words that were never seen" for exp in exps)


def test_a_reason_noted_by_an_earlier_pipeline_does_not_count():
    exps = make_group(0, 2, rewards=[0.0, 0.0])
    fill(exps)
    assert reasons(exps) == ["filtered by dapo"] * 2
    for exp in exps:
        exp.reward = float(exp.eid.run)
    fill(exps)
    assert reasons(exps) == [None, None]


def test_a_reward_noted_by_an_earlier_pipeline_does_not_count():
    exps = make_group(0, 2, rewards=[0.0, 0.0])
    fill(exps, "grpo", [shaped([])])
    for exp in exps:
        exp.reward = float(exp.eid.run)
    data, _ = fill(exps)
    assert len(data.storage.experiences) == 2


@pytest.mark.parametrize("filtered_by", ["dapo", "reward_std_filter"])
def test_a_group_without_the_metric_in_one_response_is_left_out(filtered_by):
    """One answer that could not be judged is no reason to stop a run; a misspelt metric is, at once."""
    partly, mixed = make_group(0, 2, rewards=[0.0, 1.0]), make_group(1, 2, rewards=[0.0, 1.0])
    for exp in [partly[0], *mixed]:
        exp.metrics["reward/accuracy"] = exp.reward or 0.0

    def run(metric):
        if filtered_by == "dapo":
            return fill(partly + mixed, (("dapo", {"metric": metric}), ("grpo", {})))
        return fill(partly + mixed, "grpo", [OperatorConfig("reward_std_filter", {"metric": metric})])

    data, metrics = run("accuracy")
    assert {exp.eid.task for exp in data.storage.experiences} == {1}
    if filtered_by == "dapo":
        assert metrics["group_advantages/invalid_group_count"] == 1
        assert reasons(partly) == ["invalid accuracy"] * 2
    with pytest.raises((ExperienceError, OperatorError), match=r"'acuracy'.*reward/accuracy"):  # and which there are
        run("acuracy")


def test_a_group_without_a_valid_reward_in_one_response_is_left_out_whatever_it_is_judged_by():
    """The add strategy behind the filter would leave it out too: a refill must not count it."""
    invalid, mixed = make_group(0, 2, rewards=[0.0, float("nan")]), make_group(1, 2, rewards=[0.0, 1.0])
    more = More(tasks=2)
    for exp in [*invalid, *mixed, *more.left[0]]:
        exp.metrics["reward/accuracy"] = float(exp.eid.run)
    data, metrics = fill(invalid + mixed, (("dapo", {"metric": "accuracy"}), ("grpo", {})), more=more)
    assert {exp.eid.task for exp in data.storage.experiences} == {1, 5}
    assert metrics["group_advantages/invalid_group_count"] == 1
    assert metrics["experience_pipeline/missing_groups"] == 0
    assert reasons(invalid) == ["invalid reward"] * 2


def test_a_filter_by_a_metric_needs_no_rewards():
    """The add strategy behind it may need none, such as a distillation."""
    tokens = {"tokens": [1, 2], "logprobs": [-2.0], "teacher_logprobs": [-1.0]}
    exps = [Experience(eid=EID(1, 0, run), metrics={"accuracy": float(run)}, **tokens) for run in (0, 1)]
    data, _ = fill(exps, (("dapo", {"metric": "accuracy"}), ("on_policy_distill", {})))
    assert len(data.storage.experiences) == 2


def test_a_reward_that_an_operator_made_invalid_leaves_its_group_out():
    spoilt, mixed = make_group(0, 2, rewards=[0.0, 1.0]), make_group(1, 2, rewards=[0.0, 1.0])
    spoils = OperatorConfig(f"{__name__}.Grades", {"rewards": [0.0, float("nan"), 0.0, 1.0]})
    _, metrics = fill(spoilt + mixed, DAPO, [spoils])
    assert metrics["group_advantages/invalid_group_count"] == 1
    assert reasons(spoilt + mixed) == ["invalid reward"] * 2 + [None] * 2


def test_a_filter_lets_runs_through_whose_last_step_alone_has_a_reward():
    steps = [(0, 0, None), (0, 1, 1.0), (1, 0, None), (1, 1, 0.0)]
    exps = [Experience(eid=EID(1, 0, run, step), tokens=[1, 2], reward=reward) for run, step, reward in steps]
    data, _ = fill(exps, (("dapo", {}), ("step_wise_grpo", {})))
    assert len(data.storage.experiences) == 4


@pytest.mark.parametrize("by", ["strategy", "operator"])
def test_a_resumed_run_goes_on_past_a_step_without_the_metric_as_it_would_have(by):
    def data():
        if by == "strategy":
            return ExperienceDataModule((("dapo", {"metric": "accuracy"}), ("grpo", {})))
        return ExperienceDataModule("grpo", operators=[OperatorConfig("reward_std_filter", {"metric": "accuracy"})])

    run = data()
    asyncio.run(run.fill(answers(0, [0.0, 1.0], [1, 1], "accuracy"), 1))
    run.storage.advance(1)
    state, without = run.state_dict(), make_group(1, 2, rewards=[0.0, 1.0])
    resumed, of_an_earlier_version = data(), data()
    resumed.load_state_dict(state)
    for opened in (run, resumed):
        assert asyncio.run(opened.fill(without, 2))["experience_pipeline/trained"] == 0
    del state["judged_by"]
    of_an_earlier_version.load_state_dict(state)
    with pytest.raises((ExperienceError, OperatorError)):
        asyncio.run(of_an_earlier_version.fill(without, 2))


def test_the_few_tasks_of_a_refill_may_all_lack_the_metric():
    exps = make_group(0, 2, rewards=[0.0, 1.0])
    for exp in exps:
        exp.metrics["reward/accuracy"] = float(exp.eid.run)
    data, _ = fill(exps, (("dapo", {"metric": "accuracy"}), ("grpo", {})), more=More(tasks=2))
    assert {exp.eid.task for exp in data.storage.experiences} == {0}


@pytest.mark.parametrize("strategy", ["grpo", "step_wise_grpo"])
def test_a_threshold_of_the_standard_deviation_is_of_the_rewards_before_shaping(strategy):
    wrong, mixed = make_group(0, 2, rewards=[0.0, 0.0]), make_group(1, 2, rewards=[0.0, 1.0])
    bonus = shaped([(exp, float(exp.eid.run)) for exp in wrong + mixed])
    data, _ = fill(wrong + mixed, ((strategy, {"std_threshold": 0.1}),), [bonus])
    assert {exp.eid.task for exp in data.storage.experiences} == {1}


def test_what_helps_against_a_filter_says_that_it_judged_the_rewards_before_operators(caplog):
    """The rewards are all of operators' making: they differ, and the filter did not see it."""
    exps = make_group(0, 2, rewards=[0.0, 0.0])
    fill(exps, (("grpo", {"std_threshold": 0.0}),), [shaped([(exp, float(exp.eid.run)) for exp in exps])])
    assert reasons(exps) == ["filtered by grpo"] * 2
    assert "rewards as they were before operators" in caplog.text
    assert "`std_threshold` has none: take `reward_variance`" in caplog.text
    data, _ = fill(exps, (("reward_variance", {"metric": "bonus"}), ("grpo", {})), [shaped([])])
    assert len(data.storage.experiences) == 2  # as advised


def test_where_the_loss_needs_no_advantage_equal_rewards_are_trained_on(caplog):
    equal, masked = make_group(0, 2, rewards=[1.0, 1.0]), make_group(1, 2, rewards=[0.0, 1.0])
    masked[0].action_mask = torch.zeros(2, dtype=torch.bool)
    _, metrics = fill(equal + masked, "grpo", all_rows=True)
    assert reasons(equal + masked) == [None, None, "no trained tokens", None]
    assert metrics["experience_pipeline/trained"] == 3
    fill(make_group(0, 2, rewards=[1.0, 1.0]), "grpo", all_rows=True)
    assert "trained on" not in caplog.text

"""Classes of one's own of every kind: with one argument, and with methods that are called otherwise."""

import asyncio
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
from support.compose import composed
from support.errors import refuses
from support.fake_model import FakeModel

from trinity_lightning.buffer.operators import ExperienceOperatorV1
from trinity_lightning.buffer.operators.experience_operator import create_operators
from trinity_lightning.config.buffer import OperatorConfig
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.config.run import typed_config, validate
from trinity_lightning.errors import ArgumentError
from trinity_lightning.explorer.tasks import Task
from trinity_lightning.explorer.workflow_runner import WorkflowRunner
from trinity_lightning.explorer.workflows import Workflow
from trinity_lightning.explorer.workflows.multi_turn import MultiTurnArguments
from trinity_lightning.explorer.workflows.workflow import SimpleWorkflow, check_workflow, experience_of, workflow_of
from trinity_lightning.train import check_weighing

HERE = __name__


# -- operators ---------------------------------------------------------------------------------------------------------


class Keeps(ExperienceOperatorV1):
    most: Any = 0

    async def process(self, exps):
        return exps[: self.most], {}


class PlainOperator(Keeps):
    def __init__(self, most=1):
        self.most = most


class KeywordOperator(Keeps):
    def __init__(self, *, most: int):
        self.most = most


@dataclass
class DataOperator(Keeps):
    most: int = 1


class StepOperator(ExperienceOperatorV1):
    async def process(self, exps, step):  # type: ignore[override]
        return exps, {}


@pytest.mark.parametrize("cls", [PlainOperator, KeywordOperator, DataOperator])
def test_an_operator_with_one_argument_works_however_it_is_written(cls: Any) -> None:
    name = f"{HERE}.{cls.__name__}"
    [operator] = create_operators([OperatorConfig(name, {"most": 3})])
    assert operator.most == 3  # type: ignore[attr-defined]
    with refuses(f"operators.{name}.args.mist", ArgumentError) as refused:
        create_operators([OperatorConfig(name, {"mist": 3})])
    assert "'most'" in str(refused.value)
    run = typed_config(composed("+recipe=grpo", f"+operators.mine={{name: {name}, args: {{mist: 3}}}}"))
    with refuses("operators.mine.args.mist", ArgumentError):
        check_weighing(run)


def test_an_operator_that_is_called_otherwise_is_refused() -> None:
    with refuses(f"operators.{HERE}.StepOperator"):
        create_operators([OperatorConfig(f"{HERE}.StepOperator")])


def test_a_strategy_s_wrong_argument_is_refused_by_its_key_before_anything_is_built() -> None:
    strategy = "add_strategy.mine={name: grpo, args: {epsilom: 1}}"
    with refuses("add_strategy.mine.args.epsilom", ArgumentError) as refused:
        check_weighing(typed_config(composed("+recipe=grpo", "~add_strategy.grpo", f"+{strategy}")))
    assert "'epsilon'" in str(refused.value)


@pytest.mark.parametrize("group", ["operators", "add_strategy"])
def test_a_path_to_a_part_of_another_kind_is_refused_by_its_key(group: str) -> None:
    with refuses(f"{group}.mine"):
        check_weighing(typed_config(composed("+recipe=grpo", f"+{group}.mine={{name: collections.Counter}}")))


# -- workflows ---------------------------------------------------------------------------------------------------------


class Asks(Workflow):
    hint: Any = ""

    async def run(self):
        question = [{"role": "user", "content": f"{self.hint}{self.task.raw_task['prompt']}"}]
        [answer] = await self.model.chat(question)
        return [experience_of(answer, question, reward=1.0)]


class PlainWorkflow(Asks):
    def __init__(self, hint="?"):
        self.hint = hint + str(self.task.raw_task["prompt"])  # which is there already


class KeywordWorkflow(Asks):
    def __init__(self, task, model, auxiliary_models=None, *, hint):
        super().__init__(task, model, auxiliary_models)
        self.hint = hint


class HandsOn(Asks):
    def __init__(self, hint: str = "?", **others: Any):
        super().__init__(**others)
        self.hint = hint


@dataclass
class DataWorkflow(Asks):
    hint: str = "?"


@dataclass
class DataSimple(SimpleWorkflow):
    hint: str = "?"


WORKFLOWS_OF_ONES_OWN = [PlainWorkflow, KeywordWorkflow, HandsOn, DataWorkflow, DataSimple]


@pytest.mark.parametrize("cls", WORKFLOWS_OF_ONES_OWN)
def test_a_workflow_with_one_argument_works_however_it_is_written(cls: Any) -> None:
    args = {"hint": "Say: "} | ({"system_prompt": "Be brief."} if cls is DataSimple else {})
    check_workflow(f"{HERE}.{cls.__name__}", args)
    task = Task(cls, {"prompt": "hi"}, workflow_args=args, reward_fn=lambda response, task: 1.0)
    runner = WorkflowRunner(ExplorerConfig(), FakeModel())
    status, experiences = asyncio.run(runner.run_task(task, 2))
    assert status.ok, status.message
    assert len(experiences) == 2
    hint = "Say: hi" if cls is PlainWorkflow else "Say: "
    assert experiences[0].prompt_text == ("system: Be brief.\nuser: hi" if cls is DataSimple else f"{hint}hi")


@pytest.mark.parametrize("cls", WORKFLOWS_OF_ONES_OWN)
def test_a_wrong_argument_of_a_workflow_is_refused_by_its_key(cls: Any) -> None:
    with refuses("workflow.args.hunt", ArgumentError) as refused:
        check_workflow(cls, {"hunt": "?"})
    assert "'hint'" in str(refused.value)
    if cls is KeywordWorkflow:
        with refuses("workflow.args.hint", ArgumentError):
            check_workflow(cls, {})
    else:
        check_workflow(cls, {})


class ReadsTheTask(Asks):
    def __init__(self, task, model, auxiliary_models=None, debug=False):
        super().__init__(task, model, auxiliary_models)
        self.hint, self.debug = task.workflow_args["hint"], debug


def test_a_constructor_that_takes_the_task_may_read_arguments_there() -> None:
    args = {"hint": "Say: ", "debug": True}
    check_workflow(ReadsTheTask, args)
    workflow: Any = workflow_of(Task(ReadsTheTask, {"prompt": "hi"}, workflow_args=args), FakeModel(), [])
    assert (workflow.hint, workflow.debug) == ("Say: ", True)
    with refuses("workflow.args.debugg", ArgumentError):
        check_workflow(ReadsTheTask, {"debugg": True})


def test_an_error_in_a_workflow_names_its_line() -> None:
    runner = WorkflowRunner(ExplorerConfig(), FakeModel())
    status, _ = asyncio.run(runner.run_task(Task(PlainWorkflow, {"question": "hi"}), 1))
    assert status.message is not None
    assert "KeyError: 'prompt' (" in status.message
    assert "test_signatures.py:" in status.message
    assert status.message.endswith(" in __init__)")


# -- environments ------------------------------------------------------------------------------------------------------


class Says:
    def reset(self, task):
        return "Say it."

    def step(self, response):
        return "Again.", 0.0, True, {}


@dataclass
class DataEnvironment(Says):
    digit: int = 7


class KeywordEnvironment(Says):
    def __init__(self, *, digit):
        self.digit = digit


class OfGym(Says):
    def reset(self, *, seed=None, options=None):  # type: ignore[override]
        return "Say it."


class OfOldGym(Says):
    def reset(self, seed=None):  # type: ignore[override]
        return "Say it."


class NoStep:
    def reset(self, task):
        return "Say it."


class HandsOnToAnother:
    def __init__(self, digit=7):
        self.inner = Says()
        self.digit = digit

    def __getattr__(self, name):
        return getattr(self.inner, name)


class WithoutSelf(DataEnvironment):
    @staticmethod
    def reset(task):  # type: ignore[override]
        return "Say it."

    @classmethod
    def step(cls, response):  # type: ignore[override]
        return "Again.", 0.0, True, {}


def environment(cls: type, **args: Any) -> MultiTurnArguments:
    return MultiTurnArguments(environment={"name": f"{HERE}.{cls.__name__}", "args": args})


@pytest.mark.parametrize("cls", [DataEnvironment, KeywordEnvironment, HandsOnToAnother, WithoutSelf])
def test_an_environment_with_one_argument_works_however_it_is_written(cls: Any) -> None:
    assert environment(cls, digit=3).make().digit == 3  # type: ignore[attr-defined]
    with refuses("workflow.args.environment.args.digits", ArgumentError) as refused:
        environment(cls, digits=3)
    assert "'digit'" in str(refused.value)
    if cls is KeywordEnvironment:
        with refuses("workflow.args.environment.args.digit", ArgumentError):
            environment(cls)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (OfGym, r"reset cannot be called as reset\(task\)"),
        (OfOldGym, r"reset takes 'seed' in the place of task: .*reset\(task\); the task is all"),
        (NoStep, r"no method step\(response\)"),
    ],
)
def test_an_environment_that_is_called_otherwise_is_refused(cls: type, message: str) -> None:
    with refuses("workflow.args.environment") as refused:
        environment(cls)
    assert re.search(message, str(refused.value))


# -- engines -----------------------------------------------------------------------------------------------------------


ENGINES = """
from dataclasses import dataclass
from my_engine import PlainEngine

class Plain(PlainEngine):
    def __init__(self, model, config, top=3):
        super().__init__(model, config)
        self.top = top

class Other(PlainEngine):
    def __init__(self, name, settings, *, top):
        super().__init__(name, settings)
        self.top = top

@dataclass
class Data(PlainEngine):
    model: str
    config: object
    top: int = 3

class Settings(PlainEngine):
    def __init__(self, model, config):
        super().__init__(model, config)
        self.top = config.args["top"]

class Nothing(PlainEngine):
    def __init__(self, top=3):
        self.top = top
"""


@pytest.fixture
def engines(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "engines_of_ones_own.py").write_text(ENGINES)
    monkeypatch.syspath_prepend(tmp_path)
    return "engines_of_ones_own"


@pytest.mark.parametrize("name", ["Plain", "Other", "Data"])
def test_an_engine_with_one_argument_works_however_it_is_written(name: str, engines: str, tmp_path: Any) -> None:
    choices = ("+recipe=grpo", "model=tiny", f"engine.name={engines}.{name}")
    run = validate(composed(*choices, "+engine.args.top=5"))
    [engine] = getattr(import_module(engines), name).of_run(run, tmp_path)
    assert (engine.top, engine.max_model_len, engine.model_version) == (5, run.engine.max_model_len, 0)
    with refuses("engine.args.tip", ArgumentError) as refused:
        validate(composed(*choices, "+engine.args.tip=5"))
    assert "'top'" in str(refused.value)
    if name == "Other":
        with refuses("engine.args.top", ArgumentError):
            validate(composed(*choices))


def test_an_engine_that_does_not_take_the_model_is_refused(engines: str) -> None:
    with refuses("engine.name") as refused:
        validate(composed("+recipe=grpo", "model=tiny", f"engine.name={engines}.Nothing"))
    assert "Nothing(model, config)" in str(refused.value)
    assert "(top)" in str(refused.value)


def test_an_engine_without_arguments_of_its_own_reads_them_in_its_section(engines: str, tmp_path: Any) -> None:
    run = validate(composed("+recipe=grpo", "model=tiny", f"engine.name={engines}.Settings", "+engine.args.top=5"))
    [engine] = import_module(engines).Settings.of_run(run, tmp_path)
    assert engine.top == 5

"""A workflow, an environment and a reward function of a project of one's own: a file and a dotted path, or a line."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from fake_model import FakeModel

from trinity_lightning.common.experience import Experience
from trinity_lightning.config.registry import PARTS, Registry
from trinity_lightning.config.schema import ExplorerConfig
from trinity_lightning.explorer.rewards import REWARDS
from trinity_lightning.explorer.runner import WorkflowRunner
from trinity_lightning.explorer.tasks import Task
from trinity_lightning.explorer.workflows import WORKFLOWS
from trinity_lightning.explorer.workflows.environments import ENVIRONMENTS

PROJECT = '''
from trinity_lightning.explorer.workflows import SimpleWorkflow

class Twice(SimpleWorkflow):
    """Asks for everything twice."""

    def reset(self, task):
        super().reset(task)
        self.messages = self.messages * 2

class Once:
    """Ends with the first response, which is worth 1."""

    def reset(self, task):
        return task.raw_task["prompt"]

    def step(self, response):
        return response, 1.0, True, {}

def length(response, task):
    return len(response) / 4
'''


@pytest.fixture(params=["by path", "built in"])
def name_of(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a configuration calls a part of the project."""
    (tmp_path / "my_project.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(str(tmp_path))

    def name(registry: Registry[Any], part: str) -> str:
        path = f"my_project.{part}"
        if request.param == "by path":
            return path
        monkeypatch.setitem(cast("dict[str, str]", PARTS[registry.kind]), "mine", path)
        monkeypatch.setattr(registry, "_items", dict(registry._items))
        return "mine"

    return name


def tried(task: Task) -> list[Experience]:
    model = FakeModel(lambda seed: "oh")
    status, experiences = asyncio.run(WorkflowRunner(ExplorerConfig(), model).run_task(task))
    assert status.ok, status.message
    return experiences


def test_a_workflow(name_of: Any) -> None:
    (one,) = tried(Task(name_of(WORKFLOWS, "Twice"), {"prompt": "hi"}))
    assert one.prompt_text == "user: hi\nuser: hi"


def test_an_environment(name_of: Any) -> None:
    arguments = {"environment": {"name": name_of(ENVIRONMENTS, "Once")}}
    (one,) = tried(Task("multi_turn", {"prompt": "hi"}, workflow_args=arguments))
    assert (one.response_text, one.reward) == ("oh", 1.0)


def test_a_reward_function(name_of: Any) -> None:
    (one,) = tried(Task("simple", {"prompt": "hi"}, reward_fn=name_of(REWARDS, "length")))
    assert one.reward == 0.5

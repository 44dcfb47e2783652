"""Runs the workflow and the commands of the page for people who come from Trinity-RFT."""

import asyncio
import re
import shlex
from typing import Any

import pytest
from support.compose import composed
from support.fake_model import FakeModel
from support.runs import ROOT

from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.config.run import validate
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import WorkflowRunner

PAGE = (ROOT / "docs" / "from_trinity.md").read_text()


def test_the_step_wise_workflow_runs() -> None:
    [script] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(script, names)
    task = Task(names["Countdown"], raw_task={"prompt": "Reach 9."}, batch_id=1, task_id=0)
    status, experiences = asyncio.run(WorkflowRunner(ExplorerConfig(), FakeModel()).run_task(task, 2))
    assert status.ok, status.message
    assert [(e.eid.run, e.eid.step, e.reward) for e in experiences] == [(r, s, s) for r in range(2) for s in range(2)]


@pytest.mark.parametrize("line", re.findall(r"^    python -m trinity_lightning\.(.*)$", PAGE, re.MULTILINE))
def test_a_command_composes(line: str) -> None:
    entry, *arguments = shlex.split(line)
    validate(composed(*arguments, name=entry))

"""The examples of docs/architecture.md are trained and built in, and its tables are compared with the code."""

import ast
import copy
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
from hydra.core.config_store import ConfigStore
from support.compose import composed
from support.errors import refuses
from support.runs import ROOT, RunTrain, only, rows

from trinity_lightning.algorithm.add_strategy import ADD_STRATEGY
from trinity_lightning.algorithm.policy_loss import POLICY_LOSS_FN
from trinity_lightning.buffer.operators import EXPERIENCE_OPERATORS
from trinity_lightning.build import train_source
from trinity_lightning.config.explain import CONFIG_ERRORS, explain
from trinity_lightning.config.hydra import register
from trinity_lightning.config.registry import PARTS, import_object
from trinity_lightning.config.run import typed_config
from trinity_lightning.errors import ArgumentError
from trinity_lightning.explorer.rewards import REWARDS
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks import Taskset
from trinity_lightning.explorer.tasks.sources import TASK_SOURCES
from trinity_lightning.explorer.workflows import WORKFLOWS
from trinity_lightning.explorer.workflows.multi_turn import ENVIRONMENTS
from trinity_lightning.train import check

PACKAGE = ROOT / "trinity_lightning"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
ENGINE = ROOT / "docs" / "examples" / "my_engine.py"
REGISTRIES = (POLICY_LOSS_FN, ADD_STRATEGY, EXPERIENCE_OPERATORS, WORKFLOWS, ENVIRONMENTS, REWARDS, TASK_SOURCES)

# Files by their names, each a part of a project of one's own.
EXAMPLES = dict(re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
EXAMPLES["my_engine.py"] = ENGINE.read_text()
# Rows of the table: kind, file, configuration, file and line of a built-in part, and what chooses it.
PART_ROWS = [
    tuple(cell.strip().strip("`") for cell in line.strip("|").split("|"))
    for line in PAGE.splitlines()
    if re.match(r"\| [\w ]+ \| `my_", line)
]
BY_KIND = pytest.mark.parametrize("row", PART_ROWS, ids=[row[0] for row in PART_ROWS])


def write_examples(folder: Path) -> None:
    for name, code in EXAMPLES.items():
        (folder / name).write_text(code)


def test_the_table_has_a_row_of_every_kind_with_an_example() -> None:
    assert {row[1] for row in PART_ROWS} == set(EXAMPLES) - {"my_schedule.py", "my_selection.py"}
    assert {row[0] for row in PART_ROWS} == PARTS.keys() - {
        "KL estimate",
        "built-in model",
        "experience keeper",
        "experience reader",
        "optimizer",
        "runner",
        "schedule",
        "weight sender",
    }


def test_parts_of_ones_own_train_together(run_train: RunTrain, tmp_path: Path) -> None:
    """Two steps; the workflow is that of the evaluation, as the environment needs another to train with."""
    write_examples(tmp_path)
    overrides = [word.replace("workflow.name=", "eval_workflow=") for row in PART_ROWS for word in shlex.split(row[2])]
    # An evaluation has no arguments of its own.
    overrides = [word for word in overrides if "workflow.args.hint" not in word]
    overrides.append("optimizer.lr_scheduler={name: my_schedule.warm, args: {steps: 2}}")
    small = ["explorer.batch_size=4", "explorer.repeat_times=4", "sampling.max_tokens=8", "eval_sampling.max_tokens=2"]
    quiet = ["logger=csv", "save_model=false", "explorer.eval_interval=9", "workflow.args.max_turns=2"]
    overrides.append("+eval_tasksets={held_out: {source: my_tasks.Sums, split: heldout, size: 6}}")
    done = run_train(tmp_path, "+recipe=grpo", "model=tiny", "steps=2", *overrides, *small, *quiet)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "my_engine.PlainEngine (fp32)" in done.stdout
    assert "policy loss my_loss.tempered, add strategy my_strategy.Sign" in done.stdout
    run = only(tmp_path, "outputs/grpo/*")
    evaluated, *steps = (row for row in rows(run) if row["sync/probe_diff/max"] or row["actor/pg_loss"])
    assert evaluated["eval/held_out/mean@1"] != ""
    assert 0 < float(evaluated["sync/probe_diff/max"]) < 1e-3  # two programs, the same weights
    assert len(steps) == 2
    for step in steps:
        assert float(step["actor/trained_rows"]) > 0
        assert float(step["actor/logprob_diff/mean"]) < 1e-4
        assert step["experience_pipeline/my_operator.DropShort/dropped"] != ""
        assert step["reward/Digits/mean"] != ""
    assert float(steps[1]["sample/lag/mean"]) == 0
    completions = [json.loads(line) for line in (run / "completions" / "step_1.jsonl").read_text().splitlines()]
    assert all(row["prompt"].endswith("Say 3.") for row in completions)
    assert {1.0, -1.0} <= {row["advantage"] for row in completions} <= {1.0, -1.0, 0.0, None}  # None: dropped


@pytest.mark.slow
def test_a_knob_of_ones_own_loss_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_examples(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    loss = "algorithm.policy_loss={name: my_loss.tempered, args: {tau: 2.0}}"
    build(loss)
    with refuses("algorithm.policy_loss.args.tao", ArgumentError):
        build(loss.replace("tau", "tao"))
    with refuses("algorithm.policy_loss.args.tau", ArgumentError):
        build(loss.replace("2.0", "hot"))


KEYS = {"add strategy": "add_strategy.sign", "experience operator": "operators.drop_short", "engine": "engine"}
KEYS |= {
    "task source": "taskset",
    "policy loss": "algorithm.policy_loss",
    "environment": "workflow.args.environment",
    "workflow": "workflow",
}


@pytest.mark.slow
@BY_KIND
def test_a_misspelt_argument_of_ones_own_part_is_refused_by_its_key(
    row: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_examples(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    kind, *_ = row
    *others, last = shlex.split(row[2])
    build(*others, last)
    name = re.findall(r"(?:args\.|args: \{)(\w+)", last)[-1]
    before, _, after = last.rpartition(name)
    with refuses(f"{KEYS.get(kind, 'reward')}.args.{name}x", ArgumentError):
        build(*others, f"{before}{name}x{after}")


def test_a_selection_of_ones_own_hands_out_tasks_and_goes_on_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_examples(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made: Any = import_object("my_selection.Repeated")
    source, resumed = (TaskSource(made(Taskset.addition(), times=3), "math") for _ in range(2))
    before = source.next_tasks(4)
    assert len({str(task.raw_task) for task in before}) == 2
    resumed.taskset.load_state_dict(source.taskset.state_dict())
    assert resumed.next_tasks(5) == source.next_tasks(5)


# -- built in ----------------------------------------------------------------------------------------------------------


def build(*choices: str) -> None:
    """Do what a command does with these choices up to its tasks; a refusal is raised."""
    config = composed("+recipe=grpo", "model=tiny", *choices)
    check(config)
    train_source(typed_config(config))


@pytest.fixture
def built_in(row: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Add one file and one line to the package, for a test; the line's name."""
    kind, own_file, _, file, line, _ = row
    folder = tmp_path / Path(file).parent
    folder.mkdir(parents=True)
    (tmp_path / file).write_text(EXAMPLES[own_file])
    package = importlib.import_module(f"trinity_lightning.{'.'.join(Path(file).parent.parts)}")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    name, path = cast("list[str]", re.findall(r'"(.*?)"', line))
    monkeypatch.setitem(cast("dict[str, str]", PARTS[kind]), name, f"{package.__name__}.{path}")
    composed()  # Hydra's own parts are registered before
    # What is registered and imported by now is forgotten again.
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", copy.deepcopy(store.repo))
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_items", dict(registry._items))
    register()
    return name


@BY_KIND
def test_a_part_is_built_in_by_a_file_and_a_line(row: tuple[str, ...], built_in: str) -> None:
    kind, chosen = row[0], shlex.split(row[5])
    part: Any = import_object(PARTS[kind][built_in])
    assert part.__module__.startswith("trinity_lightning.")
    build(*chosen)
    for registry in REGISTRIES:
        if registry.kind == kind:
            assert registry.get(built_in) is part


@BY_KIND
def test_a_misspelt_name_lists_what_was_built_in(row: tuple[str, ...], built_in: str) -> None:
    *others, chosen = shlex.split(row[5])
    with pytest.raises(CONFIG_ERRORS) as refused:
        build(*others, f"{chosen}x")
    sentence = explain(refused.value)
    assert f"Did you mean '{built_in}'?" in sentence
    listed = re.split(r"[.,] ?", sentence.partition("Known: ")[2])
    assert PARTS[row[0]].keys() <= set(listed)


# -- files, functions and lists ----------------------------------------------------------------------------------------


def test_every_file_that_the_page_names_is_there() -> None:
    planned = {row[3] for row in PART_ROWS}
    named = set(re.findall(r"(?<![./\w])\w[\w/]*/\w+\.py", PAGE)) - planned
    folders = (PACKAGE, ROOT, ROOT / "docs")
    assert not [name for name in named if not any((folder / name).is_file() for folder in folders)]


def test_every_function_on_the_way_of_an_experience_is_there() -> None:
    stages = re.findall(r"^\| \d+ \| .* \| `([\w/]+\.py)` \| `([\w.]+)` \|$", PAGE, re.MULTILINE)
    assert stages
    assert [(file, name) for file, name in stages if name not in defined_in(PACKAGE / file)] == []


def test_every_name_that_the_page_looks_up_in_a_file_is_there() -> None:
    places = re.findall(r"`([\w.]+)`\s+in\s+`([\w/]+\.py)`", PAGE)
    assert places
    files = {file: next(folder / file for folder in (PACKAGE, ROOT) if (folder / file).is_file()) for _, file in places}
    assert [(name, file) for name, file in places if name not in defined_in(files[file])] == []


def defined_in(file: Path) -> set[str]:
    """Functions, classes and constants of a module, and methods as `Class.method`."""
    body = ast.parse(file.read_text()).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    names = {node.name for node in body if isinstance(node, FUNCTIONS | ast.ClassDef)}
    names |= {f"{kind.name}.{node.name}" for kind in classes for node in kind.body if isinstance(node, FUNCTIONS)}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


SIDE_EFFECTS = (
    r"os\.environ\[.*\] =|os\.environ\.(?:setdefault|update|pop)|del os\.environ|filterwarnings|simplefilter"
    r"|signal\.signal\(|torch\.set_(?!grad)|seed_everything|atexit\.register|register_at_fork|sys\.path\.insert"
    r"|sys\.path \+=|mallopt\(|madvise\(|prctl\(|\.handlers\.clear|\.setLevel\(|addHandler\(|register_new_resolver"
    r"|_dynamo\.config|Interface\.register\(|\.__class__ =|precision_plugin =|os\.environ \|"
)


def test_the_list_of_side_effects_is_complete() -> None:
    [table] = re.findall(r"## Side effects on the process\n.*", PAGE, re.DOTALL)
    doing = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(SIDE_EFFECTS, path.read_text())
    }
    assert doing <= set(re.findall(r"`([\w/]+\.py)`", table))

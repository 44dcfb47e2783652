"""Blocks of code and commands in the documentation run, each as its language means (support/doc_blocks.py)."""

import ast
import importlib.metadata
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.compose import composed
from support.doc_blocks import COMMAND, LANGUAGES, PAGES, Block, blocks_of, commands_of, composing
from support.runs import ROOT

from trinity_lightning.build import eval_sources, train_source
from trinity_lightning.config.registry import import_object
from trinity_lightning.config.run import typed_config, validate
from trinity_lightning.explorer.tasks import Task
from trinity_lightning.explorer.workflows import MathWorkflow
from trinity_lightning.train import check

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
TRL = ROOT / "docs" / "from_trl.md"


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


# -- what the pages show -----------------------------------------------------------------------------------------------


def test_every_fence_has_a_language_that_is_run() -> None:
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []
    text = [block for block in of("text") if any(COMMAND.match(line.strip()) for line in block.text.splitlines())]
    assert [str(block) for block in text] == [], "commands belong into a block of `sh`"


def test_commands_are_all_that_a_block_of_sh_has() -> None:
    lines = [(str(block), line) for block in of("sh") for line in commands_of(block.page)]
    assert [place for place, line in lines if not COMMAND.match(line)] == []


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_entries_can_be_read(block: Block) -> None:
    left, entries = block.text.strip(), []
    while left:
        entry, end = json.JSONDecoder().raw_decode(left)
        entries.append(entry)
        left = left[end:].lstrip()
    assert entries
    assert all(isinstance(entry, dict) for entry in entries)


def scripts() -> list[Block]:
    """Scripts that need no model: that without Hydra is run by test_readme.py, and that of TRL is checked below."""
    return [block for block in of("python") if not block.file and not re.search(r"L\.Trainer|from trl", block.text)]


@pytest.mark.parametrize("block", [*scripts(), *(block for block in of("python") if block.file)], ids=str)
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {"__name__": "shown"})


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that the modules of a page are imported from, and nobody else's of the same names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("my_")]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def write_files(page: Path, folder: Path) -> None:
    """Write what a page says to save: modules, recipes, and a file of tasks."""
    recipes = folder / "my_conf" / "recipe"
    recipes.mkdir(parents=True)
    for block in blocks_of(page):
        if block.file:
            (folder / block.file).write_text(block.text)
        elif block.language == "yaml":
            (recipes / f"{yaml.safe_load(block.text)['name']}.yaml").write_text(block.text)
    entries = [block.text for block in blocks_of(page) if block.language == "json"]
    tasks = entries[0] if entries else '{"prompt": "1 + 1 =", "question": "1 + 1 =", "answer": "2"}\n' * 10
    for name in ("subtraction", "sums"):
        (folder / f"{name}.jsonl").write_text(tasks)


TRAINING = [
    (page, command)
    for page in PAGES
    if any(block.file for block in blocks_of(page))
    for command in commands_of(page)
    if re.match(r"python -m trinity_lightning\.(train|evaluate) ", command) and "my_" in command
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), TRAINING, ids=[command for _, command in TRAINING])
def test_a_command_with_parts_of_the_page_can_begin(page: Path, command: str, readers_folder: Path) -> None:
    """Composed with the page's recipes, checked as a run checks itself, and its tasks are made."""
    write_files(page, readers_folder)
    _, _, module, *words = shlex.split(command)
    words = [word for word in words if word != "--multirun"]
    if words[0] == "--config-dir":
        words[:2] = [f"hydra.searchpath=[file://{readers_folder}/{words[1]}]"]
    words = [word if "[" in word else word.partition(",")[0] for word in words if not word.startswith("logger=")]
    program = module.rpartition(".")[2]
    config = composed(*words, "model=tiny", "model.name=tiny", "logger=csv", name=program)
    if program == "evaluate":
        assert eval_sources(validate(config))
        return
    check(config)
    tasks = train_source(typed_config(config)).next_tasks(2)
    assert len(tasks) == 2


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_is_a_recipe_of_the_page_or_a_file_of_conf(block: Block) -> None:
    """Recipes with a command are composed above; an excerpt is as the shipped recipe has it."""
    if block.page.parent.name == "config":
        group = ROOT / "conf" / block.page.stem
        assert block.text.strip() in {path.read_text().strip() for path in group.glob("*.yaml")}
    elif "name" not in (shown := yaml.safe_load(block.text)):
        shipped = [yaml.safe_load(path.read_text()) for path in (ROOT / "recipes").glob("*.yaml")]
        assert any(within(shown, recipe) for recipe in shipped)
    else:
        recipe = shown["name"]
        assert block.text.startswith("# @package _global_\n")
        assert any("--config-dir my_conf" in line and f"+recipe={recipe}" in line for line in commands_of(block.page))


def within(part: Any, whole: Any) -> bool:
    """True if all keys of nested mappings are in another one, with the same values."""
    if not isinstance(part, dict) or not isinstance(whole, dict):
        return part == whole
    return all(key in whole and within(value, whole[key]) for key, value in part.items())


OTHERS = sorted({command for page in PAGES for command in commands_of(page) if not composing(command)})
# Where programs of other libraries declare their subcommands and options: a distribution, and its files.
DECLARED = {
    "pip": ("pip", ["pip/_internal/commands/__init__.py", "pip/_internal/cli/cmdoptions.py"]),
    "pre-commit": ("pre_commit", ["pre_commit/main.py"]),
    "pytest": ("pytest", ["_pytest/mark/__init__.py", "_pytest/main.py", "_pytest/terminal.py", "_pytest/runner.py"]),
    "ray": ("ray", ["ray/scripts/scripts.py"]),
    "torchrun": ("torch", ["torch/distributed/run.py"]),
    "wandb": ("wandb", ["wandb/cli/cli.py"]),
}


@pytest.mark.parametrize("command", OTHERS)
def test_a_program_and_its_options_exist(command: str) -> None:
    """Commands of this package are accepted by test_docs.py; of all others program, file and options are there."""
    for part in re.split(r" && | > \S+", command):
        words = [word for word in shlex.split(part) if not re.match(r"[A-Z_]+=", word)]
        if words:
            check_program(words)


def check_program(words: list[str]) -> None:
    program, *rest = words
    if program == "python" and rest[0] == "-m":
        program, *rest = rest[1:]
    if program in ("source", "."):
        assert rest == [".venv/bin/activate"]
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets)
    elif program == "srun":
        check_program(rest)
    else:
        declared, places = declarations(program, rest)
        assert [
            word for word in rest if word.startswith("-") and not is_declared(word.partition("=")[0], declared)
        ] == []
        assert [word for word in places if not (ROOT / word).exists() and word not in READERS_FILES] == []
        extras = [name for word in rest for name in re.findall(r"^\S*\[([\w,]+)\]$", word)]
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {name for extra in extras for name in extra.split(",")} <= known.keys()


READERS_FILES = ("results.jsonl", "a,b", "outputs/grpo/TIME", "outputs/subtraction/TIME")


def is_declared(option: str, declared: str) -> bool:
    return re.search(rf"[\"'` ,]{re.escape(option)}(?=[\"'` ,/=])", declared) is not None or option in ("--help", "-h")


def declarations(program: str, rest: list[str]) -> tuple[str, list[str]]:
    """The text in which a program's options are declared, and the arguments that are files."""
    files = [word for word in rest if "/" in word and not word.startswith("-")]
    ours = {
        "report": "report",
        **{path.stem: f"cli/{path.stem}" for path in (ROOT / "trinity_lightning/cli").glob("*.py")},
    }
    if program == "python":
        return (ROOT / rest[0]).read_text(), files
    if program.startswith("trinity_lightning."):
        return (ROOT / f"{program.replace('.', '/')}.py").read_text(), []
    if program.startswith("trinity-lightning"):
        name = program.removeprefix("trinity-lightning").lstrip("-") or next((w for w in rest if w in ours), "train")
        return (ROOT / "trinity_lightning" / f"{ours.get(name, name)}.py").read_text(), []
    distribution, sources = DECLARED[program]
    installed = importlib.metadata.distribution(distribution)
    text = "\n".join(Path(str(installed.locate_file(file))).read_text() for file in sources)
    subcommand = (
        [word for word in rest if not word.startswith("-")][:1] if program not in ("pytest", "torchrun") else []
    )
    assert [word for word in subcommand if word not in text] == []
    return text, files if program == "pytest" else []


# -- TRL ---------------------------------------------------------------------------------------------------------------


def trl_arguments() -> tuple[set[str], set[str]]:
    """Arguments of GRPOConfig: its own, and those that it inherits; read, not imported, which would take seconds."""
    grpo = _annotated(importlib.metadata.distribution("trl").locate_file("trl/trainer/grpo_config.py"))
    trl = _annotated(importlib.metadata.distribution("trl").locate_file("trl/trainer/base_config.py"))
    files = importlib.metadata.distribution("transformers").locate_file("transformers/training_args.py")
    return grpo, grpo | trl | _annotated(files)


def _annotated(path: object) -> set[str]:
    tree = ast.parse(Path(str(path)).read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    names = [node.target for cls in classes for node in cls.body if isinstance(node, ast.AnnAssign)]
    return {name.id for name in names if isinstance(name, ast.Name)}


def test_every_argument_of_grpo_config_has_a_row() -> None:
    grpo, known = trl_arguments()
    tables = TRL.read_text().partition("## GRPOConfig, argument by argument")[2].partition("| `loss_type` | here |")
    rows = [line for part in (tables[0], tables[2]) for line in part.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert grpo - named - {"_VALID_DICT_FIELDS"} == set(), "arguments of TRL's that docs/from_trl.md lacks"
    assert (
        named - known - {"peft_config", "dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"} == set()
    )


def test_the_script_for_trl_has_arguments_that_trl_has() -> None:
    [script] = [block.text for block in of("python") if "from trl" in block.text]
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    [config] = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "GRPOConfig"]
    assert {keyword.arg for keyword in config.keywords} <= trl_arguments()[1]


def test_trls_reward_is_adapted(readers_folder: Path) -> None:
    write_files(TRL, readers_folder)
    correct: Any = import_object("my_adapted.correct")

    task = Task(MathWorkflow, raw_task={"prompt": "1 + 1 =", "answer": "2"})
    assert (correct("It is 2", task), correct("3", task)) == (1.0, 0.0)

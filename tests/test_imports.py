"""The architecture as tests: imports go one way, in no circle, at the top of a file; the reading list is measured."""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.runs import environment

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "trinity_lightning"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
}

# What joins the rooms, and may import all of them.
TOPS = (
    "train",
    "build",
    "evaluate",
    "evaluation",
    "engines",
    "report",
    "resume",
)
PACKAGE_TOPS = (
    "plan",
    "plan.__main__",
    "plan.command",
    "plan.gpu",
    "plan.here",
    "plan.memory",
    "plan.pictures",
    "plan.run",
    "plan.start",
    "plan.trial",
    "explorer.callback",
    "explorer.distributed",
    "buffer.datamodule",
    "buffer.dataset",
    "buffer.held_out",
    "buffer.offline",
)
COMMANDS = {module for module in MODULES if module.startswith(f"{PACKAGE}.cli")}  # one file for each command
TOP = {f"{PACKAGE}.{name}" for name in (*TOPS, *PACKAGE_TOPS)} | COMMANDS
# The package that offers a module of the top under its own name.
RE_EXPORTERS = {f"{PACKAGE}.explorer"}
EXPLORER_PARTS = ("explorer.tasks", "explorer.rewards", "explorer.workflows", "explorer.models")
# Longest prefix first: `explorer.tasks` is a room of its own within `explorer`.
ROOMS = (
    *EXPLORER_PARTS,
    "buffer.operators",
    "explorer",
    "buffer",
    "algorithm",
    "trainer",
    "monitor",
    "sync",
    "common",
    "config",
)
MAY_IMPORT = {
    "config": {"config"},
    "common": {"common", "config"},
    "sync": {"common", "config", "sync"},
    **{room: {"common", "config", "sync", *EXPLORER_PARTS} for room in EXPLORER_PARTS},
    "explorer": {"common", "config", "sync", *EXPLORER_PARTS, "explorer", "trainer"},
    "buffer.operators": {"common", "config", "buffer.operators"},
    "algorithm": {"common", "config", "algorithm"},
    "buffer": {"common", "config", "buffer.operators", "algorithm", "buffer"},
    "trainer": {"common", "config", "sync", "algorithm", "trainer"},
    "monitor": {"common", "config", "monitor"},
}
MAY_USE_LIGHTNING = {
    *TOP,
    f"{PACKAGE}.explorer.interruption",
    *(f"{PACKAGE}.trainer.{name}" for name in ("policy", "garbage", "ddp", "fsdp", "checkpoint", "optim")),
}

# Programs: they refuse a wrong command before they import what a run needs.
ENTRY_POINTS = {f"{PACKAGE}.{name}" for name in ("train", "evaluate", "report", "plan.command")} | COMMANDS
# Its names are imported at their first use: `explorer.tasks` and `explorer.rewards` must be importable without torch.
IMPORTS_ON_USE = {f"{PACKAGE}.explorer"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
IMPORTS_BY_PATH = {"import_object", "import_module", "__import__"}
OWN_NAMES = {"__name__", "__package__"}  # variables of every module, from which a path within the package can be made

MAX_FILE_LINES = 600  # cut by idea, not by length
MAX_FUNCTION_LINES = 50  # lines of code: signatures with their types and docstrings may be as long as they need


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def room_of(module: str) -> str:
    """The room a module lives in; "top" for what joins the rooms, "root" for what is in none."""
    if module in TOP:
        return "top"
    inside = module.removeprefix(PACKAGE).removeprefix(".")
    return next((room for room in ROOMS if inside == room or inside.startswith(room + ".")), "root")


def imports_in(source: str) -> Iterator[str]:
    """Dotted names imported anywhere in a module, also within functions; `from a import b` is a.b."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ("." * node.level + f"{node.module}.{alias.name}" for alias in node.names)


def wrong_imports(module: str, source: str) -> list[str]:
    """The imports that this module must not have, each as a line to read."""
    wrong = []
    for name in imports_in(source):
        target = name if name in MODULES else name.rpartition(".")[0]
        room, other = room_of(module), room_of(target)
        if name.startswith("."):
            wrong.append(f"{module}: relative import {name}")
        elif name.split(".")[0] in {"lightning", "pytorch_lightning"}:
            if module not in MAY_USE_LIGHTNING and room != "monitor":
                wrong.append(f"{module} imports {name}")
        elif target.split(".")[0] == PACKAGE and room != "top" and other != "root":
            re_exported = module in RE_EXPORTERS and target.startswith(module + ".")
            if other not in MAY_IMPORT[room] and not re_exported:
                wrong.append(f"{module} ({room}) imports {target} ({other})")
    return wrong


def test_imports_go_one_way() -> None:
    wrong = [line for module, path in MODULES.items() for line in wrong_imports(module, path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("common.random_state", "from trinity_lightning.algorithm import kl"),
        ("algorithm.kl", "import trinity_lightning.buffer.operators"),
        ("explorer.tasks.task", "from trinity_lightning.explorer.scheduler import Scheduler"),
        ("explorer.scheduler", "from trinity_lightning.explorer.callback import ExplorerCallback"),
        ("sync.proof", "def f():\n    from trinity_lightning.explorer import models"),
        ("sync.proof", "import lightning.pytorch as pl"),
        ("common.random_state", "from .errors import TrinityError"),
    ],
)
def test_a_wrong_import_is_found(module: str, statement: str) -> None:
    assert len(wrong_imports(f"{PACKAGE}.{module}", statement)) == 1


def test_every_module_has_a_room() -> None:
    root = {module for module in MODULES if room_of(module) == "root"}
    assert root == {PACKAGE, f"{PACKAGE}.errors"}


def test_every_exception_is_a_module() -> None:
    exceptions = TOP | MAY_USE_LIGHTNING | RE_EXPORTERS | ENTRY_POINTS | IMPORTS_ON_USE
    assert exceptions - MODULES.keys() == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    ["config.run", "evaluate", "report", "cli.doctor", "monitor.report.comparison_page"],  # `evaluate` imports `train`
)
def test_configuration_is_read_without_heavy_imports(module: str) -> None:
    heavy = ["torch", "lightning", "transformers", "vllm", "datasets", "wandb"]
    code = f"import sys, {PACKAGE}.{module}; print(*(name for name in {heavy} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


# -- circles and late imports ------------------------------------------------------------------------------------------


class Import(NamedTuple):
    """An import of a module of the package.

    Attributes:
        target: the module.
        line: its line.
        is_late: True within a function, where it runs at the first call.
    """

    target: str
    line: int
    is_late: bool


@functools.cache
def own_imports(source: str) -> list[Import]:
    """The imports of the package's modules, without those that only type checkers see.

    `from package.module import x` also runs `package/__init__.py` first. That is left out, as usual in Python: every
    module would otherwise stand in a circle with a package that offers its names.
    """
    constants = paths_by_name(source)
    return [
        Import(target, node.lineno, is_late)
        for node, is_late in nodes_that_run(source)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
        for target in targets_of(node, constants)
    ]


def nodes_that_run(source: str) -> Iterator[tuple[ast.AST, bool]]:
    """The syntax tree without what only type checkers see, each node with True if it is within a function."""
    todo: list[tuple[ast.AST, bool]] = [(parsed(source), False)]
    while todo:
        node, is_late = todo.pop()
        yield node, is_late
        is_late = is_late or isinstance(node, FUNCTIONS | ast.Lambda)
        for_types = body_for_types(node)
        todo += [(child, is_late) for child in ast.iter_child_nodes(node) if child not in for_types]


def body_for_types(node: ast.AST) -> list[ast.stmt]:
    """The body of a plain `if TYPE_CHECKING:`. Its `else:` runs, and so does the body of any other condition."""
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        return node.body
    return []


def targets_of(node: ast.Import | ast.ImportFrom | ast.Call, constants: Mapping[str, set[str]]) -> set[str]:
    """The modules of the package that a statement imports, or that a call imports by a path."""
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        names = {f"{node.module}.{alias.name}" for alias in node.names}
    else:
        names = paths_in(node, constants)
    return {module_of(name) for name in names if name.split(".")[0] == PACKAGE}


def paths_in(call: ast.Call, constants: Mapping[str, set[str]]) -> set[str]:
    """The paths in the arguments of `import_object(...)`, `import_module(...)` or `__import__(...)`.

    A path that is made in the call, as by `"trinity_lightning." + name`, is known by its beginning alone. One that is
    made of `__name__` counts as the package itself.
    """
    if getattr(call.func, "attr", getattr(call.func, "id", None)) not in IMPORTS_BY_PATH:
        return set()
    parts = [part for argument in [*call.args, *call.keywords] for part in ast.walk(argument)]
    variables = {part.id for part in parts if isinstance(part, ast.Name)}
    texts = {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    paths = {text for text in texts if text.split(".")[0] == PACKAGE}
    paths |= {path for variable in variables for path in constants.get(variable, ())}
    relative = [text for text in texts if text.startswith(".")]
    if relative and paths:
        paths = {importlib.util.resolve_name(text, path) for text in relative for path in paths}
    return paths | ({PACKAGE} if variables & OWN_NAMES else set())


def paths_by_name(source: str) -> dict[str, set[str]]:
    """The paths within the package that variables of a file are assigned, by the names of the variables."""
    paths: dict[str, set[str]] = {}
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            texts = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            named = {text for text in texts if isinstance(text, str) and text.split(".")[0] == PACKAGE}
            for variable in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if named and isinstance(variable, ast.Name):
                    paths.setdefault(variable.id, set()).update(named)
    return paths


def module_of(name: str) -> str:
    """The module that has this name: itself, or the longest one that it begins with."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules, each of which reaches every other one by its imports."""
    reached = {name: reached_from(name, arrows) for name in arrows}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in arrows
        if name in reached[name]
    }
    return sorted(map(sorted, groups))


def reached_from(name: str, arrows: Mapping[str, set[str]]) -> set[str]:
    reached, todo = set[str](), [name]
    while todo:
        new = arrows[todo.pop()] - reached
        reached |= new
        todo += new
    return reached


def test_no_circle_of_imports() -> None:
    """Imports within functions count, too."""
    arrows = {
        module: {imported.target for imported in own_imports(path.read_text())} - {module}
        for module, path in MODULES.items()
    }
    assert circles(arrows) == []


def test_modules_of_the_package_are_imported_at_the_top() -> None:
    late = [
        f"{module}, line {imported.line}: {imported.target}"
        for module, path in MODULES.items()
        if module not in ENTRY_POINTS | IMPORTS_ON_USE
        for imported in own_imports(path.read_text())
        if imported.is_late
    ]
    assert not late, "\n".join(late)


@pytest.mark.parametrize(
    "statement",
    [
        "from trinity_lightning.common import files",
        "from trinity_lightning.common.files import write_atomically",
        "import trinity_lightning.common.files as f",
        "write = import_object('trinity_lightning.common.files.write_atomically')",
        "importlib.import_module('trinity_lightning.common.files')",
        "import_object(f'trinity_lightning.common.files.{name}')",
        "import_object(path='trinity_lightning.common.files')",
        "import_module('.files', 'trinity_lightning.common')",
        "import_module('.files', package='trinity_lightning.common')",
        "__import__('trinity_lightning.common.files', fromlist=['write_atomically'])",
    ],
)
def test_a_late_import_is_found(statement: str) -> None:
    [late] = own_imports(f"def f(name):\n    if name:\n        {statement}")
    assert (late.target, late.line, late.is_late) == (f"{PACKAGE}.common.files", 3, True)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("PATH = 'trinity_lightning.common.files'\ndef f():\n    import_module(PATH)", "common.files"),
        ("PATHS: dict = {1: 'trinity_lightning.common'}\ndef f():\n    import_object(PATHS[1])", "common"),
        ("f = lambda: import_object('trinity_lightning.common.files.write_atomically')", "common.files"),
        ("def f(name):\n    import_module('trinity_lightning.' + name)", ""),
        ("def f(name):\n    import_module(f'{__name__}.{name}')", ""),
        ("def f(name):\n    import_module('.' + name, __package__)", ""),
        ("def f():\n    if not TYPE_CHECKING:\n        import trinity_lightning.common", "common"),
        ("def f():\n    if TYPE_CHECKING:\n        pass\n    else:\n        import trinity_lightning.common", "common"),
        ("def f(x):\n    if TYPE_CHECKING or x:\n        import trinity_lightning.common", "common"),
    ],
)
def test_a_late_import_is_found_however_it_is_written(source: str, target: str) -> None:
    [late] = own_imports(source)
    assert (late.target, late.is_late) == (f"{PACKAGE}.{target}".removesuffix("."), True)


def test_a_late_import_by_the_name_of_a_module_is_found_in_the_package() -> None:
    """The one module that is excepted has it."""
    for module in IMPORTS_ON_USE:
        assert any(imported.is_late for imported in own_imports(MODULES[module].read_text()))


def test_imports_for_type_checkers_count_neither_as_late_nor_as_a_circle() -> None:
    assert own_imports("def f():\n    if TYPE_CHECKING:\n        from trinity_lightning.common import files") == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


# -- what there is to read ---------------------------------------------------------------------------------------------


def test_files_and_functions_stay_short() -> None:
    long = []
    for module, path in MODULES.items():
        source = path.read_text()
        lines = len(source.splitlines())
        if lines > MAX_FILE_LINES:
            long.append(f"{module}: {lines} lines")
        for node in ast.walk(parsed(source)):
            if isinstance(node, FUNCTIONS):
                code = node.body[1:] if ast.get_docstring(node) else node.body
                length = (code[-1].end_lineno or 0) - code[0].lineno + 1 if code else 0
                if length > MAX_FUNCTION_LINES:
                    long.append(f"{module}.{node.name}: {length} lines")
    assert not long, "\n".join(long)


def listed() -> dict[str, str]:
    """The files that docs/architecture.md lists as those of a default run, each with why a reader opens it."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    [section] = re.findall(r"^## What a default run runs\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"^\| `([\w/]+\.py)` \| (.+) \|$", section, re.MULTILINE))


@pytest.mark.engine
def test_the_reading_list_is_what_a_default_run_runs(tmp_path: Path) -> None:
    """Two steps of the default recipe on the tiny model, whose responses have to get different rewards."""
    if importlib.util.find_spec("vllm") is None or torch.cuda.is_available():
        pytest.skip("the list is measured with vLLM on a CPU")
    script, ran = ROOT / "tests" / "support" / "functions_run.py", tmp_path / "ran"
    reward = "reward={math: 1.0, contains_digits: 0.1}"
    done = subprocess.run(
        [sys.executable, str(script), str(ran), f"{PACKAGE}.train", "+recipe=grpo", "model=tiny", "steps=2", reward],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    files, known = set(ran.read_text().split()), listed()
    lines = [f"add:    | `{name}` | why a reader opens it |" for name in sorted(files - known.keys())]
    lines += [f"remove: | `{name}` | {known[name]} |" for name in sorted(known.keys() - files)]
    assert not lines, "\n".join(["docs/architecture.md, What a default run runs:", *lines])

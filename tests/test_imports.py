"""The architecture as tests: imports go one way, heavy libraries load late, and what must be read stays small."""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

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
    "gpu_plan",
    "plan",
    "planner",
    "report",
    "resume",
    "servers",
)
PACKAGE_TOPS = (
    "explorer.callback",
    "explorer.distributed",
    "buffer.datamodule",
    "buffer.dataset",
    "buffer.offline",
)
TOP = {f"{PACKAGE}.{name}" for name in (*TOPS, *PACKAGE_TOPS)}
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
    *(f"{PACKAGE}.trainer.{name}" for name in ("policy", "ddp", "fsdp", "checkpoint_io", "other_models")),
}

MAX_FILE_LINES = 600  # cut by idea, not by length
MAX_FUNCTION_LINES = 50  # of code: signatures with their types and docstrings may be as long as they need

# What `+recipe=grpo` starts from: the modules that its names in the table of parts stand for are imported by name, and
# metrics.csv, the report and what experiences are sent as by a function that every run calls.
DEFAULT_RUN = (
    "train",
    "build",
    "explorer.models.vllm_engine",
    "explorer.workflows.workflow",
    "explorer.rewards.answers",
    "algorithm.add_strategy.add_strategy",
    "algorithm.policy_loss.ppo",
    "monitor.csv_logger",
    "monitor.report",
    "common.experience.codec",
)
MAX_DEFAULT_RUN = 8_000  # lines of code
MAX_FILES, MAX_LINES = 182, 35_612  # of the package


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
    """What this module must not import, in words."""
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


@pytest.mark.slow
@pytest.mark.parametrize("module", ["config.checks", "evaluate", "report"])  # the second imports `train`
def test_configuration_is_read_without_heavy_imports(module: str) -> None:
    heavy = ["torch", "lightning", "transformers", "vllm", "datasets", "wandb"]
    code = f"import sys, {PACKAGE}.{module}; print(*(name for name in {heavy} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_files_and_functions_stay_short() -> None:
    long = []
    for module, path in MODULES.items():
        source = path.read_text()
        lines = len(source.splitlines())
        if lines > MAX_FILE_LINES:
            long.append(f"{module}: {lines} lines")
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                code = node.body[1:] if ast.get_docstring(node) else node.body
                length = (code[-1].end_lineno or 0) - code[0].lineno + 1 if code else 0
                if length > MAX_FUNCTION_LINES:
                    long.append(f"{module}.{node.name}: {length} lines")
    assert not long, "\n".join(long)


# -- what must be read -------------------------------------------------------------------------------------------------


NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_code(source: str) -> int:
    """Lines without docstrings, imports, comments and blank ones."""
    left_out: set[int] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body and ast.get_docstring(node, clean=False) is not None else None
            left_out.update(range(first.lineno, (first.end_lineno or 0) + 1) if first else ())
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for token in tokens if token.type not in NO_CODE for n in range(token.start[0], token.end[0] + 1)}
    return len(lines - left_out)


def imported_at_once(nodes: Sequence[ast.stmt]) -> Iterator[str]:
    """What a module imports when it is imported itself: not within its functions, nor for type checkers alone."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If):
            for_checkers = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            yield from imported_at_once(node.orelse if for_checkers else [*node.body, *node.orelse])
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            yield from imported_at_once(node.body)


def closure(starts: Sequence[str]) -> set[str]:
    """The modules of the package that are imported with these, packages of modules included."""
    found: set[str] = set()
    waiting = list(starts)
    while waiting:
        name = waiting.pop()
        while name and name not in MODULES:  # a name within a module, or a library
            name = name.rpartition(".")[0]
        if name and name not in found:
            found.add(name)
            waiting += [name.rpartition(".")[0], *imported_at_once(parsed(MODULES[name].read_text()).body)]
    return found


def test_the_default_run_needs_little_of_the_package() -> None:
    needed = closure([f"{PACKAGE}.{name}" for name in DEFAULT_RUN])
    sizes = {name: lines_of_code(MODULES[name].read_text()) for name in needed}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:10]
    assert sum(sizes.values()) <= MAX_DEFAULT_RUN, f"{sum(sizes.values())}, most of them in {largest}"


def bound_in(nodes: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that a module has as soon as it is imported; others are imported when they are asked for."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def test_the_default_run_asks_packages_for_nothing_that_they_import_later() -> None:
    """What is counted is then all that is imported."""
    late = []
    for name in closure([f"{PACKAGE}.{name}" for name in DEFAULT_RUN]):
        for imported in imported_at_once(parsed(MODULES[name].read_text()).body):
            package, _, attribute = imported.rpartition(".")
            if package in MODULES and imported not in MODULES:
                bound = bound_in(parsed(MODULES[package].read_text()).body)
                late += [] if attribute in bound else [f"{name} imports {imported}"]
    assert not late, "\n".join(late)


def test_the_package_does_not_grow() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in MODULES.values())
    assert (len(MODULES) <= MAX_FILES, lines <= MAX_LINES) == (True, True), f"{len(MODULES)} files, {lines} lines"


def test_an_experience_passes_through_few_modules() -> None:
    """From vLLM to the loss, as the picture in docs/architecture.md numbers them."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    [picture] = re.findall(r"TRY IT(.*?)THE LOSS", page, re.DOTALL)
    way = [f"{PACKAGE}.{path.replace('/', '.')}" for path in re.findall(r"\d  ([\w/]+)\.py", picture)]
    assert picture.count(".py") == len(way), "a file on the way has no number"
    assert 10 < len(way) <= 20
    assert {name.removesuffix(".__init__") for name in way} <= closure([f"{PACKAGE}.{name}" for name in DEFAULT_RUN])


def test_code_is_counted_without_docstrings_imports_and_comments() -> None:
    source = '"""A."""\n\nimport ast\n\n# b\ndef f() -> None:\n    """C.\n\n    D.\n    """\n    x = """\n    e"""\n'
    assert lines_of_code(source) == 3


def test_what_is_imported_late_is_not_at_once() -> None:
    source = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ntry:\n    from c import d\nexcept E:\n    pass\n"
    source += "def f():\n    import g\n"
    assert list(imported_at_once(parsed(source).body)) == ["b", "c.d"]

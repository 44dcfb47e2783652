"""Documentation: generated pages are up to date, files and links are there, commands can be run as they are written."""

import ast
import os
import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict
from support.compose import composed
from support.doc_blocks import PAGES, commands_of, composing
from support.runs import ROOT

from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.run import validate
from trinity_lightning.plan.command import PlanConfig, register

COMMAND = re.compile(  # of Python, or of what starts it, such as torchrun
    r"^(?: {4,}|#   )(?:\w.*\\\n +|\w.* )-m (trinity_lightning\.(?:train|evaluate|plan) (?:.*\\\n)*.*)", re.MULTILINE
)
COMMANDS = sorted(
    {
        command.replace("\\\n", " ").partition("  #")[0].strip()
        for page in [*PAGES, *ROOT.glob("recipes/*.yaml")]
        for command in COMMAND.findall(page.read_text())
        if "--config-dir" not in command  # whose recipe test_readme.py writes and runs
    }
    | {
        command
        for page in PAGES
        for shown in commands_of(page)
        if (command := composing(shown)) and "--config-dir" not in command  # of test_snippets.py and test_new.py
    }
)


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts that write the pages can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def test_config_pages_are_up_to_date() -> None:
    import config_docs  # pyright: ignore[reportMissingImports]

    written = {path.name: path.read_text() for path in (ROOT / "docs" / "config").glob("*.md")}
    assert written == config_docs.pages(), "run: python scripts/config_docs.py"
    assert config_docs.ALGORITHMS.read_text() == config_docs.algorithms_page(), "run: python scripts/config_docs.py"


def test_the_page_of_metrics_is_up_to_date() -> None:
    import metrics_docs  # pyright: ignore[reportMissingImports]

    assert metrics_docs.PAGE.read_text() == metrics_docs.metrics_page(), "run: python scripts/metrics_docs.py"


def test_every_objective_says_when_to_choose_it() -> None:
    import config_docs  # pyright: ignore[reportMissingImports]

    before, _, rest = config_docs.ALGORITHMS.read_text().partition(config_docs.BEGIN)
    by_hand = before + rest.partition(config_docs.END)[2]
    rows = " ".join(line.split("|")[1] for line in by_hand.splitlines() if line.startswith("|"))
    missing = [name for kind in ("policy loss", "add strategy") for name in PARTS[kind] if f"`{name}`" not in rows]
    assert missing == [], "add a row by hand to docs/algorithms.md: when to choose it"


def test_links_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#]+)", page.read_text())]
    assert [link for page, link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_files_that_contributing_names_are_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"(?:tests|docs|scripts|trinity_lightning)/[\w/.]*\w", page)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_docstring_begins_with_a_verb_or_a_noun() -> None:
    """A reader who meets a relative clause first has to read the sentence twice."""
    openings = re.compile(r"\s*(Of|That|Those|What|Whether|Which)\b")
    openers = [
        f"{path.relative_to(ROOT)}, line {getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        for folder in ("trinity_lightning", "tests", "benchmarks", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and openings.match(text := ast.get_docstring(node) or "")
    ]
    assert not openers, "\n".join(openers)


def test_the_tree_in_the_page_of_the_architecture_is_the_tree() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    [tree] = re.findall(r"^    conf/ .*?\n\n", page, re.MULTILINE | re.DOTALL)
    folders, named = [ROOT], set[Path]()
    for line in tree.rstrip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2 - 2
        here = folders[depth]
        paths = [here / name for name in re.split(" {2,}", line.strip())[0].split()]
        named.update(paths)
        folders[depth + 1 :] = [paths[-1]]
    assert [path for path in named if not path.exists()] == []
    inside = {path for path in (ROOT / "trinity_lightning").iterdir() if not path.name.startswith("__")}
    assert {path for path in inside if path.is_dir() or path.suffix == ".py"} <= named


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Composed and validated, in a folder with the files that it names."""
    step_file = "outputs/grpo/TIME/experiences/step_1.trxp"
    data = [
        f"{name}.jsonl"
        for name in ("subtraction", "expert", "games", "gsm8k", "heldout", "examples", "pairs", "squares", "sums")
    ]
    folders = ("FOLDER", "Qwen2.5-0.5B", "Qwen2.5-7B", "SmolVLM-256M-Instruct")
    for name in (*data, *(f"{folder}/config.json" for folder in folders), step_file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("seed", "1")  # of a loop
    program, *words = shlex.split(os.path.expandvars(command))
    if "--multirun" in words:
        words = [word.partition(",")[0] for word in words]
    overrides = [word for word in words if not word.startswith(("--", "hydra")) and word != "job"]
    if program.endswith(".plan"):
        register()
        config = composed(*overrides, name="plan")
        with open_dict(config):
            assert isinstance(OmegaConf.to_object(config.pop("plan")), PlanConfig)
        validate(config, here=False)
        return
    of_this_machine = re.search(r"trainer\.devices=[3-9]", command) is None
    validate(composed(*overrides, name=program.rpartition(".")[2]), here=of_this_machine)

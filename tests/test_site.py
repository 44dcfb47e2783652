"""The documentation site builds without a warning and has every public name; its metrics and knobs exist."""

import ast
import importlib
import re
import subprocess
import sys
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.browser import browser as browser
from support.doc_blocks import PAGES, blocks_of
from support.runs import ROOT, RunTrain, environment
from test_public_names import PUBLIC

from trinity_lightning.config.registry import import_object, options
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.monitor.presentation import METRICS, find_metric

TROUBLES = ROOT / "docs" / "troubleshooting.md"


# -- the site ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment(), "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return folder


@pytest.mark.slow
def test_pages_load_nothing_from_the_network(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//"
    )
    pages = sorted(site.rglob("*.html"))
    assert {"index.html", "troubleshooting.html", "changelog.html"} <= {page.name for page in pages}
    assert [page.name for page in pages if loads.search(page.read_text())] == []
    assert (site / "search" / "search_index.js").exists()  # which a page on disk searches


def test_the_site_is_searched_from_disk(site: Path, browser: Any) -> None:
    page, requests, errors = browser.new_page(), list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((site / "index.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("clip_ratio")
    page.wait_for_selector(".md-search-result__item")
    results = page.locator(".md-search-result__item a").evaluate_all("links => links.map(link => link.href)")
    assert any("/metrics.html" in result for result in results)
    assert [request for request in requests if not request.startswith("file:")] == errors == []


def test_a_phone_need_not_scroll_sideways(site: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 400, "height": 800})
    wide = []
    for name in ("index", "troubleshooting", "from_trl", "metrics", "api/runs"):
        page.goto((site / f"{name}.html").as_uri())
        if page.evaluate("document.documentElement.scrollWidth") > 400:
            wide.append(name)
    assert wide == []


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    described = {line.split(" ")[0] for line in lines}
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))  # which name the registries
    missing = []
    for module, names in [*PUBLIC.items(), ("", " ".join(imports_of_the_script()))]:
        for name in names.split():
            promised = (
                import_object(name)
                if "." in name
                else getattr(importlib.import_module(f"trinity_lightning.{module}"), name)
            )
            where = f"{getattr(promised, '__module__', '')}.{getattr(promised, '__qualname__', '')}"
            if where not in described and f"`{name}`" not in pages:
                missing.append(name)
    assert missing == []


def imports_of_the_script() -> list[str]:
    [script] = [block.text for page in PAGES for block in blocks_of(page) if "L.Trainer" in block.text]
    nodes = [node for node in ast.parse(script).body if isinstance(node, ast.ImportFrom)]
    return [f"{node.module}.{alias.name}" for node in nodes for alias in node.names]


# -- names -------------------------------------------------------------------------------------------------------------

CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
METRIC_HEADS = {metric.pattern.partition("/")[0] for metric in METRICS if "/" in metric.pattern}
NO_METRIC = re.compile(r"\.\w+$|=|\s|/$")  # a file, a setting, a phrase, a folder


def begins(code: str) -> bool:
    """True for a pattern of the table, or the beginning of one: `experience_pipeline/untrained`."""
    beginning = re.sub(r"<\w+>", "<>", code.removesuffix("/...")) + "/"
    return any(re.sub(r"<\w+>", "<>", f"{metric.pattern}/").startswith(beginning) for metric in METRICS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_that_a_page_names_exist(page: Path) -> None:
    named = {code for code in CODE.findall(page.read_text()) if code.partition("/")[0] in METRIC_HEADS and "/" in code}
    named = {code for code in named if not NO_METRIC.search(code)}
    plain = {re.sub(r"<\w+>", "x", re.sub(r"\{(\w+)[^}]*\}", r"\1", code)): code for code in named}
    assert [code for name, code in plain.items() if not begins(code) and not find_metric(name)] == []


def known_knobs() -> set[str]:
    """Dotted keys of the typed sections, and of what conf/ composes."""
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "config").glob("*.md"))
    return set(re.findall(r"^\| `([\w.]+)` \|", pages, re.MULTILINE))


SECTIONS = {field.name for field in fields(TrainConfig)}
FREE = re.compile(  # mappings whose keys are a part's, a library's or the user's own
    r"(add_strategy|operators|workflow|callbacks|logger|trainer|eval_tasksets|tasksets|auxiliary_models|eval_sampling)\.|"
    r"(algorithm\.policy_loss|engine|optimizer|taskset)\.(args|name)\b|algorithm\.critic\b|buffer\.(expert|dataset)\b|"
    r"model\.(chat_template_kwargs|processor_args)\.|reward_solved\."
)
READERS = (
    "index first_run your_task your_own from_trl troubleshooting metrics gpu results pictures guide_runs guide_script "
    "guide_servers report wandb commands"
)
PAGES_OF_READERS = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in READERS.split())]
KNOB = re.compile(r"['+~]*([a-z_]+(?:\.[a-z_0-9]+)+)(?:=.*)?", re.DOTALL)


@pytest.mark.parametrize("page", PAGES_OF_READERS, ids=lambda page: page.stem)
def test_knobs_that_a_page_names_exist(page: Path) -> None:
    knobs, unknown = known_knobs(), set()
    for code in CODE.findall(page.read_text()):
        for word in code.split():
            knob = KNOB.fullmatch(word)
            if knob and knob[1].partition(".")[0] in SECTIONS and knob[1] not in knobs and not FREE.match(knob[1]):
                unknown.add(knob[1])
    assert unknown == set()


def test_choices_that_a_page_names_exist() -> None:
    """A word such as engine=vllm names a choice of its group, unless it is a path of the reader's own."""
    unknown = set()
    for page in PAGES_OF_READERS:
        for code in CODE.findall(page.read_text()):
            for word in code.split():
                group, sign, choice = word.partition("=")
                if sign and (ROOT / "conf" / group).is_dir() and re.fullmatch(r"\w+", choice) and choice.islower():
                    unknown |= {word} - {f"{group}={name}" for name in options(group)}
    assert unknown == set()


# -- troubleshooting ---------------------------------------------------------------------------------------------------


@pytest.fixture
def troubleshooting(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("troubleshooting")


def test_every_symptom_has_a_section_and_every_failure_says_how_it_shows(troubleshooting: Any) -> None:
    page = TROUBLES.read_text()
    listed = re.findall(r"^\| \[[^]]+\]\(#([\w-]+)\) \|", page, re.MULTILINE)
    sections = [
        title.lower().replace(" ", "-") for title in re.findall(r"^## (.*)$", page.replace(",", ""), re.MULTILINE)
    ]
    assert listed == sections[: len(listed)]
    failures = list(troubleshooting.failures(page))
    assert len(failures) >= 14
    assert [failure.title for failure in failures if not failure.conditions + failure.messages] == []


@pytest.mark.slow
@pytest.mark.parametrize("title", ["Everything is cut off", "The gradient is not finite"])
def test_a_failure_shows_as_the_page_says(
    title: str, troubleshooting: Any, run_train: RunTrain, tmp_path: Path
) -> None:
    """The others take minutes: python scripts/troubleshooting.py."""
    [failure] = [failure for failure in troubleshooting.failures(TROUBLES.read_text()) if failure.title == title]
    (tmp_path / "my_faults.py").write_text(troubleshooting.faults(TROUBLES.read_text()))
    done = run_train(tmp_path, *failure.command[1:], "output_dir=run", "save_model=false", "explorer.eval_interval=0")
    assert failure.unseen(troubleshooting.rows_of(tmp_path / "run"), done.stdout) == []


def test_a_healthy_run_does_not_show_a_failure(troubleshooting: Any) -> None:
    [failure] = [failure for failure in troubleshooting.failures(TROUBLES.read_text()) if "cut off" in failure.title]
    healthy = [{"response_length/clip_ratio": "0.1", "response_length/max": "30", "reward/mean": ""}]
    assert failure.unseen(healthy, "") == ["response_length/clip_ratio > 0.9", "response_length/max = 2"]
    assert failure.unseen([*healthy, {"response_length/clip_ratio": "1.0", "response_length/max": "2"}], "") == []

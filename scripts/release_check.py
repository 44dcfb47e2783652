"""Check a release as a newcomer would meet it; `make release-check` calls this.

    python scripts/release_check.py [extra ...]

Builds the sdist, and the wheel from the sdist; installs the wheel with the extras (by default vLLM's build for this
machine) from the registry into an empty environment; and there, in another folder than the checkout, asks every command
for its help and trains with both engines. Takes minutes and downloads gigabytes; everything is removed at the end.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from setup import TORCH_COMPANIONS, broken_packages, engine_extra

ROOT = Path(__file__).resolve().parents[1]
# Two steps of the tiny model, in the seconds that its libraries take to load.
TRIAL = (
    "+recipe=grpo",
    "model=tiny",
    "reward=contains_digits",
    "explorer.batch_size=2",
    "explorer.repeat_times=4",
    "sampling.max_tokens=8",
    "explorer.eval_interval=0",
    "steps=2",
)
ENGINES = ("transformers", "vllm")


class ReleaseError(Exception):
    """A built release does not do what it has to; the message has the command and its output."""


def call(*command: str | Path, folder: Path, env: Mapping[str, str] | None = None) -> str:
    """The output of a command; ReleaseError when it fails."""
    process = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if process.returncode != 0:
        raise ReleaseError(f"`{' '.join(map(str, command))}` gave {process.returncode}:\n{process.stdout[-6000:]}")
    return process.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist of the checkout, and the wheel that it builds. No network is used."""
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def outside() -> dict[str, str]:
    """The environment of a command that must not see the checkout."""
    apart = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "WANDB_SERVICE")}
    return apart | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}


def train(venv: Path, folder: Path, *arguments: str) -> Path:
    """Train with the installed package, in a folder of its own; the folder of the run, which has a model."""
    output = call(venv / "bin/trinity-lightning", *TRIAL, *arguments, folder=folder, env=outside())
    runs = list(folder.glob("outputs/grpo/*"))
    if len(runs) != 1 or not (runs[0] / "model" / "model.safetensors").exists():
        raise ReleaseError(f"the run wrote no model:\n{output[-6000:]}")
    return runs[0]


def try_commands(venv: Path, folder: Path) -> None:
    """Ask the doctor about a run, and train a new project for a step."""
    command, small = venv / "bin/trinity-lightning", ("model=tiny", "engine=transformers", "logger=csv")
    call(command, "doctor", "--seconds", "120", "+recipe=grpo", *small, folder=folder, env=outside())
    call(command, "new", "mine", folder=folder, env=outside())
    recipe = ("--config-dir", "conf", "+recipe=mine", "steps=1")
    call(command, *recipe, *small, folder=folder / "mine", env=outside())


def install(wheel: Path, extras: Sequence[str], venv: Path) -> None:
    """Make an empty environment and install the wheel with everything that it asks for."""
    folder, python = venv.parent, venv / "bin/python"
    call(sys.executable, "-m", "venv", venv, folder=folder)
    call(python, "-m", "pip", "install", f"{wheel}[{','.join(extras)}]", folder=folder, env=outside())
    if broken := broken_packages(python, TORCH_COMPANIONS):  # as scripts/setup.py does, which says why
        call(python, "-m", "pip", "uninstall", "--yes", *broken, folder=folder)


def main(extras: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="release-check-") as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        print(f"built {sdist.name} and {wheel.name}", flush=True)
        chosen = list(extras) or [engine_extra()]
        install(wheel, chosen, venv := folder / "venv")
        print(f"installed with {', '.join(chosen)} into an empty environment", flush=True)
        for script in sorted((venv / "bin").glob("trinity-lightning*")):
            call(script, "--help", folder=folder, env=outside())
        for engine in ENGINES if {"cpu", "vllm"} & {*chosen} else ENGINES[:1]:
            (place := folder / engine).mkdir()
            print(f"trained with engine={engine}: {train(venv, place, f'engine={engine}').name}", flush=True)
        try_commands(venv, folder)
        print("asked the doctor, and trained a new project", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ReleaseError as failure:
        sys.exit(f"release-check: {failure}")

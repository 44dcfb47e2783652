"""Run a program, and write down the files of the package with functions that ran.

python tests/support/functions_run.py FILE PROGRAM ARGUMENTS

FILE gets one path a line, relative to the package. A function that is called by an import does not count: a file that
is only imported is none that the run needs.
"""

import inspect
import runpy
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = f"{Path(__file__).resolve().parents[2] / 'trinity_lightning'}/"
IMPORT = "<frozen importlib._bootstrap>"


def watch() -> set[str]:
    """The files with functions that run from now on, in any thread; the set grows with them."""
    files: set[str] = set()

    def note(code: CodeType, frame: FrameType | None) -> bool:
        """Add the file of a function that begins to run; False if it has to be looked at again when it is called."""
        path = code.co_filename
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or a class
        if path in files or not path.startswith(PACKAGE) or not path.endswith(".py") or not is_function:
            return True
        if is_importing(frame):
            return False
        files.add(path)
        return True

    if sys.version_info >= (3, 12):
        monitoring = sys.monitoring

        def begins(code: CodeType, _: int) -> Any:
            return monitoring.DISABLE if note(code, sys._getframe(1)) else None

        monitoring.use_tool_id(monitoring.PROFILER_ID, "functions_run")
        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.PY_START, begins)
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.PY_START)
    else:

        def called(frame: FrameType, event: str, argument: Any) -> None:
            note(frame.f_code, frame)  # None is returned: lines are not traced

        threading.settrace(called)
        sys.settrace(called)
    return files


def is_importing(frame: FrameType | None) -> bool:
    """True if a module is being imported further up the stack."""
    while frame is not None and frame.f_code.co_filename != IMPORT:
        frame = frame.f_back
    return frame is not None


if __name__ == "__main__":
    target, program, *arguments = sys.argv[1:]
    ran = watch()
    sys.argv = [program, *arguments]
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        Path(target).write_text("".join(f"{path.removeprefix(PACKAGE)}\n" for path in sorted(ran)))

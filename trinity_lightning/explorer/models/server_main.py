"""vLLM's server as a child process that never outlives its parent; started by path, `python -P server_main.py FLAGS`.

Its standard input is a pipe that the parent holds open and never writes to. However the parent ends, the pipe ends with
it; then the server and the processes that it started end too.
"""

import os
import runpy
import signal
import threading


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin: a thread that waits in there would crash Python at its own end
    os.killpg(os.getpgid(0), signal.SIGKILL)  # the parent made this process the leader of a group of its own


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)

"""Processes of this machine."""

import signal


def how_it_ended(code: int) -> str:
    """How a process with this return code of `subprocess` ended: "ended with exit code 1", say."""
    killed = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was ended by signal {-code}{killed}" if code < 0 else f"ended with exit code {code}"

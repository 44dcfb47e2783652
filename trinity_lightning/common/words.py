"""Words for messages: lists that are cut, and how a process ended."""

import signal
from collections.abc import Sequence


def listed(names: Sequence[object], most: int) -> str:
    """The first `most` names, and how many more there are: "3, 5, 8 and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def how_it_ended(code: int) -> str:
    """A process's end in words, from its return code as `subprocess` has it: "ended with exit code 1"."""
    killed = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was ended by signal {-code}{killed}" if code < 0 else f"ended with exit code {code}"

"""What is said of a taskset that is not the one that a checkpoint has the cursor of."""

from collections.abc import Mapping
from typing import Any, Never

from trinity_lightning.errors import ConfigError


def refuse_state(name: str, state: Mapping[str, Any], own: Mapping[str, Any]) -> Never:
    """A saved state that is not of this taskset, whose `own` state is given; a ConfigError that says what differs."""
    if state.keys() != own.keys():
        raise ConfigError(f"not the state of a taskset: it has {sorted(state)}, expected {sorted(own)}.")
    different = [
        f"{key} {state[key]!r} -> {own[key]!r}"
        for key in own
        if key not in ("position", "difficulty") and state[key] != own[key]
    ]
    raise ConfigError(
        f"taskset '{name}' is not the one that was saved ({', '.join(different)}): its cursor would point "
        "at other tasks. Resume with the saved taskset, or start a new run."
    )

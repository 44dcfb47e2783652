"""One sentence for every misspelt name: what is allowed, and the nearest match."""

import difflib
from collections.abc import Iterable


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name most like `name`, or None when none is alike."""
    return next(iter(difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)), None)


def unknown_name(kind: str, name: object, allowed: Iterable[str]) -> str:
    """A message for an unknown `name` of a `kind`: the nearest match, then everything allowed."""
    names = sorted(allowed)
    match = nearest(str(name), names)
    hint = f" Did you mean '{match}'?" if match else ""
    return f"unknown {kind} '{name}'.{hint} Known: {', '.join(names) or 'none'}."

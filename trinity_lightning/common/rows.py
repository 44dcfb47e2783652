"""Rows of data that cannot be used: they are refused together, the first few by place and reason."""

import itertools
from collections.abc import Callable, Sequence

from trinity_lightning.errors import ConfigError

MOST_NAMED = 5  # rows that a message names
MOST_COMPARED = 4096  # rows whose pictures are read to compare them, when a run is resumed


def spread(indices: Sequence[int], most: int) -> Sequence[int]:
    """At most so many of the indices, evenly spread."""
    return indices[:: -(-len(indices) // most)] if indices else indices


def check_rows(where: str, count: int, check: Callable[[int], object], place: Callable[[int], str]) -> None:
    """Check every row, and refuse the bad ones in one message.

    Args:
        where: the data's name in messages.
        count: number of rows.
        check: raises a ConfigError for the index of a bad row.
        place: the place of the row with an index, for messages.

    Raises:
        ConfigError: some rows are bad; the message names the first five by place and reason, and counts them. Its key
            is that of the bad rows if they have one in common; `configured_at` completes it.
    """
    errors: dict[int, ConfigError] = {}
    for index in range(count):
        try:
            check(index)
        except ConfigError as error:
            errors[index] = error
    if not errors:
        return
    places: dict[str, list[str]] = {}  # by reason
    for index, error in itertools.islice(errors.items(), MOST_NAMED):
        places.setdefault(str(error), []).append(place(index))
    named = " ".join(f"{', '.join(bad_rows)}: {reason}" for reason, bad_rows in places.items())
    first = next(iter(errors.values()))
    keys = {error.key for error in errors.values()}
    key = keys.pop() if len(keys) == 1 else None
    if len(errors) == 1:
        raise ConfigError(f"{where}, {named}", key=key) from first
    more = f" And {len(errors) - MOST_NAMED} more." if len(errors) > MOST_NAMED else ""
    raise ConfigError(f"{where}: {len(errors)} of {count} entries are refused. {named}{more}", key=key) from first

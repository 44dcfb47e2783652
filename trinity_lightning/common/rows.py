"""Rows of data that cannot be used: refused together, the first few by place and reason."""

from collections.abc import Callable

from trinity_lightning.errors import ConfigError

MOST_NAMED = 5  # rows that a message names


def check_rows(where: str, count: int, check: Callable[[int], object], place: Callable[[int], str]) -> None:
    """Look at every row, and refuse the bad ones in one message.

    Args:
        where: what messages call the data.
        count: number of rows.
        check: raises a ConfigError for the index of a bad row.
        place: where the row of an index is, for messages.

    Raises:
        ConfigError: some rows are bad; it names the first five by place and reason, and counts them.
    """
    reasons: dict[int, ConfigError] = {}
    for index in range(count):
        try:
            check(index)
        except ConfigError as error:
            reasons[index] = error
    if not reasons:
        return
    named = [f"{place(index)}: {reasons[index]}" for index in list(reasons)[:MOST_NAMED]]
    first = next(iter(reasons.values()))
    if len(reasons) == 1:
        raise ConfigError(f"{where}, {named[0]}") from first
    more = f" And {len(reasons) - MOST_NAMED} more." if len(reasons) > MOST_NAMED else ""
    raise ConfigError(f"{where}: {len(reasons)} of {count} entries are refused. {' '.join(named)}{more}") from first

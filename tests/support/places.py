"""Messages without the places of errors, which are lines of the tests themselves."""

import re


def without_places(message: object) -> str:
    """A message without the lines of code that it names, " (tests/my_test.py:12 in work)"."""
    return re.sub(r" \([^()]*\.py:\d+ in \w+\)", "", str(message))

"""Makes the project's docstrings what griffe reads for the API reference.

A docstring may say `a, b: text` for two arguments; griffe knows entries of one name, so each name gets the text. Links
in docstrings of the configuration lead from its pages (docs/config); from the pages in docs/api they lead there.
"""

import re
from typing import Any

from griffe import Docstring, Extension, Object

SECTION = re.compile(r"^(?:Args|Attributes|Raises):\n(?:(?: .*)?\n?)*", re.MULTILINE)
JOINT = re.compile(r"^ {4}(\w+(?:, \w+)+): (.*(?:\n(?: {5,}.*)?)*)", re.MULTILINE)
CONFIG_LINK = re.compile(r"\]\((\w+\.md)\)")


def split(text: str) -> str:
    """Return the docstring with an entry for each of the names that share one."""

    def entries(match: re.Match[str]) -> str:
        description = match[2].rstrip("\n")
        return "\n".join(f"    {name}: {description}" for name in match[1].split(", ")) + "\n" * (
            len(match[2]) - len(description)
        )

    return SECTION.sub(lambda section: JOINT.sub(entries, section[0]), text)


class Docstrings(Extension):
    """Mends every docstring."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Mend the docstring of an object."""
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = CONFIG_LINK.sub(r"](../config/\1)", split(obj.docstring.value))

"""A report is made to be passed on: passwords and keys of the configuration stay behind."""

import re

HIDDEN = "***"

_PASSWORD_IN_URL = re.compile(r"(://[^\s:/@]*:)\S+(@)")
_SECRETS = "api_?key|access_?key|private_?key|password|passwd|passphrase|secret|credential|access_?token|auth_?token"
# Besides, what ends in `token`: max_tokens and stop_token_ids are no secrets, nor are the tokens of a tokenizer.
_NAME = rf"[\w.-]*(?:(?:{_SECRETS})\w*|(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)token)"
_PREFIX = r"^ *(?:- +)*"
_KEY = re.compile(rf"({_PREFIX})(['\"]?{_NAME}['\"]?:)(?=\s|$)(?!\s+null\s*$)", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?<![\w.-])({_NAME}(?:=|['\"]:\s*)).+$", re.IGNORECASE)
_ANY_KEY = re.compile(rf"({_PREFIX})(?:[^\s:]+:\s)?")


def without_secrets(config: str) -> str:
    """The text of a YAML file without passwords in URLs and the values of keys and NAME=value that name a secret."""
    kept: list[str] = []
    column: int | None = None  # of a hidden value's key: the value may go on in the lines below
    for line in _PASSWORD_IN_URL.sub(rf"\g<1>{HIDDEN}\g<2>", config.removesuffix("\n")).split("\n"):
        if column is not None and _goes_on(line, column):
            continue
        column = None
        if key := _KEY.match(line):
            column, line = len(key[1]), f"{key[0]} {HIDDEN}"
        elif assigned := _ASSIGNED.search(line):
            column, line = _column(line), f"{line[: assigned.start()]}{assigned[1]}{HIDDEN}"
        kept.append(line)
    return "\n".join(kept) + "\n" * config.endswith("\n")


def _goes_on(line: str, column: int) -> bool:
    """Whether a line belongs to the value of a key at a column; a list may stand right below its key."""
    indent = len(line) - len(line.lstrip(" "))
    return not line.strip() or indent > column or (indent == column and line[indent:].startswith("- "))


def _column(line: str) -> int:
    """Where a line's key begins; of a list's item without a key the column before its text."""
    found = _ANY_KEY.match(line)
    return len(found[1]) - (found[0] == found[1]) if found else 0

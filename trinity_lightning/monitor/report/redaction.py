"""A report is made to be passed on: passwords and keys of the configuration stay behind."""

import re

HIDDEN = "***"

_PASSWORD_IN_URL = re.compile(r"(://[^\s:/@]*:)\S+(@)")
_NAMES = "api_?key|password|passwd|secret|access_?token|auth_?token|credential"
_SECRET_KEY = re.compile(rf"^(\s*(?:- )?[\w.]*(?:{_NAMES})\w*:[ \t]+)(?!null\b)\S.*$", re.IGNORECASE | re.MULTILINE)


def without_secrets(config: str) -> str:
    """The text of a YAML file without passwords in URLs and the values of keys that name a secret."""
    return _SECRET_KEY.sub(rf"\g<1>{HIDDEN}", _PASSWORD_IN_URL.sub(rf"\g<1>{HIDDEN}\g<2>", config))

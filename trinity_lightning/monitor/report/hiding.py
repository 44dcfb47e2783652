"""Hides secrets in the configuration of a run, which its page shows."""

import math
import re
from typing import Any

import yaml

HIDDEN = "***"

_PASSWORD_IN_URL = re.compile(r"(://[^\s:/@]*:)\S+(@)")
_SECRETS = "api_?key|access_?key|private_?key|password|passwd|passphrase|secret|credential|access_?token|auth_?token"
# Names that end in `token` are secrets too; max_tokens and stop_token_ids are none, nor are the tokens of a tokenizer.
_NAME = rf"[\w.-]*(?:(?:{_SECRETS})\w*|(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)token)"
_KEY = re.compile(_NAME, re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?<![\w.-])({_NAME}(?:=|['\"]:\s*)).+$", re.IGNORECASE | re.DOTALL)


def without_secrets(config: str) -> str:
    """The text of a YAML file with secrets hidden: passwords in URLs, and values whose key or NAME= names a secret."""
    try:
        tree = yaml.safe_load(config)
    except yaml.YAMLError:  # its message would show some of the text
        return "config.yaml is damaged: it is no YAML."
    return yaml.safe_dump(hidden(tree), sort_keys=False, allow_unicode=True, width=math.inf)


def hidden(node: Any) -> Any:
    """The same values with secrets hidden, as in `without_secrets`."""
    if isinstance(node, dict):
        secret = {key for key, value in node.items() if value is not None and _KEY.fullmatch(str(key))}
        return {key: HIDDEN if key in secret else hidden(value) for key, value in node.items()}
    if isinstance(node, list):
        return [hidden(item) for item in node]
    if isinstance(node, str):
        return _ASSIGNED.sub(rf"\1{HIDDEN}", _PASSWORD_IN_URL.sub(rf"\1{HIDDEN}\2", node))
    return node

"""Refusals: an error is asserted by its type and by the key that it names, never by the words of its message."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trinity_lightning.errors import ConfigError


@contextmanager
def refuses(key: str | None, kind: type[ConfigError] = ConfigError) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Assert that the block raises an error of this type with this `key`, and yield the error that was caught.

    Example:
        with refuses("engine.gpus"):
            validate(config)
        with refuses("model.nmae", ArgumentError) as refused:
            validate(config)
        assert refused.value.fix == "give model.name"

    Args:
        key: the whole dotted key that the error names; None: no single key is at fault.
        kind: type of the error; a subclass is accepted, as by `pytest.raises`.
    """
    with pytest.raises(kind) as refused:
        yield refused
    assert refused.value.key == key, f"the key is {refused.value.key}: {refused.value}"

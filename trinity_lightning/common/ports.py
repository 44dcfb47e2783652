"""Where this machine can listen."""

import socket

from trinity_lightning.common.errors import ConfigError


def free_port(address: str) -> int:
    """A port of that address of this machine on which nothing listens.

    Raises:
        ConfigError: it is no address of this machine.
    """
    try:
        with socket.create_server((address, 0)) as probe:
            return probe.getsockname()[1]
    except OSError as error:
        raise ConfigError(
            f"synchronizer.address is {address!r}, and this machine cannot listen there ({error}): give the address "
            "of this machine that the servers reach it by."
        ) from error

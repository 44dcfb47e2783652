"""Refuses flags that Hydra does not have, and wrong folders, in a sentence: settings are written `key=value`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.sections import RECIPE, keys_like
from trinity_lightning.errors import ConfigError

_ONE_DASH = re.compile(r"-[^-=]{2}")  # argparse reads `-model=tiny` as -m, and `-plan.device=L4` as -p with a value


def check_flags(arguments: Sequence[str]) -> None:
    """Refuse arguments that Hydra's parser cannot read, and a --config-dir that is no folder.

    Hydra's parser would print its usage, which has none of our keys.

    Args:
        arguments: the command line without the program.

    Raises:
        ConfigError: names the flag, and the setting or folder that was probably meant.
    """

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; --hydra-help explains Hydra's flags.")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    known = {flag for action in parser._actions for flag in action.option_strings}
    for position, argument in enumerate(arguments):
        if _ONE_DASH.match(argument) and argument.partition("=")[0] not in known:
            raise _unknown_flag(arguments[position:])
    flags, unread = parser.parse_known_args(arguments)
    for argument in unread:
        if argument.startswith("-"):
            raise _unknown_flag(arguments[arguments.index(argument) :])
    if unread:
        raise ConfigError(f"a flag parts '{unread[0]}' from the other settings: put flags before all settings.")
    if flags.config_dir is not None and not Path(flags.config_dir).is_dir():
        raise ConfigError(
            f"--config-dir: there is no folder '{Path(flags.config_dir).absolute()}': give the one that has "
            "recipe/NAME.yaml in it (a path that is not absolute begins in the present folder)."
        )


def _unknown_flag(arguments: Sequence[str]) -> ConfigError:
    """The refusal of a flag, the first of the arguments; its value may be the second."""
    flag, equals, value = arguments[0].partition("=")
    follower = next(iter(arguments[1:2]), "-")
    if not equals:
        value = "VALUE" if follower.startswith("-") or "=" in follower else follower
    meant = keys_like(flag.lstrip("-").replace("-", "_"), TrainConfig)
    settings = [f"+recipe={value}" if key == RECIPE else f"{key}={value}" for key in meant]
    advice = f", such as {' or '.join(settings)}." if settings else " (--cfg job shows them)."
    return ConfigError(
        f"'{flag}' is no flag of this command: settings are written key=value{advice}",
        key=meant[0] if len(meant) == 1 and meant[0] != RECIPE else None,
    )

"""Checks the signatures of the user's own parts: the library must be able to call or make each of them."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from trinity_lightning.config.own_code import raised_by
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ArgumentError, ConfigError, configured_at

T = TypeVar("T")
Parameter = inspect.Parameter
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
PACKAGE = __name__.partition(".")[0]

# -- the user's functions and methods, as the library calls them -------------------------------------------------------

# Names that TRL, verl and OpenRLHF give to one of our parameters. Each pattern matches a whole name.
SYNONYMS: Mapping[str, str] = {
    "response": r"(completion|answer|solution|output|generation|prediction|predict|text|response)(_(str|text))?",
    "rewards": r"(token_level_)?(rewards|scores)",
    "groups": r"(group_)?(index|indices|idx|ids|uids?)|group",
    "experiences": r"exps|experiences",
}
# For each of our parameters: names by which a user expects another value in its place, and the source of that value.
_ANSWER = "task.raw_task['answer'] is the answer to compare with"
_PROMPT, _PROMPTS = "task.raw_task['prompt'] is the prompt", r"prompts?|questions?|query|queries|messages|prompt_text"
_TRUTHS = r"ground_truths?|gts?|labels?|targets?|references?|gold|expected|truth|solutions|answers"
ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "response": {
        _PROMPTS: _PROMPT,
        _TRUTHS: _ANSWER,
        r"data_source|extra_info|reward_model": "task.raw_task has all fields of the task's entry",
        r"(completion|response|output|generation)s|completion_ids": "it is called for one response at a time",
    },
    "task": {
        _PROMPTS: _PROMPT,
        rf"{_TRUTHS}|answer|solution": _ANSWER,
        r"extra_info|reward_model": "task.raw_task has all fields of the task's entry",
        r"seed|options": "the task is all that an environment begins from",
    },
}


def check_call(label: str, function: Callable[..., Any], names: Sequence[str], shown: str, key: str = "") -> None:
    """Refuse a user's function that cannot be called, by position, as the library calls it.

    Args:
        label: the function, for messages.
        function: a function, a method, or another callable.
        names: our names of the positional arguments, in order.
        shown: the call, for messages: "score(rewards, groups, runs)".
        key: dotted key of the function's further arguments; empty if it has none. The key of the function itself is
            left to `configured_at`.

    Raises:
        ArgumentError: a further argument has no default and is missing.
        ConfigError: the function takes fewer or more arguments, or a parameter's name shows that it expects another
            value in this place.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C without a signature
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        for parameter in signature.parameters.values():
            if key and parameter.kind is Parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
                raise ArgumentError(
                    f"{key}.{parameter.name} is missing: {label} has no default for it.", key=f"{key}.{parameter.name}"
                ) from error
        raise ConfigError(f"{label} cannot be called as {shown}: {error}{_hints(signature, names)}.") from error
    for name, parameter in zip(names, _positional(signature), strict=False):
        if (why := _mismatch(parameter.name, name, names)) is not None:
            raise ConfigError(f"{label} takes '{parameter.name}' in the place of {name}: it is called as {shown}{why}.")


def _positional(signature: inspect.Signature) -> list[Parameter]:
    return [parameter for parameter in signature.parameters.values() if parameter.kind in POSITIONAL]


def _mismatch(parameter: str, name: str, names: Sequence[str]) -> str | None:
    """The end of a message if `parameter` stands for a value other than `name`, which is passed to it; else None."""
    if (place := _place_of(parameter, name)) is not None:
        return f"; {place}"
    if _means(parameter, name):
        return None
    if any(_means(parameter, other) for other in names):
        return ", in this order"
    return next((f"; {place}" for other in names if (place := _place_of(parameter, other)) is not None), None)


def _means(parameter: str, name: str) -> bool:
    """True if a user's parameter is another word for our parameter `name`."""
    return parameter == name or re.fullmatch(SYNONYMS.get(name, re.escape(name)), parameter) is not None


def _place_of(parameter: str, name: str) -> str | None:
    """The source of the value that a user's parameter in the place of `name` stands for; None if it is not known."""
    places = ELSEWHERE.get(name, {}).items()
    return next((place for pattern, place in places if re.fullmatch(pattern, parameter)), None)


def _hints(signature: inspect.Signature, names: Sequence[str]) -> str:
    """The sources of the values that the function's parameters stand for, in brackets; empty if none is known."""
    places = [_place_of(parameter, name) for parameter in signature.parameters for name in names]
    hints = "; ".join(dict.fromkeys(place for place in places if place))
    return f" ({hints})" if hints else ""


@functools.cache
def check_methods(kind: str, part: type[Any]) -> None:
    """Refuse a user's class with a method that does not take the arguments of the library's method that it overrides.

    Raises:
        ConfigError: names the method and its call.
    """
    library_classes = [cls for cls in part.__mro__ if is_of_the_library(cls)]
    for user_class in part.__mro__:
        if user_class in library_classes or user_class is object:
            continue
        for name, method in vars(user_class).items():
            base = next((vars(cls)[name] for cls in library_classes if name in vars(cls)), None)
            if inspect.isfunction(method) and inspect.isfunction(base) and not name.startswith("__"):
                needed = (p for p in _positional(inspect.signature(base)) if p.default is p.empty)
                names = [parameter.name for parameter in needed]
                shown = f"{name}({', '.join(names[1:])})"
                check_call(f"{kind} '{part.__name__}': its {name}", method, names, shown)


# -- the user's classes, as the library makes them ---------------------------------------------------------------------


def check_arguments(
    label: str, make: Callable[..., Any], args: Mapping[str, Any], key: str = "args", given: Sequence[str] = ()
) -> None:
    """Refuse arguments that a class or a function does not take, and missing arguments.

    A class with named arguments and `**others` also takes the arguments of its bases. A class with `**others` alone
    takes any argument.

    Args:
        label: the part, for messages.
        make: the class, or a function.
        args: the user's arguments.
        key: the dotted key of `args`.
        given: names of arguments that the library passes itself.

    Raises:
        ArgumentError: names the key, and lists the arguments.
    """
    parameters = inspect.signature(make).parameters.values()
    named = [parameter for parameter in parameters if parameter.kind in NAMED and parameter.name not in given]
    known = [parameter.name for parameter in named]
    if _takes_any(parameters):
        known = [*dict.fromkeys([*known, *_handed_on(make, given)])] if known or is_of_the_library(make) else [*args]
    for name in args:
        if name not in known:
            raise ArgumentError(
                f"{key}.{name}: {unknown_name(f'argument of {label}', name, known)}", key=f"{key}.{name}"
            )
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in args:
            raise ArgumentError(
                f"{key}.{parameter.name} is missing: {label} has no default for it. "
                f"It takes {', '.join(map(str, named))}.",
                key=f"{key}.{parameter.name}",
            )


def _takes_any(parameters: Iterable[Parameter]) -> bool:
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)


def is_of_the_library(part: Any) -> bool:
    """True for a class or a function of this package, False for the user's."""
    return str(getattr(part, "__module__", "")).partition(".")[0] == PACKAGE


def _handed_on(make: Any, given: Sequence[str]) -> list[str]:
    """Names of the arguments of a class's bases, which receive its further keywords."""
    bases = make.__mro__[1:] if isinstance(make, type) else ()
    signatures = [inspect.signature(vars(base)["__init__"]) for base in bases[:-1] if "__init__" in vars(base)]
    parameters = [parameter for signature in signatures for parameter in signature.parameters.values()]
    return [
        parameter.name for parameter in parameters if parameter.kind in NAMED and parameter.name not in (*given, "self")
    ]


def has_method(kind: type[Any], name: str) -> bool:
    """True if a class or one of its bases defines this method. (`hasattr` would find `type.__call__` in any class.)"""
    return any(name in vars(base) for base in kind.__mro__)


def made(
    label: str, kind: type[T], args: Mapping[str, Any], key: str = "args", given: Mapping[str, Any] | None = None
) -> T:
    """An instance of a class, made with the user's arguments and the library's.

    The constructor gets the library's values for which it has parameters. The other values are set on the instance
    before the constructor runs, so that a class need not pass them on to its base.

    Args:
        label, args, key: as in `check_arguments`.
        kind: the class.
        given: the library's values by name.

    Raises:
        ArgumentError: as `check_arguments`.
        Exception: the constructor raised it. A ConfigError about one of the arguments gets the whole key.
    """
    given = given or {}
    check_arguments(label, kind, args, key, tuple(given))
    parameters = inspect.signature(kind).parameters
    takes_any = _takes_any(parameters.values())
    passed = {name: value for name, value in given.items() if takes_any or name in parameters}
    instance = kind.__new__(kind)
    for name, value in given.items():
        if name not in parameters:
            with suppress(AttributeError):  # the user's class has a property of this name
                object.__setattr__(instance, name, value)
    with configured_at(None, section=key, names=parameters.keys() - given.keys()):
        instance.__init__(**passed, **args)
    return instance


def made_at_start(
    label: str, kind: type[T], args: Mapping[str, Any], key: str = "args", given: Mapping[str, Any] | None = None
) -> T:
    """Call `made` while a run is being built.

    Raises:
        ConfigError: as `made`; or the user's code raised an error, which is given with its file and line.
    """
    with raised_by(label, ConfigError):
        return made(label, kind, args, key, given)


def parameters_beside(kind: type[Any], given: Sequence[str]) -> list[str]:
    """Names of the part's own arguments: those of its constructor that the library does not give."""
    parameters = inspect.signature(kind).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in NAMED and parameter.name not in given]

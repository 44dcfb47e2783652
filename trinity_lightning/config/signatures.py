"""How parts of your own are called and made: what their parameters mean by their names, and what they may be given."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from trinity_lightning.config.own_code import raised_by
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ArgumentError, ConfigError

T = TypeVar("T")
Parameter = inspect.Parameter
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
PACKAGE = __name__.partition(".")[0]

# -- how a function of your own is called ------------------------------------------------------------------------------

# Names that TRL, verl and OpenRLHF have for what a function here is given: patterns of the whole name.
SYNONYMS: Mapping[str, str] = {
    "response": r"(completion|answer|solution|output|generation|prediction|predict|text|response)(_(str|text))?",
    "rewards": r"(token_level_)?(rewards|scores)",
    "groups": r"(group_)?(index|indices|idx|ids|uids?)|group",
    "experiences": r"exps|experiences",
}
# Names of what a function is not given in that place, and where it finds it.
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


def check_call(what: str, function: Callable[..., Any], names: Sequence[str], shown: str, key: str = "") -> None:
    """Refuse a function of the user's that cannot be called by position as the library calls it.

    Args:
        what: the function, for messages.
        function: a function, a method, or an object that can be called.
        names: of what it is given, in order.
        shown: how it is called, for messages: "score(rewards, groups, runs)".
        key: the dotted key under which it may be given further arguments, if it may.

    Raises:
        ArgumentError: it lacks a further argument.
        ConfigError: it takes fewer or more arguments, or one of them by its name is another than what stands there.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # one written in C that does not say what it takes
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        for parameter in signature.parameters.values():
            if key and parameter.kind is Parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
                raise ArgumentError(
                    f"{key}.{parameter.name} is missing: {what} has no default for it.", key=f"{key}.{parameter.name}"
                ) from error
        raise ConfigError(f"{what} cannot be called as {shown}: {error}{_hints(signature, names)}.") from error
    for name, parameter in zip(names, _positional(signature), strict=False):
        if (why := _misplaced(parameter.name, name, names)) is not None:
            raise ConfigError(f"{what} takes '{parameter.name}' in the place of {name}: it is called as {shown}{why}.")


def _positional(signature: inspect.Signature) -> list[Parameter]:
    return [parameter for parameter in signature.parameters.values() if parameter.kind in POSITIONAL]


def _misplaced(own: str, name: str, names: Sequence[str]) -> str | None:
    """Where a function finds what it calls a parameter by, if that is not what stands there; else None."""
    if (place := _place_of(own, name)) is not None:
        return f"; {place}"
    if _means(own, name):
        return None
    if any(_means(own, other) for other in names):
        return ", in this order"
    return next((f"; {place}" for other in names if (place := _place_of(own, other)) is not None), None)


def _means(own: str, name: str) -> bool:
    return own == name or re.fullmatch(SYNONYMS.get(name, re.escape(name)), own) is not None


def _place_of(own: str, name: str) -> str | None:
    return next((place for pattern, place in ELSEWHERE.get(name, {}).items() if re.fullmatch(pattern, own)), None)


def _hints(signature: inspect.Signature, names: Sequence[str]) -> str:
    """Where the function finds what it asks for, in brackets."""
    places = [_place_of(own, name) for own in signature.parameters for name in names]
    found = "; ".join(dict.fromkeys(place for place in places if place))
    return f" ({found})" if found else ""


@functools.cache
def check_methods(kind: str, part: type[Any]) -> None:
    """Refuse a class of the user's with a method that is not called as the method of the library that it overrides.

    Raises:
        ConfigError: names the method, and says how it is called.
    """
    theirs = [cls for cls in part.__mro__ if _is_of_the_library(cls)]
    for own in part.__mro__:
        if own in theirs or own is object:
            continue
        for name, method in vars(own).items():
            base = next((vars(cls)[name] for cls in theirs if name in vars(cls)), None)
            if inspect.isfunction(method) and inspect.isfunction(base) and not name.startswith("__"):
                needed = (p for p in _positional(inspect.signature(base)) if p.default is p.empty)
                names = [parameter.name for parameter in needed]
                shown = f"{name}({', '.join(names[1:])})"
                check_call(f"{kind} '{part.__name__}': its {name}", method, names, shown)


# -- how a class of your own is made -----------------------------------------------------------------------------------


def check_arguments(
    what: str, make: Callable[..., Any], args: Mapping[str, Any], key: str = "args", given: Sequence[str] = ()
) -> None:
    """Refuse arguments that a class or a function does not take, or lacks.

    Further keywords (`**others`) of a class that names arguments are those of its bases; of one that names none, any.

    Args:
        what: the part, for messages.
        make: the class, or the function that makes one.
        args: the user's arguments.
        key: the dotted key that they stand under.
        given: names of what the library passes itself.

    Raises:
        ArgumentError: names the key, and lists what there is.
    """
    parameters = inspect.signature(make).parameters.values()
    named = [parameter for parameter in parameters if parameter.kind in NAMED and parameter.name not in given]
    known = [parameter.name for parameter in named]
    if _takes_any(parameters):
        known = [*dict.fromkeys([*known, *_handed_on(make, given)])] if known or _is_of_the_library(make) else [*args]
    for name in args:
        if name not in known:
            raise ArgumentError(
                f"{key}.{name}: {unknown_name(f'argument of {what}', name, known)}", key=f"{key}.{name}"
            )
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in args:
            raise ArgumentError(
                f"{key}.{parameter.name} is missing: {what} has no default for it. "
                f"It takes {', '.join(map(str, named))}.",
                key=f"{key}.{parameter.name}",
            )


def _takes_any(parameters: Iterable[Parameter]) -> bool:
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)


def _is_of_the_library(part: Any) -> bool:
    return str(getattr(part, "__module__", "")).partition(".")[0] == PACKAGE


def _handed_on(make: Any, given: Sequence[str]) -> list[str]:
    """Names that the bases of a class take, which names arguments of its own and hands further ones on to them."""
    bases = make.__mro__[1:] if isinstance(make, type) else ()
    signatures = [inspect.signature(vars(base)["__init__"]) for base in bases[:-1] if "__init__" in vars(base)]
    parameters = [parameter for signature in signatures for parameter in signature.parameters.values()]
    return [
        parameter.name for parameter in parameters if parameter.kind in NAMED and parameter.name not in (*given, "self")
    ]


def has_method(kind: type[Any], name: str) -> bool:
    """True if instances of a class have a method; the class itself can always be called."""
    return any(name in vars(base) for base in kind.__mro__)


def made(
    what: str, kind: type[T], args: Mapping[str, Any], key: str = "args", given: Mapping[str, Any] | None = None
) -> T:
    """A part made of the user's arguments, and of what the library gives it.

    A constructor takes of the latter what it has parameters for. The rest is set on the instance before the constructor
    runs, so that a class need not hand it on to its base.

    Args:
        what, args, key: as of `check_arguments`.
        kind: the class.
        given: what the library gives, by name.

    Raises:
        ArgumentError: as `check_arguments`.
        Exception: whatever the constructor raises.
    """
    given = given or {}
    check_arguments(what, kind, args, key, tuple(given))
    parameters = inspect.signature(kind).parameters
    takes_any = _takes_any(parameters.values())
    passed = {name: value for name, value in given.items() if takes_any or name in parameters}
    instance = kind.__new__(kind)
    for name, value in given.items():
        if name not in parameters:
            with suppress(AttributeError):  # a property of the user's own
                object.__setattr__(instance, name, value)
    instance.__init__(**passed, **args)
    return instance


def made_at_start(
    what: str, kind: type[T], args: Mapping[str, Any], key: str = "args", given: Mapping[str, Any] | None = None
) -> T:
    """`made`, where a run is put together.

    Raises:
        ConfigError: as `made`, also of what the user's code raised, with its file and line.
    """
    with raised_by(what, ConfigError):
        return made(what, kind, args, key, given)


def parameters_beside(kind: type[Any], given: Sequence[str]) -> list[str]:
    """Names of what a class of the user's takes beside what the library gives it: the part's arguments."""
    parameters = inspect.signature(kind).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in NAMED and parameter.name not in given]

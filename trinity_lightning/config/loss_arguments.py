"""The arguments of policy losses, checked before torch is imported: a built-in loss's are read from its source."""

import ast
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from trinity_lightning.config.losses import LOSSES
from trinity_lightning.config.registry import PACKAGE_DIR, PARTS
from trinity_lightning.config.signatures import POSITIONAL
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ArgumentError, ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.algorithm import AlgorithmConfig

KEY = "algorithm.policy_loss"
ARGS = f"{KEY}.args"

# Arguments that the trainer gives, not the configuration: tensors by position, the others by keyword.
TENSORS = ("logprobs", "old_logprobs", "action_mask", "advantages")
TOTALS = ("num_tokens", "num_sequences", "max_response_length")
EXTRAS = (
    *("ref_logprobs", "num_computed_tokens", "expert_mask", "num_expert_tokens", "num_expert_sequences", "pairs"),
    *("stream_weights", "stream_totals", "terms", "top_k_logprobs", "teacher_top_k_logprobs"),
)


def check_loss(algorithm: "AlgorithmConfig") -> None:
    """Refuse wrong arguments of a built-in policy loss; those of the user's own are known once it is imported.

    Raises:
        ConfigError: as `check_loss_arguments`.
    """
    name, args = algorithm.policy_loss.name, dict(algorithm.policy_loss.args)
    if algorithm.loss_agg_mode is not None:
        args["loss_agg_mode"] = algorithm.loss_agg_mode
    if name in LOSSES and args:
        check_loss_arguments(name, loss_arguments(signature_in_source(PARTS["policy loss"][name])), args)


# Plain types of arguments: the Python types that fit them, and the words for them in messages.
_PLAIN: dict[object, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a name"),
    Mapping: ((Mapping,), "{name: value}"),
    NoneType: ((NoneType,), "null"),
}


def check_loss_arguments(name: str, valid: Mapping[str, inspect.Parameter], args: Mapping[str, Any]) -> None:
    """Refuse arguments that the policy loss of that name does not have, and values of the wrong type.

    Raises:
        ConfigError: `loss_agg_mode` for a loss with an average of its own; or a value that is NaN.
        ArgumentError: an unknown argument, the message lists the valid ones; one that is missing, or of the wrong type.
    """
    for arg, value in args.items():
        if arg == "loss_agg_mode" and arg not in valid:
            raise ConfigError(
                f"algorithm.loss_agg_mode: policy loss '{name}' has an average of its own",
                key="algorithm.loss_agg_mode",
                fix="leave it out",
            )
        if arg not in valid:
            known = valid.keys() - {"loss_agg_mode"}  # a key of its own in the configuration
            unknown = unknown_name(f"argument of policy loss '{name}'", arg, known)
            raise ArgumentError(f"{ARGS}.{arg}: {unknown}", key=f"{ARGS}.{arg}")
        _check_type(f"argument '{arg}' of policy loss '{name}'", f"{ARGS}.{arg}", value, valid[arg].annotation)
    for arg, parameter in valid.items():
        if arg not in args and parameter.default is parameter.empty:
            raise ArgumentError(
                f"{ARGS}.{arg} is missing: policy loss '{name}' has no default for it, nor has the trainer.",
                key=f"{ARGS}.{arg}",
            )


def loss_arguments(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    """The arguments of a policy loss that the configuration may set, by name."""
    parameters = signature.parameters.values()
    tensors = [p.name for p in parameters if p.kind in POSITIONAL][: len(TENSORS)]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: p for p in named if p.name not in (*tensors, *TENSORS, *TOTALS, *EXTRAS)}


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """The signature with annotations as types; or as text, which is not checked, if a name in them is not found."""
    try:
        return inspect.signature(fn, eval_str=True)
    except (NameError, AttributeError, TypeError, SyntaxError):
        return inspect.signature(fn)


def _check_type(argument: str, key: str, value: object, annotation: Any) -> None:
    """Refuse NaN (a ConfigError), and a value that fits none of an annotation's plain types (an ArgumentError).

    An annotation that has other types too is not checked.
    """
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{argument} is nan", key=key, fix="give a number")
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    plain = [_PLAIN[kind] for choice in choices if (kind := get_origin(choice) or choice) in _PLAIN]
    types = [fitting_type for fitting, _ in plain for fitting_type in fitting]
    fits = bool in types if isinstance(value, bool) else isinstance(value, tuple(types))  # True is an int to Python
    if fits or len(plain) < len(choices):
        return
    raise ArgumentError(f"{argument} is {value!r}", key=key, fix=f"give {' or '.join(words for _, words in plain)}")


# -- signatures without an import --------------------------------------------------------------------------------------

_TYPES = {"bool": bool, "int": int, "float": float, "str": str, "Mapping": Mapping, "None": NoneType}


def signature_in_source(path: str) -> inspect.Signature:
    """The signature of a function of this package at a dotted path, read from its source.

    The types of `_PLAIN` are the annotations; `object` stands for any other, and `...` for a default.
    """
    module, _, name = path.rpartition(".")
    file = PACKAGE_DIR.joinpath(*module.split(".")[1:]).with_suffix(".py")
    functions = (node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.FunctionDef))
    arguments = next(function.args for function in functions if function.name == name)
    positional, named = [*arguments.posonlyargs, *arguments.args], arguments.kwonlyargs
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(positional) + [inspect.Parameter.KEYWORD_ONLY] * len(named)
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.arg,
                kind,
                default=inspect.Parameter.empty if default is None else ...,
                annotation=_type_of(argument.annotation),
            )
            for argument, kind, default in zip([*positional, *named], kinds, defaults, strict=True)
        ]
    )


def _type_of(annotation: ast.expr | None) -> Any:
    if isinstance(annotation, ast.BinOp):  # float | None
        return functools.reduce(operator.or_, map(_type_of, (annotation.left, annotation.right)))
    if isinstance(annotation, ast.Subscript):  # Mapping[str, Any]
        return _type_of(annotation.value)
    return _TYPES.get("" if annotation is None else ast.unparse(annotation), object)

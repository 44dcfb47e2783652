"""Arguments of a policy loss: tensors from the trainer, by their names, and settings from the configuration."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from trinity_lightning.algorithm.policy_loss.policy_loss import PolicyLossFn
from trinity_lightning.config.loss_arguments import (
    ARGS,
    EXTRAS,
    KEY,
    TENSORS,
    TOTALS,
    check_loss_arguments,
    loss_arguments,
    signature_of,
)
from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.signatures import POSITIONAL, has_method, made_at_start
from trinity_lightning.errors import ConfigError

LOSS = f"loss({', '.join(TENSORS)}, **totals)"  # how a loss is called, for messages


def with_arguments(name: str, loss: Any, args: Mapping[str, Any]) -> PolicyLossFn:
    """A loss with its arguments set. A class takes them in its constructor, or in its call.

    Args:
        name: name of the loss; a loss that is not built in may name its tensors in other ways (`in_our_terms`).
        loss: a function, a class or an object.
        args: the arguments of the configuration.

    Raises:
        ConfigError: as `check_loss_arguments` and `in_our_terms`; or a class whose instances cannot be called.
    """
    if isinstance(loss, type):
        loss, args = instance_of(name, loss, args)
    if not callable(loss):
        raise ConfigError(f"policy loss '{name}' cannot be called", key=KEY, fix=f"give a function, called as {LOSS}")
    fn = cast("PolicyLossFn", loss) if name in PARTS["policy loss"] else in_our_terms(name, loss, args)
    check_loss_arguments(name, loss_arguments(signature_of(fn)), args)
    return functools.partial(fn, **args)


def instance_of(name: str, kind: type[Any], args: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Make an instance of a class; returns the method that a call of it runs, and the arguments for that call.

    Raises:
        ConfigError: it cannot be called, or its constructor refuses its arguments.
    """
    method = "forward" if issubclass(kind, nn.Module) else "__call__"
    if not has_method(kind, method):
        raise ConfigError(
            f"policy loss '{name}' cannot be called", key=KEY, fix=f"give the class a method __call__, as {LOSS}"
        )
    of_call = {arg for arg in inspect.signature(getattr(kind, method)).parameters if arg in args}
    of_call -= inspect.signature(kind).parameters.keys()
    of_constructor = {arg: value for arg, value in args.items() if arg not in of_call}
    instance: Any = made_at_start(f"policy loss '{name}'", kind, of_constructor, ARGS)
    return getattr(instance, method), {arg: args[arg] for arg in of_call}


# -- The tensors of a user's loss: TRL, verl and OpenRLHF have other names for them, and another order -----------------

_LOGPROBS = r"(log_?probs?|logps?|lps?)"
_NAMES = {
    "logprobs": rf"((new|cur|curr|current|policy|pi|pi_theta|theta|train|trainer|actor|model|per_token|token|action)_)*"
    rf"{_LOGPROBS}(_(new|current|theta))?|new",
    "old_logprobs": rf"((pi|policy)_)?(old|prev|previous)_((policy|per_token|token|action)_)*{_LOGPROBS}"
    rf"|{_LOGPROBS}_(old|prev)|old",
    "action_mask": r"((action|response|loss|completion|token|eos|valid)_)?masks?",
    "advantages": r"advs?|advantages?",
    "ref_logprobs": rf"(ref|reference)_((policy|per_token|token|action)_)*{_LOGPROBS}|{_LOGPROBS}_ref|ref",
}
_ENGINES = rf"(rollout|inference|infer|sampling|sampler|vllm)_((per_token|policy)_)*{_LOGPROBS}"


def in_our_terms(name: str, loss: Callable[..., Any], args: Mapping[str, Any]) -> PolicyLossFn:
    """A user's loss, made callable as `PolicyLossFn`; its tensors may have other names and another order.

    It is called by position if the names of its parameters allow that, else by their names. The names that other
    frameworks use are known. The loss may leave out tensors that it has no use for.

    Args:
        name: name of the loss, for messages.
        loss: the loss as the user wrote it.
        args: the arguments of the configuration.

    Raises:
        ConfigError: some parameters have known names, and others are not known; two parameters are for one tensor; or
            one is for something that the trainer does not give.
    """
    parameters = list(signature_of(loss).parameters.values())
    leading = [p for p in parameters if p.kind in POSITIONAL][: len(TENSORS)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    # Our name of the tensor by the user's name of the parameter.
    tensors = {p.name: tensor for p in parameters if (tensor := _meaning(p)) and p.name not in args}
    _refuse_engines(name, leading, args)
    knobs = [p for p in leading if _is_knob(p) or p.name in args]
    placed = zip(leading, TENSORS, strict=False)
    in_order = not knobs and all(tensors.get(p.name, tensor) == tensor for p, tensor in placed)
    if in_order and (takes_any or len(leading) == len(TENSORS)):
        leading_names = {p.name for p in leading}
        tensors = {label: tensor for label, tensor in tensors.items() if label not in leading_names}
        if all(label == tensor for label, tensor in tensors.items()):
            return cast("PolicyLossFn", loss)
        tensors |= {p.name: tensor for p, tensor in zip(leading, TENSORS, strict=False)}
    _check_names(name, leading, tensors, args)
    return _by_name(loss, parameters, tensors)


def _meaning(parameter: inspect.Parameter) -> str | None:
    """The tensor that a parameter means here, by its name; None for a setting, which has another name or a default."""
    if parameter.name in (*TENSORS, *TOTALS, *EXTRAS):
        return parameter.name
    if _is_knob(parameter) or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        return None
    return next((tensor for tensor, pattern in _NAMES.items() if re.fullmatch(pattern, parameter.name)), None)


def _is_knob(parameter: inspect.Parameter) -> bool:
    """True for a setting: a parameter with a default other than None."""
    return parameter.default is not parameter.empty and parameter.default is not None


def _refuse_engines(name: str, leading: Sequence[inspect.Parameter], args: Mapping[str, Any]) -> None:
    """Refuse a parameter for the engine's log-probabilities, which are never given beside the old ones."""
    required = (parameter.name for parameter in leading if parameter.default is parameter.empty)
    for label in required:
        if label not in args and re.fullmatch(_ENGINES, label):
            raise ConfigError(
                f"policy loss '{name}' takes '{label}': it is called as {LOSS}; the engine's log-probabilities are "
                "old_logprobs with algorithm.old_logprobs=engine.",
                key=KEY,
            )


def _check_names(
    name: str, leading: Sequence[inspect.Parameter], tensors: Mapping[str, str], args: Mapping[str, Any]
) -> None:
    """Refuse a loss called by name in which two parameters mean one tensor, or one means none; a ConfigError."""
    takes = f"policy loss '{name}' takes ({', '.join(p.name for p in leading)})"
    for label, tensor in tensors.items():
        if twice := [other for other, same in tensors.items() if same == tensor and other != label]:
            raise ConfigError(
                f"{takes}, of which '{label}' and '{twice[0]}' are both {tensor}: it is called as {LOSS}.", key=KEY
            )
    for parameter in leading:
        if parameter.name not in tensors and parameter.name not in args and parameter.default is parameter.empty:
            raise ConfigError(
                f"{takes}, in which '{parameter.name}' is not known, and the others do not stand where they are given: "
                f"it is called as {LOSS}",
                key=KEY,
                fix="use these names, or this order",
            )
    if "logprobs" not in tensors.values():
        raise ConfigError(f"{takes} and no logprobs, which are what is trained: it is called as {LOSS}.", key=KEY)


def _by_name(
    loss: Callable[..., Any], parameters: Sequence[inspect.Parameter], tensors: Mapping[str, str]
) -> PolicyLossFn:
    """The loss, called by the user's names of its parameters; its signature has our names."""
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]

    def called(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, **others: Any) -> Any:
        available = others | dict(zip(TENSORS, (logprobs, old_logprobs, action_mask, advantages), strict=True))
        values = {label: available[tensor] for label, tensor in tensors.items() if tensor in available}
        values |= {key: value for key, value in others.items() if key not in tensors.values()}
        return loss(*(values.pop(label) for label in by_position), **values)

    first = [inspect.Parameter(tensor, inspect.Parameter.POSITIONAL_OR_KEYWORD) for tensor in TENSORS]
    renamed = [p.replace(name=tensors.get(p.name, p.name)) for p in parameters]
    named = [p.replace(kind=p.KEYWORD_ONLY) for p in renamed if p.kind in (*POSITIONAL, p.KEYWORD_ONLY)]
    any_more = [p for p in renamed if p.kind is p.VAR_KEYWORD]
    signature = inspect.Signature([*first, *(p for p in named if p.name not in TENSORS), *any_more])
    called.__signature__ = signature  # type: ignore[attr-defined]
    return cast("PolicyLossFn", called)

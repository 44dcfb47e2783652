"""What the configuration may set of a policy loss: its keyword arguments, their types, and means over sequences."""

import inspect
import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from torch import Tensor

from trinity_lightning.algorithm.policy_loss.policy_loss import PolicyLossFn
from trinity_lightning.config.training import LOSS_AGG_MODES
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError

# Keyword arguments that the trainer gives, not the configuration.
TOTALS = ("num_tokens", "num_sequences", "max_response_length")
EXTRAS = (
    *("ref_logprobs", "num_computed_tokens", "expert_mask", "num_expert_tokens", "num_expert_sequences", "pairs"),
    *("stream_weights", "stream_totals", "terms", "top_k_logprobs", "teacher_top_k_logprobs"),
)

# Plain types of arguments, the Python types that fit them, and what to give.
_PLAIN: dict[object, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a name"),
    Mapping: ((Mapping,), "{name: value}"),
    NoneType: ((NoneType,), "null"),
}


def check_arguments(name: str, fn: PolicyLossFn, args: Mapping[str, Any]) -> None:
    """Refuse arguments that the policy loss of that name does not have, and values of the wrong type.

    Raises:
        ConfigError: a `loss_agg_mode`, of a loss that has an average of its own; a value that is NaN.
        TypeError: an unknown argument, the message lists the valid ones; or one of the wrong type.
    """
    valid = loss_arguments(fn)
    for arg, value in args.items():
        if arg == "loss_agg_mode" and arg not in valid:
            raise ConfigError(f"algorithm.loss_agg_mode: policy loss '{name}' has an average of its own: leave it out.")
        if arg not in valid:
            own = valid.keys() - {"loss_agg_mode"}  # a key of its own in the configuration
            raise TypeError(unknown_name(f"argument of policy loss '{name}'", arg, own))
        _check_type(f"argument '{arg}' of policy loss '{name}'", value, valid[arg].annotation)


def loss_arguments(fn: PolicyLossFn) -> dict[str, inspect.Parameter]:
    """The arguments of a policy loss that the configuration may set, by name."""
    parameters = _signature(fn).parameters.values()
    given = (*TOTALS, *EXTRAS)
    return {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in given}


def _signature(fn: PolicyLossFn) -> inspect.Signature:
    """The signature, its annotations as types; as text, which is not checked, if a name in them is not to be found."""
    try:
        return inspect.signature(fn, eval_str=True)
    except (NameError, AttributeError, TypeError, SyntaxError):
        return inspect.signature(fn)


def _check_type(argument: str, value: object, annotation: Any) -> None:
    """TypeError if the annotation names plain types only and the value is of none of them; ConfigError if it is NaN."""
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{argument} is nan; give a number.")
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    plain = [_PLAIN.get(get_origin(choice) or choice) for choice in choices]
    known = [each for each in plain if each is not None]
    types = [each for fitting, _ in known for each in fitting]
    fits = bool in types if isinstance(value, bool) else isinstance(value, tuple(types))  # True is an int to Python
    if fits or len(known) < len(plain):
        return
    raise TypeError(f"{argument} is {value!r}; give {' or '.join(words for _, words in known)}.")


# -- the argument loss_agg_mode ----------------------------------------------------------------------------------------


def mean_of_sequences(
    values: Tensor, mask: Tensor, loss_agg_mode: str, num_sequences: int | None, max_response_length: int | None
) -> Tensor:
    """One number of `values` [b, r], which are 0 outside the mask; modes, totals and errors as of `aggregate`."""
    sequences = max(mask.shape[0] if num_sequences is None else num_sequences, 1)
    if loss_agg_mode == "seq-mean-token-mean":
        return (values.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / sequences
    if loss_agg_mode == "seq-mean-token-sum":
        return values.sum() / sequences
    if loss_agg_mode == "seq-mean-token-sum-norm":
        longest = mask.shape[1] if max_response_length is None else max_response_length
        return values.sum() / (sequences * max(longest, 1))
    raise ConfigError(unknown_name("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES))

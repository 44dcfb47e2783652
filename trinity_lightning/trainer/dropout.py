"""Everything random in a model's forward pass, switched off: the first ratio of a PPO step must be 1."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

# Shares and amplitudes, by their names in configurations and modules of transformers: attention_dropout, resid_pdrop,
# attn_drop, layerdrop, drop_path_rate, fusion_droppath, drop_mlp_rate, router_jitter_noise; not xdrope_section.
_RANDOM = re.compile(r"dropout|jitter|layer_?drop|(^|_)drop_?path|(^|_)p?drop(_(\w+_)?(rate|prob|p))?$")


def switch_off_dropout(model: nn.Module) -> None:
    """Set every share of dropout to 0, in the configuration (which some layers read in their forward pass) and modules.

    Training mode stays what it is otherwise. Noise that routers of experts add to their input goes, too.
    """
    for holder, name in _shares(model):
        setattr(holder, name, 0.0)


def has_dropout(model: nn.Module) -> bool:
    """Whether `switch_off_dropout` would change anything."""
    return any(getattr(holder, name) for holder, name in _shares(model))


def _shares(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Every share of dropout, as an object and its attribute."""
    module: Any
    for module in model.modules():
        if "Dropout" in type(module).__name__ and hasattr(module, "p"):  # torch's own, and those made after them
            yield module, "p"
        for holder in (module, *_configs(getattr(module, "config", None))):
            for name, value in list(vars(holder).items()):
                # A share of 1 may be written as an integer; other integers, and flags such as token_dropout, are none.
                if (isinstance(value, float) or (type(value) is int and value == 1)) and _RANDOM.search(name):
                    yield holder, name


def _configs(config: Any) -> Iterator[Any]:
    """A configuration of transformers and those within it, such as a text model's."""
    from transformers import PretrainedConfig

    if isinstance(config, PretrainedConfig):
        yield config
        for part in vars(config).values():
            yield from _configs(part)

"""Keys that are not there: what is said of them."""

from collections.abc import Iterable

from trinity_lightning.config.engines import CAPABILITIES
from trinity_lightning.config.values import nearest

# What keys of earlier versions, and of other libraries, are called here.
RENAMED = {
    "algorithm.kl_coef": "algorithm.kl.coef",
    "algorithm.policy_loss_args": "algorithm.policy_loss.args",
    "engine.kind": "engine.name",
    "optimizer.learning_rate": "optimizer.lr",
}


def unknown_key(key: str, siblings: Iterable[str]) -> str:
    """A message for a key that is not there: what it is called, or the nearest of its siblings."""
    if key in RENAMED:
        return f"unknown key '{key}'. It is called {RENAMED[key]}."
    prefix, dot, name = key.rpartition(".")
    names = sorted(siblings)
    match = nearest(name, names)
    hint = f" Did you mean '{prefix}{dot}{match}'?" if match else ""
    return f"unknown key '{key}'.{hint} Known here: {', '.join(names) or 'none'}."


def choice_of(group: str) -> str:
    """What to write instead of the name of a choice as the value of its group."""
    return f"{group} has keys: a recipe chooses them in its defaults, '- override /{group}: NAME'."


def unread_key(key: str, engine: str) -> str:
    """A message for a key of `engine` that this engine does not read: which ones do."""
    owners = [name for name, each in CAPABILITIES.items() if key in each.keys]
    of_vllm = len(owners) > 1 and all(CAPABILITIES[name].is_vllm for name in owners)
    owner = "vLLM" if of_vllm else f"engine={' or '.join(owners)}"
    return f"engine.{key} is of {owner}, and {engine} does not read it: leave the key out."

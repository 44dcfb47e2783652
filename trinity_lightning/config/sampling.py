"""What keeps sampled tokens usable for training: they come from the policy's own, whole distribution."""

from collections.abc import Mapping
from typing import Any

from trinity_lightning.errors import ConfigError

DEFAULT_TEMPERATURE = 1.0  # of every engine

# Each of these makes the sampled distribution another than the policy's, whose gradient is taken.
EVALUATION_ONLY = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def check_trained_sampling(settings: Mapping[str, Any]) -> None:
    """Refuse what would draw training rollouts from another distribution than the policy's.

    Args:
        settings: sampling settings by vLLM's names; None values are unset.

    Raises:
        ConfigError: names the setting.
    """
    for name in EVALUATION_ONLY:
        if settings.get(name) is not None:
            raise ConfigError(
                f"sampling.{name} is for evaluation only, as training rollouts are drawn from the policy's whole "
                f"distribution. Leave it out, or set eval_sampling.{name}."
            )
    temperature = settings.get("temperature")
    if temperature is not None and not temperature > 0:
        raise ConfigError(f"sampling.temperature is {temperature}; training needs one above 0, such as 1.0.")

"""Packages that not everyone needs, asked for where they are."""

import importlib.util

from trinity_lightning.common.errors import ConfigError


def require_vllm() -> None:
    """ConfigError, with what to install, where vLLM is not."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed. Install it with `pip install 'trinity-lightning[cpu]'` (no GPU) or "
            "`pip install 'trinity-lightning[vllm]'` (NVIDIA GPU), or choose engine=transformers."
        )


def require_ray() -> None:
    """ConfigError, with what to install, where Ray is not."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "explorer.runner=ray: Ray is not installed. Install it with `pip install 'trinity-lightning[ray]'`, or "
            "choose explorer.runner=local."
        )

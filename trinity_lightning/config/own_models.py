"""Models that are not built in, or next to the policy: what is refused before one is loaded."""

import json
import logging
import re
from pathlib import Path
from typing import Any

from trinity_lightning import config as late
from trinity_lightning.config.models import BUILT_IN_MODELS, load_tokenizer
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.config.values import nearest, unknown_name
from trinity_lightning.errors import ConfigError

logger = logging.getLogger(__name__)

HUB_SECONDS = 10  # for an answer of the hub
# Of transformers' class names, those without a head that continues a text.
_NOT_CAUSAL = re.compile(
    r"(?<!LMHead)(?<!DoubleHeads)Model$|For(MaskedLM|PreTraining|QuestionAnswering|MultipleChoice|\w+Classification)$"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9_-][\w.-]*/[\w.-]+")


def check_folder_or_hub_name(name: str) -> None:
    """Refuse a name that can be neither; a ConfigError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model folder '{name}' holds no config.json: give a folder made by save_pretrained.")
        return
    if folder.exists():
        raise ConfigError(f"model '{name}' is a file: give the folder of a checkpoint (with config.json).")
    if "/" not in name and not name.startswith("~"):
        raise ConfigError(unknown_name("model", name, BUILT_IN_MODELS) + " Or a folder, or a hub name 'org/name'.")
    # `outputs/model` reads like a hub name; a folder `outputs` right here says that a folder was meant.
    if _HUB_NAME.fullmatch(name) and not folder.parent.is_dir():
        return
    siblings = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    match = nearest(folder.name, siblings)
    hint = f" Did you mean '{folder.parent / match}'?" if match else ""
    raise ConfigError(f"there is no model folder '{name}'.{hint} A hub name has the form 'org/name'.")


def check_same_vocabulary(key: str, name: str, tokenizer: Any) -> None:
    """Refuse a model, named by `key`, that would read the policy's tokens by another vocabulary; a ConfigError.

    A ModelLoadError: the model has no tokenizer.
    """
    if load_tokenizer(name).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{key} '{name}' has another vocabulary than the policy, whose tokens it would misread: choose a model of "
            "the policy's family."
        )


def check_trainable(name: str) -> None:
    """A ConfigError if a folder's files are damaged, or its checkpoint is quantised or of no model that generates."""
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        return
    config = config_of(folder)
    _check_weights(folder)
    kinds = [str(each) for each in config.get("architectures") or ()]
    if kinds and all(map(_NOT_CAUSAL.search, kinds)):
        raise ConfigError(f"model '{name}' is a {kinds[0]}, which generates nothing: give a causal language model.")
    if config.get("quantization_config"):
        raise ConfigError(
            f"model '{name}' is quantised, and such weights cannot be trained: give the model that it was made from, "
            "and engine.args.quantization=fp8 for vLLM to round what it is sent."
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
    raise ConfigError(f"config.json of model folder '{folder}' is damaged ({reason}): write or copy the model again.")


def _check_weights(folder: Path) -> None:
    """Refuse weights whose file is not whole, by what it says at its beginning of its own length."""
    from safetensors import SafetensorError, safe_open

    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "np"):
                continue
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"the weights '{path}' are damaged ({error}): write or copy the model again.") from error


def check_on_hub(name: str) -> None:
    """Refuse a hub name that neither the cache has nor the hub, which is asked once: transformers asks for minutes.

    A ConfigError. A hub that answers late, or in a way of its own, is left to transformers.
    """
    if name in BUILT_IN_MODELS or Path(name).expanduser().is_dir():
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_SECONDS)
    except HFValidationError as error:
        raise ConfigError(f"model '{name}' is no name of a model on the hub: {error}") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"the hub has no model '{name}', or shows it to others only: see `hf auth login`.") from error
    except Exception as error:  # of the HTTP library that the hub's client happens to use
        if hasattr(error, "response") or "imeout" in type(error).__name__:
            logger.warning("the hub did not say whether it has model '%s' (%s)", name, error)
            return
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model '{name}' is neither a folder nor in the hub's cache on this machine, and the hub cannot be asked "
            f"({reason}): give a folder, or connect to the network."
        ) from error


def check_there(run: TrainConfig) -> None:
    """Refuse models of a run that cannot be had, and a teacher or critic that would misread; a ConfigError."""
    for name in (run.model.name, *(model.model for model in run.auxiliary_models.values() if model.url is None)):
        check_on_hub(name)
    if run.buffer.has_rollouts and run.auxiliary_models:
        late.auxiliary_models.check_vocabularies(run)
    if run.algorithm.critic is not None and run.algorithm.critic.model is not None:
        late.objectives.check_value_model(run.algorithm.critic.model, run.model.name)

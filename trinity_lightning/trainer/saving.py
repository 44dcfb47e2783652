"""Saves a trained policy as a folder that transformers, vLLM and TRL load; tries out saving before training."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from trinity_lightning.common.files import disk_full_named
from trinity_lightning.config.models import generation_file, is_picture_model, processor_files
from trinity_lightning.errors import ConfigError, DiskFullError
from trinity_lightning.sync.stream import check_conversion


@dataclass(frozen=True)
class ModelFiles:
    """Files of a model's folder beside its weights.

    Attributes:
        name: the model's name or folder, for messages.
        tokenizer: the model's tokenizer.
        generation: contents of the model's own generation_config.json; None: it has none.
        processor: contents of the files of a picture model's processor, by their names.
    """

    name: str
    tokenizer: Any
    generation: bytes | None
    processor: Mapping[str, bytes]

    @classmethod
    def of(cls, name: str, tokenizer: Any, config: Any) -> "ModelFiles":
        """The files of the model of that name, whose configuration and tokenizer are loaded."""
        processor = processor_files(name) if is_picture_model(config) else {}
        return cls(name, tokenizer, generation_file(name), processor)

    def write(self, folder: Path, model: Any, weights: Mapping[str, Tensor]) -> None:
        """Write the weights first, then everything else that belongs to the model."""
        with default_generation_config(model):
            model.save_pretrained(folder, state_dict=weights)
        try:
            generation = folder / "generation_config.json"
            generation.unlink(missing_ok=True)
            if self.generation is not None:
                generation.write_bytes(self.generation)
            self.tokenizer.save_pretrained(folder)
            for file, content in self.processor.items():
                (folder / file).write_bytes(content)
        except Exception as error:
            error.add_note(f"The weights are in '{folder}', whole; only other files are missing.")
            raise

    def try_out(self, folder: Path, model: Any, parameters: Mapping[str, Tensor]) -> None:
        """Write the folder without any weights inside `folder`, and remove it.

        Args:
            folder: where the model will be saved.
            model: the Hugging Face model.
            parameters: the weights that will be saved, by name.

        Raises:
            ConfigError: model or tokenizer could not be saved once trained.
            DiskFullError: the disk is full now.
        """
        try:
            with disk_full_named(folder), TemporaryDirectory(prefix=".model-", dir=folder) as trial:
                self.write(Path(trial), model, {})
                check_conversion(parameters, model)
        except DiskFullError:
            raise
        except Exception as error:  # whatever a model's own code raises
            raise ConfigError(
                f"model '{self.name}' could not be saved once it is trained ({type(error).__name__}: "
                f"{' '.join(str(error).split())})",
                key="model",
                fix="mend its files, or train it with save_model=false, which leaves its weights in checkpoints",
            ) from error


def allow_reading(folder: Path) -> None:
    """Give weight files the mode of config.json: safetensors makes them readable for this user alone."""
    mode = (folder / "config.json").stat().st_mode
    for file in folder.rglob("*.safetensors"):
        with suppress(PermissionError):  # some network file systems have modes of their own
            file.chmod(mode)


@contextmanager
def default_generation_config(model: Any) -> Iterator[None]:
    """Let the model save transformers' defaults in place of its own settings, which it may refuse to save."""
    from transformers import GenerationConfig

    settings, model.generation_config = getattr(model, "generation_config", None), GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings

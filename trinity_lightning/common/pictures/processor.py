"""The processor that engine and trainer share: it turns pictures into tensors, and expands their placeholders."""

import asyncio
import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from trinity_lightning.common.experience import ExperienceError
from trinity_lightning.common.pictures.picture import FIELD, Picture
from trinity_lightning.common.pictures.prompt import PLACES, Expansion
from trinity_lightning.common.pictures.tensors import MASK, PIXELS, PictureTensors
from trinity_lightning.config.model import NO_PROCESSOR_ARGS
from trinity_lightning.config.models import is_picture_model, load_config, reads_text_alone, resolve_model
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError, ModelLoadError

# Bytes of tensors and decoded pictures in the expansions that a processor keeps: the rollouts of a prompt share them,
# however late each is asked for.
MOST_BYTES = 512 << 20
# Stands for the token of pictures where it is part of a text, such as one that the policy has sampled. No text has this
# character: Unicode keeps it free for such use.
AS_TEXT = "\ufdd0"
_OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")  # a processor's other tensors


class PictureProcessor:
    """Expands texts with pictures by a model's Hugging Face processor.

    Attributes:
        args: further arguments of the processor's calls (`model.processor_args`).

    Args:
        processor: the model's processor.
        args: see above.
    """

    def __init__(self, processor: Any, args: Mapping[str, Any] | None = None) -> None:
        self._processor, self.args = processor, dict(args or {})
        self._expansions: OrderedDict[tuple[str, ...], Expansion] = OrderedDict()
        self._bytes = 0
        self._written: dict[tuple[int, int], str] = {}
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None  # made at the first use, as a copy in another process has none

    @property
    def token(self) -> str:
        """The placeholder of a picture in a text."""
        return self._processor.image_token

    @property
    def token_id(self) -> int:
        """Id of the token that stands for pictures."""
        return int(self._processor.image_token_id)

    def expand(self, text: str, pictures: Sequence[Picture]) -> Expansion:
        """The text as the model reads it; equal texts with equal pictures share one result.

        Args:
            text: the text, special tokens included, with a placeholder for each picture.
            pictures: the pictures, in the order of their placeholders.

        Raises:
            ConfigError: the numbers of placeholders and pictures differ; or the processor refuses the pictures.
        """
        key = (text, *(picture.digest for picture in pictures))
        with self._lock:
            if key not in self._expansions:
                expansion = self._expansions[key] = self._expanded(text, pictures)
                self._bytes += _bytes_of(expansion)
                while self._bytes > MOST_BYTES and len(self._expansions) > 1:
                    self._bytes -= _bytes_of(self._expansions.popitem(last=False)[1])
            self._expansions.move_to_end(key)
            return self._expansions[key]

    async def pieces_of(self, text: str, pictures: Sequence[Picture]) -> list[Expansion | list[int]]:
        """Same as `pieces`, in a thread: the other rollouts of an event loop go on while large pictures are read."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="pictures")  # one: equal prompts are expanded once
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.pieces, text, pictures)

    def pieces(self, text: str, pictures: Sequence[Picture]) -> list[Expansion | list[int]]:
        """The text as the model reads it, in one piece; or in several, between which the token of pictures is text.

        Args:
            text: as in `expand`, with `AS_TEXT` wherever the token of pictures is text.
            pictures: as in `expand`.

        Raises:
            ConfigError: as in `expand`; or the tokenizer reads a piece alone as other tokens.
        """
        self._check_places(text, len(pictures))
        token, rest = self._encode(self.token), iter(pictures)
        pieces: list[Expansion | list[int]] = []
        for piece in text.split(AS_TEXT):
            shown = list(itertools.islice(rest, piece.count(self.token)))
            pieces += [token] * bool(pieces) + [self.expand(piece, shown) if shown else self._encode(piece)]
        unexpanded = [piece.unexpanded if isinstance(piece, Expansion) else piece for piece in pieces]
        if len(pieces) > 1 and self._encode(text.replace(AS_TEXT, self.token)) != [*itertools.chain(*unexpanded)]:
            raise ConfigError(f"the tokenizer reads a text otherwise behind {self.token}", key="model.name")
        return pieces

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """Refuse `Experience.multi_modal_inputs` whose places are not as many as the model has states for them.

        Raises:
            ExperienceError: as above, with both numbers; or as in `PictureTensors.of`.
        """
        if PictureTensors.of(inputs) is None:
            return
        places, rows = len(inputs[PLACES]), len(inputs[PIXELS])
        if places != (states := rows * self._tokens_per_row):
            raise ExperienceError(
                f"multi_modal_inputs: {PLACES} has {places} places, and the model has {states} states for {rows} rows "
                f"of {PIXELS}."
            )

    @cached_property
    def _tokens_per_row(self) -> Fraction:
        """Tokens for each row of pixels, which is a picture, a tile or a patch."""
        inputs = self.expand(self.token, [Picture(Image.new("RGB", (64, 64), "white"))]).inputs
        return Fraction(len(inputs[PLACES]), len(inputs[PIXELS]))

    def _encode(self, text: str) -> list[int]:
        return self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _check_places(self, text: str, pictures: int) -> None:
        if (places := text.count(self.token)) != pictures:
            raise ConfigError(
                f"a prompt has places for {places} pictures, and {pictures} pictures",
                key=FIELD,
                fix=f"give each picture a part of type 'image', and do not write {self.token} in a text",
            )

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy in another process, which begins without expansions."""
        return {**self.__dict__, "_expansions": OrderedDict(), "_bytes": 0, "_lock": None, "_thread": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def _expanded(self, text: str, pictures: Sequence[Picture]) -> Expansion:
        self._check_places(text, len(pictures))
        outputs = self._processed(text, [picture.image for picture in pictures])
        token_ids, nested = outputs["input_ids"][0], MASK in outputs
        # Idefics3's tensors have the prompt as dimension 0, and its pictures as dimension 1.
        tensors = {name: outputs[name][0] if nested else outputs[name] for name in outputs if name not in _OF_TEXT}
        if nested:
            tensors[MASK] = tensors[MASK].bool()  # an eighth of its bytes, as an experience keeps it
            _check_visible(tensors[PIXELS])
        tensors[PLACES] = (token_ids == self.token_id).nonzero()[:, 0]
        return Expansion(tuple(self._encode(text)), tuple(pictures), tuple(token_ids.tolist()), tensors)

    def _processed(self, text: str, images: list[Any]) -> Any:
        """The processor's outputs for a text and pictures of Pillow's; a ConfigError if it refuses the pictures."""
        settings: dict[str, Any] = {"add_special_tokens": False, "return_tensors": "pt", **self.args}
        try:
            return self._processor(text=[text], images=[images], **settings)
        except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
            sizes = ", ".join(f"{width} x {height}" for width, height in (image.size for image in images))
            raise ConfigError(
                f"the model's processor refuses pictures of {sizes} pixels ({error})", key="model.processor_args"
            ) from error

    def written(self, size: tuple[int, int]) -> str:
        """The text that the processor writes in place of a picture's placeholder, which the picture's size decides.

        Its tokens are those of the picture. Many pictures have few sizes: the pixels of each need not be read for it.

        Args:
            size: width and height in pixels.

        Raises:
            ConfigError: the processor refuses the size.
            ModelLoadError: the tokenizer reads the text as other tokens.
        """
        if size not in self._written:
            tokenizer = self._processor.tokenizer
            token_ids = self._processed(self.token, [Image.new("RGB", size)])["input_ids"][0].tolist()
            text = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if tokenizer.encode(text, add_special_tokens=False) != token_ids:
                raise ModelLoadError(f"the tokenizer reads what the processor writes for a picture otherwise: {text!r}")
            self._written[size] = text
        return self._written[size]


def _check_visible(pictures: Tensor) -> None:
    """Refuse pictures that are all zeros, which Idefics3 takes for padding; a ConfigError."""
    if not pictures.flatten(1).any(1).all():
        raise ConfigError(
            "a picture is all zeros to the model, which such models take for none",
            key="model.processor_args",
            fix="leave do_normalize and do_rescale as the model's processor has them",
        )


def marked_as_text(value: Any, token: str) -> Any:
    """The value with `AS_TEXT` in place of a token, in all of its texts."""
    if isinstance(value, str):
        return value.replace(token, AS_TEXT)
    if isinstance(value, Mapping):
        return {name: marked_as_text(inner, token) for name, inner in value.items()}
    return [marked_as_text(inner, token) for inner in value] if isinstance(value, list | tuple) else value


def _bytes_of(expansion: Expansion) -> int:
    pixels = sum(3 * width * height for width, height in (picture.image.size for picture in expansion.pictures))
    return pixels + sum(tensor.nbytes for tensor in expansion.inputs.values())


# -- the processor of a model ------------------------------------------------------------------------------------------


def load_processor(name: str, args: Mapping[str, Any] | None = None) -> PictureProcessor | None:
    """The processor of a model that reads pictures; None: the model reads text alone.

    Args:
        name: name of the model.
        args: arguments of the processor's calls (`model.processor_args`).

    Raises:
        ConfigError: as `resolve_model`.
        ModelLoadError: the model reads pictures, and its processor cannot be loaded.
    """
    source, config = resolve_model(name), load_config(name)
    if not is_picture_model(config):
        if args:
            raise reads_text_alone(name)
        return None
    processor = _hugging_face_processor(name, source, config)
    _check_names(processor, args or {})
    return PictureProcessor(processor, args)


def _check_names(processor: Any, args: Mapping[str, Any]) -> None:
    """Refuse arguments that a processor's part for pictures does not have; a ConfigError."""
    typed = getattr(processor.image_processor, "valid_kwargs", None)
    known = {*getattr(typed, "__annotations__", ())} - {*NO_PROCESSOR_ARGS}
    for argument in args if typed else ():  # a class of the model's own may have declared none
        if argument not in known:
            raise ConfigError(
                unknown_name(f"argument of {type(processor).__name__}", argument, known),
                key=f"model.processor_args.{argument}",
            )


def _hugging_face_processor(name: str, source: Path | str, config: Any) -> Any:
    """The processor of a picture model; of SmolVLM its part for pictures, if its part for videos cannot be loaded."""
    from transformers import AutoImageProcessor, AutoProcessor

    try:
        try:
            processor = AutoProcessor.from_pretrained(source)
        except ImportError:  # SmolVLM reads videos by torchvision and num2words; its pictures are those of Idefics3
            if config.model_type != "smolvlm":
                raise
            from transformers import Idefics3Processor

            processor = Idefics3Processor.from_pretrained(source)
        if not hasattr(processor, "image_processor"):  # of a folder without its files AutoProcessor loads a tokenizer
            AutoImageProcessor.from_pretrained(source)
            raise ValueError(f"{type(processor).__name__} takes no pictures.")
    except (ImportError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"cannot load the processor of model '{name}', which reads pictures: {error} "
            "A checkpoint folder needs the processor's files too: processor.save_pretrained(folder)."
        ) from error
    return processor

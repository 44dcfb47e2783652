"""Prompts with pictures as vLLM takes them: each text with pictures is processed by vLLM once."""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from trinity_lightning.common.pictures.prompt import Expansion, PicturePrompt
from trinity_lightning.config.models import is_picture_model
from trinity_lightning.errors import RolloutError

IMAGE = "image"  # vLLM's name of the modality


def picture_config(path: str) -> Any:
    """The configuration of a model that reads pictures; None: it reads text alone, or transformers does not know it.

    Args:
        path: the model's folder, or its hub name.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError):  # vLLM may know a model that transformers does not
        return None
    return config if is_picture_model(config) else None


def picture_arguments(
    path: str, given: Mapping[str, Any], processor_args: Mapping[str, Any], most_pictures: int | None
) -> dict[str, Any]:
    """Arguments of vLLM that a model which reads pictures needs, joined with those given: none for a text model.

    vLLM's class for SmolVLM loads a processor that reads videos too, by torchvision and num2words. Without them it is
    loaded as Idefics3, which has the same weights and computes the same.

    Args:
        path: the model's folder, or its hub name.
        given: arguments of vLLM, which win. Of those that have parts, as the limits have, each part does.
        processor_args: arguments of the model's processor.
        most_pictures: largest number of pictures of a prompt; None: it is not known.
    """
    if (config := picture_config(path)) is None:
        return {}
    # vLLM reserves memory for the largest input that is allowed, which would often be a film.
    limits = {"video": 0, "audio": 0} | ({} if most_pictures is None else {IMAGE: max(most_pictures, 1)})
    # `VLLMPictures` keeps what vLLM has processed; in vLLM's own cache it would be a second and a third time.
    arguments: dict[str, Any] = {"limit_mm_per_prompt": limits, "mm_processor_cache_gb": 0}
    if processor_args:
        arguments["mm_processor_kwargs"] = dict(processor_args)
    lacks_videos = not all(map(importlib.util.find_spec, ("torchvision", "num2words")))
    if lacks_videos and config.model_type == "smolvlm":
        arguments["hf_overrides"] = {"architectures": ["Idefics3ForConditionalGeneration"]}
    return {name: _joined_with(value, given[name]) if name in given else value for name, value in arguments.items()}


def _joined_with(value: Any, given: Any) -> Any:
    """The value that was given, or both if they have parts."""
    return {**value, **given} if isinstance(value, Mapping) and isinstance(given, Mapping) else given


class VLLMPictures:
    """Makes inputs of prompts with pictures for vLLM in this process.

    Token ids that are expanded already are never expanded again: what vLLM makes of each text with pictures is kept as
    long as the text, and a prompt of several turns is put together from it.

    Args:
        renderer: vLLM's renderer of the engine.
        args: arguments of the model's processor, the same as the trainer's.
    """

    def __init__(self, renderer: Any, args: Mapping[str, Any]) -> None:
        self._renderer, self._args = renderer, dict(args)
        self._rendered: WeakKeyDictionary[Expansion, Mapping[str, Any]] = WeakKeyDictionary()

    def input_of(self, prompt: PicturePrompt) -> dict[str, Any]:
        """The prompt as `LLMEngine.add_request` takes it.

        Raises:
            RolloutError: vLLM expands a picture to other tokens than the trainer.
        """
        for _, expansion in prompt.expansions:
            if expansion not in self._rendered:
                images = [picture.image for picture in expansion.pictures]
                [rendered] = self._renderer.render_cmpl([unexpanded_prompt(expansion.unexpanded, images, self._args)])
                check_same(expansion.token_ids, rendered["prompt_token_ids"])
                self._rendered[expansion] = rendered
        return joined_input(prompt, [(start, self._rendered[expansion]) for start, expansion in prompt.expansions])


def unexpanded_prompt(token_ids: Sequence[int], images: Sequence[Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """A text with pictures as vLLM's renderer takes it.

    Args:
        token_ids: token ids with one placeholder for each picture.
        images: the pictures, as Pillow's.
        args: arguments of the model's processor.
    """
    unexpanded = {"prompt_token_ids": list(token_ids), "multi_modal_data": {IMAGE: list(images)}}
    return {**unexpanded, "mm_processor_kwargs": dict(args)}


def joined_input(token_ids: Sequence[int], texts: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """A prompt as vLLM's engine takes it.

    Args:
        token_ids: the prompt's token ids.
        texts: its texts with pictures, as vLLM's renderer made them, each with the place of its first token.
    """
    items, hashes, ranges = [], [], []
    for start, rendered in texts:
        items += rendered["mm_kwargs"][IMAGE]
        hashes += rendered["mm_hashes"][IMAGE]
        ranges += [replace(tokens, offset=start + tokens.offset) for tokens in rendered["mm_placeholders"][IMAGE]]
    from vllm.multimodal.inputs import MultiModalKwargsItems

    return {
        "type": "multimodal",
        "prompt_token_ids": list(token_ids),
        "mm_kwargs": MultiModalKwargsItems({IMAGE: items}),
        "mm_hashes": {IMAGE: hashes},
        "mm_placeholders": {IMAGE: ranges},
    }


def bytes_of(rendered: Mapping[str, Any]) -> int:
    """Bytes of the tensors that vLLM has made of pictures."""
    leaves = tree_leaves([item.get_data() for item in rendered["mm_kwargs"][IMAGE]])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def check_same(trainers: Sequence[int], vllms: Sequence[int]) -> None:
    """Refuse a text with pictures that vLLM expands to other tokens than the trainer; a RolloutError."""
    if list(trainers) == list(vllms):
        return
    pairs = zip(trainers, vllms, strict=False)
    first = next(
        (place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(trainers), len(vllms))
    )
    raise RolloutError(
        f"vLLM expands a prompt with pictures to other tokens than the model's processor: {len(vllms)} and "
        f"{len(trainers)} tokens, which first differ at place {first} ({list(vllms[first : first + 3])} and "
        f"{list(trainers[first : first + 3])})."
    )

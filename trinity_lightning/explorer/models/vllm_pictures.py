"""Prompts with pictures as vLLM takes them: each text with pictures is processed by vLLM once."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from trinity_lightning.common.pictures.prompt import Expansion, PicturePrompt
from trinity_lightning.errors import RolloutError

IMAGE = "image"  # vLLM's name of the modality


class VLLMPictures:
    """Makes vLLM's inputs of prompts with pictures.

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
        items, hashes, ranges = [], [], []
        for start, expansion in prompt.expansions:
            rendered = self._of_expansion(expansion)
            items += rendered["mm_kwargs"][IMAGE]
            hashes += rendered["mm_hashes"][IMAGE]
            ranges += [replace(tokens, offset=start + tokens.offset) for tokens in rendered["mm_placeholders"][IMAGE]]
        from vllm.multimodal.inputs import MultiModalKwargsItems

        return {
            "type": "multimodal",
            "prompt_token_ids": list(prompt),
            "mm_kwargs": MultiModalKwargsItems({IMAGE: items}),
            "mm_hashes": {IMAGE: hashes},
            "mm_placeholders": {IMAGE: ranges},
        }

    def _of_expansion(self, expansion: Expansion) -> Mapping[str, Any]:
        if expansion not in self._rendered:
            images = [picture.image for picture in expansion.pictures]
            unexpanded = {"prompt_token_ids": list(expansion.unexpanded), "multi_modal_data": {IMAGE: images}}
            [rendered] = self._renderer.render_cmpl([{**unexpanded, "mm_processor_kwargs": self._args}])
            _check_same(expansion.token_ids, rendered["prompt_token_ids"])
            self._rendered[expansion] = rendered
        return self._rendered[expansion]


def _check_same(trainers: tuple[int, ...], vllms: list[int]) -> None:
    if list(trainers) == list(vllms):
        return
    pairs = zip(trainers, vllms, strict=False)
    first = next(
        (place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(trainers), len(vllms))
    )
    raise RolloutError(
        f"vLLM expands a prompt with pictures to other tokens than the model's processor: {len(vllms)} and "
        f"{len(trainers)} tokens, which first differ at place {first} ({vllms[first : first + 3]} and "
        f"{list(trainers[first : first + 3])})."
    )

"""Random pictures, prompts and experiences with pictures, and what transformers itself computes for them."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.pictures.processor import PictureProcessor, load_processor
from trinity_lightning.common.pictures.prompt import PLACES, PicturePrompt
from trinity_lightning.config.models import load_tokenizer, resolve_model


@cache
def processor() -> PictureProcessor:
    loaded = load_processor("tiny_vision")
    assert loaded is not None
    return loaded


def random_picture(seed: int, size: tuple[int, int] | None = None) -> Picture:
    generator = random.Random(seed)
    width, height = size or (generator.randrange(8, 90), generator.randrange(8, 90))
    return Picture(Image.frombytes("RGB", (width, height), generator.randbytes(3 * width * height)))


def prompt_of(text: str, pictures: Sequence[Picture]) -> PicturePrompt:
    """The prompt of a user's message, with `<image>` where pictures are."""
    text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return PicturePrompt.joined(processor().expand(text, pictures))


def prompt_in_tiles(text: str, picture: Picture) -> PicturePrompt:
    """The prompt of a user's message, with a picture that is cut up into tiles of 64 x 64 pixels."""
    text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    args = {"do_image_splitting": True, "size": {"longest_edge": 128}}
    return PicturePrompt.joined(PictureProcessor(processor()._processor, args).expand(text, [picture]))


def experience(
    prompt: Sequence[int], response: Sequence[int], task: int = 0, run: int = 0, **fields: Any
) -> Experience:
    return Experience(
        eid=EID(batch=1, task=task, run=run),
        tokens=[*prompt, *response],
        prompt_length=len(prompt),
        multi_modal_inputs=prompt.inputs if isinstance(prompt, PicturePrompt) else None,
        advantages=[(-1.0) ** run] * len(response),
        **fields,
    )


def picture_groups(runs: int = 3, seed: int = 0) -> list[Experience]:
    """Ragged rollouts of five prompts.

    Two have equal text and different pictures, one has two pictures, one shares its first picture with another, and one
    has none. Some responses have the token that stands for pictures, which the policy has sampled.
    """
    first, second = random_picture(1), random_picture(2)
    plain = load_tokenizer("tiny_vision").encode("<|im_start|>user\nHow many?<|im_end|>\n", add_special_tokens=False)
    prompts: list[Sequence[int]] = [
        prompt_of("<image>How many?", [first]),
        prompt_of("<image>How many?", [second]),
        prompt_of("Is <image> like <image>?", [first, second]),
        prompt_of("<image>How red?", [first]),
        plain,
    ]
    generator = random.Random(seed)
    rows = []
    for task, prompt in enumerate(prompts):
        for run in range(runs):
            response = [generator.randrange(4, 100) for _ in range(generator.randrange(1, 9))]
            if run == 1:
                response[0] = processor().token_id
            rows.append(experience(prompt, response, task, run))
    return rows


def plain_model(name: str = "tiny_vision") -> Any:
    """The model as transformers loads it, never trained."""
    return AutoModelForImageTextToText.from_pretrained(resolve_model(name), dtype=torch.float32)


def plain_logprobs(model: Any, tokens: Sequence[int], inputs: dict[str, torch.Tensor] | None) -> torch.Tensor:
    """Log-probability of each token but the first, by transformers' own forward pass of one row: [len - 1].

    A picture's token that was sampled is text. As transformers would take it for a picture's place, its vector is put
    in by hand where a row has one.
    """
    ids, arguments = torch.tensor([list(tokens)]), {}
    if inputs:
        arguments = {name: tensor[None] for name, tensor in inputs.items() if name != PLACES}
        sampled = torch.ones(ids.shape[1], dtype=torch.bool).index_fill(0, inputs[PLACES], False)
        sampled &= ids[0] == model.config.image_token_id
        if sampled.any():
            states = model.get_image_features(**arguments).pooler_output.flatten(0, -2)
            vectors = model.get_input_embeddings()(ids)
            arguments = {"inputs_embeds": vectors.index_copy(1, inputs[PLACES], states[None])}
            logits = model(**arguments).logits
            return logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    logits = model(input_ids=ids, **arguments).logits
    return logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]

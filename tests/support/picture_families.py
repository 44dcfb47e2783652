"""Rollouts with pictures for the small random models of `picture_models`, and what transformers computes for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, ProcessorMixin, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from support.picture_models import family_model
from support.pictures import experience
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.pictures.processor import PictureProcessor
from trinity_lightning.common.pictures.prompt import PLACES, Expansion, PicturePrompt
from trinity_lightning.config.models import load_tokenizer

IMAGE, ALIAS = 100, 111  # the token of pictures, and one with its vector in place of it, for rows that have sampled it
_BEGIN, _END = 101, 102  # tokens around a picture
_GRIDS = ((1, 4, 8), (1, 8, 4), (1, 6, 4))  # of Qwen's pictures: two with as many tokens, and one with fewer
_TOKENS = {"llava": 16, "gemma3": 4}
Inputs = dict[str, Tensor]


def family_folder(family: str, folder: Path) -> str:
    """A small random model of the family, whose attention is far from even, in a folder."""
    model = family_model(family)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.6 * weight[0].numel() ** -0.5 * (3 if "q_proj" in name else 1), generator=generator)
        vectors = model.get_input_embeddings().weight
        vectors.normal_(0, 0.5, generator=generator)
        vectors[ALIAS] = vectors[IMAGE]
    model.save_pretrained(folder)
    load_tokenizer("tiny_vision").save_pretrained(folder)
    return str(folder)


class QwenProcessor(Qwen2VLProcessor):
    """Qwen-VL's processor without its part for films, which needs torchvision, with the tokens of `tiny_vision`."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.image_token_id = tokenizer.decode([IMAGE]), IMAGE
        self.video_token, self.video_token_id = "<film>", -1
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def qwen_processor() -> PictureProcessor:
    pictures = Qwen2VLImageProcessorPil(patch_size=8, min_pixels=16 * 16, max_pixels=64 * 64)
    return PictureProcessor(QwenProcessor(pictures, load_tokenizer("tiny_vision")))


def picture(family: str, number: int) -> tuple[Inputs, int]:
    """The tensors of a random picture, and the number of its tokens."""
    generator = torch.Generator().manual_seed(number)
    if family in _TOKENS:
        return {"pixel_values": torch.randn(1, 3, 32, 32, generator=generator)}, _TOKENS[family]
    grid = torch.tensor([_GRIDS[number]])
    patches = int(grid.prod())
    pixels = torch.randn(patches, 3 * 2 * 8 * 8, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": grid}, patches // 4


def prompt(family: str, *parts: Sequence[int] | int) -> tuple[list[int], Inputs | None]:
    """Tokens and inputs of a prompt of texts (lists of tokens) and pictures (by number)."""
    tokens: list[int] = []
    places: list[int] = []
    inputs: list[Inputs] = []
    for part in parts:
        if not isinstance(part, int):
            tokens += part
            continue
        tensors, count = picture(family, part)
        inputs.append(tensors)
        places += range(len(tokens) + 1, len(tokens) + 1 + count)
        tokens += [_BEGIN, *[IMAGE] * count, _END]
    if not inputs:
        return tokens, None
    return tokens, {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]} | {
        PLACES: torch.tensor(places)
    }


def picture_prompts(family: str) -> list[PicturePrompt]:
    """Prompts of different lengths, with one to three pictures."""
    parts = [([5, 6], 0, [7]), ([5], 1, [7, 8, 9], 2, [5]), (2, [10], 0, [11], 1)]
    made = []
    for tokens, inputs in (prompt(family, *some) for some in parts):
        assert inputs is not None
        made.append(PicturePrompt.joined(Expansion(tuple(tokens), (), tuple(tokens), inputs)))
    return made


def rollouts(family: str, runs: int = 3) -> list[Experience]:
    """Ragged rollouts of five prompts.

    Two have equal tokens and different pictures, one has two pictures of different sizes, one shares its first picture
    with another, and one has none. Some responses have the token of pictures, which the policy has sampled.
    """
    prompts = [
        prompt(family, [5, 6], 0, [7, 8, 9]),
        prompt(family, [5, 6], 1, [7, 8, 9]),
        prompt(family, 2, [10], 0, [11]),
        prompt(family, 2, [10, 12], 1),
        prompt(family, [5, 6, 13]),
    ]
    generator = torch.Generator().manual_seed(1)
    rows = []
    for task, (tokens, inputs) in enumerate(prompts):
        for run in range(runs):
            response = torch.randint(4, 100, (2 + (3 * task + 2 * run) % 7,), generator=generator).tolist()
            if run == 1:
                response[0] = IMAGE
            row = experience(tokens, response, task, run)
            row.multi_modal_inputs = inputs
            rows.append(row)
    return rows


def own_logprobs(model: Any, row: Experience) -> Tensor:
    """Log-probability of each response token by transformers' own forward pass.

    A sampled token of pictures is another one with the same vector there, which transformers takes for text.
    """
    ids, inputs = row.tokens.long()[None], row.multi_modal_inputs
    arguments = {}
    if inputs is not None:
        types = torch.zeros_like(ids).index_fill(1, inputs[PLACES], 1)
        arguments = {name: tensor for name, tensor in inputs.items() if name != PLACES}
        arguments |= dict.fromkeys(_types_of(model), types)
    else:
        types = torch.zeros_like(ids)
    read = torch.where((ids == IMAGE) & (types == 0), ALIAS, ids)
    logits = model(input_ids=read, **arguments).logits[0, row.prompt_length - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, row.prompt_length :, None])[:, 0]


def _types_of(model: Any) -> tuple[str, ...]:
    """Name of the argument with types of tokens, if the model has one."""
    kind = model.config.model_type
    return ("mm_token_type_ids",) if kind.startswith("qwen") else ("token_type_ids",) if kind == "gemma3" else ()


def assert_same_gradients(ours: Inputs, expected: Inputs) -> None:
    """Every gradient, but for rounding of its largest entry; some of 0 are rounding alone."""
    ours, expected = _with_one_token_of_pictures(ours), _with_one_token_of_pictures(expected)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        rounding = 1e-5 * float(gradient.abs().max()) + 1e-8
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=rounding, msg=name)


def own_loss(folder: str, rows: Sequence[Experience]) -> tuple[float, Inputs]:
    """Loss and gradients of plain policy gradients by transformers, one row after the other."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    total, tokens = torch.zeros(()), sum(row.response_length for row in rows)
    for row in rows:
        assert row.advantages is not None
        total = total - (row.advantages * own_logprobs(model, row)).sum() / tokens
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _with_one_token_of_pictures(gradients: Inputs) -> Inputs:
    """The gradients with that of the alias added to that of the token of pictures."""
    joined = dict(gradients)
    (name,) = (name for name in gradients if name.endswith("embed_tokens.weight"))
    joined[name] = gradients[name].clone()
    joined[name][IMAGE] += joined[name][ALIAS]
    joined[name][ALIAS] = 0
    return joined

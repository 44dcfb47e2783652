"""Promises of every engine that takes pictures. Tests of one subclass `PicturePromises`: fixtures `engine`, `driver`.

The engine is one of `tiny_vision` in float32.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from support.pictures import plain_logprobs, plain_model, processor, prompt_of, random_picture
from support.tiny_model import train_a_little
from trinity_lightning.common.inference import Completion
from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.sync.stream import weight_stream

ROUNDING = 1e-5


def prompts(count: int, seed: int = 0) -> list[PicturePrompt]:
    """Prompts with one to three pictures of any size."""
    sizes = [1 + i % 3 for i in range(count)]
    pictures = [[random_picture(seed + 3 * i + k) for k in range(size)] for i, size in enumerate(sizes)]
    return [prompt_of("<image>" * len(some) + f"How many of {i}?", some) for i, some in enumerate(pictures)]


def worst_difference(completions: Sequence[Completion], model: Any) -> float:
    """Largest difference of log-probabilities from those of transformers' own forward pass."""
    worst = 0.0
    for completion in completions:
        prompt = completion.prompt_token_ids
        assert isinstance(prompt, PicturePrompt)
        with torch.no_grad():
            exact = plain_logprobs(model, [*prompt, *completion.token_ids], prompt.inputs)[len(prompt) - 1 :]
        worst = max(worst, float((exact - torch.tensor(completion.logprobs)).abs().max()))
    return worst


def answers(engine: Engine, driver: Driver, asked: Sequence[PicturePrompt]) -> list[Completion]:
    async def ask() -> list[list[Completion]]:
        requests = [engine.generate(prompt, n=2, seed=i, max_tokens=6) for i, prompt in enumerate(asked)]
        return await asyncio.gather(*requests)

    return [completion for completions in driver.run(ask()) for completion in completions]


class PicturePromises:
    def test_log_probabilities_are_transformers_own(self, engine: Engine, driver: Driver) -> None:
        driver.run(engine.load())
        assert worst_difference(answers(engine, driver, prompts(33)), plain_model()) < ROUNDING

    def test_a_prompt_with_pictures_is_scored(self, engine: Engine, driver: Driver) -> None:
        (prompt,) = prompts(1, seed=50)
        with torch.no_grad():
            exact = plain_logprobs(plain_model(), prompt, prompt.inputs)
        torch.testing.assert_close(torch.tensor(driver.run(engine.logprobs(prompt))), exact, rtol=0, atol=ROUNDING)

    def test_a_changed_pixel_changes_log_probabilities(self, engine: Engine, driver: Driver) -> None:
        picture, other = random_picture(7, (64, 64)), random_picture(7, (64, 64))
        other.image.putpixel((5, 5), tuple(255 - value for value in other.image.getpixel((5, 5))))  # type: ignore
        first, second = (driver.run(engine.logprobs(prompt_of("<image>?", [one]))) for one in (picture, other))
        assert first[-8:] != second[-8:]

    def test_a_sampled_token_of_pictures_is_text(self, engine: Engine, driver: Driver) -> None:
        (prompt,) = prompts(1, seed=60)
        longer = PicturePrompt.joined(prompt, [processor().token_id, 20, 21])
        with torch.no_grad():
            exact = plain_logprobs(plain_model(), longer, longer.inputs)
        torch.testing.assert_close(torch.tensor(driver.run(engine.logprobs(longer))), exact, rtol=0, atol=ROUNDING)

    def test_later_turns_bring_further_pictures(self, engine: Engine, driver: Driver) -> None:
        asked = Conversation([{"role": "user", "content": "Look"}]).with_pictures([random_picture(70)])
        (first,) = driver.run(engine.chat(asked, seed=1, max_tokens=4))
        later = Conversation([{"role": "user", "content": "And here?"}]).with_pictures([random_picture(71)])
        so_far = PicturePrompt.joined(first.prompt_token_ids, list(first.token_ids))
        prompt = driver.run(engine.render(later, so_far=so_far))
        assert list(prompt[: len(so_far)]) == list(so_far)
        assert isinstance(prompt, PicturePrompt)
        assert prompt.pictures == [random_picture(70), random_picture(71)]
        (second,) = driver.run(engine.generate(prompt, seed=2, max_tokens=4))
        assert worst_difference([second], plain_model()) < ROUNDING

    def test_rollouts_of_a_prompt_share_its_tensors(self, engine: Engine, driver: Driver) -> None:
        asked = Conversation([{"role": "user", "content": "Look"}]).with_pictures([random_picture(80)])
        first, second = (driver.run(engine.render(asked)) for _ in range(2))
        assert isinstance(first, PicturePrompt)
        assert isinstance(second, PicturePrompt)
        assert first.inputs is second.inputs

    def test_a_trained_tower_arrives_although_pictures_were_cached(self, engine: Engine, driver: Driver) -> None:
        asked, model = prompts(6, seed=90), plain_model()
        answers(engine, driver, asked)
        train_a_little(model)
        driver.run(engine.sync_weights(weight_stream(model), 1))
        try:
            assert worst_difference(answers(engine, driver, asked), model) < ROUNDING
        finally:
            driver.run(engine.sync_weights(weight_stream(plain_model()), 2))

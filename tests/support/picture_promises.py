"""Promises of every engine that takes pictures. Tests of one subclass `PicturePromises`: fixtures `engine`, `driver`.

The engine is one of `tiny_vision` in float32.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from io import BytesIO
from typing import Any

import pytest
import torch

from support.pictures import plain_logprobs, plain_model, processor, prompt_of, random_picture
from support.policy import make_policy
from support.tiny_model import train_a_little
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import Completion
from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.pictures.prompt import PLACES, PicturePrompt
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.models.tool_calls import ToolCall
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import WorkflowRunner
from trinity_lightning.explorer.workflows.workflow import SimpleWorkflow
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


class Painter:
    """Shows its canvas in every turn, and paints over it before the next; the second turn has two pictures and a text.

    Attributes:
        shown: copies of what the policy was shown, of all instances.
    """

    shown: list[Picture] = []  # noqa: RUF012 - of all instances

    def __init__(self) -> None:
        self._canvas, self._turn = random_picture(300, (40, 30)).image.copy(), 0

    def _painted(self) -> Any:
        self._canvas.paste(random_picture(300 + len(self.shown), (40, 30)).image)
        self.shown.append(Picture(self._canvas.copy()))
        return self._canvas

    def reset(self, task: Task) -> Any:
        return ["Look", self._painted()] if task.raw_task["begins"] else "Look"

    def step(self, response: str) -> Any:
        self._turn += 1
        if self._turn == 2:
            return "And now?", 0.0, False, {}
        file = BytesIO()
        self._painted().save(file, "PNG")
        return [{"type": "image", "image": file.getvalue()}, "and", self._painted()], 0.5, self._turn == 4, {}


class Misplaced(SimpleWorkflow):
    """Says of a picture that it has fewer tokens than it has."""

    async def run(self) -> list[Experience]:
        experiences = await super().run()
        for experience in experiences:
            inputs = experience.multi_modal_inputs or {}
            experience.multi_modal_inputs = {**inputs, PLACES: inputs[PLACES][:-1]}
        return experiences


def paint(seed: int) -> Any:
    """Paints.

    Args:
        seed: any number
    """
    return ["Here", random_picture(seed).image]


def calling(times: int) -> Any:
    """A parser that takes a random model's first responses for calls."""
    seeds = list(range(400, 400 + times))
    return lambda text: ("", [ToolCall("paint", {"seed": seeds.pop(0)})]) if seeds else (text, [])


@cache
def untrained_policy() -> Any:
    """The trainer's policy before its first step."""
    policy = make_policy(name="tiny_vision")
    policy.configure_model()
    return policy


def check_trained(experience: Experience, pictures: Sequence[Picture]) -> None:
    """The experience has these pictures, and log-probabilities that trainer and transformers agree with."""
    inputs, mask = experience.multi_modal_inputs, experience.action_mask
    assert inputs is not None
    assert mask is not None
    assert experience.logprobs is not None
    expected = processor().expand("<image>" * len(pictures), pictures).inputs
    assert set(experience.tokens[inputs[PLACES]].tolist()) == {processor().token_id}
    assert len(inputs[PLACES]) == len(expected[PLACES])
    torch.testing.assert_close(inputs["pixel_values"], expected["pixel_values"], rtol=0, atol=0)
    policy, batch = untrained_policy(), OptimizerBatch.of([experience], explore_step=1)
    with torch.no_grad():
        exact = plain_logprobs(policy.policy, experience.tokens.tolist(), inputs)[experience.prompt_length - 1 :]
        (trainers,) = policy.passes().columns(policy.policy, batch, policy.placement)[0]
    torch.testing.assert_close(experience.logprobs[mask], exact[mask], rtol=0, atol=ROUNDING)
    torch.testing.assert_close(experience.logprobs[mask], trainers[mask], rtol=0, atol=ROUNDING)


def tried(
    engine: Engine, driver: Driver, workflow: str, raw_task: dict[str, Any], arguments: dict[str, Any]
) -> list[Experience]:
    """The experiences of one run of a workflow."""
    task = Task(workflow, raw_task, rollout_args={"max_tokens": 5}, workflow_args=arguments)
    status, experiences = driver.run(WorkflowRunner(ExplorerConfig(), engine).run_task(task, 1))
    assert status.ok, status.message
    return experiences


class PicturePromises:
    def test_log_probabilities_are_transformers_own(self, engine: Engine, driver: Driver) -> None:
        driver.run(engine.load())
        assert worst_difference(answers(engine, driver, prompts(51)), plain_model()) < ROUNDING

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
        parts = [{"type": "text", "text": "<image> or "}, {"type": "image", "image": random_picture(61)}]
        rendered = driver.run(engine.render([{"role": "user", "content": parts}]))
        assert isinstance(rendered, PicturePrompt)
        for longer in (PicturePrompt.joined(prompt, [processor().token_id, 20, 21]), rendered):
            with torch.no_grad():
                exact = plain_logprobs(plain_model(), longer, longer.inputs)
            torch.testing.assert_close(torch.tensor(driver.run(engine.logprobs(longer))), exact, rtol=0, atol=ROUNDING)

    def test_later_turns_bring_further_pictures(self, engine: Engine, driver: Driver) -> None:
        asked = Conversation([{"role": "user", "content": "Look"}]).with_pictures([random_picture(70)])
        (first,) = driver.run(engine.chat(asked, seed=1, max_tokens=4))
        later = Conversation([{"role": "user", "content": "And here?"}]).with_pictures([random_picture(71)])
        sampled = [*first.token_ids, processor().token_id]  # which is text, before a picture as well as behind all
        so_far = PicturePrompt.joined(first.prompt_token_ids, sampled)
        prompt = driver.run(engine.render(later, so_far=so_far))
        assert list(prompt[: len(so_far)]) == list(so_far)
        assert isinstance(prompt, PicturePrompt)
        assert prompt.pictures == [random_picture(70), random_picture(71)]
        (second,) = driver.run(engine.generate(prompt, seed=2, max_tokens=4))
        assert worst_difference([second], plain_model()) < ROUNDING

    @pytest.mark.parametrize("begins", [True, False])
    @pytest.mark.parametrize("mode", ["single", "step_wise"])
    def test_an_environment_shows_pictures_in_its_turns(
        self, engine: Engine, driver: Driver, mode: str, begins: bool
    ) -> None:
        Painter.shown.clear()
        arguments = {"environment": Painter, "max_turns": 4, "mode": mode}
        experiences = tried(engine, driver, "multi_turn", {"begins": begins}, arguments)
        pictures = [Picture(picture.image) for picture in Painter.shown]
        counts = [begins, begins + 2, begins + 2, begins + 4] if mode == "step_wise" else [begins + 4]
        assert len(experiences) == len(counts)
        for experience, count in zip(experiences, counts, strict=True):
            if count:
                check_trained(experience, pictures[:count])
            else:
                assert experience.multi_modal_inputs is None
        if begins and mode == "step_wise":  # the pictures of the last three steps are in memory once
            inputs = [experience.multi_modal_inputs or {} for experience in experiences[1:]]
            assert len({tensors["pixel_values"].untyped_storage().data_ptr() for tensors in inputs}) == 1

    def test_a_tool_answers_with_pictures(self, engine: Engine, driver: Driver) -> None:
        arguments = {"tools": [paint], "tool_parser": calling(2)}
        task = {"prompt": "<image>?", "images": [random_picture(399)], "answer": "3"}
        (experience,) = tried(engine, driver, "tool_use", task, arguments)
        assert (experience.metrics["tool_calls"], experience.metrics["tool_errors"]) == (2.0, 0.0)
        check_trained(experience, [random_picture(seed) for seed in (399, 400, 401)])
        assert "tool\nHere<" in engine.tokenizer.decode(experience.tokens)

    def test_an_experience_with_too_few_places_fails_its_task(self, engine: Engine, driver: Driver) -> None:
        task = Task(Misplaced, {"prompt": "<image>?", "images": [random_picture(411)]}, rollout_args={"max_tokens": 2})
        status, experiences = driver.run(WorkflowRunner(ExplorerConfig(), engine).run_task(task, 1))
        assert not status.ok
        assert "16 states" in str(status.message)
        assert experiences == []

    def test_a_teacher_sees_the_pictures_too(self, engine: Engine, driver: Driver) -> None:
        raw = {"prompt": "<image>?", "images": [random_picture(410)]}
        task = Task("on_policy_distill", raw, rollout_args={"max_tokens": 5})
        status, experiences = driver.run(WorkflowRunner(ExplorerConfig(), engine, [engine]).run_task(task, 1))
        assert status.ok, status.message
        (experience,) = experiences
        assert experience.teacher_logprobs is not None
        torch.testing.assert_close(experience.teacher_logprobs, experience.logprobs, rtol=0, atol=ROUNDING)

    def test_openais_client_takes_pictures(self, engine: Engine, driver: Driver) -> None:
        picture = random_picture(500)
        place = {"type": "image_url", "image_url": {"url": picture.data_url}}
        messages = [{"role": "user", "content": [place, {"type": "text", "text": "Look"}]}]
        client = engine.get_openai_async_client()
        response = driver.run(client.chat.completions.create(model="any", messages=messages, max_tokens=3, seed=1))
        assert response.prompt_token_ids == list(prompt_of("<image>Look", [picture]))

    def test_rollouts_of_a_prompt_share_its_tensors(self, engine: Engine, driver: Driver) -> None:
        asked = Conversation([{"role": "user", "content": "Look"}]).with_pictures([random_picture(80)])
        first, second = (driver.run(engine.render(asked)) for _ in range(2))
        assert isinstance(first, PicturePrompt)
        assert isinstance(second, PicturePrompt)
        assert first.inputs is second.inputs

    def test_a_trained_tower_arrives_although_pictures_were_cached(self, engine: Engine, driver: Driver) -> None:
        asked, model = prompts(51), plain_model()
        answers(engine, driver, asked)
        train_a_little(model)
        driver.run(engine.sync_weights(weight_stream(model), 1))
        try:
            assert worst_difference(answers(engine, driver, asked), model) < ROUNDING
        finally:
            driver.run(engine.sync_weights(weight_stream(plain_model()), 2))


class VLLMPicturePromises(PicturePromises):
    """Promises of vLLM's engines, which expand a prompt's pictures themselves, too."""

    def test_tokens_that_vllm_would_expand_otherwise_are_refused_at_the_first_difference(
        self, engine: Engine, driver: Driver
    ) -> None:
        expansion = processor().expand("<image>?", [random_picture(1)])
        other = replace(expansion, token_ids=(*expansion.token_ids[:3], 7, *expansion.token_ids[4:]))
        with pytest.raises(RolloutError, match="place 3"):
            driver.run(engine.generate(PicturePrompt.joined(other), max_tokens=1))

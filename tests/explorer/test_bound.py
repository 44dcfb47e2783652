"""A model as a run sees it, for coroutines and for threads."""

import asyncio
import copy
import inspect
from typing import Any

import pytest
from PIL import Image
from support.errors import refuses
from support.fake_model import FakeModel

from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.random_state import rollout_seed
from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.explorer.models.blocking import BlockingModel
from trinity_lightning.explorer.models.bound import BoundModel


def view(model: FakeModel, run: int = 2, **sampling: Any) -> BoundModel:
    return BoundModel(model, run_seed=5, batch=7, task=1, run=run, sampling=sampling)


def test_it_is_an_inference_model() -> None:
    assert isinstance(view(FakeModel()), InferenceModel)


def test_every_call_has_a_seed_of_its_own_and_a_new_view_has_the_same() -> None:
    model = FakeModel()

    async def calls() -> list[int]:
        bound = view(model)
        await bound.generate([1])
        await bound.chat([{"role": "user", "content": "a"}])
        await bound.generate("b")
        return [call["seed"] for call in model.calls]

    assert asyncio.run(calls()) == [rollout_seed(5, 7, 1, turn, 2) for turn in range(3)]
    assert asyncio.run(calls())[3:] == asyncio.run(calls())[:3]


@pytest.mark.parametrize("variables", [None, {"mood": "calm"}])
def test_a_conversation_keeps_its_pictures(variables: dict[str, Any] | None) -> None:
    rendered: list[Conversation] = []

    class Rendering(FakeModel):
        async def render(self, messages: Any, tools: Any = None, so_far: Any = ()) -> list[int]:
            rendered.append(messages)
            return [1]

    picture = Picture(Image.new("RGB", (2, 2), "red"))
    bound = BoundModel(Rendering(), run_seed=5, batch=7, task=1, run=2, template_variables=variables)
    asyncio.run(bound.render(Conversation([{"role": "user", "content": "a"}]).with_pictures([picture])))
    assert rendered[0][0]["content"][0] == {"type": "image", "image": picture}
    assert rendered[0].template_variables == (variables or {})


def test_a_chat_brings_pictures_to_the_first_message_of_the_user() -> None:
    asked: list[Conversation] = []

    class Chatting(FakeModel):
        async def chat(self, messages: Any, tools: Any = None, n: int = 1, images: Any = (), **sampling: Any) -> Any:
            asked.append(messages)
            assert not images
            return await super().chat([{"role": "user", "content": "a"}], tools, n, **sampling)

    picture = Picture(Image.new("RGB", (2, 2), "red"))
    asyncio.run(view(Chatting()).chat([{"role": "user", "content": "a"}], images=[picture]))
    assert asked[0][0]["content"][0] == {"type": "image", "image": picture}


def test_n_samples_are_those_of_n_runs() -> None:
    async def texts(run: int, n: int) -> list[str]:
        return [completion.text for completion in await view(FakeModel(), run).generate([1], n=n)]

    together = asyncio.run(texts(3, 4))
    assert together == [asyncio.run(texts(run, 1))[0] for run in (3, 4, 5, 6)]


def test_the_tasks_settings_are_defaults_and_none_means_the_engines_own() -> None:
    model = FakeModel()
    bound = view(model, temperature=0.7, max_tokens=9, stop=None)
    asyncio.run(bound.generate([1], temperature=0.1, top_p=0.5, seed=4))
    asyncio.run(bound.chat([{"role": "user", "content": "a"}], n=2, max_tokens=None))
    assert model.calls[0] == {"prompt": [1], "n": 1, "temperature": 0.1, "max_tokens": 9, "top_p": 0.5, "seed": 4}
    assert model.calls[1] == {"prompt": "a", "n": 2, "temperature": 0.7, "seed": rollout_seed(5, 7, 1, 1, 2)}


@pytest.mark.parametrize(
    "setting",
    [
        *({"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}, {"min_tokens": 2}, {"logit_bias": {7: 1.5}}),
        *({"allowed_token_ids": [7, 8]}, {"bad_words": ["no"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        {"thinking_token_budget": 3},
    ],
)
def test_a_call_that_is_trained_on_comes_from_the_whole_distribution(setting: dict[str, Any]) -> None:
    model = FakeModel()
    trained = BoundModel(model, run_seed=5, batch=7, task=1, run=2, trained=True)
    with refuses(f"sampling.{next(iter(setting))}"):
        asyncio.run(trained.generate([1], **setting))
    assert model.calls == []
    asyncio.run(view(model).generate([1], **setting))


def test_the_temperature_used_is_that_of_the_calls() -> None:
    bound = view(FakeModel(), temperature=0.7)
    assert bound.used_temperature == 0.7
    asyncio.run(bound.generate([1], temperature=0.0))
    assert bound.used_temperature == 0.0
    asyncio.run(bound.generate([1]))
    assert bound.used_temperature is None
    assert view(FakeModel()).used_temperature == 1.0


def test_versions() -> None:
    model = FakeModel()
    bound = view(model)
    model.model_version = 3
    assert bound.used_version == 3
    asyncio.run(bound.generate([1]))
    model.model_version = 4
    asyncio.run(bound.generate([1]))
    assert (bound.model_version, bound.used_version) == (4, 3)


def test_the_rest_is_passed_on_or_refused() -> None:
    bound = view(FakeModel(max_model_len=33))
    assert bound.max_model_len == 33
    assert asyncio.run(bound.logprobs([1, 2])) == [-1.0]
    with pytest.raises(RuntimeError):
        asyncio.run(bound.sync_weights([], 1))
    with pytest.raises(RuntimeError):
        asyncio.run(bound.shutdown())


def test_the_blocking_model_waits_for_the_loop() -> None:
    async def main() -> None:
        model = FakeModel(latency=0.01)
        blocking = BlockingModel(view(model))
        completions = await run_in_thread(lambda: blocking.generate([1], n=2))
        assert [completion.text for completion in completions] == [str(rollout_seed(5, 7, 1, 0, run)) for run in (2, 3)]
        assert blocking.model_version == copy.copy(blocking).model_version == 0
        assert [*inspect.signature(blocking.generate).parameters][:2] == ["prompt", "n"]
        with pytest.raises(RuntimeError):  # the event loop would wait for itself
            blocking.generate([1])

    asyncio.run(main())

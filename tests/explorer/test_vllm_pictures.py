"""Pictures with a real vLLM, in float32."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.picture_promises import PicturePromises
from support.pictures import processor, prompt_of, random_picture
from support.tiny_vllm import tiny_engine

from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine

pytestmark = pytest.mark.usefixtures("needs_vllm")


@pytest.fixture(scope="module")
def engine() -> VLLMEngine:
    return tiny_engine("tiny_vision", max_model_len=512)


@pytest.fixture(scope="module")
def driver(engine: VLLMEngine) -> Iterator[Driver]:
    driver = Driver([engine])
    try:
        driver.run(engine.load())
        yield driver
        driver.run(engine.shutdown())
    finally:
        driver.close()


class TestPictures(PicturePromises):
    def test_tokens_that_vllm_would_expand_otherwise_are_refused_at_the_first_difference(
        self, engine: VLLMEngine, driver: Driver
    ) -> None:
        expansion = processor().expand("<image>?", [random_picture(1)])
        other = replace(expansion, token_ids=(*expansion.token_ids[:3], 7, *expansion.token_ids[4:]))
        with pytest.raises(RolloutError, match="place 3"):
            driver.run(engine.generate(PicturePrompt.joined(other), max_tokens=1))

    def test_what_is_expanded_once_is_never_expanded_again(
        self, engine: VLLMEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompt = prompt_of("<image>once", [random_picture(200)])
        driver.run(engine.generate(prompt, max_tokens=1, seed=0))

        def refuse(*_: object) -> None:
            raise AssertionError("expanded again")

        assert engine._engine is not None
        monkeypatch.setattr(engine._engine.renderer, "render_cmpl", refuse)
        longer = PicturePrompt.joined(prompt, [20, 21])
        driver.run(engine.generate(longer, n=2, max_tokens=1, seed=0))

"""Pictures with a real vLLM, in float32."""

from collections.abc import Iterator

import pytest
from support.picture_promises import ROUNDING, VLLMPicturePromises, answers, prompts, worst_difference
from support.pictures import plain_model, prompt_of, random_picture
from support.tiny_model import train_a_little
from support.tiny_vllm import tiny_engine

from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.sync.stream import changing_stream, weight_stream
from trinity_lightning.trainer.frozen import freeze

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


class TestPictures(VLLMPicturePromises):
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

    def test_a_frozen_tower_stays_when_the_other_weights_are_sent(self, engine: VLLMEngine, driver: Driver) -> None:
        asked, model = prompts(3, seed=300), plain_model()
        freeze(model, ["vision", "connector"])
        answers(engine, driver, asked)
        train_a_little(model.get_decoder())
        stream = changing_stream(model)
        assert not any("vision" in name or "connector" in name for name in stream.shapes)
        driver.run(engine.sync_weights(stream, 1))
        try:
            assert worst_difference(answers(engine, driver, asked), model) < ROUNDING
        finally:
            driver.run(engine.sync_weights(weight_stream(plain_model()), 2))

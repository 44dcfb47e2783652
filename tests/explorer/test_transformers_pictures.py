"""Pictures with the training model itself as the engine."""

from collections.abc import Iterator

import pytest
from support.picture_promises import PicturePromises
from support.pictures import plain_model

from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    engine = TransformersEngine("tiny_vision", max_model_len=512)
    engine.bind(plain_model())
    return engine


@pytest.fixture(scope="module")
def driver(engine: TransformersEngine) -> Iterator[Driver]:
    driver = Driver([engine])
    try:
        yield driver
    finally:
        driver.close()


class TestPictures(PicturePromises):
    pass

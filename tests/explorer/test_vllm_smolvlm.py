"""A real vLLM with the files of SmolVLM, whose videos need further packages, and with arguments of its processor."""

from pathlib import Path

import pytest
from support.picture_models import smolvlm_folder
from support.picture_promises import ROUNDING, answers, worst_difference
from support.pictures import plain_model, random_picture
from support.tiny_vllm import tiny_engine

from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.explorer.driver import Driver

pytestmark = pytest.mark.usefixtures("needs_vllm")


def test_smolvlm_reads_pictures_that_are_cut_up(tmp_path: Path) -> None:
    folder = str(smolvlm_folder(tmp_path / "smolvlm"))
    engine = tiny_engine(folder, max_model_len=256)
    engine.processor_args = {"do_image_splitting": True, "size": {"longest_edge": 128}}
    driver = Driver([engine])
    try:
        driver.run(engine.load())
        assert engine.processor is not None
        prompts = [
            PicturePrompt.joined(engine.processor.expand(f"<image>How many? {seed}", [random_picture(seed, size)]))
            for seed, size in enumerate([(128, 128), (50, 90), (128, 20)])
        ]
        assert {len(prompt.inputs["pixel_values"]) for prompt in prompts} >= {3, 5}  # tiles, and the whole picture
        assert worst_difference(answers(engine, driver, prompts), plain_model(folder)) < ROUNDING
        asked = Conversation([{"role": "user", "content": "Look"}]).with_pictures([random_picture(9)])
        (answer,) = driver.run(engine.chat(asked, max_tokens=2))  # by the processor's template, a file of its own
        assert isinstance(answer.prompt_token_ids, PicturePrompt)
        driver.run(engine.shutdown())
    finally:
        driver.close()

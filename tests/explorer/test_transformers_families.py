"""Families of picture models with the training model itself as the engine: it agrees with trainer and transformers."""

from pathlib import Path

import pytest
import torch
from support.picture_families import IMAGE, family_folder, own_logprobs, picture_prompts, qwen_processor
from support.picture_promises import answers
from support.pictures import experience, random_picture
from support.policy import make_policy

from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models import transformers_engine
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "llava", "gemma3"])
def test_engine_and_trainer_and_transformers_agree(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of different lengths are decoded together, and scored behind a sampled token of pictures."""
    processor = qwen_processor()
    monkeypatch.setattr(transformers_engine, "load_processor", lambda *_: processor)  # their own need torchvision
    policy = make_policy(name=family_folder(family, tmp_path), max_tokens_per_micro_batch=500)
    policy.configure_model()
    engine = TransformersEngine(policy.model_name, max_model_len=128)
    engine.bind(policy.policy)
    asked = picture_prompts(family)
    if family.startswith("qwen"):
        pictures = [random_picture(1, (40, 30)), random_picture(2, (20, 90))]
        asked.append(PicturePrompt.joined(processor.expand("Is <image> like <image>?", pictures)))
    driver = Driver([engine])
    try:
        driver.run(engine.load())
        completions = answers(engine, driver, asked)
        longer = [PicturePrompt.joined(prompt, [20, IMAGE, 21, IMAGE]) for prompt in asked]
        scored = [driver.run(engine.logprobs(prompt)) for prompt in longer]
    finally:
        driver.close()

    def compare(prompt: PicturePrompt, response: list[int], logprobs: list[float]) -> None:
        row = experience(prompt, response)
        with torch.no_grad():
            expected = own_logprobs(policy.policy, row)
        ours = policy.sequence_logprobs(PicturePrompt.joined(prompt, response))[len(prompt) - 1 :]
        for values in (ours, logprobs):
            torch.testing.assert_close(torch.tensor(values), expected, rtol=0, atol=1e-5)

    for completion in completions:
        assert isinstance(completion.prompt_token_ids, PicturePrompt)
        compare(completion.prompt_token_ids, list(completion.token_ids), list(completion.logprobs))
    for prompt, logprobs in zip(asked, scored, strict=True):
        compare(prompt, [20, IMAGE, 21, IMAGE], logprobs[len(prompt) - 1 :])

"""vLLM that computes with the adapters of a policy that reads pictures."""

import pytest
import torch
from support.picture_promises import ROUNDING, answers, prompts, worst_difference
from support.pictures import plain_model

from trinity_lightning.config.engines import EngineConfig, EngineDtype
from trinity_lightning.config.model import LoRAConfig
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.vllm_adapter import VLLMAdapterEngine
from trinity_lightning.trainer.adapter import Adapter

CONFIG = EngineConfig(dtype=EngineDtype.fp32, max_model_len=256, max_num_seqs=16, kv_cache_gb=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_vllm")
def test_prompts_with_pictures_are_computed_with_the_adapters_that_were_sent() -> None:
    model, asked = plain_model(), prompts(4)
    Adapter(model, LoRAConfig(r=8), "tiny_vision")
    engine = VLLMAdapterEngine("tiny_vision", CONFIG, model.adapter.alone().shapes)
    driver = Driver([engine])
    driver.run(engine.load())
    for version in (1, 2):
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        driver.run(engine.sync_weights(model.adapter.alone(), version))
        completions = answers(engine, driver, asked)
        assert worst_difference(completions, model) < ROUNDING
        assert worst_difference(completions, plain_model()) > 0.01
    driver.run(engine.shutdown())
    driver.close()

"""vLLM that computes with the policy's adapters itself; a whole run is in test_adapter_runs.py."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.tiny_model import logprobs, tiny_model

from trinity_lightning.config.engines import EngineConfig, EngineDtype
from trinity_lightning.config.training import LoRAConfig
from trinity_lightning.errors import WeightSyncError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.vllm_adapter import VLLMAdapterEngine
from trinity_lightning.sync.proof import PROBE_TEXT, Synchronizer, Tolerance
from trinity_lightning.sync.stream import WeightStream
from trinity_lightning.trainer.adapter import Adapter

LORA = LoRAConfig(r=9, alpha=7, targets=["q_proj", "down_proj"])  # vLLM has room for ranks of 8 and 16


@pytest.fixture(scope="module")
def driven(needs_vllm: Any) -> Iterator[tuple[VLLMAdapterEngine, Driver, Any]]:
    """An engine, its driver, and a policy with adapters."""
    torch.manual_seed(0)
    model = tiny_model()
    config = EngineConfig(dtype=EngineDtype.fp32, max_model_len=320, max_num_seqs=4, kv_cache_gb=0.05)
    engine = VLLMAdapterEngine("tiny", config, Adapter(model, LORA, "tiny").alone().shapes)
    driver = Driver([engine])
    driver.run(engine.load())
    yield engine, driver, model
    driver.run(engine.shutdown())
    driver.close()


def synchronizer(driven: tuple[VLLMAdapterEngine, Driver, Any], ignored: str = "") -> Synchronizer:
    """One that sends zeros for the factor of that name."""
    engine, driver, model = driven
    probe = engine.tokenizer.encode(PROBE_TEXT)

    def send() -> None:
        stream = WeightStream.of((name, each * (name != ignored)) for name, each in model.adapter.alone())
        driver.run(engine.sync_weights(stream, 1))

    return Synchronizer(
        model.adapter.perturbed_alone,
        send,
        trainer_logprobs=lambda: logprobs(model, probe),
        engine_logprobs=lambda: [driver.run(engine.logprobs(probe))],
        tolerance=Tolerance.of(model.dtype, engine.dtype),
        check_interval=1,
        with_drill=True,
    )


def test_the_drill_catches_a_factor_that_does_not_arrive(driven: tuple[VLLMAdapterEngine, Driver, Any]) -> None:
    for name in driven[2].adapter.alone().shapes:
        with pytest.raises(WeightSyncError, match="drill with perturbed weights"):
            synchronizer(driven, name).sync()


def test_drill_and_probes_pass_whenever_adapters_are_sent(driven: tuple[VLLMAdapterEngine, Driver, Any]) -> None:
    engine, driver, model = driven
    sync, probe = synchronizer(driven), engine.tokenizer.encode(PROBE_TEXT)
    assert sync.sync()["sync/probe_diff/max"] < 1e-4
    before = driver.run(engine.logprobs(probe))
    assert before == pytest.approx(logprobs(tiny_model(), probe), abs=1e-6)  # B is zero: the model as it was
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.requires_grad):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    assert sync.sync()["sync/probe_diff/max"] < 1e-4
    assert driver.run(engine.logprobs(probe)) != pytest.approx(before, abs=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sent: sent.pop(next(iter(sent))), "1 missing"),
        (lambda sent: sent.update({"lm_head.lora_A.weight": torch.zeros(9, 64)}), "1 unknown to the engine"),
        (lambda sent: sent.update({next(iter(sent)): torch.zeros(8, 64)}), "1 wrong shape"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    driven: tuple[VLLMAdapterEngine, Driver, Any], change: Any, message: str
) -> None:
    engine, driver, model = driven
    change(sent := dict(model.adapter.alone()))
    with pytest.raises(WeightSyncError, match=message):
        driver.run(engine.sync_weights(WeightStream.of(sent.items()), 1))

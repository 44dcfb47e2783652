"""vLLM that computes with the policy's adapters itself; whole runs are in test_adapter_runs.py."""

import os
import re
import signal
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_promises import plain_logprobs
from support.forked import fork_servers
from support.runs import Commands
from support.tiny_model import logprobs, tiny_model
from support.tiny_vllm import take_posted, until_written

from trinity_lightning.config.engines import EngineConfig, EngineDtype
from trinity_lightning.config.model import LoRAConfig
from trinity_lightning.errors import WeightSyncError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.vllm_adapter import VLLMAdapterEngine, VLLMAdapterServerEngine
from trinity_lightning.sync.proof import PROBE_TEXT, Synchronizer, Tolerance
from trinity_lightning.sync.stream import WeightStream
from trinity_lightning.trainer.adapter import Adapter

LORA = LoRAConfig(r=9, alpha=7, targets=["q_proj", "down_proj"])  # vLLM has room for ranks of 8 and 16
CONFIG = EngineConfig(dtype=EngineDtype.fp32, max_model_len=320, max_num_seqs=4, kv_cache_gb=0.05)


@pytest.fixture(scope="module")
def driven(needs_vllm: Any) -> Iterator[tuple[VLLMAdapterEngine, Driver, Any]]:
    """An engine, its driver, and a policy with adapters."""
    torch.manual_seed(0)
    model = tiny_model()
    engine = VLLMAdapterEngine("tiny", CONFIG, Adapter(model, LORA, "tiny").alone().shapes)
    driver = Driver([engine])
    driver.run(engine.load())
    yield engine, driver, model
    driver.run(engine.shutdown())
    driver.close()


def synchronizer(driven: tuple[VLLMAdapterEngine, Driver, Any], ignored: str = "") -> Synchronizer:
    """A synchronizer that sends zeros for the factor named `ignored`."""
    engine, driver, model = driven
    probe = engine.tokenizer.encode(PROBE_TEXT)

    def send() -> None:
        stream = WeightStream.of((name, factor * (name != ignored)) for name, factor in model.adapter.alone())
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


@torch.no_grad()
def move(model: Any) -> None:
    """Change all adapters."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def test_the_drill_catches_a_factor_that_does_not_arrive(driven: tuple[VLLMAdapterEngine, Driver, Any]) -> None:
    for name in driven[2].adapter.alone().shapes:
        with pytest.raises(WeightSyncError, match="drill"):
            synchronizer(driven, name).sync()


def test_drill_and_probes_pass_whenever_adapters_are_sent(driven: tuple[VLLMAdapterEngine, Driver, Any]) -> None:
    engine, driver, model = driven
    sync, probe = synchronizer(driven), engine.tokenizer.encode(PROBE_TEXT)
    assert sync.sync()["sync/probe_diff/max"] < 1e-4
    before = driver.run(engine.logprobs(probe))
    assert before == pytest.approx(logprobs(tiny_model(), probe), abs=1e-6)  # B is zero: the model as it was
    move(model)
    assert sync.sync()["sync/probe_diff/max"] < 1e-4
    assert driver.run(engine.logprobs(probe)) != pytest.approx(before, abs=1e-2)


def test_responses_go_on_with_the_adapters_that_come_meanwhile(driven: tuple[VLLMAdapterEngine, Driver, Any]) -> None:
    engine, driver, model = driven
    driver.run(engine.sync_weights(model.adapter.alone(), 1))
    task = driver.start(engine.generate(list(range(4, 40)), n=2, seed=3, max_tokens=12, ignore_eos=True))
    take_posted(engine)
    until_written(engine, driver, 5)
    old = deepcopy(model)
    move(model)
    sync = driver.start(engine.sync_weights(model.adapter.alone(), 2))
    take_posted(engine)
    driver.wait(sync)
    for completion in driver.wait(task):
        assert completion.versions == ((0, 1), (5, 2))
        before, after = (plain_logprobs(completion, model=weights) for weights in (old, model))
        assert list(completion.logprobs) == pytest.approx([*before[:5], *after[5:]], rel=0, abs=1e-5)
        assert before[5:] != pytest.approx(after[5:], abs=1e-3)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (lambda sent, first: sent.pop(first), None),
        (lambda sent, _: sent.update({"lm_head.lora_A.weight": torch.zeros(9, 64)}), "lm_head.lora_A.weight"),
        (lambda sent, first: sent.update({first: torch.zeros(8, 64)}), None),
    ],
    ids=["missing", "unknown", "wrong shape"],
)
def test_adapters_that_do_not_fit_are_refused_by_name(
    driven: tuple[VLLMAdapterEngine, Driver, Any], change: Any, factor: str | None
) -> None:
    """The factor named is None for the first one of all."""
    engine, driver, model = driven
    sent = dict(model.adapter.alone())
    change(sent, first := next(iter(sent)))
    with pytest.raises(WeightSyncError, match=f"'{re.escape(factor or first)}'"):
        driver.run(engine.sync_weights(WeightStream.of(sent.items()), 1))


def test_a_server_that_dies_within_a_sync_is_started_again_with_the_new_adapters(
    run_train: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each of the requests that a sync is made of."""
    torch.manual_seed(0)
    model, text = tiny_model(), list(range(4, 40))
    adapter = Adapter(model, LORA, "tiny")
    fork_servers(run_train.address, monkeypatch.setattr)
    engine = VLLMAdapterServerEngine("tiny", CONFIG, shapes=adapter.alone().shapes, log=tmp_path / "log")
    driver, change = Driver(), engine._change

    def dying_before(last: str) -> Any:
        def request(path: str, body: Any) -> Any:
            if path.startswith(last):
                monkeypatch.setattr(engine, "_change", change)
                assert engine._process is not None
                os.killpg(engine._process._process.pid, signal.SIGKILL)
            return change(path, body)

        return request

    try:
        for version, last in enumerate(("never", "/v1/unload", "/v1/load", "/reset"), 1):
            move(model)
            monkeypatch.setattr(engine, "_change", dying_before(last))
            driver.run(engine.sync_weights(adapter.alone(), version))
            assert (engine.model_version, engine.restarts) == (version, version - 1)
            assert driver.run(engine.logprobs(text)) == pytest.approx(logprobs(model, text), abs=1e-4)
    finally:
        driver.run(engine.shutdown())
        driver.close()

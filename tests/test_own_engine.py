"""The engine of docs/examples: what is refused. What it does: test_architecture.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from my_engine import PlainEngine
from support.compose import composed
from support.errors import refuses
from support.runs import ROOT, SMALL, RunTrain

from trinity_lightning.config.engines import Capabilities, capabilities_of
from trinity_lightning.config.run import validate
from trinity_lightning.errors import UnfinishedClassError
from trinity_lightning.explorer.models.engine import Engine

PLAIN = "my_engine.PlainEngine"
OWN = f"engine.name={PLAIN}"
OWN_ENGINE = ROOT / "docs" / "examples" / "my_engine.py"
STALE_ENGINE = """
from my_engine import PlainEngine


class StaleEngine(PlainEngine):
    async def _take(self, stream, version):
        self._model_version = version
"""


class HalfEngine(Engine):
    """Without most of what an engine is."""

    capabilities = Capabilities()

    async def load(self) -> None: ...

    async def _completions(self, token_ids: Any, n: Any, sampling: Any) -> Any: ...

    async def _take(self, stream: Any, version: Any) -> None: ...


def test_an_engine_that_keeps_its_first_weights_stops_the_run(run_train: RunTrain, tmp_path: Path) -> None:
    (tmp_path / "my_engine.py").write_text(OWN_ENGINE.read_text())
    (tmp_path / "stale_engine.py").write_text(STALE_ENGINE)
    done = run_train(tmp_path, "+recipe=grpo", *SMALL, "engine.name=stale_engine.StaleEngine", "steps=1")
    assert done.returncode == 1
    assert "drill with perturbed weights: the engine's log-probabilities are not the trainer's" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("engine.name=vllmm",), "engine"),
        (("engine.name=my_engine.Plain",), "engine.name"),
        (("engine.name=no_such_module.Mine",), "engine.name"),
        (("engine.name=support.tiny_model.tiny_model",), "engine.name"),
        ((OWN, "engine.kv_cache_gb=1"), "engine.kv_cache_gb"),
        ((OWN, "explorer.sync_offset=1"), "explorer.sync_offset"),
        ((OWN, "explorer.runner=ray"), "explorer.runner"),
        ((OWN, "synchronizer=nccl"), "synchronizer.method"),
    ],
)
def test_what_an_engine_says_that_it_cannot_do_is_refused(arguments: tuple[str, ...], key: str) -> None:
    with refuses(key):
        validate(composed("+recipe=grpo", "model=tiny", *arguments))


def test_an_engine_without_all_of_its_methods_is_refused_by_their_names() -> None:
    with pytest.raises(UnfinishedClassError, match="_logprobs, dtype, shutdown, tokenizer, weight_shapes"):
        validate(composed("+recipe=grpo", "model=tiny", "engine.name=test_own_engine.HalfEngine"))


def test_an_engine_that_takes_weights_by_nccl_wants_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainEngine, "capabilities", Capabilities(sync_methods=("nccl",)))
    config = composed("+recipe=grpo", "model=tiny", OWN, "synchronizer=nccl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with refuses("synchronizer"):
        validate(config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    validate(config)


def test_an_engine_says_what_it_can_do() -> None:
    from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
    from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
    from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine

    for name, engine in {
        "transformers": TransformersEngine,
        "vllm": VLLMEngine,
        "vllm_server": VLLMServerEngine,
    }.items():
        assert capabilities_of(name) is engine.capabilities
    assert capabilities_of(PLAIN).keys == ("dtype", "max_num_seqs", "args")

"""Weights that are packed for vLLM's CPU build are, to the bit, what vLLM itself makes of them."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_model import logprobs, train_a_little

from trinity_lightning.config.engines import EngineDtype
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.errors import ModelLoadError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models import vllm_engine
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.sync.stream import weight_stream

pytestmark = pytest.mark.usefixtures("needs_vllm")

TEXT = [7, 30, 41, 12, 5, 97, 58]
SIZES: dict[str, Any] = {"vocab_size": 102, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 128}
# Without AVX-512 oneDNN multiplies no bfloat16, and vLLM packs float32 alone.
BF16_IS_PACKED = torch.ops.mkldnn._is_mkldnn_bf16_supported()
PACKED, DTYPE = (EngineDtype.bf16, torch.bfloat16) if BF16_IS_PACKED else (EngineDtype.fp32, torch.float32)


def qwen2() -> Any:
    """Biases, and a head of its own."""
    config = transformers.Qwen2Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=False)
    return transformers.Qwen2ForCausalLM(config)


def gpt2() -> Any:
    """Weights that are stored transposed, square ones too, and queries, keys and values as one."""
    config = transformers.GPT2Config(vocab_size=102, n_positions=128, n_embd=64, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def engine_of(model: Any, folder: Path, dtype: EngineDtype) -> VLLMEngine:
    model.save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    return VLLMEngine(str(folder), dtype=dtype, max_model_len=32, max_num_seqs=4, kv_cache_gb=0.05)


def packed_vocabularies(engine: VLLMEngine) -> list[str]:
    """Kinds of the matrices as large as the vocabulary that the engine keeps packed."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    assert engine._packed is not None
    modules = engine._packed._model.modules()
    layers: list[Any] = [module for module in modules if isinstance(module, VocabParallelEmbedding)]
    return [type(layer).__name__ for layer in layers if layer.cpu_linear is not torch.nn.functional.linear]


@pytest.fixture(scope="module", params=[qwen2, gpt2], ids=["qwen2", "gpt2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ...]]:
    """A model and an engine of it that takes its weights by `PackedWeights`, in bfloat16 where this CPU can."""
    torch.manual_seed(0)
    model, folder = request.param(), tmp_path_factory.mktemp("model")
    engine = engine_of(model, folder, PACKED)
    driver = Driver([engine])
    driver.run(engine.load())
    yield model.to(DTYPE), engine, driver
    driver.run(engine.shutdown())
    driver.close()


def test_they_are_what_vllm_makes_of_them(
    served: tuple[Any, VLLMEngine, Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine, driver = served
    assert packed_vocabularies(engine) == ["ParallelLMHead"]  # and not the embeddings, which are looked up
    before = driver.run(engine.logprobs(TEXT))
    train_a_little(model)
    driver.run(engine.sync_weights(weight_stream(model), 1))
    packed = driver.run(engine.logprobs(TEXT))
    assert packed != before
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_packed", None)
        driver.run(engine.sync_weights(weight_stream(model), 2))
    assert driver.run(engine.logprobs(TEXT)) == packed
    train_a_little(model, scale=-0.05)
    driver.run(engine.sync_weights(weight_stream(model), 3))  # after vLLM's own way, too
    assert driver.run(engine.logprobs(TEXT)) != packed


def test_layers_that_vllm_did_not_pack_are_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)
    model = qwen2()
    engine = engine_of(model, tmp_path, EngineDtype.fp32)
    with closing(Driver([engine])) as driver:
        for version in (1, 2):
            assert driver.run(engine.logprobs(TEXT)) == pytest.approx(logprobs(model, TEXT), abs=1e-4)
            train_a_little(model)
            driver.run(engine.sync_weights(weight_stream(model), version))
        assert driver.run(engine.logprobs(TEXT)) == pytest.approx(logprobs(model, TEXT), abs=1e-4)
        driver.run(engine.shutdown())


def test_layers_that_cannot_be_taken_over_are_a_load_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any) -> None:
        raise RuntimeError("no such layer")

    monkeypatch.setattr(vllm_engine, "PackedWeights", refuse)
    engine = engine_of(qwen2(), tmp_path, EngineDtype.fp32)
    with closing(Driver([engine])) as driver, pytest.raises(ModelLoadError, match="no such layer"):
        driver.run(engine.load())
    assert not torch.distributed.is_initialized()
    assert engine._engine is None

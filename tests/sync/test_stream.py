"""Weights are sent as `save_pretrained` writes them, also for models whose experts are fused."""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.errors import refuses
from support.tiny_model import tiny_model
from torch import Tensor

from trinity_lightning.config.engines import EngineConfig
from trinity_lightning.config.model import ModelConfig
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.errors import WeightSyncError
from trinity_lightning.explorer.models.vllm_engine import check_experts
from trinity_lightning.sync import stream as conversions
from trinity_lightning.sync.stream import changing_stream, check_shapes, parameter_shapes, weight_stream, while_sent
from trinity_lightning.trainer.frozen import freeze

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
HEADS_OF_16: dict[str, Any] = SIZES | {"head_dim": 16}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "tied llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**HEADS_OF_16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    ),
    "olmoe": lambda: transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)
    ),
    "granitemoe": lambda: transformers.GraniteMoeForCausalLM(  # whose checkpoints do not call them experts
        transformers.GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_stream_is_what_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    written, stream = load_file(tmp_path / "model.safetensors"), weight_stream(model)
    sent = dict(stream)
    tied = {"lm_head.weight"} if name.startswith("tied") else set()
    assert set(sent) == set(written) | tied
    assert list(sent) == list(stream.shapes)
    assert {key: tuple(value.shape) for key, value in sent.items()} == stream.shapes
    assert parameter_shapes(str(tmp_path)) == stream.shapes
    assert all(torch.equal(sent[key], value) for key, value in written.items())
    assert ("mlp.experts.gate_up_proj" in str(list(model.state_dict()))) is any("experts" in key for key in written)


def test_layers_are_converted_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["mixtral"]()
    stream, converted = weight_stream(model), []
    original = conversions._reverted
    monkeypatch.setattr(
        conversions, "_reverted", lambda tensors, plain: converted.append(len(tensors)) or original(tensors, plain)
    )
    seen = iter(stream)
    next(seen)
    assert converted == [1]
    assert len(list(seen)) + 1 == len(stream.shapes)
    assert max(converted) < len(model.state_dict()) / 2


@pytest.mark.parametrize(
    ("name", "engine", "gpu", "refused"),
    [
        ("qwen3_moe", "vllm", False, True),
        ("qwen3_moe", "vllm_server", False, True),
        ("granitemoe", "vllm", False, True),
        ("qwen3_moe", "vllm", True, False),
        ("qwen3_moe", "transformers", False, False),
        ("llama", "vllm", False, False),
    ],
)
def test_experts_that_would_not_arrive_in_vllm_on_a_cpu_are_refused(
    name: str, engine: str, gpu: bool, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MODELS[name]().config.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    config = TrainConfig(model=ModelConfig(name=str(tmp_path)), engine=EngineConfig(name=engine))
    with refuses("model.name") if refused else nullcontext():
        check_experts(config)


def test_an_expert_is_streamed_as_it_is_now() -> None:
    model = MODELS["mixtral"]()
    stream = weight_stream(model)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.fill_(3.0)
    sent = dict(stream)
    assert (sent["model.layers.1.block_sparse_moe.experts.2.w2.weight"] == 3.0).all()
    assert not (sent["model.layers.0.block_sparse_moe.experts.2.w2.weight"] == 3.0).all()


def test_what_is_still_read_of_a_sync_that_was_given_up_is_refused() -> None:
    readers: list[Iterator[tuple[str, Tensor]]] = []
    with suppress(TimeoutError), while_sent(weight_stream(MODELS["llama"]())) as sent:
        readers.append(iter(sent))
        next(readers[0])
        raise TimeoutError
    with pytest.raises(WeightSyncError):
        next(readers[0])
    with while_sent(weight_stream(MODELS["llama"]())) as sent:
        assert [name for name, _ in sent] == list(sent.shapes)


def test_weights_that_do_not_fit_are_listed_by_name_with_the_nearest() -> None:
    expected = {f"layers.{i}.up_proj": (2, 3) for i in range(12)} | {"head": (3,)}
    with pytest.raises(WeightSyncError) as misfit:
        check_shapes({"layers.0.up_prj": (2, 3), "head": (4,)}, expected)
    missing = [f"layers.{i}.up_proj" for i in range(8)]  # the first ones
    named = re.findall(r"'([^']+\.up_\w+|head)'", str(misfit.value))
    assert named == [*missing, "layers.0.up_prj", "layers.0.up_proj", "head"]
    for problem in ("12 missing", "4 more", "(nearest: ", "(4,)", "(3,)"):
        assert problem in str(misfit.value)


def test_an_engine_of_ones_own_may_give_its_shapes_as_lists() -> None:
    shapes: Any = {"a": [2, 3]}
    check_shapes({"a": (2, 3)}, shapes)
    with pytest.raises(WeightSyncError, match="'a'"):
        check_shapes({"a": (3, 2)}, shapes)


def test_layers_in_which_nothing_is_trained_are_not_sent_again() -> None:
    model = tiny_model()
    freeze(model, ["embed_tokens", "layers.0", "layers.1.mlp", "layers.1.self_attn"])
    stream, whole = changing_stream(model), weight_stream(model)
    assert stream.all_shapes == whole.shapes
    assert {name for name in whole.shapes if ".layers.1." in name} | {"model.norm.weight"} == stream.shapes.keys()
    assert dict(stream).keys() == stream.shapes.keys()
    freeze(model := tiny_model(), ["q_proj"])
    assert changing_stream(model).rest is None

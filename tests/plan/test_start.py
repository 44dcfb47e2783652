"""Rows of the table at the start of a run on a GPU: attention, graphs, requests, weight sync, micro-batches."""

import re
from dataclasses import replace
from typing import Any

import pytest

from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.config.engines import EngineConfig, EngineDtype, SynchronizerConfig
from trinity_lightning.config.model import ModelConfig, WeightDtype
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.trainer import SHARDS
from trinity_lightning.plan.start import rows_on_a_gpu

RUN = TrainConfig(model=ModelConfig("tiny", WeightDtype.bf16), engine=EngineConfig(dtype=EngineDtype.bf16))
HOPPER, TURING = (9, 0), (7, 5)


def rows(run: TrainConfig, capability: tuple[int, int] = HOPPER, ranks: int = 1, why: str = "") -> dict[str, str]:
    return dict(rows_on_a_gpu(run, capability, 8192, ranks, why))


def test_the_rows_of_a_run_on_an_h100() -> None:
    assert rows(RUN) == {
        "attention": "trainer sdpa (flash), FlexAttention where rows share a prefix; vLLM FLASH_ATTN",
        "graphs": "trainer layers compiled, where the model's architecture allows it (model.compile=auto); "
        "vLLM graphs of steps of at most 512 requests",
        "requests": "at most 256 at once",
        "weight sync": "within this process",
        "micro-batches": "at most 8,192 computed tokens, by the memory plan",
    }


@pytest.mark.parametrize(
    ("engine", "capability", "attention"),
    [
        ({}, TURING, "trainer sdpa .memory-efficient., .*; vLLM TRITON_ATTN .*compute capability 8.0"),
        ({"dtype": EngineDtype.fp32}, HOPPER, "vLLM TRITON_ATTN .*no float32"),
        ({"args": {"attention_backend": "FLEX_ATTENTION"}}, HOPPER, "vLLM FLEX_ATTENTION"),
        ({"name": "vllm_server", "urls": ["http://node7:8000"]}, HOPPER, "vLLM as its servers were started"),
        ({"name": "transformers"}, HOPPER, "share a prefix$"),
    ],
)
def test_attention_goes_by_dtype_and_gpu(engine: dict[str, Any], capability: tuple[int, int], attention: str) -> None:
    assert re.search(attention, rows(replace(RUN, engine=replace(RUN.engine, **engine)), capability)["attention"])


@pytest.mark.parametrize(
    ("engine", "graphs"),
    [
        ({"max_num_seqs": 100}, "vLLM graphs of steps of at most 200 requests"),
        ({"max_num_seqs": 1024}, "vLLM graphs of steps of at most 1024 requests"),
        (
            {"max_num_seqs": 1024, "args": {"cudagraph_capture_sizes": [8, 256]}},
            "vLLM graphs of steps of at most 256 requests",
        ),
        ({"args": {"enforce_eager": True}}, "vLLM none (enforce_eager)"),
        ({"name": "transformers"}, "(model.compile=auto)"),
    ],
)
def test_graphs_reach_as_far_as_vllm_captures_them(engine: dict[str, Any], graphs: str) -> None:
    assert rows(replace(RUN, engine=replace(RUN.engine, **engine)))["graphs"].endswith(graphs)


@pytest.mark.parametrize(
    ("engine", "requests"),
    [
        ({"max_num_seqs": 1024}, "at most 1,024 at once"),
        ({"max_num_seqs": 1024, "args": {"max_num_seqs": 99}}, "at most 99 at once"),
        ({"name": "vllm_server", "urls": ["http://node7:8000"]}, None),  # as its servers were started
        ({"name": "transformers"}, None),
    ],
)
def test_vllm_decodes_as_many_requests_at_once_as_the_plan_says(engine: dict[str, Any], requests: str | None) -> None:
    assert rows(replace(RUN, engine=replace(RUN.engine, **engine))).get("requests") == requests


@pytest.mark.parametrize(
    ("compiles", "trainer", "layers"),
    [
        (True, None, "trainer layers compiled;"),
        (False, None, "trainer kernel by kernel (model.compile=false);"),
        ("auto", {"strategy": {"_target_": SHARDS}}, "trainer kernel by kernel (layers in shards);"),
    ],
)
def test_layers_are_compiled_as_configured(compiles: bool | str, trainer: Any, layers: str) -> None:
    run = replace(RUN, model=replace(RUN.model, compile=compiles), trainer=trainer)
    assert rows(run)["graphs"].startswith(layers)


def test_a_folder_has_its_reason_and_ranks_take_the_fewest_tokens() -> None:
    server = replace(RUN, engine=replace(RUN.engine, name="vllm_server"), synchronizer=SynchronizerConfig("checkpoint"))
    assert rows(server, why="trainer.num_nodes is 2")["weight sync"] == (
        "through a folder (checkpoint): trainer.num_nodes is 2"
    )
    assert rows(replace(server, synchronizer=SynchronizerConfig("ipc")))["weight sync"] == "within the GPU (ipc)"
    assert "weight sync" not in rows(replace(RUN, engine=EngineConfig(name="transformers")))
    assert rows(RUN, ranks=2)["micro-batches"].endswith("all processes take the fewest that any of them plans")
    chosen = replace(RUN, algorithm=AlgorithmConfig(max_tokens_per_micro_batch=512))
    assert rows(chosen)["micro-batches"] == "at most 512 computed tokens, as configured"

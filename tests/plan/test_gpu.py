"""A run's configuration with the values of the memory plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.errors import refuses
from support.shapes import SMOLLM2

from trinity_lightning.common.hardware import GIB, GPUS, known_gpu
from trinity_lightning.common.model_memory import Training
from trinity_lightning.config.algorithm import AlgorithmConfig, KLConfig
from trinity_lightning.config.buffer import BufferConfig, DatasetConfig
from trinity_lightning.config.engines import EngineConfig, EngineDtype, EngineSleep
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.config.model import LoRAConfig, ModelConfig, OptimizerConfig, WeightDtype
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.trainer import REPLICAS
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.vllm_engine import engine_args
from trinity_lightning.plan import gpu as gpu_plan
from trinity_lightning.plan.gpu import (
    Gpus,
    follower_plan,
    planned,
    planned_engine,
    rollouts_of,
    tokens_on_a_cpu,
    training_of,
    with_memory_plan,
)
from trinity_lightning.plan.memory import ACTIVATIONS, REFERENCE, Rollouts, plan


def test_counting_adapters_draws_no_random_numbers_of_the_run() -> None:
    run = TrainConfig(model=ModelConfig(name="tiny", lora=LoRAConfig(r=4)))
    before = torch.get_rng_state()
    assert gpu_plan.adapters_of(run)[0] > 0
    assert torch.equal(torch.get_rng_state(), before)


def config(**engine: Any) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig("smollm2", WeightDtype.bf16, gradient_checkpointing=True, attn_implementation="eager"),
        engine=EngineConfig(dtype=EngineDtype.fp32, max_model_len=512, **engine),
        explorer=ExplorerConfig(batch_size=32, repeat_times=16),
        algorithm=AlgorithmConfig(kl=KLConfig(coef=0.1), max_tokens_per_micro_batch=2048),
    )


def test_a_plan_is_asked_for_what_is_configured() -> None:
    assert training_of(config(), 1) == Training(2, 512, 2048, reference=True, checkpointing=True, eager=True)
    assert training_of(replace(config(), algorithm=AlgorithmConfig()), 1).tokens is None
    assert training_of(replace(config(), trainer={"precision": "bf16-mixed"}), 1).width == 4
    half = replace(
        config(), model=ModelConfig("smollm2", WeightDtype.fp16), engine=EngineConfig(dtype=EngineDtype.fp16)
    )
    assert training_of(half, 1).width == rollouts_of(half, 1).width == 2
    assert rollouts_of(config(), 1) == Rollouts(4, 512, 512)
    chosen = config(max_num_seqs=99, kv_cache_gb=2.0, sleep=EngineSleep.never)
    assert rollouts_of(chosen, 1) == Rollouts(4, 512, 512, max_num_seqs=99, kv_cache=2 * GIB, sleep=False)
    assert rollouts_of(config(name="vllm_server", servers=3), 1).servers == 3
    assert rollouts_of(config(speculative=4), 1).drafted == 4


def test_before_ampere_keys_are_repeated_for_torchs_kernel() -> None:
    run = replace(config(), model=ModelConfig("smollm2", WeightDtype.fp16))
    assert training_of(run, 1, before_ampere=True) == replace(training_of(run, 1), repeats_keys=True)
    assert training_of(config(), 1, before_ampere=True) == training_of(config(), 1)  # eager attention always does
    gpus = Gpus(1, 14 * GIB, 15 * GIB, 10**15)
    older, newer = (planned(run, replace(gpus, before_ampere=before))[1].training for before in (True, False))
    assert older[ACTIVATIONS] > newer[ACTIVATIONS]
    assert known_gpu("Tesla T4") == GPUS["T4"]
    assert [name for name, gpu in GPUS.items() if gpu.before_ampere] == ["T4"]


def test_engines_of_all_ranks_share_the_tasks_and_their_weights_sleep_in_one_host() -> None:
    """As many as the planned machine has GPUs, however many there are here."""
    trainer = {"devices": "auto", "strategy": {"_target_": REPLICAS}}
    run = replace(config(per_rank=True), trainer=trainer)
    assert rollouts_of(run, 8) == Rollouts(4, 512, 4 * 16, processes=8)
    assert rollouts_of(replace(run, trainer={**trainer, "devices": 2}), 8).processes == 2


@pytest.mark.parametrize(("name", "on_host", "offloadable"), [("adamw", 0, 2), ("adamw_offload", 2, 2)])
def test_adamw_moves_to_the_host_with_all_trainers_of_a_machine(name: str, on_host: int, offloadable: int) -> None:
    trainer = {"devices": 2, "strategy": {"_target_": REPLICAS}}
    training = training_of(replace(config(), trainer=trainer, optimizer=OptimizerConfig(name=name)), 8)
    assert (training.on_host, training.offloadable) == (on_host, offloadable)


@pytest.mark.parametrize(
    ("context", "buffer", "tokens"),
    [
        (256, {}, 512),
        (512, {}, 512),
        (513, {}, None),
        (256, {"storage": "file", "path": "."}, 512),
        (256, {"storage": "dataset", "path": "org/name"}, None),
    ],
)
def test_short_rows_have_the_same_tokens_on_every_cpu(context: int, buffer: dict[str, Any], tokens: int | None) -> None:
    run = replace(config(), engine=EngineConfig(max_model_len=context), buffer=BufferConfig(**buffer))
    assert tokens_on_a_cpu(run) == tokens


def test_an_optimizer_of_ones_own_does_not_move_to_the_host() -> None:
    training = training_of(replace(config(), optimizer=OptimizerConfig(name="torch.optim.SGD")), 1)
    assert training.offloadable == 0


def test_a_value_model_is_planned_for() -> None:
    run = replace(config(), algorithm=AlgorithmConfig(critic={"model": "smollm2"}))
    assert training_of(run, 1).value_model == SMOLLM2
    assert training_of(replace(run, algorithm=AlgorithmConfig(critic={})), 1).value_model is None


def test_without_a_gpu_there_is_no_plan() -> None:
    assert with_memory_plan(config()) == (config(), None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 24 GiB, of which 20 are free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("loss", "length", "longest", "reference"), [("dpo", 9000, 18000, True), ("sft", 9000, 9000, False)]
)
def test_a_run_on_a_dataset_is_planned_for_its_longest_row_or_pair(
    loss: str, length: int, longest: int, reference: bool
) -> None:
    read = BufferConfig(storage="dataset", path="org/name", dataset=DatasetConfig(max_length=length))
    model = ModelConfig("smollm2", WeightDtype.bf16, gradient_checkpointing=True)
    run = replace(config(), model=model, buffer=read, algorithm=AlgorithmConfig(policy_loss=loss))
    assert training_of(run, 1) == Training(2, longest, reference=reference, checkpointing=True)
    planned, estimate = with_memory_plan(run)
    assert planned == run
    assert estimate is not None
    assert estimate.micro_batch_tokens == max(longest, 16384)
    assert (REFERENCE in estimate.training, estimate.engine) == (reference, 0)
    unknown = replace(run, buffer=replace(read, dataset=DatasetConfig()))
    assert training_of(unknown, 1).longest_row == 0


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_is_shared_is_planned_by_the_models_shape() -> None:
    run = replace(config(), model=ModelConfig("smollm2", WeightDtype.bf16), algorithm=AlgorithmConfig())
    planned, estimate = with_memory_plan(run)
    assert estimate is not None
    assert estimate == plan(SMOLLM2, training_of(run, 1), rollouts_of(run, 1), 20 * GIB, 10**15)
    engine = replace(run.engine, max_num_seqs=512)
    assert planned == replace(run, engine=planned_engine(engine, estimate, 24 * GIB))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("free", "sleeps"), [(0, False), (100 * GIB, True)])
def test_vllm_sleeps_only_if_its_container_has_memory_for_that(
    free: int, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_plan, "free_memory", lambda: free)
    estimate = with_memory_plan(replace(config(), algorithm=AlgorithmConfig(max_tokens_per_micro_batch=100_000)))[1]
    assert estimate is not None
    assert estimate.sleep is sleeps


@pytest.mark.usefixtures("gpu")
def test_a_resumed_run_is_planned_with_the_budget_of_its_checkpoint(tmp_path: Path) -> None:
    run = replace(config(), algorithm=AlgorithmConfig())
    torch.save({"policy": {"max_tokens": 1536}}, tmp_path / "it.ckpt")
    _, fresh = with_memory_plan(run)
    _, resumed = with_memory_plan(run, str(tmp_path / "it.ckpt"))
    assert fresh is not None
    assert resumed is not None
    assert fresh.micro_batch_tokens != resumed.micro_batch_tokens == 1536
    _, configured = with_memory_plan(config(), str(tmp_path / "it.ckpt"))
    assert configured is not None
    assert configured.micro_batch_tokens == 2048
    torch.save({"policy": {}}, tmp_path / "old.ckpt")
    with refuses("ckpt_path"):
        with_memory_plan(run, str(tmp_path / "old.ckpt"))


@pytest.mark.usefixtures("gpu")
def test_a_resumed_run_keeps_the_plan_that_was_recorded_if_it_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = replace(config(), algorithm=AlgorithmConfig(max_tokens_per_micro_batch=1536))
    torch.save({"policy": {"max_tokens": 1536}}, tmp_path / "it.ckpt")

    def resumed(recorded: str, **engine: Any) -> EngineConfig:
        (tmp_path / "config.yaml").write_text(f"engine: {recorded}")
        again = replace(run, engine=replace(run.engine, **engine))
        return with_memory_plan(again, str(tmp_path / "it.ckpt"), tmp_path / "config.yaml")[0].engine

    assert resumed("{kv_cache_gb: 1.25, sleep: always}").kv_cache_gb == 1.25
    assert resumed("{kv_cache_gb: 1.25, sleep: always}").sleep is EngineSleep.always
    assert resumed("{kv_cache_gb: 1.25, sleep: never}", kv_cache_gb=2.0).kv_cache_gb == 2.0
    for elsewhere in ({"gpus": [1]}, {"urls": ["http://node7:8000"]}):
        server = resumed("{kv_cache_gb: 1.25, sleep: always}", name="vllm_server", **elsewhere)
        assert (server.kv_cache_gb, server.sleep) == (None, EngineSleep.auto)
    assert not caplog.records
    assert resumed("{kv_cache_gb: 100, sleep: never}") == with_memory_plan(run)[0].engine
    assert "no longer fits; planning again" in caplog.text


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("engine", "counted"),
    [
        ({}, True),
        ({"kv_cache_gb": 1.0}, True),
        ({"args": {"gpu_memory_utilization": 0.25}}, True),
        ({"gpus": [1]}, False),
    ],
)
def test_the_server_of_a_judge_on_the_trainers_gpu_has_a_share_of_it(engine: dict[str, Any], counted: bool) -> None:
    judge = {"model": "smollm2", "engine": {"max_model_len": 512, **engine}}
    run = replace(config(), algorithm=AlgorithmConfig(), auxiliary_models={"judge": judge})
    planned, estimate = with_memory_plan(run)
    assert estimate is not None
    assert ("auxiliary models" in estimate.training) is counted
    [server] = planned.auxiliary_models.values()
    if not counted:
        assert server.engine == EngineConfig(max_model_len=512, gpus=[1])
        return
    share = server.engine.args["gpu_memory_utilization"]
    assert estimate.training["auxiliary models"] == pytest.approx(share * 24 * GIB, rel=1e-3)
    arguments = engine_args("model", server.engine, on_cpu=False)
    assert arguments["kv_cache_memory_bytes"] == (GIB if "kv_cache_gb" in engine else 1_509_949_440)
    assert (share == 0.25) == ("args" in engine)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("engine", [{"name": "transformers"}, {"name": "vllm_server", "gpus": [1]}])
def test_a_judge_has_its_share_beside_a_trainer_alone_too(engine: dict[str, Any]) -> None:
    planned, estimate = with_memory_plan(replace(config(**engine), auxiliary_models={"judge": {"model": "smollm2"}}))
    assert estimate is None or estimate.engine == 0
    [judge] = planned.auxiliary_models.values()
    assert judge.engine.args["gpu_memory_utilization"] < 0.3


@pytest.mark.usefixtures("gpu")
def test_a_judge_on_the_trainers_gpu_and_another_is_refused() -> None:
    judge = {"model": "smollm2", "engine": {"gpus": [0, 1]}}
    with refuses("auxiliary_models.judge.engine.gpus"):
        with_memory_plan(replace(config(), auxiliary_models={"judge": judge}))


@pytest.mark.usefixtures("gpu")
def test_a_model_that_does_not_fit_is_refused() -> None:
    run = replace(config(sleep=EngineSleep.never), algorithm=AlgorithmConfig(max_tokens_per_micro_batch=10**6))
    with pytest.raises(ConfigError, match=r"does not fit into the 20\.0 GiB.*max_tokens_per_micro_batch=auto"):
        with_memory_plan(run)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "engine",
    [
        {"name": "vllm_server", "gpus": [1]},
        {"name": "vllm_server", "urls": ["http://node7:8000"]},
        {"name": "vllm_server", "gpus": [1, 2], "servers": 2},
    ],
)
def test_engines_elsewhere_decode_a_step_at_once_and_the_trainer_is_planned_alone(engine: dict[str, Any]) -> None:
    run = config(**engine)
    planned, estimate = with_memory_plan(run)
    assert estimate == plan(SMOLLM2, training_of(run, 1), None, 20 * GIB, 10**15)
    assert estimate is not None
    assert (estimate.kv_cache, estimate.engine, estimate.micro_batch_tokens) == (0, 0, 2048)
    assert planned == config(**engine, max_num_seqs=512)


@pytest.mark.usefixtures("gpu")
def test_the_training_model_that_generates_itself_keeps_its_own_default() -> None:
    assert with_memory_plan(config(name="transformers")) == (config(name="transformers"), None)


TWO = {"devices": 2, "strategy": {"_target_": REPLICAS}}


@pytest.mark.parametrize(
    ("engine", "free", "tokens"),
    [
        ({}, 20, 16384),  # rank 0, which shares its GPU with vLLM, may plan fewer
        ({"name": "vllm_server", "gpus": [2]}, 6, 2048),
        ({"per_rank": True, "kv_cache_gb": 8.0}, 20, 4096),
    ],
    ids=["rank 0 has the engine", "little memory", "an engine of its own"],
)
def test_a_rank_other_than_0_plans_for_its_own_gpu(
    engine: dict[str, Any], free: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig("smollm2", WeightDtype.bf16)
    run = replace(config(**engine), trainer=TWO, model=model, algorithm=AlgorithmConfig())
    assert follower_plan(run, 1) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: {1: (free * GIB, 24 * GIB)}[gpu])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: {1: (8, 0)}[gpu])
    estimate = follower_plan(run, 1)
    assert estimate is not None
    assert (estimate.micro_batch_tokens, estimate.device) == (tokens, free * GIB)
    assert (estimate.engine > 0) == run.engine.per_rank
    chosen = replace(run, algorithm=AlgorithmConfig(max_tokens_per_micro_batch=1000))
    assert [plan and plan.micro_batch_tokens for plan in [follower_plan(chosen, 1)]] == [1000]
    assert follower_plan(replace(run, engine=EngineConfig(name="transformers")), 1) is None
    assert follower_plan(replace(run, trainer={**TWO, "accelerator": "cpu"}), 1) is None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("gpus", "servers"), [([0, 1, 2, 3], 4), ([0, 1], 1)])
def test_servers_on_the_trainers_gpu_and_others_are_refused(gpus: list[int], servers: int) -> None:
    with refuses("engine.gpus"):
        with_memory_plan(config(name="vllm_server", gpus=gpus, servers=servers))


@pytest.mark.usefixtures("gpu")
def test_a_server_on_the_trainers_gpu_is_planned() -> None:
    run = replace(config(name="vllm_server"), algorithm=AlgorithmConfig())
    planned, estimate = with_memory_plan(run)
    assert estimate is not None
    assert planned.engine.kv_cache_gb == estimate.kv_cache / GIB
    assert not estimate.sleep


@pytest.mark.parametrize("sleep", [True, False])
def test_vllm_is_started_with_what_the_plan_gives_it(sleep: bool) -> None:
    estimate = plan(SMOLLM2, Training(2, 512), Rollouts(2, 512, 512, sleep=sleep), 20 * GIB, 100 * GIB)
    engine = planned_engine(EngineConfig(max_model_len=512, max_num_seqs=512), estimate, 24 * GIB)
    arguments = engine_args("model", engine, on_cpu=False)
    assert arguments["kv_cache_memory_bytes"] == estimate.kv_cache
    assert arguments["gpu_memory_utilization"] == pytest.approx(estimate.engine / (24 * GIB), abs=1e-4)
    assert arguments["max_num_seqs"] == 512
    assert arguments.get("enable_sleep_mode", False) is sleep


@pytest.mark.parametrize(
    ("requests", "settings", "graph"),
    [
        (512, {}, None),
        (1000, {}, 1008),  # vLLM's graphs are 16 requests apart
        (1024, {}, 1024),
        (1024, {"speculative": 3}, None),
        (1024, {"args": {"cudagraph_capture_sizes": [8, 256]}}, None),  # vLLM refuses both
        (1024, {"args": {"compilation_config": {"mode": 0}}}, None),
    ],
)
def test_steps_of_more_requests_than_vllms_largest_graph_get_a_larger_one(
    requests: int, settings: dict[str, Any], graph: int | None
) -> None:
    engine = EngineConfig(max_num_seqs=requests, **settings)
    assert engine_args("model", engine, on_cpu=False).get("max_cudagraph_capture_size") == graph
    assert "max_cudagraph_capture_size" not in engine_args("model", engine, on_cpu=True)


def test_what_is_given_to_vllm_by_hand_holds() -> None:
    estimate = plan(SMOLLM2, Training(2, 512), Rollouts(2, 512, 512), 20 * GIB, 100 * GIB)
    engine = planned_engine(EngineConfig(args={"gpu_memory_utilization": 0.5}), estimate, 24 * GIB)
    assert engine.args == {"gpu_memory_utilization": 0.5, "max_num_batched_tokens": 8192}


def test_vllm_without_a_plan_has_defaults_of_its_machine() -> None:
    cpu, gpu = (engine_args("model", EngineConfig(), on_cpu) for on_cpu in (True, False))
    assert (cpu["max_num_seqs"], cpu["kv_cache_memory_bytes"]) == (64, GIB // 2)
    assert (gpu["max_num_seqs"], gpu.get("kv_cache_memory_bytes")) == (256, None)

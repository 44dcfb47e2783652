"""Plans of runs: against what was measured here, for models that are known on paper, and what is refused."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from support.compose import composed
from support.errors import refuses
from support.runs import ROOT, RunTrain

from trinity_lightning.common.hardware import GIB
from trinity_lightning.common.model_memory import ModelShape, Training
from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.run import typed_config
from trinity_lightning.errors import ConfigError
from trinity_lightning.plan.command import as_json, as_text, register
from trinity_lightning.plan.command import plan as plan_of
from trinity_lightning.plan.memory import (
    ACTIVATIONS,
    CACHE,
    ENGINE_WEIGHTS,
    GATHERED,
    GRADIENTS,
    GRAPHS,
    MASTERS,
    MOMENTS,
    POLICY,
    REFERENCE,
    RESERVE,
    Rollouts,
    engine_alone,
    plan,
)
from trinity_lightning.plan.run import RunPlan, training_flops
from trinity_lightning.sync.stream import skeleton
from trinity_lightning.trainer.flops import ModelSize, Work

# Of the published configurations, what the number of parameters follows from.
QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
QWEN_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
# Qwen2.5-7B, Llama 3.1 70B and Qwen3-30B-A3B, by their model cards and papers.
PUBLISHED = [(QWEN_7B, 7.62e9, 6.53e9), (LLAMA_70B, 70.6e9, 68.5e9), (QWEN_30B_A3B, 30.5e9, 29.9e9)]


CPU = ("model.dtype=bf16", "trainer=cpu", "plan.memory_gb=16", "plan.tflops=0.93", "plan.bandwidth_gb=29")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], str]:
    """Writes a folder that holds nothing but a model's config.json: the same folder for the same config."""

    @cache
    def written(text: str) -> str:
        path = tmp_path_factory.mktemp("model")
        (path / "config.json").write_text(text)
        return str(path)

    return lambda config: written(json.dumps(config))


def planned(*overrides: str, recipe: str = "grpo") -> RunPlan:
    register()
    return plan_of(composed(f"+recipe={recipe}", *overrides, name="plan"))


def test_the_default_recipe_takes_what_was_measured_here() -> None:
    """docs/performance.md: benchmarks/memory.py's parts while it trains, and the peak of a whole run, in GB."""
    estimate = planned(*CPU)
    parts = estimate.shares[0].memory.training
    measured = {POLICY: 0.27, MASTERS: 0.54, MOMENTS: 1.08, GRADIENTS: 0.54, ACTIVATIONS: 0.29, RESERVE: 0.5 + 0.3}
    assert {name: parts[name] / 1e9 for name in measured} == pytest.approx(measured, rel=0.15)
    assert (parts[ENGINE_WEIGHTS] + parts[GRAPHS]) / 1e9 == pytest.approx(0.7, rel=0.15)
    peak = (estimate.shares[0].memory.device - estimate.shares[0].memory.left) / 1e9
    assert peak == pytest.approx(4.3, rel=0.05)
    assert peak == pytest.approx(4.55, rel=0.15)


def test_the_seconds_of_a_step_are_of_the_size_that_was_measured_here() -> None:
    """A step of the default recipe with its prompts of 45 and responses of about 20 tokens: 2.2 + 2.8 + 0.12 s.

    Of its groups those that teach nothing are not trained; the plan counts all.
    """
    lengths = ("plan.prompt_tokens=45", "plan.response_tokens=20")
    estimate = planned(*CPU, *lengths)
    assert estimate.tokens["computed by training"] == 8 * (45 + 8 * 20)
    assert estimate.seconds["training"] == pytest.approx(2.8, rel=0.3)
    assert estimate.seconds["rollout"] == pytest.approx(2.2, rel=0.3)
    assert estimate.seconds["weight sync"] == pytest.approx(0.12, rel=0.3)


@pytest.mark.parametrize(("config", "parameters", "in_layers"), PUBLISHED)
def test_parameters_are_those_that_were_published(
    config: dict[str, Any], parameters: float, in_layers: float, folder: Any
) -> None:
    model = skeleton(folder(config))
    shape = ModelShape.of(model)
    assert shape.parameters == pytest.approx(parameters, rel=0.003)
    assert shape.parameters - shape.outside == pytest.approx(in_layers, rel=0.003)
    assert ModelSize.of(model).head == config["vocab_size"] * config["hidden_size"]


@pytest.mark.slow
def test_a_7b_model_on_8_gpus_of_80_gb_is_refused_whole_and_says_what_helps(folder: Any) -> None:
    overrides = (f"model.name={folder(QWEN_7B)}", "trainer=ddp", "trainer.devices=8", "plan.device=H100-80GB")
    with pytest.raises(ConfigError, match=r"policy 14\.2, masters 28\.4, Adam's moments 56\.7, gradients 28\.4"):
        planned(*overrides)
    with pytest.raises(ConfigError, match=r"a device of 1\d\d\.\d GiB has room"):
        planned(*overrides, "model.gradient_checkpointing=true")


@pytest.mark.slow
def test_a_7b_model_fits_if_8_gpus_share_it(folder: Any) -> None:
    overrides = (
        f"model.name={folder(QWEN_7B)}",
        "trainer.devices=8",
        "plan.device=H100-80GB",
        "algorithm.kl.coef=0.01",
    )
    with pytest.raises(ConfigError, match=r"without a reference \(algorithm\.kl\.coef=0\) 14\.2 GiB less"):
        planned(*overrides, "trainer=ddp")
    with pytest.raises(ConfigError, match=r"trainer=fsdp2 with trainer\.devices=8 .* takes 113\.6 GiB less"):
        planned(*overrides, "trainer=ddp")
    estimate = planned(*overrides, "trainer=fsdp2")
    parts, parameters = estimate.shares[1].memory.training, estimate.parameters
    shared = (parts[part] for part in (POLICY, MOMENTS, GRADIENTS, REFERENCE))
    assert sum(shared) == pytest.approx((4 + 8 + 4 + 2) * parameters / 8, rel=1e-6)
    assert 2 * parameters / 28 < parts[GATHERED] < 2 * parameters
    assert estimate.shares[0].memory.training[ENGINE_WEIGHTS] == 2 * parameters
    assert min(share.memory.left for share in estimate.shares) >= 0
    in_each = planned(*overrides, "trainer=fsdp2", "engine.per_rank=true")
    assert [share.memory.training[ENGINE_WEIGHTS] for share in in_each.shares] == [2 * parameters] * 2
    assert in_each.seconds["rollout"] < estimate.seconds["rollout"]
    assert in_each.seconds["training"] == estimate.seconds["training"]


@pytest.mark.slow
def test_a_7b_model_fits_one_gpu_by_adapters(folder: Any) -> None:
    """Rank 4 is sent; vLLM makes room for rank 8."""
    overrides = (f"model.name={folder(QWEN_7B)}", "plan.device=H100-80GB")
    with pytest.raises(ConfigError, match=r"has room"):
        planned(*overrides)
    overrides = (*overrides, "model.lora.r=4")
    merged, alone = (planned(*overrides, f"synchronizer.lora={way}", recipe="lora") for way in ("merged", "adapter"))
    [share], parameters = merged.shares, merged.parameters
    assert share.memory.left > 0
    widths = {"q": (3584, 3584), "k": (3584, 512), "v": (3584, 512), "o": (3584, 3584)}
    widths |= {"gate": (3584, 18944), "up": (3584, 18944), "down": (18944, 3584)}
    adapters = 28 * 4 * sum(map(sum, widths.values()))
    parts = {POLICY: 2 * (parameters + adapters), MASTERS: 4 * adapters, MOMENTS: 8 * adapters, GRADIENTS: 4 * adapters}
    assert {name: share.memory.training[name] for name in parts} == parts
    for estimate, held, sent in ((merged, parameters, parameters), (alone, parameters + 2 * adapters, adapters)):
        assert estimate.shares[0].memory.generating[ENGINE_WEIGHTS] == 2 * held
        assert estimate.seconds["weight sync"] == pytest.approx(2 * sent / 10e9)


def test_a_7b_model_fits_one_gpu_with_its_optimizer_on_the_host(folder: Any) -> None:
    overrides = (f"model.name={folder(QWEN_7B)}", "plan.device=H100-80GB", "model.gradient_checkpointing=true")
    overrides += ("optimizer.name=adamw_offload",)
    [share] = (estimate := planned(*overrides, "plan.host_gb=135")).shares
    assert {
        POLICY: 2 * estimate.parameters,
        GRADIENTS: 4 * estimate.parameters,
    }.items() <= share.memory.training.items()
    assert not {MASTERS, MOMENTS} & share.memory.training.keys()
    assert share.memory.left >= 0
    text = as_text(estimate)
    assert "on the host: 113.5 GiB: masters 28.4, Adam's moments 56.7, copies of gradients 28.4" in text
    assert "the optimizer's steps in the host's memory are not counted (optimizer.name)" in text
    assert json.loads(as_json(estimate))["memory"][0]["on_host"] == share.memory.on_host
    two = planned(*overrides, "trainer=ddp", "trainer.devices=2", "plan.host_gb=249").shares[0].memory.on_host
    assert two == {name: 2 * size for name, size in share.memory.on_host.items()}
    with pytest.raises(ConfigError, match=r"the 200\.0 GiB .* of the host's memory: all trainers need 227\.0 GiB"):
        planned(*overrides, "trainer=ddp", "trainer.devices=2", "plan.host_gb=200")
    with pytest.raises(ConfigError, match=r"optimizer\.name=adamw_offload, .* takes \d\d\.\d GiB less"):
        planned(*overrides[:-1])


def test_a_70b_model_on_paper(folder: Any) -> None:
    """64 devices of 80 GB train it, 8 do not; an engine of it is split over 2 GPUs at least."""
    shape = ModelShape.of(skeleton(folder(LLAMA_70B)))
    device, rollouts = 78 * GIB, Rollouts(2, 4096, 512)
    training = Training(2, 4096, checkpointing=True, shards=64)
    assert plan(shape, training, None, device, 0).left > 0
    with pytest.raises(ConfigError, match=r"policy 32\.9, Adam's moments 65\.7, gradients 32\.9, gathered layers"):
        plan(shape, replace(training, shards=8), None, device, 0)
    with refuses("engine.gpus"):
        engine_alone(shape, rollouts, device)
    two, four = (engine_alone(shape, replace(rollouts, gpus=gpus), device) for gpus in (2, 4))
    assert two.training[ENGINE_WEIGHTS] == 2 * four.training[ENGINE_WEIGHTS] == shape.parameters
    assert four.kv_cache > two.kv_cache + two.training[ENGINE_WEIGHTS] // 2


@pytest.mark.slow
def test_a_run_of_a_70b_model_on_paper(folder: Any) -> None:
    """As docs/scaling.md has it: 8 devices do not hold it, 32 do, which is the advice, and the plan of 64 adds up."""
    overrides = (f"model.name={folder(LLAMA_70B)}", "plan.device=H100-80GB", "trainer=fsdp2", "engine=vllm_server")
    overrides += ("engine.max_model_len=4096", "sampling.max_tokens=2048", "plan.prompt_tokens=500")
    overrides += ("explorer.batch_size=64", "model.gradient_checkpointing=true")
    with pytest.raises(ConfigError, match=r"trainer=fsdp2 with trainer\.devices=32 \(of all machines together\)"):
        planned(*overrides, "trainer.devices=8", "engine.urls=[http://node9:8000]")
    estimate = planned(*overrides, "trainer.devices=4", "+trainer.num_nodes=16", "engine.gpus=[4,5,6,7]")
    shares = [(share.name, share.devices) for share in estimate.shares]
    assert shares == [("rank 0", 1), ("ranks 1 to 63", 63), ("1 server, 4 GPUs each", 4)]
    first, _, server = (share.memory for share in estimate.shares)
    held = sum(first.training[part] for part in (POLICY, MOMENTS, GRADIENTS))
    assert held == pytest.approx((4 + 8 + 4) * estimate.parameters / 64, rel=1e-6)
    assert server.training[ENGINE_WEIGHTS] == 2 * estimate.parameters // 4
    assert min(share.memory.left for share in estimate.shares) > 0
    assert first.micro_batch_tokens == 16384
    half = planned(*overrides, "trainer.devices=4", "+trainer.num_nodes=8", "engine.gpus=[4,5,6,7]").shares[0].memory
    assert (half.micro_batch_tokens, half.left > 0) == (4096, True)
    sizes = (sum(first.training.values()), held, first.training[GATHERED])
    assert [round(size / GIB, 1) for size in sizes] == [78.3, 16.4, 27.5]
    tokens = estimate.tokens["computed by training"]
    assert tokens == 64 * 8 * (500 + 2048)  # a group is more than a micro-batch
    products = 68.5e9 * (2 + 2 + 4) * tokens  # forward, recomputed, backward
    assert estimate.seconds["training"] == pytest.approx(products / (64 * 0.4 * 990e12), rel=0.1)


def test_servers_on_gpus_of_their_own_and_ranks_are_listed_apart(folder: Any) -> None:
    overrides = ("engine=vllm_server", "engine.gpus=[2,3,4,5]", "engine.servers=2", "trainer=ddp", "trainer.devices=2")
    small = QWEN_7B | {"num_hidden_layers": 4}
    estimate = planned(f"model.name={folder(small)}", "plan.device=H100-80GB", *overrides)
    assert [(share.name, share.devices) for share in estimate.shares] == [
        ("rank 0", 1),
        ("rank 1", 1),
        ("2 servers, 2 GPUs each", 4),
    ]
    trainer, other, server = (share.memory for share in estimate.shares)
    assert trainer.training == other.training
    assert ENGINE_WEIGHTS not in trainer.training
    assert server.training[ENGINE_WEIGHTS] == 2 * estimate.parameters // 2


@pytest.mark.slow
def test_a_gpu_without_bfloat16_computes_in_float16(folder: Callable[[dict[str, Any]], str]) -> None:
    estimate = planned("model=smollm2", "plan.device=T4")
    assert estimate.model.endswith("fp16")
    assert estimate.hardware.flops == 6.5e13


@pytest.mark.parametrize("device", [CPU, ("plan.device=L4",)])
def test_a_run_on_stored_experiences_has_its_trainer_alone(device: tuple[str, ...], tmp_path: Path) -> None:
    lengths = ("plan.prompt_tokens=45", "plan.response_tokens=20")
    overrides = (f"buffer.path={tmp_path}", "buffer.batch_size=24", *device, *lengths)
    estimate = planned(*overrides, recipe="offline")
    [share] = estimate.shares
    assert not {ENGINE_WEIGHTS, CACHE} & {*share.memory.training, *share.memory.generating}
    assert (estimate.tokens["computed by training"], "generated" in estimate.tokens) == (24 * 65, False)
    assert list(estimate.seconds) == ["training"]
    assert not {"plan.rollout_share", "plan.bandwidth_gb", "plan.sync_gb"} & estimate.assumed.keys()


@pytest.mark.slow
def test_pairs_of_a_dataset_have_two_rows_each_and_a_reference() -> None:
    lengths = ("plan.prompt_tokens=45", "plan.response_tokens=20")
    overrides = ("buffer.path=org/name", "buffer.batch_size=12", *CPU, *lengths)
    estimate = planned(*overrides, "algorithm.layout=padded", recipe="dpo")
    assert REFERENCE in estimate.shares[0].memory.training
    assert estimate.tokens["computed by training"] == 12 * 2 * 65
    assert "buffer.dataset.max_length" in estimate.assumed
    assert "buffer.dataset.max_length" not in planned(*overrides, "buffer.dataset.max_length=65", recipe="dpo").assumed


@pytest.mark.slow
def test_processes_of_one_cpu_are_no_faster_than_one() -> None:
    one = planned(*CPU)
    two = planned(
        *(override.replace("trainer=cpu", "trainer=ddp") for override in CPU),
        *("trainer.accelerator=cpu", "trainer.devices=2"),
    )
    assert two.seconds["training"] == one.seconds["training"]
    assert len(two.shares) == 2


@pytest.mark.slow
def test_a_machine_has_its_own_memory_for_its_own_processes() -> None:
    overrides = (*(override.replace("trainer=cpu", "trainer=ddp") for override in CPU), "trainer.accelerator=cpu")
    overrides += ("trainer.devices=2", "engine.max_model_len=1024")  # a context for which the free memory counts
    one = planned(*overrides).shares
    two = planned(*overrides, "+trainer.num_nodes=2").shares
    assert [share.memory for share in two] == [share.memory for share in one]
    assert [share.devices for share in two] == [1, 3]


@pytest.mark.slow
def test_servers_on_one_device_share_its_speed() -> None:
    overrides = ("plan.device=H100-80GB", "engine=vllm_server")
    one, two, apart = (
        planned(*overrides, *servers).seconds["rollout"]
        for servers in ([], ["engine.servers=2"], ["engine.servers=2", "engine.gpus=[1,2]"])
    )
    assert apart < one <= two


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "split"),
    [
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, 2),
        ({"data_parallel_size": 4}, 1),
        ({"pipeline_parallel_size": 4}, 4),  # which splits no heads: 9 of them are no obstacle
    ],
)
def test_a_server_spreads_its_model_as_vllm_is_asked_to(sizes: dict[str, int], split: int, folder: Any) -> None:
    heads = {"num_attention_heads": 8 if split == 2 else 9, "num_key_value_heads": 1, "hidden_size": 576}
    small = QWEN_7B | {"num_hidden_layers": 4, "intermediate_size": 1536, **heads}
    args = [f"+engine.args.{name}={size}" for name, size in sizes.items()]
    overrides = (f"model.name={folder(small)}", "plan.device=H100-80GB", "engine=vllm_server", "engine.gpus=[2,3,4,5]")
    estimate = planned(*overrides, *args)
    assert estimate.shares[-1].name == "1 server, 4 GPUs each"
    assert estimate.shares[-1].memory.training[ENGINE_WEIGHTS] == 2 * estimate.parameters // split


def test_an_engine_with_the_trainers_weights_is_sent_none() -> None:
    estimate = planned("plan.device=L4", "engine=transformers")
    assert list(estimate.seconds) == ["rollout", "training"]
    assert "plan.sync_gb" not in estimate.assumed


@pytest.mark.parametrize(
    ("overrides", "under_way"),
    [
        ((), 64),
        (("explorer.run_ahead=2", "engine.max_num_seqs=80"), 80),
        (("explorer.run_ahead=2", "explorer.max_concurrent=24"), 24),
        (("explorer.run_ahead=0",), 0),
        (("explorer.in_flight=wait",), 0),
    ],
)
def test_a_sync_that_rollouts_do_not_wait_for_has_their_tokens_computed_again(
    overrides: tuple[str, ...], under_way: int
) -> None:
    lengths = ("plan.device=H100-80GB", "plan.prompt_tokens=40", "plan.response_tokens=20")
    estimate = planned(*lengths, "explorer.max_staleness=2", *overrides)
    tokens = {name: count for name, count in estimate.tokens.items() if "again" in name}
    seconds = {name: count for name, count in estimate.seconds.items() if "again" in name}
    if not under_way:
        assert (tokens, seconds) == ({}, {})
        return
    assert tokens == {"computed again after a sync, at most": under_way * (40 + 10)}
    [cost] = seconds.values()
    assert 0 < cost < estimate.seconds["rollout"]
    assert "explorer.run_ahead" in estimate.assumed


@pytest.mark.parametrize(
    ("overrides", "counted"),
    [
        (("plan.device=H100-80GB",), True),
        (("plan.device=H100-80GB", "engine=transformers"), True),
        (("plan.device=H100-80GB", "engine=vllm_server", "engine.gpus=[1]"), True),
        (("plan.device=H100-80GB", "+auxiliary_models.judge.engine.gpus=[1]"), False),
        (CPU, False),
    ],
)
def test_servers_of_auxiliary_models_are_counted_or_named(overrides: tuple[str, ...], counted: bool) -> None:
    estimate = planned(*overrides, "workflow=judge", "+auxiliary_models.judge.model=smollm2")
    assert ("auxiliary models" in estimate.shares[0].memory.training) is counted
    assert ("auxiliary_models.judge" in estimate.assumed) is not counted


@pytest.mark.slow
def test_adapters_alone_have_an_optimizer_and_cost_no_gradient_of_the_weights() -> None:
    whole, adapters = (
        planned("plan.device=H100-80GB", "algorithm.kl.coef=0.01", recipe=name) for name in ("grpo", "lora")
    )
    assert REFERENCE in whole.shares[0].memory.training
    assert REFERENCE not in adapters.shares[0].memory.training
    assert adapters.shares[0].memory.training[MOMENTS] < whole.shares[0].memory.training[MOMENTS] / 25
    assert "adapters" in adapters.model
    assert adapters.seconds["training"] == pytest.approx(whole.seconds["training"] * 3 / 4, rel=1e-6)
    with pytest.raises(ConfigError) as refused:
        planned("plan.device=L4", "plan.memory_gb=2", recipe="lora")
    assert "fsdp2" not in str(refused.value)


@pytest.mark.slow
def test_a_value_model_costs_a_second_training_without_a_head_and_a_critic_a_forward_pass() -> None:
    size, step = ModelSize.of(skeleton(str(resolve_model("tiny")))), Work(tokens=1000, predicted=400, pairs=9000)
    ppo = ("+recipe=ppo", "model=tiny", "algorithm.optimizer_steps=1")
    plain, head, model = (
        training_flops(typed_config(composed(*overrides)), size, step)
        for overrides in (("+recipe=grpo", "model=tiny"), ppo, (*ppo, "+algorithm.critic.model=tiny"))
    )
    assert head == pytest.approx(plain * 4 / 3)
    assert model == pytest.approx(head + size.training_flops(replace(step, predicted=0)) * 4 / 3)


def test_all_ranks_are_planned_with_the_tokens_that_they_agree_on(folder: Any) -> None:
    small = QWEN_7B | {"num_hidden_layers": 4}
    overrides = ("trainer=ddp", "trainer.devices=2", "plan.device=H100-80GB", "engine=vllm_server", "engine.gpus=[2]")
    estimate = planned(f"model.name={folder(small)}", *overrides)
    first, other, _ = (share.memory for share in estimate.shares)
    assert first.training[ACTIVATIONS] == other.training[ACTIVATIONS]
    assert estimate.tokens["of a micro-batch"] == other.micro_batch_tokens


def test_the_table_shows_every_part_and_what_is_assumed() -> None:
    text = as_text(planned("plan.device=H100-80GB", "plan.prompt_tokens=45"))
    for word in (POLICY, MASTERS, MOMENTS, GRADIENTS, ACTIVATIONS, ENGINE_WEIGHTS, CACHE, "1 x H100-80GB"):
        assert word in text
    assert "trainer: 78.6 GiB free: side by side, leaves " in text
    assert "every prompt has 45 tokens (plan.prompt_tokens)" in text
    assert "training reaches 0.4 of the speed of products (plan.training_share)" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("plan.device=H100",), "plan.device"),
        (("plan=L4",), "plan"),
        (("plan.device=L4", "plan.memory_gb=1000"), "plan.memory_gb"),
        (("plan.device=L4", "trainer=cpu"), "plan.device"),
        (("plan.training_share=2",), "plan.training_share"),
        (("plan.device=H200", "trainer=ddp", "trainer.devices=two"), "trainer.devices"),
        (
            ("plan.device=H200", "trainer=ddp", "trainer.devices=4", "engine=vllm_server", "engine.gpus=[3]"),
            "engine.gpus",
        ),
        (("plan.device=H200", "trainer=ddp"), "trainer.devices"),
        (("plan.prompt_tokens=250",), "plan.prompt_tokens"),  # nor do the responses fit
        (("plan.device=H200", "engine=vllm_server", "engine.gpus=[1,2,3]", "engine.servers=2"), "engine.gpus"),
        (("plan.device=H200", "engine=vllm_server", "engine.gpus=[1,2,3,4]"), "engine.gpus"),  # 9 heads
        (("plan.device=H200", "+engine.args.tensor_parallel_size=2"), "engine.args.tensor_parallel_size"),
        (("plan.memory_gb=2", "plan.tflops=0.87", "plan.bandwidth_gb=29", "trainer=cpu"), None),  # does not fit
    ],
)
def test_what_cannot_be_planned_is_refused(overrides: tuple[str, ...], key: str | None) -> None:
    with refuses(key):
        planned(*overrides)


def test_a_model_without_a_config_is_refused(tmp_path: Path, folder: Any) -> None:
    with refuses("model.name"):
        planned(f"model.name={tmp_path}")
    with refuses("model.name"):
        planned(f"model.name={folder({'model_type': 'unheard_of'})}", "plan.device=H200")


def test_json_is_one_line_that_adds_up() -> None:
    line = as_json(estimate := planned("plan.device=L4"))
    read = json.loads(line)
    assert "\n" not in line
    [memory] = read["memory"]
    assert memory["free"] - memory["left"] == max(sum(memory[phase].values()) for phase in ("training", "generating"))
    assert read["seconds"] == estimate.seconds


@pytest.mark.slow
def test_the_page_shows_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (ROOT / "docs" / "scaling.md").read_text().partition("## Planning a run")[2].partition("\n## ")[0]
    commands = re.findall(r"^    python -m trinity_lightning\.plan ((?:.*\\\n)*.*)", section, re.MULTILINE)
    outputs = re.findall(r"```text\n(.*?)\n```", section, re.DOTALL)
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FOLDER" / "config.json").write_text(json.dumps(QWEN_7B))
    monkeypatch.chdir(tmp_path)
    for command, output in zip(commands, outputs, strict=True):
        recipe, *overrides = command.replace("\\\n", " ").split()
        assert as_text(planned(*overrides, recipe=recipe.removeprefix("+recipe="))) == output


def test_the_command_prints_a_plan_and_leaves_no_folder(run_train: RunTrain, tmp_path: Path) -> None:
    command = partial(run_train, tmp_path, "+recipe=grpo", program="trinity_lightning.plan")
    done = command("plan.device=L4", "plan.json=true")
    assert (done.returncode, json.loads(done.stdout)["device"]) == (0, "L4")
    by_its_name = run_train(tmp_path, "plan", "+recipe=grpo", "plan.device=L4", "plan.json=true")
    assert (by_its_name.returncode, by_its_name.stdout) == (0, done.stdout)
    refused = command("plan.device=L5")
    assert refused.returncode == 2
    assert refused.stdout.startswith("trinity-lightning: unknown plan.device 'L5'. Did you mean 'L4'?")
    assert list(tmp_path.iterdir()) == []


def test_pictures_of_a_step_are_counted() -> None:
    """32 prompts of a picture each, and 16 tokens and 64 x 64 pixels for each, with a mask of a byte a pixel."""
    estimate = planned(*CPU, "model=tiny_vision", recipe="grpo_vision")
    assert estimate.pictures is not None
    assert (estimate.pictures.count, estimate.pictures.seen, estimate.pictures.tokens) == (32, 16, 19)
    assert estimate.pictures.tensors == 32 * 64**2 * (3 * 4 + 1)
    assert "every prompt has 1 picture of its own (plan.pictures)" in as_text(estimate)
    assert re.search(r"pictures +32\ntokens of each +19\nMB of their pixels, on the host +1.7\n", as_text(estimate))
    assert json.loads(as_json(estimate))["pictures"]["count"] == 32
    none = planned(*CPU, "model=tiny_vision", "plan.pictures=0", recipe="grpo_vision")
    assert none.pictures is None
    assert none.seconds["training"] < estimate.seconds["training"]
    assert "pictures" not in json.loads(as_json(none))


def test_pairs_share_their_pictures_and_arguments_of_the_processor_count() -> None:
    tiles = ("+model.processor_args.do_image_splitting=true", "+model.processor_args.size.longest_edge=128")
    estimate = planned(*CPU, "model=tiny_vision", *tiles, "plan.pictures=2", "buffer.path=org/pairs", recipe="dpo")
    assert estimate.pictures is not None
    assert (estimate.pictures.count, estimate.pictures.seen) == (2 * 16, 5 * 16)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("model=tiny", "plan.pictures=1"), "plan.pictures"),
        (("model=tiny_vision", "plan.pictures=20"), "plan.pictures"),
        (("model=tiny_vision", "plan.prompt_tokens=19"), "plan.prompt_tokens"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(overrides: tuple[str, ...], key: str) -> None:
    with refuses(key):
        planned(*CPU, *overrides)

"""Memory plans: what is counted is what real models take, and no plan promises more than the device has."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compose import composed
from support.errors import refuses
from support.picture_models import family_model
from support.shapes import QWEN_1_5B, QWEN_3B, SMOLLM2
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from trinity_lightning.common.hardware import GIB
from trinity_lightning.common.model_memory import ModelShape, Training, activations, layer_bytes
from trinity_lightning.config.model import ModelConfig
from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.run import typed_config
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.vllm_engine import CPU_BLOCK_TOKENS
from trinity_lightning.plan.gpu import adapters_of, frozen_of, training_of
from trinity_lightning.plan.memory import (
    BLOCK_TOKENS,
    CACHE,
    COPIES,
    COUNTS,
    CUDA_CONTEXT,
    GATHERED,
    GRADIENTS,
    MASTERS,
    MOMENTS,
    PINNED,
    POLICY,
    VALUE_MODEL,
    WORKSPACES,
    Rollouts,
    auxiliary_server,
    cache_bytes,
    engine_alone,
    engine_weights,
    micro_batch_tokens,
    plan,
    states_on_host,
    token_counts,
    weight_states,
)
from trinity_lightning.sync.stream import skeleton
from trinity_lightning.trainer.adapter import Adapter
from trinity_lightning.trainer.lean import lean_layers

HOST = 200 * GIB

SMALL: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def test_shapes_come_from_models_without_weights() -> None:
    assert ModelShape.of(skeleton(str(resolve_model("smollm2")))) == SMOLLM2
    settings: dict[str, Any] = {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    }
    settings |= {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
    with torch.device("meta"):
        assert ModelShape.of(Qwen2ForCausalLM(Qwen2Config(**settings))) == QWEN_1_5B


@pytest.mark.parametrize(("dtype", "lean"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_autograd_saves_is_counted(dtype: torch.dtype, lean: bool, attention: str, checkpointing: bool) -> None:
    rows, length = 2, 200
    model: Any = LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation=attention))  # pyright: ignore[reportCallIssue]
    model.to(dtype).train()
    if lean:
        lean_layers(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    training = Training(dtype.itemsize, length, eager=attention == "eager", on_cpu=lean)
    layers = SMALL["num_hidden_layers"]
    last_norm = (dtype.itemsize + (0 if lean else 4)) * SMALL["hidden_size"]  # the head saves the rest
    layer = SMALL["hidden_size"] * dtype.itemsize if checkpointing else layer_bytes(ModelShape.of(model), training)
    assert saved_by(model, rows, length) == pytest.approx(rows * length * (layers * layer + last_norm), rel=0.03)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_adapters_have_is_counted(dropout: float, tmp_path: Path) -> None:
    """Activations are counted a little too large: norms save less if their weights are frozen."""
    model: Any = LlamaForCausalLM(LlamaConfig(**SMALL))  # pyright: ignore[reportCallIssue]
    model.config.save_pretrained(tmp_path)
    config = typed_config(composed("+recipe=lora", f"model.name={tmp_path}", f"model.lora.dropout={dropout}"))
    adapters, width = adapters_of(config)
    shape, training = ModelShape.of(model), Training(2, 200, adapters=adapters, adapter_width=width)
    Adapter(model.bfloat16().train(), config.model.lora, "")
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert weight_states(shape, training) == {
        POLICY: 2 * shape.parameters + 2 * trained,
        MASTERS: 4 * trained,
        MOMENTS: 8 * trained,
        GRADIENTS: 4 * trained,
    }
    expected = 2 * 200 * SMALL["num_hidden_layers"] * layer_bytes(shape, training)
    assert 0.75 * expected < saved_by(model, 2, 200) < expected


def saved_by(model: Any, rows: int, length: int) -> int:
    """Bytes that autograd saves in a forward pass, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(rows, length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    assert states.requires_grad
    return sum(saved.values())


def test_states_are_18_bytes_a_parameter_and_split_over_devices() -> None:
    states = weight_states(QWEN_1_5B, Training(2, 1))
    assert sum(states.values()) == 18 * QWEN_1_5B.parameters
    with_values = Training(2, 1, value_model=QWEN_1_5B)
    assert sum(weight_states(QWEN_1_5B, with_values).values()) == 2 * 18 * QWEN_1_5B.parameters
    alone = activations(QWEN_1_5B, Training(2, 1), 4096)
    assert 1.5 * alone < activations(QWEN_1_5B, with_values, 4096) < 2 * alone
    split = weight_states(QWEN_1_5B, Training(2, 1, shards=4, reference=True))
    gathered = split.pop(GATHERED)  # float32 weights take the masters' place: 4 + 8 and 2 of the reference, in shards
    assert sum(split.values()) == 18 * QWEN_1_5B.parameters // 4
    layer = (QWEN_1_5B.parameters - QWEN_1_5B.outside) // QWEN_1_5B.layers
    assert gathered == 2 * (QWEN_1_5B.outside + 2 * layer) + (4 + 4) * QWEN_1_5B.outside + (2 + 4) * layer
    assert MASTERS not in weight_states(QWEN_1_5B, Training(4, 1))
    assert weight_states(QWEN_1_5B, Training(2, 1, shards=4, adapters=400)) == {
        POLICY: 2 * QWEN_1_5B.parameters // 4 + 4 * 100,
        MOMENTS: 8 * 100,
        GRADIENTS: 4 * 100,
        GATHERED: 2 * (QWEN_1_5B.outside + 2 * layer),
    }


def test_masters_and_moments_of_all_trainers_of_a_machine_are_in_its_memory_or_refused() -> None:
    shape, parameters = replace(QWEN_1_5B, parameters=3 << 28), 3 << 28
    training = Training(2, 1024, on_host=2, value_model=replace(shape, parameters=1 << 28))
    assert weight_states(shape, training) == {
        POLICY: 2 * parameters,
        GRADIENTS: 4 * parameters,
        VALUE_MODEL: (2 + 4) << 28,
    }
    on_host = {MASTERS: 2 * 4 << 30, MOMENTS: 2 * 8 << 30, COPIES: 2 * 4 << 30}  # of 1 << 30 parameters, a power of two
    estimate = plan(shape, training, Rollouts(2, 1024, 512), 78 * GIB, sum(on_host.values()))
    assert (estimate.on_host, estimate.offload) == (on_host, False)
    assert estimate.rows()[-1] == ("on the host", "32.0 GiB: masters 8.0, Adam's moments 16.0, copies of gradients 8.0")
    with refuses("optimizer.name"):
        plan(shape, training, Rollouts(2, 1024, 512), 78 * GIB, int(31.9 * GIB))
    one_more = replace(training, on_host=1, value_model=replace(shape, parameters=(1 << 28) + 1))
    assert states_on_host(shape, one_more)[COPIES] == (4 << 30) + 4  # not the next power of two
    on_cpu = weight_states(shape, Training(4, 1024, on_host=2, on_cpu=True))
    assert sum(on_cpu.values()) == (4 + 4 + 4 + 8 + 4) * parameters


def test_vllm_sleeps_in_what_the_optimizer_leaves_of_the_host() -> None:
    training, rollouts = Training(2, 1024, on_host=1, checkpointing=True), Rollouts(2, 1024, 512)
    asleep = engine_weights(QWEN_1_5B, rollouts) + token_counts(QWEN_1_5B, rollouts)
    needed = sum(states_on_host(QWEN_1_5B, training).values()) + PINNED * asleep
    assert plan(QWEN_1_5B, training, rollouts, 16 * GIB, needed).sleep
    with pytest.raises(ConfigError, match=r"does not fit into the 16\.0 GiB"):
        plan(QWEN_1_5B, training, rollouts, 16 * GIB, needed - 1)


@pytest.mark.parametrize(
    ("shape", "device", "training", "rollouts", "expected"),
    [  # micro-batch, GiB of cache, utilization, sleep, offload
        (SMOLLM2, 139, {}, {}, (16384, 11.2, 0.09, False, False)),
        (QWEN_1_5B, 139, {}, {}, (16384, 14.0, 0.14, False, False)),
        (QWEN_1_5B, 78, {}, {}, (8192, 14.0, 0.26, False, False)),
        (QWEN_1_5B, 78, {"tokens": 2000}, {}, (2000, 14.0, 0.26, False, False)),
        (QWEN_1_5B, 78, {}, {"kv_cache": 3 * GIB}, (8192, 3.0, 0.12, False, False)),
        (QWEN_1_5B, 78, {}, {"sleep": True}, (8192, 14.0, 0.26, True, False)),
        (QWEN_1_5B, 78, {}, {"sleep": False, "max_num_seqs": 1024}, (8192, 16.8, 0.32, False, False)),
        (QWEN_1_5B, 78, {}, {"beside": 10 * GIB}, (8192, 7.1, 0.17, False, False)),
        (QWEN_1_5B, 60, {}, {}, (4096, 11.8, 0.3, False, False)),
        (QWEN_1_5B, 44, {"checkpointing": True}, {}, (4096, 7.2, 0.3, False, False)),
        (QWEN_1_5B, 36, {"checkpointing": True}, {}, (16384, 7.8, 0.39, True, False)),
        (QWEN_1_5B, 32, {"checkpointing": True}, {}, (2048, 14.0, 0.63, True, True)),
    ],
)
def test_the_cheapest_way_with_room_for_all_rollouts_is_taken(
    shape: ModelShape, device: int, training: dict, rollouts: dict, expected: tuple
) -> None:
    estimate = plan(shape, Training(2, 1024, **training), Rollouts(2, 1024, 512, **rollouts), device * GIB, HOST)
    cache, share = round(estimate.kv_cache / GIB, 1), round(estimate.engine / estimate.device, 2)
    assert (estimate.micro_batch_tokens, cache, share, estimate.sleep, estimate.offload) == expected


@pytest.mark.parametrize("context", [1, 16, 100, 1024])
def test_the_smallest_cache_holds_whole_blocks_of_one_request_and_vllms_empty_one(context: int) -> None:
    rollouts = Rollouts(2, context, 1, max_num_seqs=1)
    tokens = (
        plan(SMOLLM2, Training(2, context), rollouts, 8 * GIB, HOST).kv_cache
        // cache_bytes(SMOLLM2, Rollouts(2, BLOCK_TOKENS, 1), 1)
        * BLOCK_TOKENS
    )
    assert tokens % CPU_BLOCK_TOKENS == 0
    assert tokens >= context + CPU_BLOCK_TOKENS


def test_masters_and_moments_move_only_to_a_host_with_room_for_them() -> None:
    training, rollouts = Training(2, 1024, checkpointing=True), Rollouts(2, 1024, 512)
    assert plan(QWEN_1_5B, training, rollouts, 32 * GIB, HOST).offload
    assert not plan(QWEN_1_5B, training, rollouts, 32 * GIB, host=8 * GIB).offload
    # Float32 masters, two moments, and what vLLM pins, each tensor as a power of two: weights, and an int32 and a bit
    # for each of 512 requests and each token of the vocabulary.
    needed = (4 + 8 + PINNED * 2) * QWEN_1_5B.parameters + PINNED * 512 * (4 * 151936 + 151936 // 8)
    assert plan(QWEN_1_5B, training, rollouts, 32 * GIB, needed).offload
    assert not plan(QWEN_1_5B, training, rollouts, 32 * GIB, needed - 1).offload


def test_engines_of_all_processes_sleep_in_the_memory_of_one_machine() -> None:
    training, rollouts = Training(2, 1024, checkpointing=True), Rollouts(2, 1024, 512, processes=8)
    needed = 2 * 8 * (engine_weights(QWEN_1_5B, rollouts) + token_counts(QWEN_1_5B, rollouts))
    assert plan(QWEN_1_5B, training, rollouts, 36 * GIB, needed).sleep
    assert not plan(QWEN_1_5B, training, rollouts, 36 * GIB, needed - 1).sleep


@pytest.mark.parametrize("processes", [1, 2])
def test_the_host_is_advised_only_if_it_has_room_for_all_trainers(processes: int) -> None:
    """Beside one's own optimizer never; it is one's AdamW of 8 bits that would have larger moments there."""
    training, advice = Training(2, 1024, tokens=16384, offloadable=processes), "optimizer.name=adamw_offload"
    needed = sum(states_on_host(QWEN_1_5B, replace(training, on_host=processes)).values())
    for asked, host, offered in (
        (training, needed, True),
        (training, needed - 1, False),
        (replace(training, moments=2), needed, True),
        (replace(training, moments=2), needed - 1, False),
        (replace(training, offloadable=0), HOST, False),
    ):
        with pytest.raises(ConfigError) as refused:
            plan(QWEN_1_5B, asked, None, 24 * GIB, host)
        assert (advice in str(refused.value)) is offered


def test_vllms_token_counts_sleep_with_its_weights() -> None:
    """4 bytes and a bit for each request and token of the vocabulary: 0.6 GB for 1,024 requests of Qwen2.5."""
    rollouts = Rollouts(2, 1024, 2000)
    counts = 1024 * (4 * 151936 + 151936 // 8)
    for sleep, servers in ((False, 0), (False, 2), (True, 0)):
        chosen = replace(rollouts, sleep=sleep, servers=servers)
        estimate = plan(QWEN_1_5B, Training(2, 1024), chosen, 139 * GIB, HOST)
        assert estimate.generating[COUNTS] == max(servers, 1) * counts
        assert estimate.training.get(COUNTS, 0) == (0 if sleep else estimate.generating[COUNTS])
    alone = engine_alone(QWEN_1_5B, rollouts, 79 * GIB)
    assert alone.training[COUNTS] == counts
    assert alone.engine == sum(alone.training.values())
    shared = plan(QWEN_1_5B, Training(2, 1024), rollouts, 139 * GIB, HOST)
    own = ("vLLM's weights", COUNTS, "vLLM's graphs", "what vLLM computes with", CACHE)
    assert shared.engine == sum(shared.generating[part] for part in own)
    on_cpu = plan(SMOLLM2, Training(2, 256, on_cpu=True), Rollouts(2, 256, 64), 16 * GIB, 0)
    assert COUNTS not in on_cpu.generating  # vLLM's runner for CPUs has none


def test_servers_on_the_trainers_device_have_caches_of_their_own() -> None:
    alone = plan(QWEN_1_5B, Training(2, 1024), Rollouts(2, 1024, 512, servers=1), 139 * GIB, HOST)
    two = plan(QWEN_1_5B, Training(2, 1024), Rollouts(2, 1024, 512, servers=2), 139 * GIB, HOST)
    assert alone.kv_cache == two.kv_cache == alone.training[CACHE] == two.training[CACHE] // 2
    assert alone.left > two.left > 0


@pytest.mark.parametrize(
    ("training", "rollouts", "message"),
    [
        (
            {},
            {},
            r"While training, .* 3\d\.\d GiB: policy 2\.9, masters 5\.8, .*gradient_checkpointing=true takes 2\.\d GiB",
        ),
        ({"checkpointing": True}, {}, r"micro-batches of 1024 tokens.* a device of 31\.\d GiB has room"),
        ({}, {"sleep": False}, "engine.sleep=auto frees"),
        ({}, {"beside": 8 * GIB}, r"auxiliary models 8\.0.*GPUs of their own .* free 8\.0 GiB"),
        ({"tokens": 9000}, {}, "max_tokens_per_micro_batch=auto"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers_and_knobs(training: dict, rollouts: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(QWEN_1_5B, Training(2, 1024, **training), Rollouts(2, 1024, 512, **rollouts), 24 * GIB, HOST)


@pytest.mark.parametrize("training", [Training(2, 1024), Training(2, 1024, checkpointing=True)])
def test_a_device_of_the_size_that_a_refusal_names_has_room(training: Training) -> None:
    """The CUDA context that the trainer has already is of the device, and not of what is free there."""
    rollouts = Rollouts(2, 1024, 512)
    with pytest.raises(ConfigError) as refused:
        plan(QWEN_1_5B, training, rollouts, 24 * GIB, host=8 * GIB)
    named = float(str(refused.value).split("a device of ")[1].split()[0]) * GIB
    context = CUDA_CONTEXT - WORKSPACES
    assert plan(QWEN_1_5B, training, rollouts, int(named + 0.05 * GIB - context), host=8 * GIB).left >= 0
    with pytest.raises(ConfigError):
        plan(QWEN_1_5B, training, rollouts, int(named - 0.05 * GIB - context), host=8 * GIB)


def test_a_cpu_has_one_way() -> None:
    training, rollouts = Training(2, 256, on_cpu=True), Rollouts(2, 256, 64, sleep=True)
    assert plan(SMOLLM2, training, rollouts, 16 * GIB, 0) == plan(
        SMOLLM2, training, replace(rollouts, sleep=None), 16 * GIB, 0
    )


def test_a_cache_too_small_for_one_request_is_refused_as_it_is_configured() -> None:
    rollouts = Rollouts(2, 1024, 64, kv_cache=1 << 20)
    with pytest.raises(ConfigError, match=r"one request of engine\.max_model_len=1024 needs 0\.0 GiB of cache"):
        plan(SMOLLM2, Training(2, 256), rollouts, 80 * GIB, HOST)


def test_a_server_that_is_to_sleep_is_refused() -> None:
    with refuses("engine.sleep"):
        Rollouts(2, 1024, 512, sleep=True, servers=1)


@pytest.mark.parametrize(("kv_cache", "gigabytes"), [(None, 3.5), (2 * GIB, 2.0)])
def test_the_server_of_an_auxiliary_model_has_room_for_half_of_its_requests(
    kv_cache: int | None, gigabytes: float
) -> None:
    rollouts = Rollouts(2, 1024, 0, kv_cache=kv_cache)
    cache, size = auxiliary_server(QWEN_1_5B, rollouts)
    assert cache == gigabytes * GIB
    # Weights 2.9, token counts 0.15, graphs and context 1 each, and to compute.
    assert size - cache == pytest.approx(6.35 * GIB, rel=0.01)
    one = auxiliary_server(QWEN_1_5B, replace(rollouts, context=1 << 20, max_num_seqs=1, kv_cache=None))[0]
    assert one == pytest.approx(28 * GIB, rel=1e-4)  # and a block


@settings(max_examples=50)
@given(
    device=st.integers(20, 140),
    tokens=st.integers(1, 16384),
    context=st.sampled_from([256, 700, 2048]),
    way=st.sampled_from([{"servers": 1}, {"sleep": False}, {}]),
    host=st.sampled_from([0, HOST]),
)
def test_what_fits_with_a_budget_of_ones_own_fits_with_auto(
    device: int, tokens: int, context: int, way: dict[str, Any], host: int
) -> None:
    rollouts, training = Rollouts(2, context, 512, **way), Training(2, context)
    try:
        plan(QWEN_3B, replace(training, tokens=tokens), rollouts, device * GIB, host)
    except ConfigError:
        return
    assert plan(QWEN_3B, training, rollouts, device * GIB, host).left >= 0


def test_fewer_tokens_than_wanted_are_computed_at_once_if_nothing_else_fits() -> None:
    estimate = plan(QWEN_3B, Training(2, 2048), Rollouts(2, 2048, 512, sleep=False), 78 * GIB, HOST)
    assert (estimate.micro_batch_tokens, estimate.sleep) == (2048, False)


def test_a_cache_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"While generating, .*key-value cache 90\.0.*engine.kv_cache_gb=null"):
        plan(SMOLLM2, Training(2, 256), Rollouts(2, 256, 64, kv_cache=90 * GIB), 80 * GIB, HOST)


@given(
    device=st.integers(8, 160),
    longest=st.integers(64, 8192),
    requests=st.integers(1, 4096),
    width=st.sampled_from([2, 4]),
    checkpointing=st.booleans(),
    sleep=st.sampled_from([None, True, False]),
    servers=st.integers(0, 2),
    beside=st.sampled_from([0, 3 * GIB]),
)
def test_no_plan_promises_more_than_there_is(
    device: int,
    longest: int,
    requests: int,
    width: int,
    checkpointing: bool,
    sleep: bool | None,
    servers: int,
    beside: int,
) -> None:
    training = Training(width, longest, checkpointing=checkpointing)
    rollouts = Rollouts(width, longest, requests, sleep=None if servers else sleep, servers=servers, beside=beside)
    try:
        estimate = plan(SMOLLM2, training, rollouts, device * GIB, HOST)
    except ConfigError:
        return
    assert estimate.left >= 0
    assert estimate.training.get("auxiliary models", 0) == estimate.generating.get("auxiliary models", 0) == beside
    assert estimate.micro_batch_tokens >= longest
    assert estimate.kv_cache < estimate.engine < estimate.device
    larger = plan(SMOLLM2, training, rollouts, (device + 40) * GIB, HOST)
    assert larger.kv_cache >= estimate.kv_cache
    assert (larger.sleep, larger.offload) <= (estimate.sleep, estimate.offload)
    assert dict(estimate.rows())["device memory"].startswith(f"{device}.0 GiB")


def test_a_budget_is_as_large_as_fits() -> None:
    training = Training(2, 1024)
    assert micro_batch_tokens(QWEN_1_5B, training, activations(QWEN_1_5B, training, 2048)) == 2048
    assert micro_batch_tokens(QWEN_1_5B, training, activations(QWEN_1_5B, training, 2048) - 1) == 1024
    assert micro_batch_tokens(QWEN_1_5B, training, GIB) == 0
    assert micro_batch_tokens(QWEN_1_5B, training, 10**15) == 16384


def test_the_table_of_a_trainer_alone_shows_no_generating() -> None:
    estimate = plan(QWEN_1_5B, Training(2, 1024), None, 80 * GIB, HOST)
    assert [name for name, _ in estimate.rows()] == ["device memory", "while training"]


def test_the_table_shows_both_phases_of_a_sleeping_engine() -> None:
    estimate = plan(QWEN_1_5B, Training(2, 1024, checkpointing=True), Rollouts(2, 1024, 512), 32 * GIB, HOST)
    names = [name for name, _ in estimate.rows()]
    assert names == ["device memory", "while training", "while generating"]
    assert MOMENTS in estimate.training
    assert MOMENTS not in estimate.generating


def test_frozen_weights_have_neither_masters_nor_moments_nor_gradients() -> None:
    whole, tower, eyes = (
        training_of(typed_config(composed("+recipe=grpo_vision", "model=tiny_vision", f"model.freeze={freeze}")), 0)
        for freeze in ("[]", "[vision]", "[vision,connector]")
    )
    shape = ModelShape.of(skeleton(str(resolve_model("tiny_vision"))))
    assert (whole.frozen, whole.frozen_tower, whole.kept_states) == (0, False, 0)
    assert 0 < tower.frozen < eyes.frozen < shape.parameters
    assert 0 < eyes.kept_states < tower.kept_states  # a patch has a row, and not only a token
    before, after = weight_states(shape, whole), weight_states(shape, eyes)
    assert before[POLICY] == after[POLICY]
    for part, width in ((MOMENTS, 8), (GRADIENTS, 4)):
        assert before[part] - after[part] == width * eyes.frozen
    assert activations(shape, eyes, 512) < activations(shape, whole, 512)


def test_states_are_reserved_for_families_that_keep_them(tmp_path: Path) -> None:
    family_model("llava").save_pretrained(tmp_path)
    tower, eyes = (
        frozen_of(replace(config, model=ModelConfig(str(tmp_path), freeze=freeze)))
        for config in [typed_config(composed("+recipe=grpo_vision", "model=tiny_vision"))]
        for freeze in (["vision_tower"], ["vision_tower", "projector"])
    )
    assert tower == {"frozen": tower["frozen"], "frozen_tower": True}  # its projector reads an inner layer of the tower
    assert eyes["kept_states"] > 0

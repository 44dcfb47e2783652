"""The probe and the drill see an engine that does not have the trainer's weights."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.tiny_model import logprobs, tiny_model, train_a_little
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from trinity_lightning.common.hardware import TORCH_DTYPES
from trinity_lightning.config.engines import EngineDtype
from trinity_lightning.config.model import LoRAConfig
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.errors import WeightSyncError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models import engine
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.sync.proof import DRILL_SCALES, PROBE_TEXT, Synchronizer, Tolerance, compare, perturbed
from trinity_lightning.sync.stream import WeightStream, weight_stream
from trinity_lightning.trainer.adapter import Adapter

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FP32 = Tolerance.of(torch.float32)


@pytest.fixture(scope="module")
def probe() -> list[int]:
    return load_tokenizer("tiny").encode(PROBE_TEXT)


@pytest.fixture
def model() -> Any:
    return tiny_model()


class CopyEngine:
    """An engine with weights of its own, the head a tensor apart from the embedding; `change` happens on the way."""

    def __init__(self, change: Callable[[str, Tensor], Tensor | None] = lambda name, tensor: tensor) -> None:
        self.model = tiny_model()
        self.model.lm_head.weight = nn.Parameter(self.model.lm_head.weight.detach().clone())
        self.change = change
        self.syncs = 0

    def take(self, stream: Any) -> None:
        self.syncs += 1
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in stream:
                if (changed := self.change(name, tensor)) is not None:
                    parameters[name].copy_(changed)


def synchronizer(
    model: Any, engine: CopyEngine, probe: list[int], check_interval: int = 1, drill: bool = True
) -> Synchronizer:
    return Synchronizer(
        partial(perturbed, model),
        send=lambda: engine.take(weight_stream(model)),
        trainer_logprobs=lambda: logprobs(model, probe),
        engine_logprobs=lambda: [logprobs(engine.model, probe)],
        tolerance=FP32,
        check_interval=check_interval,
        with_drill=drill,
    )


def ignoring(*names: str) -> Callable[[str, Tensor], Tensor | None]:
    return lambda name, tensor: None if not names or name in names else tensor


# -- the stream -------------------------------------------------------------------------------------------------------


def test_a_tied_head_is_streamed_under_both_names(model: Any) -> None:
    stream = weight_stream(model)
    tensors = dict(stream)
    assert list(tensors) == list(stream.shapes)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == stream.shapes
    assert tensors[HEAD].data_ptr() == tensors[EMBEDDING].data_ptr()
    assert set(tensors) == {*model.state_dict()}
    assert not any(tensor.requires_grad for tensor in tensors.values())
    assert dict(stream).keys() == tensors.keys()  # it can be read again


def test_a_stream_shows_the_present_weights(model: Any) -> None:
    stream = weight_stream(model)
    train_a_little(model)
    assert torch.equal(dict(stream)[EMBEDDING], model.get_input_embeddings().weight)


def test_weights_are_streamed_layer_by_layer(model: Any) -> None:
    """vLLM keeps what it was sent of a layer in memory until the layer is whole."""
    names = list(weight_stream(model).shapes)
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers)
    assert len(set(layers)) == model.config.num_hidden_layers
    assert (names[0], names[-1]) == (EMBEDDING, HEAD)


# -- compare ----------------------------------------------------------------------------------------------------------


def test_compare_gives_mean_and_maximum() -> None:
    assert compare([-1.0, -2.0], [-1.0, -2.0005], FP32, "probe") == pytest.approx((0.00025, 0.0005))


@pytest.mark.parametrize(
    ("trainer", "engine", "tolerance"),
    [
        ([-1.0] * 100, [-1.0] * 99 + [-1.6], Tolerance(0.06, 0.5)),
        ([-1.0] * 100, [-1.07] * 100, Tolerance(0.06, 0.5)),
        ([-1.0, -2.0], [-1.0, float("nan")], Tolerance(0.06, 0.5)),
        ([-1.0, -2.0], [-1.0, float("-inf")], Tolerance(0.06, 0.5)),
        ([-1.0, -2.0], [-1.0, -2.002], FP32),
    ],
)
def test_compare_refuses_what_is_beyond_the_tolerance(
    trainer: list[float], engine: list[float], tolerance: Tolerance
) -> None:
    with pytest.raises(WeightSyncError, match=r"^probe 3: "):
        compare(trainer, engine, tolerance, "probe 3")


def test_compare_says_what_it_allows_these_tokens() -> None:
    """An unlikely token may differ by more, so that the worst one is not always the one that differs the most."""
    tolerance = Tolerance(0.06, 0.5, relative_mean=0.02, relative_max=0.1)
    with pytest.raises(WeightSyncError, match=r"0\.45 \(allowed 0\.12\), of the worst token 0\.7 \(allowed 0\.6\)"):
        compare([-1.0, -9.0, -1.0, -1.0], [-1.7, -8.0, -1.05, -1.05], tolerance, "probe")


@pytest.mark.parametrize("engine", [[], [-1.0], [-1.0, -1.0, -1.0]])
def test_compare_refuses_another_number_of_tokens(engine: list[float]) -> None:
    with pytest.raises(WeightSyncError, match=rf"probe.*\b2\b.*\b{len(engine)}\b"):
        compare([-1.0, -1.0], engine, FP32, "probe")


def test_one_16_bit_side_is_enough_for_the_wider_tolerance() -> None:
    assert Tolerance.of(torch.float32, torch.float32) == Tolerance(1e-3, 1e-3)
    assert Tolerance.of(torch.float32, torch.bfloat16) == Tolerance(0.06, 0.5, relative_mean=0.02, relative_max=0.1)
    assert Tolerance.of(torch.float16, torch.bfloat16) == Tolerance.of(torch.bfloat16)
    half = Tolerance.of(torch.float16, torch.float32)
    assert Tolerance.of(torch.float32).max < half.max < Tolerance.of(torch.bfloat16).max / 4


def test_a_vllm_on_a_gpu_may_round_single_float32_tokens_as_tf32_does() -> None:
    gpu = Tolerance.of(torch.float32, torch.float32, on_gpu=True)
    assert gpu == Tolerance(1e-3, 1e-2)
    assert Tolerance.of(torch.float32, torch.bfloat16, on_gpu=True) == Tolerance.of(torch.bfloat16)
    compare([-1.0] * 9, [*[-1.0] * 8, -1.008], gpu, "probe")
    with pytest.raises(WeightSyncError, match=r"0\.008 \(allowed 0\.001\)"):
        compare([-1.0] * 9, [*[-1.0] * 8, -1.008], FP32, "probe")


def test_unlikely_tokens_may_be_rounded_more() -> None:
    bf16 = Tolerance.of(torch.bfloat16)
    likely = [-0.1] * 99
    compare([*likely, -8.0], [*likely, -9.2], bf16, "probe")
    with pytest.raises(WeightSyncError, match=r"1\.4 \(allowed 1\.3\)"):
        compare([*likely, -8.0], [*likely, -9.4], bf16, "probe")
    with pytest.raises(WeightSyncError, match=r"0\.6 \(allowed 0\.51\)"):
        compare([*likely, -0.1], [*likely, -0.7], bf16, "probe")
    compare([-3.0] * 50, [-3.11] * 50, bf16, "probe")
    with pytest.raises(WeightSyncError, match=r"0\.13 \(allowed 0\.12\)"):  # twice the mean at most, however unlikely
        compare([-30.0] * 50, [-30.13] * 50, bf16, "probe")


# -- perturbed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_perturbed_moves_every_tensor_and_restores_it_bit_for_bit(dtype: torch.dtype) -> None:
    config = Qwen2Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = Qwen2ForCausalLM(config)  # its biases are zeros
    model = nn.Module.to(model, dtype)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with perturbed(model) as perturb:
        perturb(0.1)
        assert not [name for name, value in model.state_dict().items() if torch.equal(value, before[name])]
        first = copy.deepcopy(model.state_dict())
        perturb(0.4)
        assert not [name for name, value in model.state_dict().items() if torch.equal(value, first[name])]
        perturb(0.1)  # seeded, and from the weights as they were
        assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(LookupError), perturbed(model) as perturb:
        raise LookupError(perturb(0.1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


# -- Synchronizer -----------------------------------------------------------------------------------------------------


def test_a_faithful_engine_passes_and_has_the_weights(model: Any, probe: list[int]) -> None:
    engine = CopyEngine()
    before = copy.deepcopy(model.state_dict())
    sync = synchronizer(model, engine, probe)
    metrics = sync.sync()
    assert metrics.keys() == {"time/sync_weight", "sync/probe_diff/mean", "sync/probe_diff/max"}
    assert metrics["sync/probe_diff/max"] < 1e-5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert engine.syncs == 2  # the drill and the true weights
    train_a_little(model)
    sync.sync()
    assert engine.syncs == 3  # one drill a run
    assert logprobs(engine.model, probe) == pytest.approx(logprobs(model, probe), abs=1e-6)


MATRICES = [name for name, p in tiny_model().named_parameters() if p.ndim == 2 and name != EMBEDDING]


@pytest.mark.parametrize("ignored", [(), (HEAD,), (EMBEDDING,), *[(name,) for name in MATRICES]])
def test_the_drill_catches_what_is_ignored_while_the_weights_are_still_equal(
    model: Any, probe: list[int], ignored: tuple[str, ...]
) -> None:
    engine = CopyEngine(ignoring(*ignored))
    synchronizer(model, engine, probe, drill=False).sync()  # a plain probe sees nothing: the weights are equal
    with pytest.raises(WeightSyncError, match="drill"):
        synchronizer(model, engine, probe).sync()


def test_the_drill_catches_an_engine_that_takes_weights_only_once(model: Any, probe: list[int]) -> None:
    engine = CopyEngine()
    engine.change = lambda name, tensor: tensor if engine.syncs == 1 else None
    with pytest.raises(WeightSyncError, match="probe of weight sync 1"):
        synchronizer(model, engine, probe).sync()


def test_a_drill_begins_with_the_scale_that_was_enough_before(model: Any, probe: list[int]) -> None:
    first = synchronizer(model, CopyEngine(), probe)
    first.sync()
    scale = first.drill_scale
    assert scale in DRILL_SCALES[1:]
    again = synchronizer(model, CopyEngine(), probe)
    again.drill_scale = scale
    asked: list[int] = []
    again.trainer_logprobs = lambda: asked.append(0) or logprobs(model, probe)
    again.sync()
    assert again.drill_scale == scale
    assert len(asked) == 3  # before and after the noise, and the probe


def test_a_model_that_does_not_depend_on_its_weights_is_no_drill(model: Any, probe: list[int]) -> None:
    sync = synchronizer(model, CopyEngine(), probe)
    sync.trainer_logprobs = lambda: [-1.0] * 10
    with pytest.raises(WeightSyncError, match="drill=false"):
        sync.sync()


def test_a_probe_is_made_at_the_first_and_then_every_check_interval(model: Any, probe: list[int]) -> None:
    sync = synchronizer(model, CopyEngine(), probe, check_interval=3)
    probed = ["sync/probe_diff/max" in sync.sync() for _ in range(7)]
    assert probed == [True, False, False, True, False, False, True]


def test_a_probe_may_be_asked_for(model: Any, probe: list[int]) -> None:
    sync = synchronizer(model, CopyEngine(), probe, check_interval=4)
    sync.sync()
    sync.probes_next = True
    assert ["sync/probe_diff/max" in sync.sync() for _ in range(4)] == [True, False, False, True]


def test_a_tensor_negated_in_flight_stops_at_the_next_probe(model: Any, probe: list[int]) -> None:
    engine = CopyEngine()
    sync = synchronizer(model, engine, probe, check_interval=2)
    sync.sync()
    engine.change = lambda name, tensor: -tensor if name == "model.layers.1.mlp.down_proj.weight" else tensor
    sync.sync()
    with pytest.raises(WeightSyncError, match=r"probe of weight sync 3: .*trainer -\d.*engine -\d"):
        sync.sync()


def test_the_worst_of_several_engines_counts(model: Any, probe: list[int]) -> None:
    engines = [CopyEngine(), CopyEngine(ignoring())]
    sync = synchronizer(model, engines[0], probe, drill=False)
    sync.engine_logprobs = lambda: [logprobs(engine.model, probe) for engine in engines]
    train_a_little(model)
    with pytest.raises(WeightSyncError, match="probe"):
        sync.sync()


# -- with vLLM, in 16 bits and quantised too -------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp16", "fp8"])
def vllm(needs_vllm: Any, request: pytest.FixtureRequest) -> Iterator[tuple[VLLMEngine, Driver, Any]]:
    """An engine, its driver, and a policy of the same dtype; a quantised engine's policy is bfloat16."""
    dtype = EngineDtype.bf16 if request.param == "fp8" else EngineDtype(request.param)
    args = {"quantization": "fp8_per_channel"} if request.param == "fp8" else {}
    engine = VLLMEngine("tiny", dtype=dtype, max_model_len=320, max_num_seqs=4, kv_cache_gb=0.05, args=args)
    driver = Driver([engine])
    driver.run(engine.load())
    yield engine, driver, tiny_model(dtype=TORCH_DTYPES[dtype])
    driver.run(engine.shutdown())
    driver.close()


def vllm_synchronizer(vllm: tuple[VLLMEngine, Driver, Any], probe: list[int]) -> Synchronizer:
    engine, driver, model = vllm
    return Synchronizer(
        partial(perturbed, model),
        send=lambda: driver.run(engine.sync_weights(weight_stream(model), 1)),
        trainer_logprobs=lambda: logprobs(model, probe),
        engine_logprobs=lambda: [driver.run(engine.logprobs(probe))],
        tolerance=Tolerance.of(model.dtype, engine.dtype, quantized=engine.quantized),
        check_interval=1,
        with_drill=True,
    )


def test_vllm_passes_drill_and_probe(vllm: tuple[VLLMEngine, Driver, Any], probe: list[int]) -> None:
    model = vllm[2]
    sync = vllm_synchronizer(vllm, probe)
    sync.sync()
    original = copy.deepcopy(model.state_dict())
    train_a_little(model)
    metrics = sync.sync()
    assert metrics["sync/probe_diff/max"] < (
        1e-4 if model.dtype == torch.float32 else 1.0 if vllm[0].quantized else 0.2
    )
    model.load_state_dict(original)


def test_vllm_takes_merged_adapters(vllm: tuple[VLLMEngine, Driver, Any], probe: list[int]) -> None:
    engine, driver, plain = vllm
    model = copy.deepcopy(plain)
    torch.manual_seed(0)
    Adapter(model, LoRAConfig(r=4), "tiny")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    before, after = (torch.tensor(logprobs(policy, probe)) for policy in (plain, model))
    assert (after - before).abs().mean() > 0.05
    difference = vllm_synchronizer((engine, driver, model), probe).sync()["sync/probe_diff/max"]
    assert difference < (1e-4 if model.dtype == torch.float32 else 1.0)


def packed_head(engine: VLLMEngine) -> Any:
    """The engine's head, and whether vLLM computes with a packed copy of its weight: that depends on dtype and CPU."""
    [model] = engine._engine.collective_rpc(lambda worker: worker.model_runner.get_model())
    head = model.lm_head
    states = torch.ones(1, head.weight.shape[1], dtype=head.weight.dtype)
    return head, bool(head.cpu_linear(states, torch.zeros_like(head.weight), None).any())


def test_the_drill_catches_vllms_stale_tied_head(
    vllm: tuple[VLLMEngine, Driver, Any], probe: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent without the head, past the check of names: vLLM takes the weights without a word, and keeps its old head.

    Its own way of taking them, that is: here the head is packed again in any case. Where vLLM packs no head of this
    dtype (bfloat16 on a CPU without AVX-512) there is none to become stale: a copy in its place does.
    """

    def without_head(model: nn.Module) -> WeightStream:
        return WeightStream.of((n, t) for n, t in weight_stream(model) if n != HEAD)

    monkeypatch.setattr(engine, "check_shapes", lambda *_: None)
    monkeypatch.setattr(vllm[0], "_packed", None)
    sync = vllm_synchronizer(vllm, probe)
    sync.send = lambda: vllm[1].run(vllm[0].sync_weights(without_head(vllm[2]), 1))
    head, is_packed = packed_head(vllm[0])
    if not is_packed:
        sync.sync()  # the head is the embedding itself
        again = vllm_synchronizer(vllm, probe)
        copied = head.weight.detach().clone()
        monkeypatch.setattr(head, "cpu_linear", lambda states, _, bias: nn.functional.linear(states, copied, bias))
        again.send, sync = sync.send, again
    with pytest.raises(WeightSyncError, match="drill"):
        sync.sync()

"""Operations of a training step, held against those that torch counts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.picture_models import FAMILIES, family_model
from support.pictures import picture_groups
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText, MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from trinity_lightning.common import hardware
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.algorithm import Layout
from trinity_lightning.config.model import LoRAConfig
from trinity_lightning.config.models import resolve_model
from trinity_lightning.trainer.adapter import Adapter
from trinity_lightning.trainer.flops import ModelSize, Peak, Work, attended, peak_flops, picture_tokens, product_shapes
from trinity_lightning.trainer.frozen import freeze
from trinity_lightning.trainer.layout import Part, PrefixGroup, cut, cut_padded

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small_qwen(tied: bool) -> Any:
    config = Qwen2Config(**SMALL, tie_word_embeddings=tied)
    config._attn_implementation = "eager"
    return Qwen2ForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_that_torch_counts(tied: bool) -> None:
    model, (rows, width) = small_qwen(tied), (3, 40)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(rows, width, dtype=torch.int64)).logits.sum().backward()
    # Attention without a kernel of its own computes all pairs, and masks half of them.
    work = Work(tokens=rows * width, predicted=rows * width, pairs=rows * width**2)
    assert ModelSize.of(model).training_flops(work) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_weights_that_only_adapters_are_trained_of_have_no_gradient() -> None:
    model, (rows, width) = small_qwen(tied=False), (3, 40)
    Adapter(model, LoRAConfig(r=1), "small")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(rows, width, dtype=torch.int64)).logits.sum().backward()
    work = Work(tokens=rows * width, predicted=rows * width, pairs=rows * width**2)
    assert ModelSize.of(model).training_flops(work) == pytest.approx(counter.get_total_flops(), rel=0.1)


def picture_model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(resolve_model("tiny_vision"), attn_implementation="eager")


def counted_with_two_pictures(model: Any) -> int:
    """The operations that torch counts for 3 rows of 60 tokens, of which the first two have a picture."""
    tokens = torch.full((3, 60), 5)
    tokens[:2, 4:20] = model.config.image_token_id
    pixels = torch.ones(2, 1, 3, 64, 64)
    with FlopCounterMode(display=False) as counter:
        states = model.get_image_features(pixels.view(1, 2, 3, 64, 64)).pooler_output
        vectors = model.get_input_embeddings()(tokens).masked_scatter(
            (tokens == model.config.image_token_id)[..., None], states
        )
        model(inputs_embeds=vectors).logits.sum().backward()
    return counter.get_total_flops()


def test_pictures_are_multiplied_by_the_tower_for_each_patch() -> None:
    model = picture_model()
    text, pictures = Work(tokens=180, predicted=180, pairs=3 * 60**2), (16, 16)
    size = ModelSize.of(model)
    assert size.training_flops(replace(text, pictures=pictures)) == pytest.approx(
        counted_with_two_pictures(model), rel=0.05
    )
    assert size.training_flops(text) < 0.9 * counted_with_two_pictures(model)


def test_a_frozen_tower_is_computed_forward_alone() -> None:
    model = picture_model()
    Adapter(model, LoRAConfig(r=1), "small")
    work = Work(tokens=180, predicted=180, pairs=3 * 60**2, pictures=(16, 16))
    assert ModelSize.of(model).training_flops(work) == pytest.approx(counted_with_two_pictures(model), rel=0.1)


@pytest.mark.parametrize("patterns", [["vision"], ["connector"], ["vision", "connector"], ["layers.1"]])
def test_frozen_weights_have_no_gradient(patterns: list[str]) -> None:
    model = picture_model()
    freeze(model, patterns)
    work = Work(tokens=180, predicted=180, pairs=3 * 60**2, pictures=(16, 16))
    assert ModelSize.of(model).training_flops(work) == pytest.approx(counted_with_two_pictures(model), rel=0.06)


def test_only_what_a_frozen_tower_has_computed_counts() -> None:
    model = picture_model()
    freeze(model, ["vision"])
    work, size = Work(tokens=180, predicted=180, pairs=3 * 60**2, pictures=(16, 16)), ModelSize.of(model)
    assert size.tower is not None
    computed = size.training_flops(work)
    assert size.training_flops(replace(work, patches=(64, 64))) == computed
    without = size.training_flops(replace(work, patches=()))
    assert computed - without == 2 * size.tower.body * 128 + 4 * size.tower.attention * 2 * 64**2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_tower_whose_weights_are_counted_once(family: str) -> None:
    model = family_model(family)
    size = ModelSize.of(model)
    assert size.tower is not None
    tables = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    tables.add(model.get_output_embeddings().weight)
    others = sum(p.numel() for p in model.parameters()) - sum(table.numel() for table in tables)
    assert size.body + size.tower.body + size.tower.projector == others
    assert min(size.tower.body, size.body) > 0
    assert size.tower.patches == {"llava": 1}.get(family, 4)


def test_a_picture_counts_once_in_every_micro_batch() -> None:
    rows = picture_groups(runs=2)
    batch = OptimizerBatch.of(rows, 0)
    whole = cut(batch, range(len(rows)), 10_000, Layout.padded)
    assert picture_tokens(rows, whole) == (16, 16)  # all rows have these two
    alone = [part for row in range(len(rows)) for part in cut(batch, [row], 10_000, Layout.padded)]
    assert len(picture_tokens(rows, alone)) == 2 + 2 + 2 * 2 + 2 + 0


def test_a_token_is_multiplied_by_its_experts_only() -> None:
    config = MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=False)
    expert = 3 * SMALL["hidden_size"] * SMALL["intermediate_size"]
    all_weights = sum(p.numel() for p in MixtralForCausalLM(config).parameters())
    size = ModelSize.of(MixtralForCausalLM(config))
    head = SMALL["vocab_size"] * SMALL["hidden_size"]
    assert size == ModelSize(
        body=all_weights - 2 * head - 6 * expert * SMALL["num_hidden_layers"], head=head, attention=3 * 64
    )


def test_layers_that_do_not_attend_are_not_counted() -> None:
    model = small_qwen(tied=True)
    model.config.layer_types = ["linear_attention", "full_attention", "sliding_attention"]
    assert ModelSize.of(model).attention == 2 * SMALL["hidden_size"]


@pytest.mark.parametrize(
    ("tokens", "before", "pairs"), [(0, 5, 0), (1, 0, 1), (4, 0, 1 + 2 + 3 + 4), (3, 10, 11 + 12 + 13)]
)
def test_a_token_attends_to_itself_and_to_all_before(tokens: int, before: int, pairs: int) -> None:
    assert attended(tokens, before) == pairs


def test_rows_are_computed_to_the_longest_of_their_micro_batch() -> None:
    parts = cut_padded([3, 7, 5, 100], [0, 1, 2], 14)
    work = Work.of([3, 7, 5, 100], parts, predicted=4)
    assert work == Work(tokens=2 * 7 + 3, predicted=4, pairs=2 * attended(7) + attended(3))


def test_a_shared_prefix_is_computed_once_and_attended_to_by_every_row() -> None:
    part = Part((2, 0, 1), tokens=14, groups=(PrefixGroup((2,), 0, 5), PrefixGroup((0, 1), 4, 9)))
    work = Work.of([7, 6, 5], [part], predicted=8)
    assert work == Work(tokens=14, predicted=8, pairs=attended(5) + attended(4) + attended(3, 4) + attended(2, 4))


def test_the_peak_of_a_cpu_is_measured_once() -> None:
    peak = peak_flops(torch.device("cpu"), torch.float32)
    assert peak is not None
    assert 1e8 < peak < 1e15
    assert peak == peak_flops(torch.device("cpu"), torch.float32)


def test_the_peak_is_that_of_the_models_own_products_too() -> None:
    model = small_qwen(tied=False)
    assert product_shapes(model, 4096) == ()  # so small that the fixed ones are faster
    sizes: dict[str, Any] = SMALL | {"hidden_size": 1024, "intermediate_size": 5000}
    config = Qwen2Config(**sizes, tie_word_embeddings=True)
    with torch.device("meta"):
        wide: Any = Qwen2ForCausalLM(config)
    # Up and down of the MLP, queries and output, keys and values; not the vocabulary of 96.
    expected = {(512, 1024, 2048), (512, 2048, 1024), (512, 1024, 1024), (512, 1024, 512)}
    assert set(product_shapes(wide, 4096)) == expected
    assert {rows for rows, _, _ in product_shapes(wide, 300)} == {300}


def test_a_product_that_waits_for_a_core_is_timed_by_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that hold it up make it longer by the clock."""
    now = {"clock": 0.0, "core": 0.0}

    def computed() -> torch.Tensor:
        now["clock"] += 4.0
        now["core"] += 2.0
        return torch.ones(1)

    clocks = SimpleNamespace(perf_counter=lambda: now["clock"], thread_time=lambda: now["core"])
    monkeypatch.setattr(hardware, "time", clocks)
    monkeypatch.setattr(hardware, "_product", lambda shape, dtype: computed)
    assert hardware.product_flops.__wrapped__(torch.float32, 2, ((3, 5, 7),)) == 2 * 3 * 5 * 7 / 2.0
    seconds, _ = hardware.timed_product.__wrapped__()
    assert set(seconds.values()) == {2.0}


def test_a_clock_that_counts_hundredths_of_a_second_measures_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))
    ticks = SimpleNamespace(thread_time=lambda: (next(calls) + 1) // 2 // 4 * 0.01)  # a product takes a quarter of one
    monkeypatch.setattr(hardware, "time", ticks)
    monkeypatch.setattr(hardware, "_product", lambda shape, dtype: lambda: torch.ones(1))
    flops = hardware.product_flops.__wrapped__(torch.float32, 2, ((10, 10, 10),))
    assert flops == pytest.approx(2000 / 0.0025, rel=0.2)


def test_a_step_that_is_faster_than_the_peak_shows_that_it_was_measured_too_low(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peak = Peak(100.0)
    assert peak.share(50.0) == 0.5
    assert not caplog.records
    assert [peak.share(130.0), peak.share(65.0), peak.share(260.0), peak.share(130.0)] == [1.0, 0.5, 1.0, 0.5]
    [record] = caplog.records  # once
    assert "perf/mfu" in record.getMessage()


def test_an_unknown_device_or_dtype_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops(torch.device("cuda"), torch.bfloat16) == 989.5e12
    assert peak_flops(torch.device("cuda"), torch.float16) == 989.5e12
    assert peak_flops(torch.device("cuda"), torch.float32) is None
    assert peak_flops(torch.device("cuda"), torch.float16) == 989.5e12
    assert peak_flops(torch.device("mps"), torch.bfloat16) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert peak_flops(torch.device("cuda"), torch.float16) == 65e12
    assert peak_flops(torch.device("cuda"), torch.bfloat16) is None

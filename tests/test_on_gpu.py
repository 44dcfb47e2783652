"""On an NVIDIA GPU: the same numbers as on a CPU, and whole runs whose engines share the GPU with the trainer.

Skipped where there is none. `python -m pytest tests/test_on_gpu.py` takes minutes.
"""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from hypothesis import given, settings
from support.engine_promises import ask, plain_logprobs
from support.layouts import SCALE, dense, segments, states
from support.policy import Gradients, assert_same_gradients, batch_of, fit, groups, make_policy
from support.runs import WITHIN_A_PASS, imitation, only, rows, start, wait_for
from support.tiny_model import tiny_model, train_a_little
from support.tiny_vllm import tiny_engine
from torch._dynamo.utils import counters

from trinity_lightning.config.algorithm import Layout
from trinity_lightning.config.engines import EngineSleep
from trinity_lightning.config.model import LoRAConfig, OptimizerConfig
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.sync.stream import weight_stream
from trinity_lightning.trainer import fused
from trinity_lightning.trainer.head import Head, token_logprobs
from trinity_lightning.trainer.layers import FlexTables, Segments
from trinity_lightning.trainer.layout import collate, cut
from trinity_lightning.trainer.placement import WHOLE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),  # of compilers and drivers: other releases than those tested elsewhere
]
LAYOUTS = (Layout.padded, Layout.shared_prefix)
QUICK = ("+recipe=grpo", "model=tiny", "reward=contains_digits", "explorer.batch_size=4", "explorer.repeat_times=4")
QUICK += ("sampling.max_tokens=12", "explorer.eval_on_startup=false", "explorer.eval_interval=0")
ADAPTER = ("model.lora.r=4", "synchronizer.lora=adapter")
EAGER = {"enforce_eager": True}  # vLLM would compile for a minute
BATCHES = [batch_of(groups(count=16, seed=seed), step=seed + 1) for seed in range(3)]


def trained(accelerator: str, optimizer: str = "adamw", **settings: Any) -> tuple[Gradients, dict[str, torch.Tensor]]:
    """Losses and gradients of three steps, on the CPU; and the weights after them. By default no layer is compiled."""
    seen, settings["model"] = Gradients(), {"compile_layers": False, **settings.get("model", {})}
    policy = make_policy(OptimizerConfig(name=optimizer, lr=1e-3), **settings)
    fit(policy, BATCHES, seen, accelerator=accelerator)
    seen.steps = [{name: tensor.cpu() for name, tensor in step.items()} for step in seen.steps]
    return seen, {name: tensor.detach().cpu() for name, tensor in policy.state_dict().items()}


@settings(deadline=None, max_examples=20)
@given(layout=segments())
def test_attention_and_its_gradients_are_those_of_a_dense_mask(layout: Segments) -> None:
    tokens = layout.starts()[-1]
    inputs = states(tokens, torch.float32)
    expected = dense(layout, inputs)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    tables = FlexTables.of(layout)
    shared = tables.attention([tensor.cuda() for tensor in tables.tensors])
    mine = [tensor.detach().cuda().requires_grad_() for tensor in inputs]
    padded = [torch.nn.functional.pad(tensor, (0, 0, 0, tables.padding)) for tensor in mine]
    attended = shared(padded[0], padded[1], padded[2], SCALE)[:, :tokens]
    torch.testing.assert_close(attended.cpu(), expected, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad((attended * weight.cuda()).sum(), mine)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.cpu(), want, rtol=1e-4, atol=1e-4)


def softmax_of_the_head(device: str) -> tuple[list[torch.Tensor], int]:
    """Log-probabilities, entropies and the gradient of the logits of 300 tokens; and the bytes that it took at most."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 50_000, generator=generator).to(device, torch.bfloat16).requires_grad_()
    head = Head(torch.nn.Identity())  # hidden states are logits
    targets = torch.randint(0, 50_000, (300,), generator=generator).to(device)
    temperature = torch.linspace(0.5, 1.5, 300).to(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, entropies = token_logprobs(head, logits, targets, temperature)
    (logprobs + 0.1 * entropies).sum().backward()
    assert logits.grad is not None
    taken = torch.cuda.max_memory_allocated() - before
    return [logprobs.detach().cpu(), entropies.detach().cpu(), logits.grad.cpu().float()], taken


def test_the_softmax_of_the_head_is_two_kernels_without_float32_logits() -> None:
    expected, _ = softmax_of_the_head("cpu")
    softmax_of_the_head("cuda")  # compiles
    mine, taken = softmax_of_the_head("cuda")
    assert fused.is_usable(torch.device("cuda", 0), torch.bfloat16, 50_000)
    for tensor, want in zip(mine, expected, strict=True):
        torch.testing.assert_close(tensor, want, rtol=1e-2, atol=1e-4)
    assert taken < 1.5 * 2 * 300 * 50_000 * 2  # the gradient twice, in bfloat16


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiles", [False, "auto"])
def test_steps_are_those_of_a_cpu(layout: Layout, compiles: bool | str, checkpointing: bool) -> None:
    model = {"compile_layers": compiles, "gradient_checkpointing": checkpointing}
    mine, _ = trained("gpu", layout=layout, model=model)
    cpu, _ = trained("cpu", layout=layout)
    assert mine.losses == pytest.approx(cpu.losses, rel=1e-4)
    # Later steps start from weights that rounding has moved apart.
    assert_same_gradients(mine.steps[0], cpu.steps[0], tolerance=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bits_learn_as_float32_does(layout: Layout, lora: LoRAConfig | None, dtype: str) -> None:
    model = {} if lora is None else {"lora": lora}
    rounded, _ = trained("gpu", dtype=dtype, layout=layout, model=model)
    exact, _ = trained("cpu", layout=layout, model=model)
    assert rounded.losses == pytest.approx(exact.losses, rel=0.1, abs=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_of_ours_waits_for_the_gpu_within_a_micro_batch(layout: Layout) -> None:
    """One wait is transformers' own: it asks if a padded row holds several sequences."""
    policy = make_policy(dtype="bf16", entropy_coef=0.1)
    policy.configure_model()
    policy.cuda()
    passes, batch = policy.passes(torch.device("cuda")), batch_of(groups())
    policy.objective.add_columns(batch)
    [part] = cut(batch, range(len(batch.experiences)), 10_000, layout)

    def compute() -> None:
        micro = collate(batch, part, policy.device)
        logprobs, entropies = passes.through(policy.policy, micro, WHOLE)
        loss, _ = policy.objective(logprobs, entropies, micro, batch, batch.num_tokens, batch.num_tokens)
        loss.backward()

    compute()  # compiles, and pins memory
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            compute()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.filename) for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    assert not [name for name in waits if "trinity_lightning" in name]
    assert len(waits) <= 1, waits


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)])
def test_ragged_steps_compile_nothing_after_the_first(lora: LoRAConfig | None) -> None:
    torch._dynamo.reset()
    counters.clear()
    graphs: list[int] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            graphs.append(counters["stats"]["unique_graphs"])

    batches = [batch_of(groups(count=count, seed=count)) for count in (12, 1, 9, 16, 4)]
    policy = make_policy(dtype="bf16", layout=Layout.auto, model={} if lora is None else {"lora": lora})
    fit(policy, batches, Look(), accelerator="gpu")
    assert graphs[0] > 4  # the layers' and others
    assert graphs[1:] == graphs[:1] * 4


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_offload"])
def test_a_step_is_repeated_to_the_bit(optimizer: str, dtype: str) -> None:
    _, once = trained("gpu", optimizer, dtype=dtype, layout=Layout.padded)
    _, again = trained("gpu", optimizer, dtype=dtype, layout=Layout.padded)
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_an_engine_in_this_process_takes_the_weights_and_sleeps() -> None:
    """Its log-probabilities are those of a forward pass: before and after a sync, and after a sleep."""
    pytest.importorskip("vllm")
    engine = tiny_engine(max_model_len=128, sleep=EngineSleep.always, args=EAGER)
    driver = Driver([engine])
    try:
        driver.run(engine.load())
        first = ask(engine, driver)
        assert list(first.logprobs) == pytest.approx(plain_logprobs(first), abs=1e-3)
        model = tiny_model()
        train_a_little(model)
        driver.run(engine.sync_weights(weight_stream(model.cuda()), version=1))
        second = ask(engine, driver)
        assert list(second.logprobs) == pytest.approx(plain_logprobs(second, model=model.cpu()), abs=1e-3)
        driver.run(engine.sleep())
        driver.run(engine.wake_up())
        assert ask(engine, driver).token_ids == second.token_ids
        assert driver.run(engine.sleep_until_sync())
        driver.run(engine.wake_up())
        with pytest.raises(RolloutError, match="sync_weights first"):
            ask(engine, driver)
        driver.run(engine.sync_weights(weight_stream(model.cuda()), version=2))
        assert ask(engine, driver).token_ids == second.token_ids
        driver.run(engine.shutdown())
    finally:
        driver.close()


@pytest.mark.parametrize(
    "overrides",
    [
        ("engine=transformers",),
        ("engine=vllm",),
        ("engine=vllm", "engine.sleep=always"),
        ("engine=vllm_server",),
        ("engine=vllm", "model.dtype=fp16"),
        ("engine=vllm", "engine.speculative=3"),
        ("engine=vllm", "model.dtype=fp16", *ADAPTER),
        ("engine=vllm_server", "model.dtype=fp16", *ADAPTER),
        ("engine=vllm_server", "synchronizer=ipc"),
        ("engine=vllm_server", "synchronizer=checkpoint"),
    ],
    ids=" ".join,
)
def test_whole_runs(overrides: tuple[str, ...], tmp_path: Path) -> None:
    if "engine=transformers" not in overrides:
        pytest.importorskip("vllm")
    eager = [f"+engine.args.{name}={value}" for name, value in EAGER.items() if overrides[0] != "engine=transformers"]
    run = start(tmp_path, *QUICK, "steps=3", "logger=csv", *eager, *overrides)
    try:
        code = run.wait(180)
    finally:
        run.kill()
    printed = (tmp_path / "stdout").read_text()
    assert code == 0, printed[-6000:]
    trained = [row for row in rows(only(tmp_path, "outputs/*/*")) if row["actor/logprob_diff/mean"]]
    assert len(trained) == 3, printed[-3000:]
    assert all(
        float(row["perf/peak_gpu_memory_reserved_gb"]) >= float(row["perf/peak_gpu_memory_gb"]) > 0 for row in trained
    )
    limit = 0.01 if "model.dtype=fp16" in overrides else 1e-3  # float32 on both sides
    assert all(float(row["actor/logprob_diff/mean"]) < limit for row in trained)


ON_TWO_GPUS = ("trainer=fsdp2", "trainer.devices=2")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")


@needs_two
def test_two_gpus_in_shards_take_the_steps_of_one(tmp_path: Path) -> None:
    losses = []
    for name, devices in {"one": ("trainer.devices=1",), "two": ON_TWO_GPUS}.items():
        folder = tmp_path / name
        folder.mkdir()
        run = start(folder, *imitation(folder), "steps=5", "model.dtype=fp32", "optimizer.lr=1e-3", *devices)
        assert run.wait(180) == 0, (folder / "stdout").read_text()[-4000:]
        losses.append(
            [float(row["actor/pg_loss"]) for row in rows(only(folder, "outputs/*/*")) if row["actor/pg_loss"]]
        )
    assert len(losses[0]) == 5
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-4)


@needs_two
@pytest.mark.parametrize(("how", "place", "message"), [(how, *case) for how, case in WITHIN_A_PASS.items()])
def test_a_rank_that_ends_or_hangs_within_a_pass_ends_the_run_which_names_it(
    how: str, place: str, message: str, tmp_path: Path
) -> None:
    """Abort what the other GPU waits for by NCCL. A rank that fails has a step behind it, which is saved."""
    arguments = (*imitation(tmp_path), *ON_TWO_GPUS, "trainer.strategy.timeout=60")  # 4 s by support/stops.py
    run = start(tmp_path, *arguments, program="support.stops", STOPS=place)
    wait_for((tmp_path / "stopped").exists, run)
    family = psutil.Process(run.pid).children(recursive=True)
    if how == "killed":
        next(process for process in family if process.environ().get("LOCAL_RANK") == "1").kill()
    assert run.wait(90) == 1
    assert not psutil.wait_procs(family, 60)[1], "a rank outlived the run"
    assert message in (printed := (tmp_path / "stdout").read_text()), printed[-4000:]
    assert ("Resume with" in printed) == (how == "fails")

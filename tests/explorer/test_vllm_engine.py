"""With a real vLLM and the tiny model; float32, so that engine and transformers agree to rounding."""

import asyncio
import json
import random
import shutil
import threading
from collections.abc import Coroutine, Iterator, Sequence
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_policy import tiny_model
from tiny_vllm import driven_engine, standing_still, tiny_engine

from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.config.models import resolve_model
from trinity_lightning.errors import (
    ConfigError,
    ModelLoadError,
    PromptTooLongError,
    RolloutError,
    WeightSyncError,
)
from trinity_lightning.explorer.host import Host
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.sync.stream import weight_stream

pytest.importorskip("vllm")

CONTEXT = 320
PROMPT = [7, 30, 41, 12]


def on_a_host(engine: VLLMEngine, coroutine: Coroutine[Any, Any, Any]) -> Any:
    host = Host([engine])
    try:
        return host.run(coroutine)
    finally:
        host.close()


# -- what cannot be loaded: before the shared engine exists, which then shows that nothing was left behind ------------


def test_a_folder_whose_weights_do_not_fit_is_a_load_error(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(resolve_model("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    engine = tiny_engine(str(folder))
    with pytest.raises(ModelLoadError, match=r"vLLM cannot load '.*broken'"):
        on_a_host(engine, engine.load())
    assert not torch.distributed.is_initialized()


def test_a_folder_without_a_model_is_a_load_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine = tiny_engine(str(tmp_path))
    with pytest.raises(ModelLoadError, match="vLLM cannot load"):
        on_a_host(engine, engine.generate(PROMPT))


def test_a_model_is_not_spread_over_devices_from_within_a_process() -> None:
    with pytest.raises(ConfigError, match=r"engine.args.tensor_parallel_size is 2, .*choose engine=vllm_server"):
        VLLMEngine("tiny", args={"tensor_parallel_size": 2})


def test_a_cpu_does_not_decode_speculatively() -> None:
    with pytest.raises(ConfigError, match=r"engine.args.speculative_config: .*wrong log-probabilities"):
        VLLMEngine("tiny", args={"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}})


def test_an_argument_that_vllm_does_not_know_is_a_configuration_error() -> None:
    engine = tiny_engine(args={"max_num_batched_token": 4096})
    with pytest.raises(ConfigError, match="Did you mean 'max_num_batched_tokens'"):
        on_a_host(engine, engine.load())


# -- one engine for all others ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driven() -> Iterator[tuple[VLLMEngine, Host]]:
    random.seed(5)
    torch.manual_seed(5)
    expected = random.random(), torch.rand(1).item()
    random.seed(5)
    torch.manual_seed(5)
    with driven_engine(CONTEXT) as engine_and_host:
        after = random.random(), torch.rand(1).item()
        assert after == expected, "loading an engine must not touch the trainer's seeds"
        yield engine_and_host


@pytest.fixture
def engine(driven: tuple[VLLMEngine, Host]) -> Iterator[VLLMEngine]:
    yield driven[0]
    assert not driven[0]._engine.has_unfinished_requests()
    assert not driven[0]._waiting


@pytest.fixture
def host(driven: tuple[VLLMEngine, Host]) -> Host:
    return driven[1]


@pytest.fixture
def other_weights(engine: VLLMEngine, host: Host) -> Iterator[Any]:
    """A model to send; the engine has its first weights again afterwards."""
    yield tiny_model()
    host.run(engine.sync_weights(weight_stream(tiny_model()), 0))


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny_model()


@torch.no_grad()
def plain_logprobs(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> list[float]:
    tokens = torch.tensor([[*prompt, *response]])
    logprobs = (model(tokens).logits[0, :-1].double() / temperature).log_softmax(-1)
    own = logprobs.gather(-1, tokens[0, 1:, None]).squeeze(-1)
    return own[len(prompt) - 1 :].tolist()


def ask(engine: VLLMEngine, host: Host, **sampling: Any) -> Completion:
    return host.run(engine.generate(PROMPT, **({"seed": 3, "max_tokens": 12} | sampling)))[0]


# -- generating -------------------------------------------------------------------------------------------------------


def test_it_is_an_inference_model(engine: VLLMEngine) -> None:
    assert isinstance(engine, InferenceModel)
    assert engine.dtype == torch.float32
    assert engine.max_model_len == CONTEXT


def test_many_chats_at_once(engine: VLLMEngine, host: Host) -> None:
    async def chat(i: int) -> list[Completion]:
        return await engine.chat([{"role": "user", "content": f"{i}"}], n=1 + i % 3, seed=i, max_tokens=2 + i % 7)

    async def chats() -> list[list[Completion]]:
        return await asyncio.gather(*[chat(i) for i in range(60)])

    for i, completions in enumerate(host.run(chats())):
        assert len(completions) == 1 + i % 3
        for completion in completions:
            assert engine.tokenizer.decode(completion.prompt_token_ids) == (
                f"<|im_start|>user\n{i}<|im_end|>\n<|im_start|>assistant\n"
            )
            assert 1 <= len(completion.token_ids) <= 2 + i % 7
            assert len(completion.logprobs) == len(completion.token_ids)
            assert completion.text == engine.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_a_text_is_tokenized(engine: VLLMEngine, host: Host) -> None:
    completion = host.run(engine.generate("1+1=", max_tokens=1, seed=0))[0]
    assert list(completion.prompt_token_ids) == engine.tokenizer.encode("1+1=")


def test_a_seed_fixes_the_tokens(engine: VLLMEngine, host: Host) -> None:
    assert ask(engine, host) == ask(engine, host)
    assert ask(engine, host).token_ids != ask(engine, host, seed=4).token_ids


def test_sample_i_of_a_request_has_its_seed_plus_i(engine: VLLMEngine, host: Host) -> None:
    together = host.run(engine.generate(PROMPT, n=4, seed=100, max_tokens=12))
    alone = [ask(engine, host, seed=100 + i) for i in range(4)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in together}) == 4


def test_tokens_depend_neither_on_the_batch_nor_on_the_order(engine: VLLMEngine, host: Host) -> None:
    generator = random.Random(0)
    requests = [([generator.randrange(4, 99) for _ in range(1 + i % 30)], i) for i in range(24)]

    async def generate(order: Sequence[int]) -> dict[int, list[int]]:
        answers = await asyncio.gather(
            *[engine.generate(requests[i][0], seed=requests[i][1], max_tokens=16) for i in order]
        )
        return {i: list(answer[0].token_ids) for i, answer in zip(order, answers, strict=True)}

    forwards = host.run(generate(range(24)))
    assert host.run(generate(generator.sample(range(24), 24))) == forwards
    assert host.run(generate([11])) == {11: forwards[11]}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_of_the_distribution_sampled_from(
    engine: VLLMEngine, host: Host, reference: Any, temperature: float
) -> None:
    completion = ask(engine, host, temperature=temperature, max_tokens=40)
    expected = plain_logprobs(reference, PROMPT, completion.token_ids, temperature)
    torch.testing.assert_close(list(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_temperature_0_takes_the_likeliest_token(engine: VLLMEngine, host: Host, reference: Any) -> None:
    completion = ask(engine, host, temperature=0.0, max_tokens=8)
    tokens = torch.tensor([[*PROMPT, *completion.token_ids]])
    with torch.no_grad():
        likeliest = reference(tokens).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert likeliest.tolist() == completion.token_ids


def test_scoring_is_a_plain_forward(engine: VLLMEngine, host: Host, reference: Any) -> None:
    tokens = [random.Random(1).randrange(4, 99) for _ in range(200)]
    torch.testing.assert_close(
        host.run(engine.logprobs(tokens)), plain_logprobs(reference, tokens[:1], tokens[1:]), atol=1e-4, rtol=0
    )
    assert host.run(engine.logprobs([5])) == []


def test_scoring_and_sampling_leave_the_trainers_random_state_alone(engine: VLLMEngine, host: Host) -> None:
    before = torch.get_rng_state()
    host.run(engine.logprobs(PROMPT))
    host.run(engine.generate(PROMPT, n=3, seed=0, max_tokens=5))
    unseeded = host.run(engine.generate(PROMPT, n=3, max_tokens=5))
    assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(completion.token_ids) for completion in unseeded}) == 3


# -- how a response ends ----------------------------------------------------------------------------------------------


def test_the_limit_ends_a_response(engine: VLLMEngine, host: Host) -> None:
    completion = ask(engine, host, max_tokens=5)
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")
    full = ask(engine, host, max_tokens=10**6, ignore_eos=True)
    assert (len(full.token_ids), full.finish_reason) == (CONTEXT - len(PROMPT), "length")


def test_the_end_token_ends_a_response_and_is_part_of_it(engine: VLLMEngine, host: Host) -> None:
    completion = ask(engine, host, max_tokens=300, logit_bias={engine.tokenizer.eos_token_id: 4.0})
    assert completion.token_ids[-1] == engine.tokenizer.eos_token_id
    assert len(completion.logprobs) == len(completion.token_ids) < 300
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert "<|im_end|>" not in completion.text


def test_a_stop_string_ends_a_response_and_is_cut_from_its_text(engine: VLLMEngine, host: Host) -> None:
    whole = ask(engine, host)
    stop = whole.text[5]
    completion = ask(engine, host, stop=[stop])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == whole.text[: whole.text.index(stop)]
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    assert len(completion.logprobs) == len(completion.token_ids)


def test_the_text_is_what_vllm_makes_of_the_tokens(engine: VLLMEngine, host: Host) -> None:
    """Decoded at the end, or by vLLM on the way, as it does when it looks for a stop string."""
    for seed in range(5):
        decoded, looked_at = (ask(engine, host, seed=seed, max_tokens=30, stop=stop) for stop in (None, ["\x00"]))
        assert decoded == looked_at
        assert decoded.text


def test_samples_of_a_prompt_share_its_blocks(
    engine: VLLMEngine, host: Host, monkeypatch: pytest.MonkeyPatch, reference: Any
) -> None:
    executor = engine._engine.model_executor
    execute = executor.execute_model
    computed: list[int] = []

    def count(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        computed.append(scheduled.total_num_scheduled_tokens)
        return execute(scheduled, *args, **kwargs)

    monkeypatch.setattr(executor, "execute_model", count)
    prompt = [5 + i % 90 for i in range(100)]  # three blocks of 32, and four tokens more
    together = host.run(engine.generate(prompt, n=5, seed=0, max_tokens=20, ignore_eos=True))
    assert computed[0] == 100 + 4 * 4
    alone = [host.run(engine.generate(prompt, seed=i, max_tokens=20, ignore_eos=True))[0] for i in range(5)]
    assert [sample.token_ids for sample in together] == [sample.token_ids for sample in alone]
    for sample in together:
        expected = plain_logprobs(reference, prompt, sample.token_ids)
        torch.testing.assert_close(list(sample.logprobs), expected, atol=1e-4, rtol=0)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_a_prompt_without_room_for_a_response_is_refused(engine: VLLMEngine, host: Host, length: int) -> None:
    before = ask(engine, host)
    with pytest.raises(PromptTooLongError, match=f"{length} tokens.*{CONTEXT}.*max_model_len"):
        host.run(engine.generate([5] * length))
    assert ask(engine, host) == before


def test_a_bad_request_is_its_callers_alone(engine: VLLMEngine, host: Host) -> None:
    async def mixed() -> list[Any]:
        calls = [
            engine.generate([]),
            engine.generate([5, 10**6]),
            engine.generate(PROMPT, temprature=1.0),
            engine.generate(PROMPT, temperature=-1.0),
            engine.generate(PROMPT, n=0),
            engine.logprobs([]),
            engine.generate(PROMPT, seed=3, max_tokens=12),
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    *refused, answer = host.run(mixed())
    assert [type(error).__name__ for error in refused] == ["VLLMValidationError"] * 2 + ["TypeError"] + [
        "VLLMValidationError"
    ] * 3
    assert "temprature" in str(refused[2])
    assert answer == [ask(engine, host)]


def test_cancelling_aborts_in_the_engine(engine: VLLMEngine, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = engine._engine.model_executor
    execute = executor.execute_model
    third_step, cancelled = threading.Event(), threading.Event()
    tokens: list[int] = []

    def wait_at_the_third(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        tokens.append(scheduled.total_num_scheduled_tokens)
        if len(tokens) == 3:
            third_step.set()
            assert cancelled.wait(60)
        return execute(scheduled, *args, **kwargs)

    async def cancel_two_of_three() -> Completion:
        all_posted = standing_still(engine)
        tasks = [asyncio.create_task(engine.generate(PROMPT, n=n, seed=3, ignore_eos=True)) for n in (1, 4)]
        kept = asyncio.create_task(engine.generate(PROMPT, seed=3, max_tokens=12))
        await asyncio.sleep(0)
        all_posted.set()
        await asyncio.to_thread(third_step.wait, 60)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        cancelled.set()
        return (await kept)[0]

    monkeypatch.setattr(executor, "execute_model", wait_at_the_third)
    answer = host.run(cancel_two_of_three())
    assert (tokens[1], tokens[-1]) == (6, 1)
    monkeypatch.undo()
    assert answer == ask(engine, host)
    assert engine._engine.get_num_unfinished_requests() == 0


def test_a_failing_step_fails_its_requests_and_no_later_ones(
    engine: VLLMEngine, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ask(engine, host)
    executor = engine._engine.model_executor
    execute = executor.execute_model
    calls = 0

    def fail_at_the_third(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory, say")
        return execute(*args, **kwargs)

    monkeypatch.setattr(executor, "execute_model", fail_at_the_third)

    async def several() -> list[Any]:
        all_posted = standing_still(engine)
        calls = [engine.generate([5 + i], n=2, seed=i, max_tokens=30, ignore_eos=True) for i in range(5)]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
        all_posted.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    errors = host.run(several())
    assert [str(error) for error in errors] == [
        "the engine failed while generating: RuntimeError: out of memory, say"
    ] * 5
    assert all(isinstance(error, RolloutError) for error in errors)
    assert ask(engine, host) == before


# -- weights ----------------------------------------------------------------------------------------------------------


def tripled(model: Any) -> Any:
    """Embedding times 3, and with it the head that is tied to it."""
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(3)
    return model


def test_a_tied_embedding_arrives_in_the_head_too(engine: VLLMEngine, host: Host, other_weights: Any) -> None:
    model = tripled(other_weights)
    tokens = list(range(10, 80))
    old = host.run(engine.logprobs(tokens))
    host.run(engine.sync_weights(weight_stream(model), 7))
    assert engine.model_version == 7
    new = host.run(engine.logprobs(tokens))
    torch.testing.assert_close(new, plain_logprobs(model, tokens[:1], tokens[1:]), atol=1e-3, rtol=0)
    assert max(abs(a - b) for a, b in zip(old, new, strict=True)) > 0.5


def test_a_sync_forgets_cached_prefixes(engine: VLLMEngine, host: Host, other_weights: Any) -> None:
    assert engine._engine.vllm_config.cache_config.enable_prefix_caching
    prompt = [5 + i % 90 for i in range(CONTEXT - 20)]
    host.run(engine.generate(prompt, seed=0, max_tokens=4))
    with torch.no_grad():
        for parameter in other_weights.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    host.run(engine.sync_weights(weight_stream(other_weights), 1))
    completion = host.run(engine.generate(prompt, seed=0, max_tokens=4))[0]
    expected = plain_logprobs(other_weights, prompt, completion.token_ids)
    torch.testing.assert_close(list(completion.logprobs), expected, atol=1e-3, rtol=0)


HEAD, UP = "lm_head.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(HEAD), "1 missing: 'lm_head.weight'"),
        (lambda tensors: tensors.pop(UP), f"1 missing: '{UP}'"),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.up_prj.weight": tensors[UP]}),
            rf"1 unknown to the engine: 'model.layers.1.mlp.up_prj.weight' \(nearest: '{UP}'\)",
        ),
        (lambda tensors: tensors.update({UP: tensors[UP].T}), rf"'{UP}' \(64, 128\), expected \(128, 64\)"),
        (dict.clear, "21 missing: 'model.embed_tokens.weight', .* and 13 more"),
    ],
)
def test_weights_that_do_not_fit_leave_the_engine_as_it_was(
    engine: VLLMEngine, host: Host, other_weights: Any, change: Any, message: str
) -> None:
    before = ask(engine, host), engine.model_version
    tensors = dict(weight_stream(tripled(other_weights)))
    change(tensors)
    with pytest.raises(WeightSyncError, match=message):
        host.run(engine.sync_weights(tensors.items(), 9))
    assert (ask(engine, host), engine.model_version) == before


def test_vllm_failing_in_the_middle_of_a_sync_is_told(
    engine: VLLMEngine, host: Host, monkeypatch: pytest.MonkeyPatch, reference: Any
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("too much")

    monkeypatch.setattr(engine._engine, "collective_rpc", fail)
    with pytest.raises(WeightSyncError, match=r"MemoryError: too much.*build another engine"):
        host.run(engine.sync_weights(weight_stream(reference), 9))
    assert engine.model_version == 0


# -- sleep: on a CPU the cache alone is given up; of vLLM's own sleep, the pause and the forgotten prefixes ------------


def cache_of(engine: VLLMEngine) -> torch.Tensor:
    """All bytes of vLLM's cache."""
    [caches] = engine._engine.collective_rpc(lambda worker: worker.model_runner.kv_caches)
    return torch.empty(0, dtype=torch.uint8).set_(caches[0].untyped_storage())


def test_an_idle_engine_gives_the_memory_of_its_cache_to_the_trainer(
    engine: VLLMEngine, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, cache = ask(engine, host), cache_of(engine)
    assert cache.any()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_has_work", lambda: True)
        engine._empty_cache()
    assert cache.any()  # a request under way would need it
    host.run(engine.sleep())
    assert not cache[PAGESIZE:-PAGESIZE].any()
    host.run(engine.wake_up())
    assert ask(engine, host) == before


def test_an_engine_that_slept_has_its_weights_and_goes_on(
    engine: VLLMEngine, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ask(engine, host)
    host.run(engine.sleep())
    assert not engine._engine.is_sleeping()  # it shares no GPU
    monkeypatch.setattr(engine, "_sleeps", True)
    host.run(engine.sleep())
    host.run(engine.sleep())
    assert engine._engine.is_sleeping()
    host.run(engine.wake_up())
    assert not engine._engine.is_sleeping()
    assert ask(engine, host) == before
    host.run(engine.wake_up())


# -- life: last, for it takes the engine away -------------------------------------------------------------------------


def test_shutdown_twice_and_an_engine_after_it(engine: VLLMEngine, host: Host) -> None:
    before = ask(engine, host)
    host.run(engine.shutdown())
    host.run(engine.shutdown())
    assert not torch.distributed.is_initialized()
    assert ask(engine, host) == before

"""Generation with the training model itself; float32, so that batches agree with single requests to rounding."""

import asyncio
import gc
import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.engine_promises import EnginePromises, ask
from support.errors import refuses
from support.metaspace import metaspace_model
from transformers import AutoModelForCausalLM, Cache

from trinity_lightning.common.inference import Completion
from trinity_lightning.config.models import resolve_model
from trinity_lightning.errors import ConfigError, PromptTooLongError, RolloutError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.sync.proof import Tolerance, compare

PROMPT = [7, 30, 41, 12]
CONTEXT = 128


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32).train()


@pytest.fixture
def engine(model: Any) -> TransformersEngine:
    engine = TransformersEngine("tiny", max_model_len=CONTEXT, max_num_seqs=8)
    engine.bind(model)
    return engine


@pytest.fixture
def driver(engine: TransformersEngine) -> Iterator[Driver]:
    driver = Driver([engine])
    yield driver
    assert not engine._has_work()
    driver.close()


@torch.no_grad()
def plain_logits(model: Any, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    model.eval()
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].double()
    model.train()
    return logits


def plain_logprobs(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> list[float]:
    logprobs = (plain_logits(model, prompt, response) / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(response)[:, None]).squeeze(-1).tolist()


# -- tokens and log-probabilities -------------------------------------------------------------------------------------


class TestPromises(EnginePromises):
    misspelt_error = ConfigError
    may_go_on: ClassVar[dict[str, Any]] = {}  # it has no ignore_eos

    def test_greedy_log_probabilities_are_those_at_temperature_1(
        self, engine: TransformersEngine, driver: Driver, model: Any
    ) -> None:
        completion = ask(engine, driver, temperature=0.0)
        expected = plain_logprobs(model, PROMPT, completion.token_ids)
        assert list(completion.logprobs) == pytest.approx(expected, abs=1e-4)


def test_samples_follow_the_distribution(engine: TransformersEngine, driver: Driver, model: Any) -> None:
    """Frequencies of 4000 first tokens at temperature 0.5, against their probabilities, within 4.5 standard errors."""
    n = 4000
    engine._max_rows = n
    samples = driver.run(engine.generate(PROMPT, n=n, seed=0, max_tokens=1, temperature=0.5))
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in samples]), minlength=100).double()
    probabilities = (plain_logits(model, PROMPT, [0])[0] / 0.5).softmax(-1)
    error = (probabilities * (1 - probabilities) / n).sqrt()
    assert ((counts / n - probabilities).abs() / error).max() < 4.5


def test_dropout_is_off_while_generating_and_the_trainer_as_before(
    engine: TransformersEngine, driver: Driver, model: Any
) -> None:
    modes: list[bool] = []
    handle = model.register_forward_hook(lambda module, *_: modes.append(module.training))
    before = torch.get_rng_state()
    ask(engine, driver)
    driver.run(engine.logprobs(PROMPT))
    handle.remove()
    assert modes
    assert not any(modes)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_it_follows_the_trainers_weights_without_a_sync(engine: TransformersEngine, driver: Driver, model: Any) -> None:
    weight = model.get_input_embeddings().weight
    before = driver.run(engine.logprobs(PROMPT))
    with torch.no_grad():
        weight.mul_(2)
    try:
        assert driver.run(engine.logprobs(PROMPT)) != before
        driver.run(engine.sync_weights(model.named_parameters(), 5))
        assert engine.model_version == 5
    finally:
        with torch.no_grad():
            weight.div_(2)
    assert driver.run(engine.logprobs(PROMPT)) == before


# -- errors, cancelling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "key"),
    [
        ({"top_p": 0.9, "min_p": 0.1}, "engine"),
        ({"temperature": -1.0}, "sampling"),
        ({"temperature": float("nan")}, "sampling"),
        ({"max_tokens": 0}, "sampling"),
        ({"n": 0}, "sampling"),
    ],
)
def test_sampling_that_it_cannot_follow_is_refused(
    engine: TransformersEngine, driver: Driver, sampling: dict[str, Any], key: str
) -> None:
    with refuses(key):
        ask(engine, driver, **sampling)
    assert len(ask(engine, driver, top_p=None).token_ids) == 12


def test_a_bad_request_is_its_callers_alone(engine: TransformersEngine, driver: Driver) -> None:
    async def mixed() -> list[Any]:
        calls = [
            engine.generate([]),
            engine.generate([5, 100]),
            engine.logprobs([-1, 5]),
            engine.generate([5] * CONTEXT),
            engine.generate(PROMPT, seed=5, max_tokens=12),
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    empty, too_high, negative, too_long, answer = driver.run(mixed())
    assert all(isinstance(error, ValueError) for error in (empty, too_high, negative))
    assert isinstance(too_long, PromptTooLongError)
    assert answer[0].token_ids == ask(engine, driver).token_ids


def test_without_a_model_it_says_what_to_do() -> None:
    with refuses(None) as refused:
        asyncio.run(TransformersEngine("tiny").generate(PROMPT))
    assert "bind(model)" in str(refused.value)


def test_the_text_of_a_sentencepiece_tokenizer_begins_with_its_space(tmp_path: Path, model: Any) -> None:
    engine = TransformersEngine(str(metaspace_model(tmp_path / "model")), max_model_len=CONTEXT)
    engine.bind(model)
    driver = Driver([engine])
    assert ask(engine, driver).text.startswith(" word")
    driver.close()


def caches() -> int:
    """The number of caches of keys and values that are in memory."""
    gc.collect()
    return sum(issubclass(type(thing), Cache) for thing in gc.get_objects())


def test_the_cache_of_a_batch_is_given_up_at_its_end(engine: TransformersEngine, driver: Driver, model: Any) -> None:
    """The trainer needs its memory before the next batch comes."""

    async def cancel_after_a_token() -> None:
        endless = asyncio.create_task(engine.generate(PROMPT, seed=5, max_tokens=100))
        await asyncio.to_thread(under_way.wait, 60)
        endless.cancel()
        await asyncio.gather(endless, return_exceptions=True)
        assert endless.cancelled()

    ask(engine, driver)
    assert caches() == 0
    steps, seen, under_way = itertools.count(1), [], threading.Event()

    def look(*_: Any) -> None:
        if next(steps) == 3:
            seen.append(caches())
            under_way.set()

    handle = model.register_forward_hook(look)
    driver.run(cancel_after_a_token())
    handle.remove()
    assert seen == [1]
    assert next(steps) < 100
    driver.run(engine.load())  # the engine has had its turn
    assert caches() == 0


def test_a_cancelled_request_is_decoded_no_further(engine: TransformersEngine, driver: Driver, model: Any) -> None:
    rows: list[int] = []
    all_posted, third_step, cancelled = threading.Event(), threading.Event(), threading.Event()

    def note_rows(module: Any, args: Any, kwargs: Any) -> None:
        rows.append(len(kwargs["input_ids"]))
        if len(rows) == 3:
            third_step.set()
            assert cancelled.wait(60)

    async def cancel() -> list[Completion]:
        await engine.load()  # else each request waits for that first, and they are posted one by one
        engine._post(lambda: all_posted.wait(60))  # so that the first batch has both
        endless = asyncio.create_task(engine.generate(PROMPT, n=4, seed=1, max_tokens=110))
        uncancelled = asyncio.create_task(engine.generate(PROMPT, seed=5, max_tokens=12))
        waiting = asyncio.create_task(engine.generate(PROMPT, n=8, seed=3))
        await asyncio.sleep(0)
        all_posted.set()
        await asyncio.to_thread(third_step.wait, 60)
        endless.cancel()
        waiting.cancel()
        await asyncio.gather(endless, waiting, return_exceptions=True)
        assert endless.cancelled()
        assert waiting.cancelled()
        cancelled.set()
        return await uncancelled

    handle = model.register_forward_pre_hook(note_rows, with_kwargs=True)
    completions = driver.run(cancel())
    handle.remove()
    assert completions[0].token_ids == ask(engine, driver).token_ids
    assert len(rows) == 12
    assert (rows[0], rows[-1]) == (5, 1)


def test_a_failing_step_fails_its_requests_and_no_later_ones(
    engine: TransformersEngine, driver: Driver, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(RolloutError, match="ZeroDivisionError"):
        ask(engine, driver)
    monkeypatch.undo()
    assert len(ask(engine, driver).token_ids) == 12


def test_under_mixed_precision_training_differs_from_the_engine_by_rounding(
    model: Any, engine: TransformersEngine, driver: Driver
) -> None:
    """The engine computes in the weights' float32, training in bfloat16: what the probe allows a 16-bit side."""
    completion = ask(engine, driver, max_tokens=32)
    with torch.autocast("cpu", torch.bfloat16):
        trained = torch.tensor(plain_logprobs(model, PROMPT, completion.token_ids))
    _, largest = compare(
        trained.tolist(), completion.logprobs, Tolerance.of(torch.bfloat16, engine.dtype), "mixed precision"
    )
    assert largest > 0

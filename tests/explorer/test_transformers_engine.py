"""Generation with the training model itself; float32, so that batches agree with single requests to rounding."""

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.config.models import resolve_model
from trinity_lightning.errors import ConfigError, PromptTooLongError, RolloutError
from trinity_lightning.explorer.host import Host
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.sync.proof import Tolerance

PROMPT = [7, 30, 41, 12]
CONTEXT = 128
END = 3


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32).train()


@pytest.fixture
def engine(model: Any) -> TransformersEngine:
    engine = TransformersEngine("tiny", max_model_len=CONTEXT, max_num_seqs=8)
    engine.bind(model)
    return engine


@pytest.fixture
def host(engine: TransformersEngine) -> Iterator[Host]:
    host = Host([engine])
    yield host
    assert not engine._has_work()
    host.close()


@torch.no_grad()
def plain_logits(model: Any, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    model.eval()
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].double()
    model.train()
    return logits


def plain_logprobs(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> list[float]:
    logprobs = (plain_logits(model, prompt, response) / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(response)[:, None]).squeeze(-1).tolist()


def ask(engine: TransformersEngine, host: Host, **sampling: Any) -> Completion:
    return host.run(engine.generate(PROMPT, **({"seed": 5, "max_tokens": 12} | sampling)))[0]


# -- tokens and log-probabilities -------------------------------------------------------------------------------------


def test_it_is_an_inference_model(engine: TransformersEngine, host: Host) -> None:
    assert isinstance(engine, InferenceModel)
    assert engine.dtype == torch.float32
    assert engine.weight_shapes["lm_head.weight"] == engine.weight_shapes["model.embed_tokens.weight"] == (100, 64)


def test_a_chat_is_rendered_with_the_template(engine: TransformersEngine, host: Host) -> None:
    completion = host.run(engine.chat([{"role": "user", "content": "hi"}], seed=0, max_tokens=3))[0]
    assert engine.tokenizer.decode(completion.prompt_token_ids) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert completion.text == engine.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_a_seed_fixes_the_tokens(engine: TransformersEngine, host: Host) -> None:
    assert ask(engine, host).token_ids == ask(engine, host).token_ids
    assert ask(engine, host).token_ids != ask(engine, host, seed=4).token_ids
    unseeded = host.run(engine.generate(PROMPT, n=4, max_tokens=12))
    assert len({tuple(completion.token_ids) for completion in unseeded}) == 4


def test_sample_i_of_a_request_has_its_seed_plus_i(engine: TransformersEngine, host: Host) -> None:
    together = host.run(engine.generate(PROMPT, n=4, seed=100, max_tokens=12))
    alone = [ask(engine, host, seed=100 + i) for i in range(4)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_tokens_depend_neither_on_the_batch_nor_on_the_order(engine: TransformersEngine, host: Host) -> None:
    """Ragged prompts and limits, more requests than rows, rows that end early and are dropped."""
    generator = random.Random(0)
    requests = [([generator.randrange(4, 99) for _ in range(1 + i % 17)], i, 1 + 5 * i % 31) for i in range(20)]

    async def generate(order: Sequence[int]) -> dict[int, Completion]:
        answers = await asyncio.gather(
            *[engine.generate(requests[i][0], seed=requests[i][1], max_tokens=requests[i][2]) for i in order]
        )
        return {i: answer[0] for i, answer in zip(order, answers, strict=True)}

    forwards = host.run(generate(range(20)))
    shuffled = host.run(generate(generator.sample(range(20), 20)))
    for i, (prompt, _, limit) in enumerate(requests):
        assert list(forwards[i].prompt_token_ids) == prompt
        assert forwards[i].token_ids == shuffled[i].token_ids == host.run(generate([i]))[i].token_ids
        assert len(forwards[i].token_ids) == limit or forwards[i].token_ids[-1] == END


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_of_the_distribution_sampled_from(
    engine: TransformersEngine, host: Host, model: Any, temperature: float
) -> None:
    async def beside_a_longer_prompt() -> Completion:
        answers = await asyncio.gather(
            engine.generate([5] * 40, seed=0, max_tokens=4),
            engine.generate(PROMPT, seed=3, max_tokens=30, temperature=temperature),
        )
        return answers[1][0]

    completion = host.run(beside_a_longer_prompt())
    expected = plain_logprobs(model, PROMPT, completion.token_ids, temperature)
    torch.testing.assert_close(list(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_samples_follow_the_distribution(engine: TransformersEngine, host: Host, model: Any) -> None:
    """Frequencies of 4000 first tokens at temperature 0.5, against their probabilities, within 4.5 standard errors."""
    n = 4000
    engine._max_rows = n
    samples = host.run(engine.generate(PROMPT, n=n, seed=0, max_tokens=1, temperature=0.5))
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in samples]), minlength=100).double()
    probabilities = (plain_logits(model, PROMPT, [0])[0] / 0.5).softmax(-1)
    error = (probabilities * (1 - probabilities) / n).sqrt()
    assert ((counts / n - probabilities).abs() / error).max() < 4.5


def test_temperature_0_takes_the_likeliest_token(engine: TransformersEngine, host: Host, model: Any) -> None:
    completion = ask(engine, host, temperature=0.0)
    assert plain_logits(model, PROMPT, completion.token_ids).argmax(-1).tolist() == completion.token_ids
    expected = plain_logprobs(model, PROMPT, completion.token_ids)
    torch.testing.assert_close(list(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_scoring_is_a_plain_forward(engine: TransformersEngine, host: Host, model: Any) -> None:
    tokens = [random.Random(1).randrange(4, 99) for _ in range(100)]
    expected = plain_logprobs(model, tokens[:1], tokens[1:])
    torch.testing.assert_close(host.run(engine.logprobs(tokens)), expected, atol=1e-4, rtol=0)
    assert host.run(engine.logprobs([5])) == []


def test_dropout_is_off_while_generating_and_the_trainer_as_before(
    engine: TransformersEngine, host: Host, model: Any
) -> None:
    modes: list[bool] = []
    handle = model.register_forward_hook(lambda module, *_: modes.append(module.training))
    before = torch.get_rng_state()
    ask(engine, host)
    host.run(engine.logprobs(PROMPT))
    handle.remove()
    assert modes
    assert not any(modes)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_it_follows_the_trainers_weights_without_a_sync(engine: TransformersEngine, host: Host, model: Any) -> None:
    weight = model.get_input_embeddings().weight
    before = host.run(engine.logprobs(PROMPT))
    with torch.no_grad():
        weight.mul_(2)
    try:
        assert host.run(engine.logprobs(PROMPT)) != before
        host.run(engine.sync_weights(model.named_parameters(), 5))
        assert engine.model_version == 5
    finally:
        with torch.no_grad():
            weight.div_(2)
    assert host.run(engine.logprobs(PROMPT)) == before


# -- how a response ends ----------------------------------------------------------------------------------------------


def test_limits(engine: TransformersEngine, host: Host) -> None:
    completion = ask(engine, host, max_tokens=5)
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")
    long = ask(engine, host, max_tokens=10**6, seed=0)
    assert len(long.token_ids) == CONTEXT - len(PROMPT) or long.finish_reason == "stop"


def test_the_end_token_ends_a_response_and_is_part_of_it(engine: TransformersEngine, host: Host) -> None:
    samples = host.run(engine.generate(PROMPT, n=8, seed=0, max_tokens=120))
    ended = [c for c in samples if c.finish_reason == "stop"]
    assert ended, "of 8 samples of 120 tokens, one in a hundred an end token"
    for completion in samples:
        assert (END in completion.token_ids) == (completion in ended)
        assert len(completion.logprobs) == len(completion.token_ids)
    for completion in ended:
        assert completion.token_ids.index(END) == len(completion.token_ids) - 1  # type: ignore[attr-defined]
        assert "<|im_end|>" not in completion.text


@pytest.mark.parametrize("as_list", [True, False])
def test_a_stop_string_ends_a_response_and_is_cut_from_its_text(
    engine: TransformersEngine, host: Host, as_list: bool
) -> None:
    whole = ask(engine, host)
    stop = whole.text[4:6]
    completion = ask(engine, host, stop=[whole.text[8], stop] if as_list else stop)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == whole.text[: whole.text.index(stop)]
    assert completion.token_ids == whole.token_ids[: whole.text.index(stop) + 2]
    assert len(completion.logprobs) == len(completion.token_ids)


# -- errors, cancelling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_p": 0.9, "min_p": 0.1}, "not min_p, top_p: use vLLM"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"n": 0}, "n = 0"),
    ],
)
def test_sampling_that_it_cannot_follow_is_refused(
    engine: TransformersEngine, host: Host, sampling: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(engine, host, **sampling)
    assert len(ask(engine, host, top_p=None).token_ids) == 12


def test_a_bad_request_is_its_callers_alone(engine: TransformersEngine, host: Host) -> None:
    async def mixed() -> list[Any]:
        calls = [
            engine.generate([]),
            engine.generate([5, 100]),
            engine.logprobs([-1, 5]),
            engine.generate([5] * CONTEXT),
            engine.generate(PROMPT, seed=5, max_tokens=12),
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    empty, too_high, negative, too_long, answer = host.run(mixed())
    assert "empty" in str(empty)
    assert "token ids from 5 to 100: the model knows 0 to 99" in str(too_high)
    assert isinstance(negative, ValueError)
    assert isinstance(too_long, PromptTooLongError)
    assert answer[0].token_ids == ask(engine, host).token_ids


def test_without_a_model_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"bind\(model\)"):
        asyncio.run(TransformersEngine("tiny").generate(PROMPT))


def test_a_cancelled_request_is_decoded_no_further(engine: TransformersEngine, host: Host, model: Any) -> None:
    rows: list[int] = []
    all_posted, third_step, cancelled = threading.Event(), threading.Event(), threading.Event()

    def note_rows(module: Any, args: Any, kwargs: Any) -> None:
        rows.append(len(kwargs["input_ids"]))
        if len(rows) == 3:
            third_step.set()
            assert cancelled.wait(60)

    async def cancel() -> list[Completion]:
        engine._post(lambda: all_posted.wait(60))  # so that the first batch has both
        endless = asyncio.create_task(engine.generate(PROMPT, n=4, seed=1, max_tokens=110))
        kept = asyncio.create_task(engine.generate(PROMPT, seed=5, max_tokens=12))
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
        return await kept

    handle = model.register_forward_pre_hook(note_rows, with_kwargs=True)
    completions = host.run(cancel())
    handle.remove()
    assert completions[0].token_ids == ask(engine, host).token_ids
    assert len(rows) == 12
    assert (rows[0], rows[-1]) == (5, 1)


def test_a_failing_step_fails_its_requests_and_no_later_ones(
    engine: TransformersEngine, host: Host, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(RolloutError, match="ZeroDivisionError"):
        ask(engine, host)
    monkeypatch.undo()
    assert len(ask(engine, host).token_ids) == 12


def test_under_mixed_precision_training_differs_from_the_engine_by_rounding(
    model: Any, engine: TransformersEngine, host: Host
) -> None:
    """The engine computes in the weights' float32, training in bfloat16: what the probe allows a 16-bit side."""
    completion = ask(engine, host, max_tokens=32)
    with torch.autocast("cpu", torch.bfloat16):
        trained = torch.tensor(plain_logprobs(model, PROMPT, completion.token_ids))
    difference = (torch.tensor(completion.logprobs) - trained).abs()
    assert difference.max() > 0
    assert Tolerance.of(torch.bfloat16, engine.dtype).allows(difference, trained)

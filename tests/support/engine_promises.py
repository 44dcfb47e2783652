"""Promises of every engine. Tests of an engine subclass `EnginePromises`, and have fixtures `engine` and `driver`.

The engine is one of the tiny model in float32, so that its tokens depend on seeds alone.
"""

import asyncio
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from transformers import GenerationConfig

from support.tiny_model import logprobs, tiny_model
from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.thoughts import answer_part
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.errors import PromptTooLongError, RolloutError, WeightSyncError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.sync.stream import weight_stream

PROMPT = [7, 30, 41, 12]
HEAD, UP = "lm_head.weight", "model.layers.1.mlp.up_proj.weight"


def ask(engine: Engine, driver: Driver, **sampling: Any) -> Completion:
    """A response to a fixed prompt."""
    return driver.run(engine.generate(PROMPT, **({"seed": 5, "max_tokens": 12} | sampling)))[0]


def plain_logprobs(completion: Completion, temperature: float = 1.0, model: Any = None) -> list[float]:
    """Log-probabilities of a response by a plain forward pass of the tiny model, or of another."""
    prompt = list(completion.prompt_token_ids)
    tokens = [*prompt, *completion.token_ids]
    return logprobs(model or _unchanged(), tokens, temperature)[len(prompt) - 1 :]


@cache
def _unchanged() -> Any:
    return tiny_model()


def as_written(engine: Engine, completion: Completion) -> str:
    """A response's text by the tiny model's tokenizer: of all tokens but its end token and padding."""
    tokenizer = engine.tokenizer
    hidden = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    return tokenizer.decode([token for token in completion.token_ids if token not in hidden])


class EnginePromises:
    value_error: ClassVar[str] = (
        "ValueError"  # of a token or a setting that cannot be; vLLM's is not to be imported yet
    )
    misspelt_error: ClassVar[type[Exception]]  # of a sampling setting that there is not
    may_go_on: ClassVar[dict[str, Any]] = {"ignore_eos": True}  # settings with which only a limit ends a response

    def test_it_is_an_inference_model(self, engine: Engine, driver: Driver) -> None:
        driver.run(engine.load())
        assert isinstance(engine, InferenceModel)
        assert engine.dtype == torch.float32
        assert engine.weight_shapes[HEAD] == engine.weight_shapes["model.embed_tokens.weight"] == (100, 64)

    # -- tokens and log-probabilities ---------------------------------------------------------------------------------

    def test_many_chats_at_once(self, engine: Engine, driver: Driver) -> None:
        async def chat(i: int) -> list[Completion]:
            return await engine.chat([{"role": "user", "content": f"{i}"}], n=1 + i % 3, seed=i, max_tokens=2 + i % 7)

        async def chats() -> list[list[Completion]]:
            return await asyncio.gather(*[chat(i) for i in range(60)])

        for i, completions in enumerate(driver.run(chats())):
            assert len(completions) == 1 + i % 3
            for completion in completions:
                prompt = f"<|im_start|>user\n{i}<|im_end|>\n<|im_start|>assistant\n"
                assert engine.tokenizer.decode(completion.prompt_token_ids) == prompt
                assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= 2 + i % 7
                assert completion.text == as_written(engine, completion)

    def test_a_conversation_brings_tools_and_variables_to_the_chat_template(
        self, engine: Engine, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver.run(engine.load())
        tokenizer: Any = load_tokenizer("tiny")  # vLLM's own is a pool of copies
        shown = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ mood }}"
        tokenizer.chat_template = shown + tokenizer.chat_template
        monkeypatch.setattr(type(engine), "tokenizer", property(lambda _: tokenizer))
        tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
        conversation = Conversation([{"role": "user", "content": "hi"}], [tool], {"mood": "calm"})
        (completion,) = driver.run(engine.chat(conversation, max_tokens=1, seed=0))
        prompt = "lookcalm<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(completion.prompt_token_ids) == prompt

    def test_a_text_is_tokenized(self, engine: Engine, driver: Driver) -> None:
        completion = driver.run(engine.generate("1+1=", max_tokens=1, seed=0))[0]
        assert list(completion.prompt_token_ids) == engine.tokenizer.encode("1+1=")

    def test_a_seed_fixes_the_tokens(self, engine: Engine, driver: Driver) -> None:
        assert ask(engine, driver).token_ids == ask(engine, driver).token_ids != ask(engine, driver, seed=4).token_ids
        before = torch.get_rng_state()
        unseeded = driver.run(engine.generate(PROMPT, n=16, max_tokens=12))
        assert len({tuple(completion.token_ids) for completion in unseeded}) > 8  # a few may be an end token alone
        assert torch.equal(torch.get_rng_state(), before)

    def test_sample_i_of_a_request_has_its_seed_plus_i(self, engine: Engine, driver: Driver) -> None:
        together = driver.run(engine.generate(PROMPT, n=4, seed=100, max_tokens=12))
        alone = [ask(engine, driver, seed=100 + i) for i in range(4)]
        assert [c.token_ids for c in together] == [c.token_ids for c in alone]
        assert len({tuple(c.token_ids) for c in together}) == 4

    def test_tokens_depend_neither_on_the_batch_nor_on_the_order(self, engine: Engine, driver: Driver) -> None:
        """Ragged prompts and limits, more requests than rows, rows that end early and are dropped."""
        generator = random.Random(0)
        requests = [([generator.randrange(4, 99) for _ in range(1 + i % 17)], i, 1 + 5 * i % 31) for i in range(20)]

        async def generate(order: Sequence[int]) -> dict[int, Completion]:
            calls = [engine.generate(requests[i][0], seed=requests[i][1], max_tokens=requests[i][2]) for i in order]
            return {i: answer[0] for i, answer in zip(order, await asyncio.gather(*calls), strict=True)}

        forwards = driver.run(generate(range(20)))
        shuffled = driver.run(generate(generator.sample(range(20), 20)))
        for i, (prompt, _, limit) in enumerate(requests):
            tokens = list(forwards[i].token_ids)
            assert list(forwards[i].prompt_token_ids) == prompt
            assert tokens == list(shuffled[i].token_ids)
            if i % 3 == 0:
                assert tokens == list(driver.run(generate([i]))[i].token_ids)  # alone
            assert len(tokens) == limit or tokens[-1] == engine.tokenizer.eos_token_id

    def test_every_end_token_of_the_model_ends_a_response(self, engine: Engine, driver: Driver) -> None:
        tokens = list(ask(engine, driver).token_ids)
        place, end = next((place, token) for place, token in enumerate(tokens) if token != tokens[-1])
        with self.end_token(engine, end):
            ended = ask(engine, driver)
            assert (list(ended.token_ids), ended.finish_reason) == (tokens[: place + 1], "stop")
            assert ended.stop_reason is None
        assert list(ask(engine, driver).token_ids) == tokens

    @contextmanager
    def end_token(self, engine: Engine, token: int) -> Iterator[None]:
        """The engine with another end token in the model's generation_config.json."""
        before = engine.generation_config
        engine.generation_config = GenerationConfig(eos_token_id=[engine.tokenizer.eos_token_id, token])
        yield
        engine.generation_config = before

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_logprobs_are_of_the_distribution_sampled_from(
        self, engine: Engine, driver: Driver, temperature: float
    ) -> None:
        async def beside_a_longer_prompt() -> Completion:
            longer = engine.generate([5] * 40, seed=0, max_tokens=4)
            measured = engine.generate(PROMPT, seed=3, max_tokens=30, temperature=temperature)
            return (await asyncio.gather(longer, measured))[1][0]

        completion = driver.run(beside_a_longer_prompt())
        assert list(completion.logprobs) == pytest.approx(plain_logprobs(completion, temperature), abs=1e-4)

    def test_temperature_0_takes_the_likeliest_token(self, engine: Engine, driver: Driver) -> None:
        completion = ask(engine, driver, temperature=0.0, max_tokens=8)
        with torch.no_grad():
            logits = _unchanged()(torch.tensor([[*PROMPT, *completion.token_ids]])).logits
        assert logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist() == list(completion.token_ids)

    def test_scoring_is_a_plain_forward(self, engine: Engine, driver: Driver) -> None:
        tokens = [random.Random(1).randrange(4, 99) for _ in range(100)]
        before = torch.get_rng_state()
        assert driver.run(engine.logprobs(tokens)) == pytest.approx(logprobs(_unchanged(), tokens), abs=1e-4)
        assert driver.run(engine.logprobs([5])) == []
        assert torch.equal(torch.get_rng_state(), before)

    def test_openais_client_talks_to_it(self, engine: Engine, driver: Driver) -> None:
        messages = [{"role": "user", "content": "2+2"}]

        async def chat() -> Any:
            client = engine.get_openai_async_client()
            return await client.chat.completions.create(model="policy", messages=messages, max_tokens=5, seed=3)

        [choice] = driver.run(chat()).choices
        [expected] = driver.run(engine.chat(messages, max_tokens=5, seed=3))
        assert choice.token_ids == list(expected.token_ids)
        assert choice.token_logprobs == list(expected.logprobs)
        assert choice.message.content == expected.text

    # -- how a response ends ------------------------------------------------------------------------------------------

    def test_limits(self, engine: Engine, driver: Driver) -> None:
        completion = ask(engine, driver, max_tokens=5)
        assert (len(completion.token_ids), completion.finish_reason) == (5, "length")
        for prompt in ([5] * (engine.max_model_len - 3), PROMPT):
            [last] = driver.run(engine.generate(prompt, seed=0, max_tokens=10**6, **self.may_go_on))
            ended = last.finish_reason == "stop" and not self.may_go_on
            assert ended or (len(last.token_ids), last.finish_reason) == (engine.max_model_len - len(prompt), "length")

    def test_the_end_token_ends_a_response_and_is_part_of_it(self, engine: Engine, driver: Driver) -> None:
        samples = driver.run(engine.generate(PROMPT, n=8, seed=0, max_tokens=120))
        ended, end = [c for c in samples if c.finish_reason == "stop"], engine.tokenizer.eos_token_id
        assert ended, "of 8 samples of 120 tokens, one in a hundred an end token"
        for completion in samples:
            assert (end in completion.token_ids) == (completion in ended)
            assert len(completion.logprobs) == len(completion.token_ids)
        for completion in ended:
            assert list(completion.token_ids).index(end) == len(completion.token_ids) - 1
            assert completion.stop_reason is None
            assert "<|im_end|>" not in completion.text

    @pytest.mark.parametrize("as_list", [True, False])
    def test_a_stop_string_ends_a_response_and_its_text(self, engine: Engine, driver: Driver, as_list: bool) -> None:
        whole = ask(engine, driver)
        stop = whole.text[4:6]
        stops = [stop, "\x00"] if as_list else stop
        completion = ask(engine, driver, stop=stops)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text == whole.text[: whole.text.index(stop)] + stop == as_written(engine, completion)
        assert list(completion.token_ids) == list(whole.token_ids)[: len(completion.logprobs)]
        cut = ask(engine, driver, stop=stops, include_stop_str_in_output=False)
        assert cut == replace(completion, text=completion.text.removesuffix(stop))

    def test_the_policys_own_markers_are_in_the_text_unless_they_are_left_out(
        self, engine: Engine, driver: Driver
    ) -> None:
        """A random policy draws each of 100 tokens; <|im_start|> is a special token, and ends nothing."""
        samples = driver.run(engine.generate(PROMPT, n=8, seed=0, max_tokens=120))
        bare = driver.run(engine.generate(PROMPT, n=8, seed=0, max_tokens=120, skip_special_tokens=True))
        assert any("<|im_start|>" in completion.text for completion in samples)
        for completion, without in zip(samples, bare, strict=True):
            assert completion.text == as_written(engine, completion)
            assert without.text == engine.tokenizer.decode(completion.token_ids, skip_special_tokens=True)

    def test_a_stop_string_may_hold_a_special_token(self, engine: Engine, driver: Driver) -> None:
        samples = driver.run(engine.generate(PROMPT, n=8, seed=0, max_tokens=120, stop=["<|im_start|>"]))
        stopped = [completion for completion in samples if completion.stop_reason == "<|im_start|>"]
        assert stopped
        for completion in stopped:
            assert completion.text.index("<|im_start|>") == len(completion.text) - len("<|im_start|>")

    def test_a_response_knows_whether_its_prompt_opened_the_thoughts(self, engine: Engine, driver: Driver) -> None:
        driver.run(engine.load())
        for prompt, opened in (("hm<think>\n", True), ("hm", False)):
            completion = driver.run(engine.generate(prompt, seed=0, max_tokens=8))[0]
            assert (answer_part(completion.text) is None) is opened

    # -- errors -------------------------------------------------------------------------------------------------------

    def test_a_prompt_without_room_for_a_response_is_refused(self, engine: Engine, driver: Driver) -> None:
        before, context = ask(engine, driver), engine.max_model_len
        for length in (context, context + 1, 10 * context):
            with pytest.raises(PromptTooLongError, match="max_model_len"):
                driver.run(engine.generate([5] * length))
        assert ask(engine, driver) == before

    def test_a_bad_request_is_its_callers_alone(self, engine: Engine, driver: Driver) -> None:
        async def mixed() -> list[Any]:
            calls = [
                engine.generate([5] * engine.max_model_len),
                engine.generate([5, 10**6]),
                engine.generate(PROMPT, temperature=-1.0),
                engine.generate(PROMPT, temprature=1.0),
                engine.generate(PROMPT, seed=5, max_tokens=12),
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

        too_long, unknown_token, negative, misspelt, answer = driver.run(mixed())
        assert isinstance(too_long, PromptTooLongError)
        for refused in (unknown_token, negative):
            assert self.value_error in [kind.__name__ for kind in type(refused).__mro__]
        assert isinstance(misspelt, self.misspelt_error)
        for refused in (unknown_token, negative, misspelt):
            assert not isinstance(refused, RolloutError), "the engine did not fail"
        assert "temperature" in str(negative)
        assert "temprature" in str(misspelt)
        assert answer[0].token_ids == ask(engine, driver).token_ids

    # -- weights ------------------------------------------------------------------------------------------------------

    def test_it_takes_weights_a_tied_head_with_them_and_forgets_what_the_old_ones_computed(
        self, engine: Engine, driver: Driver
    ) -> None:
        prompt = [5 + i % 90 for i in range(100)]
        driver.run(engine.generate(prompt, seed=0, max_tokens=4))
        try:
            for version, scale in ((1, 1.5), (2, 0.8)):
                model = tiny_model(scale)
                assert model.config.tie_word_embeddings
                driver.run(engine.sync_weights(weight_stream(model), version))
                assert engine.model_version == version
                completion = driver.run(engine.generate(prompt, seed=0, max_tokens=4))[0]
                assert completion.versions == ((0, version),)
                expected = plain_logprobs(completion, model=model)
                assert list(completion.logprobs) == pytest.approx(expected, abs=1e-3)
                assert driver.run(engine.logprobs(PROMPT)) == pytest.approx(logprobs(model, PROMPT), abs=1e-3)
        finally:
            driver.run(engine.sync_weights(weight_stream(tiny_model()), 0))

    @pytest.mark.parametrize(
        ("change", "tensor"),
        [
            (lambda tensors: tensors.pop(HEAD), HEAD),
            (lambda tensors: tensors.update({UP + "s": tensors[UP]}), UP + "s"),
            (lambda tensors: tensors.update({UP: tensors[UP].T}), UP),
        ],
        ids=["missing", "unknown", "wrong shape"],
    )
    def test_weights_that_do_not_fit_leave_it_as_it_was(
        self, engine: Engine, driver: Driver, change: Any, tensor: str
    ) -> None:
        before = ask(engine, driver), engine.model_version
        tensors = dict(weight_stream(tiny_model(3.0)))
        change(tensors)
        with pytest.raises(WeightSyncError, match=f"'{re.escape(tensor)}'"):
            driver.run(engine.sync_weights(tensors.items(), 9))
        assert (ask(engine, driver), engine.model_version) == before

"""Operators that ask an auxiliary model: the judge and the teacher."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.errors import refuses
from support.fake_model import FakeModel
from support.judge_server import judge_server
from support.operators import make, rewards

from trinity_lightning.buffer.operators import OperatorConfig, auxiliary, create_operators
from trinity_lightning.buffer.operators.auxiliary import JudgeOperator, TeacherTopK
from trinity_lightning.buffer.operators.experience_operator import OperatorChain
from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.runs import Untrained
from trinity_lightning.common.thoughts import Response
from trinity_lightning.errors import OperatorError, RolloutError
from trinity_lightning.explorer.models.openai_api import OpenAIModel

openai = pytest.importorskip("openai")

PROMPT = 'Q: {prompt} A: {response} ({answer}) -> {"score": 0.5}'


def answered(*responses, reward: float | None = 1.0, answer="4"):
    return [
        make(run=i, reward=reward, prompt_text="2+2?", response_text=text, info={"answer": answer})
        for i, text in enumerate(responses)
    ]


def ask(urls, exps, model="judge", client_model=None, **args):
    """The judge's result for these experiences, from the servers at these URLs."""

    async def run():
        clients = [openai.AsyncOpenAI(base_url=url, api_key="none") for url in urls]
        for client in clients:
            if client_model is not None:
                client.model_path = client_model
        (operator,) = create_operators(
            [OperatorConfig("judge", {"model": model, "prompt": PROMPT} | args)], {"judge": clients, 0: clients}
        )
        try:
            await operator.prepare()
            return await operator.process(exps)
        finally:
            await operator.close()
            for client in clients:
                await client.close()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(auxiliary, "BACKOFF_SECONDS", 0.001)


def by_text(scores):
    """An answer whose score depends on which response is asked about."""

    def answer(body):
        question = body["messages"][0]["content"]
        return 200, next(text for response, text in scores.items() if f"A: {response} " in question)

    return answer


def test_scores_are_kept_and_added_with_their_weight():
    with judge_server(lambda body: (200, '{"score": 0.5}')) as server:
        exps = answered("four", "five")
        passed, metrics = ask([server.url], exps, weight=2.0)
    assert passed == exps
    assert rewards(exps) == [2.0, 2.0]
    assert [exp.info["judge_score"] for exp in exps] == [0.5, 0.5]
    assert metrics == {"score/mean": 0.5, "failed_count": 0}
    asked = sorted(body["messages"][0]["content"] for body in server.requests)
    assert asked == ['Q: 2+2? A: five (4) -> {"score": 0.5}', 'Q: 2+2? A: four (4) -> {"score": 0.5}']
    assert all(body["temperature"] == 0 for body in server.requests)


def test_an_experience_without_a_reward_gets_the_judge_s():
    with judge_server(lambda body: (200, '{"score": 0.25}')) as server:
        exps = answered("four", reward=None)
        ask([server.url], exps, weight=2.0)
    assert rewards(exps) == [0.5]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 1}', 1.0),
        ('```json\n{"reason": "{ok}", "score": 0.75}\n```', 0.75),
        ('First I thought {"score": 0.1}, but: {"score": 0}', 0.0),
        ("a set {1, 2}, then {\"score\": 0.5} and {'x'}", 0.5),
    ],
)
def test_scores_are_found_within_text(text, score):
    with judge_server(lambda body: (200, text)) as server:
        (exp,), _ = ask([server.url], answered("four"))
    assert exp.info["judge_score"] == score


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((200, '{"score": 1.5}'), "the score 1.5 is not from 0 to 1"),
        ((200, '{"score": NaN}'), "the score nan is not"),
        ((200, '{"score": "good"}'), 'no {"score": number}'),
        ((200, '{"score": true}'), 'no {"score": number}'),
        ((200, "very good"), "number}: 'very good'"),
        ((200, ""), 'no {"score": number}'),
        ((500, "out of order"), "out of order"),
        ((400, "no such model"), "no such model"),
    ],
)
def test_failed_items_keep_their_reward_and_are_counted_and_logged(answer, reason, caplog):
    with judge_server(lambda body: answer) as server, caplog.at_level(logging.WARNING):
        exps = answered("four", "five")
        passed, metrics = ask([server.url], exps, max_retries=1)
    assert passed == exps
    assert rewards(exps) == [1.0, 1.0]
    assert all("judge_score" not in exp.info for exp in exps)
    assert metrics == {"failed_count": 2}
    assert len(server.requests) == 4
    assert "judge 'judge': 2 of 2 items failed" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("opened", [True, False])
def test_a_judge_of_the_run_that_was_cut_off_in_its_thoughts_gave_no_score(opened):
    """Its prompt had opened them: the text that OpenAI's API gives does not say so."""
    exps = answered("4")

    async def judged():
        client = FakeModel(lambda seed: Response('Say {"score": 0.5}. Or', opened=opened)).get_openai_async_client()
        args = {"model": "judge", "prompt": "{response}", "max_retries": 0, "sampling": {"seed": 1}}
        (operator,) = create_operators([OperatorConfig("judge", args)], {"judge": [client]})
        return await operator.process(exps)

    _, metrics = asyncio.run(judged())
    assert (metrics["failed_count"], exps[0].reward) == ((1, 1.0) if opened else (0, 1.5))


def test_one_failed_item_leaves_the_others():
    with judge_server(by_text({"four": '{"score": 1}', "five": "hm"})) as server:
        exps = answered("four", "five")
        _, metrics = ask([server.url], exps, max_retries=0)
    assert rewards(exps) == [2.0, 1.0]
    assert metrics == {"score/mean": 1.0, "failed_count": 1}


def test_a_failed_attempt_is_followed_by_others():
    answers = iter([(500, "busy"), (200, "hm"), (200, '{"score": 1}')])
    with judge_server(lambda body: next(answers)) as server:
        _, metrics = ask([server.url], answered("four"), max_retries=2)
    assert metrics == {"score/mean": 1.0, "failed_count": 0}
    assert len(server.requests) == 3


def test_experiences_that_share_their_info_keep_their_own_score():
    with judge_server(by_text({"four": '{"score": 0}', "five": '{"score": 1}'})) as server:
        exps = answered("four", "five")
        exps[1].info = shared = exps[0].info
        ask([server.url], exps)
    assert [exp.info["judge_score"] for exp in exps] == [0.0, 1.0]
    assert shared == {"answer": "4"}


@pytest.mark.slow
def test_a_server_that_hangs_or_is_not_there_is_a_failed_item(caplog):
    release = threading.Event()

    def hang(body):
        release.wait(20)
        return 200, '{"score": 1}'

    with judge_server(hang) as server, caplog.at_level(logging.WARNING):
        _, metrics = ask([server.url], answered("four"), timeout=0.2, max_retries=1)
        release.set()
    assert metrics == {"failed_count": 1}
    assert "no answer within 0.2 s" in caplog.text or "timed out" in caplog.text
    _, metrics = ask([server.url], answered("four"), max_retries=0)
    assert metrics == {"failed_count": 1}


def test_items_are_judged_at_the_same_time_and_over_all_clients():
    barrier = threading.Barrier(8)

    def together(body):
        barrier.wait(20)  # all eight have to be there
        return 200, '{"score": 1}'

    with judge_server(together) as one, judge_server(together) as other:
        start = time.perf_counter()
        _, metrics = ask([one.url, other.url], answered(*"abcdefgh"))
        assert time.perf_counter() - start < 20
        assert [len(one.requests), len(other.requests)] == [4, 4]
    assert metrics["failed_count"] == 0


@pytest.mark.parametrize(
    ("models", "client_model", "key", "name"),
    [
        (["llama"], None, "judge", "llama"),
        (["llama", "judge"], None, "judge", "judge"),
        (["llama", "judge"], "qwen", "judge", "qwen"),
        (None, None, "judge", "judge"),
        (["llama"], None, 0, "llama"),
    ],
)
def test_the_model_is_called_what_its_server_calls_it(models, client_model, key, name):
    with judge_server(lambda body: (200, '{"score": 1}'), models) as server:
        ask([server.url], answered("four"), model=key, client_model=client_model)
    assert [body["model"] for body in server.requests] == [name]


def test_further_arguments_of_the_request():
    with judge_server(lambda body: (200, '{"score": 1}')) as server:
        ask([server.url], answered("four"), sampling={"max_tokens": 9, "temperature": 0.7})
    (body,) = server.requests
    assert (body["max_tokens"], body["temperature"]) == (9, 0.7)


def test_what_is_filled_in_is_not_filled_in_again():
    with judge_server(lambda body: (200, '{"score": 1}')) as server:
        ask([server.url], answered("{answer} {prompt} {0}"))
    assert server.requests[0]["messages"][0]["content"] == 'Q: 2+2? A: {answer} {prompt} {0} (4) -> {"score": 0.5}'


def test_a_judge_that_cannot_be_found_is_told():
    with judge_server(lambda body: (200, ""), ["llama", "judge-7b"]) as server:
        with refuses(".args.model") as refused:
            ask([server.url], [], model="jugde")
        assert "Did you mean 'judge'" in str(refused.value)
        with refuses(".args.model") as refused:
            ask([server.url], [])
        assert "judge-7b, llama" in str(refused.value)
    with refuses(".args.model"):
        asyncio.run(JudgeOperator("judge", PROMPT).process([]))


def test_what_the_prompt_asks_for_must_be_there():
    with judge_server(lambda body: (200, '{"score": 1}')) as server:
        exps = answered("four")
        del exps[0].info["answer"]
        with pytest.raises(ExperienceError, match=r"experience 1/0/0/0/\w+ has no info\['answer'\]"):
            ask([server.url], exps)
        exps = answered("four")
        exps[0].response_text = None
        with pytest.raises(ExperienceError, match="has no response_text"):
            ask([server.url], exps)


@pytest.mark.parametrize(
    ("key", "value"),
    [("prompt", "Is {prompt} good?"), ("weight", float("nan")), ("timeout", 0), ("max_retries", -1), ("sampling", 3)],
)
def test_values_out_of_range_are_told(key, value):
    args = {key: value}
    with refuses(f"operators.judge.args.{key}"):
        create_operators([OperatorConfig("judge", {"model": "judge", "prompt": "{response}"} | args)])


def test_nothing_to_judge():
    with judge_server(lambda body: (200, "")) as server:
        assert ask([server.url], []) == ([], {"failed_count": 0})
    assert json.dumps(server.requests) == "[]"


# -- a teacher's likeliest tokens --------------------------------------------------------------------------------------


def test_an_endpoint_without_log_probabilities_is_refused() -> None:
    with judge_server(lambda _: (200, "a text"), ["some-model"]) as server:
        operator = TeacherTopK()
        model = OpenAIModel(server.url, "some-model")
        operator.set_auxiliary_model({"teacher": [model.get_openai_async_client()]})
        with pytest.raises(RolloutError, match="of the 3 tokens that it was sent: it must be a server of vLLM"):
            asyncio.run(operator.process([Experience(tokens=[1, 2, 3], prompt_length=1)]))
    assert server.requests[0]["prompt"] == [1, 2, 3]
    assert server.requests[0]["prompt_logprobs"] == 16


class Teacher:
    """Stands in for an OpenAI client: each request is answered by the next of these functions."""

    model_path = "teacher"

    def __init__(self, *answers: Callable[[], Awaitable[Any]]) -> None:
        self.answers, self.options = list(answers), []
        self.completions = self

    def with_options(self, **options: Any) -> "Teacher":
        self.options.append(options)
        return self

    async def create(self, **body: Any) -> Any:
        entry = {"7": {"rank": 1, "logprob": -0.5}, "8": {"rank": 2, "logprob": -1.0}}
        await self.answers.pop(0)()
        return SimpleNamespace(choices=[SimpleNamespace(prompt_logprobs=[None, *[entry] * (len(body["prompt"]) - 1)])])


async def works() -> None:
    """Answers at once."""


async def died() -> None:
    raise openai.OpenAIError("the vLLM server does not answer. It was ended by signal 9.")


async def hangs() -> None:
    await asyncio.Event().wait()


def taught(*answers: Callable[[], Awaitable[Any]], **args: Any) -> tuple[Experience, Teacher]:
    operator, teacher = TeacherTopK(k=2, **args), Teacher(*answers)
    operator.set_auxiliary_model({"teacher": [cast("Any", teacher)]})
    [experience], _ = asyncio.run(operator.process([Experience(tokens=[1, 2, 3], prompt_length=1)]))
    return experience, teacher


@pytest.mark.parametrize("fails", [died, hangs])
def test_a_teacher_that_fails_once_is_asked_again(fails: Callable[[], Awaitable[Any]]) -> None:
    """A server of the run that died is started again by the next request."""
    experience, teacher = taught(fails, works, timeout=0.05, max_retries=1)
    assert experience.info["teacher_top_k"]["ids"].tolist() == [[7, 8]] * 2
    assert teacher.options == [{"max_retries": 0}] * 2  # the client's own would multiply these attempts


@pytest.mark.parametrize(
    ("fails", "why"), [(died, "OpenAIError: the vLLM server does not answer"), (hangs, "no answer within 0.01 s")]
)
def test_a_teacher_that_goes_on_failing_ends_the_wait(fails: Callable[[], Awaitable[Any]], why: str) -> None:
    with pytest.raises(RolloutError, match=rf"the teacher 'teacher' failed \(attempts: 3\): {why}"):
        taught(fails, fails, fails, timeout=0.01)


def test_what_is_advised_after_a_teacher_failed_is_what_the_configuration_takes() -> None:
    """`teacher_kl` refuses on_error=skip."""
    chain = OperatorChain(
        [OperatorConfig("teacher_top_k")], {"teacher": [cast("Any", Teacher(died, died, died))]}, None
    )
    with pytest.raises(OperatorError, match=r"failed \(attempts: 3\)(.|\n)*longer timeout(.|\n)*ckpt_path=last") as e:
        asyncio.run(chain.process([Experience(tokens=[1, 2], prompt_length=1)], 1, [], Untrained(all_rows=True)))
    assert "Set its on_error to skip" not in str(e.value)


def test_what_cannot_work_is_refused() -> None:
    operator = TeacherTopK("tutor")
    operator.set_auxiliary_model({"teacher": []})
    with refuses(".args.model"):
        asyncio.run(operator.prepare())
    with refuses("k"):
        TeacherTopK(k=0)
    with refuses("timeout"):
        TeacherTopK(timeout=0)
    with refuses("max_retries"):
        TeacherTopK(max_retries=-1)


@pytest.mark.parametrize(("status", "reason"), [(200, "log-probabilities of the 2 tokens"), (400, "too many logprobs")])
def test_an_endpoint_is_asked_before_any_rollout(status: int, reason: str) -> None:
    with judge_server(lambda _: (status, "too many logprobs"), ["some-model"]) as server:
        operator = TeacherTopK(k=30)
        operator.set_auxiliary_model({"teacher": [OpenAIModel(server.url, "some-model").get_openai_async_client()]})
        with refuses("auxiliary_models.teacher.url") as refused:
            asyncio.run(operator.prepare())
    assert reason in str(refused.value)
    assert server.requests[0]["prompt_logprobs"] == 30

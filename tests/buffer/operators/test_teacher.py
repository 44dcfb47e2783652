"""A teacher that is not there, or is no server of vLLM's. One that is: tests/explorer/test_vllm_server.py."""

import asyncio

import pytest
from support.judge_server import judge_server

from trinity_lightning.buffer.operators.teacher import TeacherTopK
from trinity_lightning.common.experience import Experience
from trinity_lightning.errors import ConfigError, RolloutError
from trinity_lightning.explorer.models.openai_api import OpenAIModel


def test_an_endpoint_without_log_probabilities_is_refused() -> None:
    with judge_server(lambda _: (200, "a text"), ["some-model"]) as server:
        operator = TeacherTopK()
        model = OpenAIModel(server.url, "some-model")
        operator.set_auxiliary_model({"teacher": [model.get_openai_async_client()]})
        with pytest.raises(RolloutError, match="of the 3 tokens that it was sent: it must be a server of vLLM"):
            asyncio.run(operator.process([Experience(tokens=[1, 2, 3], prompt_length=1)]))
    assert server.requests[0]["prompt"] == [1, 2, 3]
    assert server.requests[0]["prompt_logprobs"] == 16


def test_what_cannot_work_is_refused() -> None:
    operator = TeacherTopK("tutor")
    operator.set_auxiliary_model({"teacher": []})
    with pytest.raises(ConfigError, match="teacher_top_k: unknown auxiliary model 'tutor'"):
        asyncio.run(operator.prepare())
    with pytest.raises(ConfigError, match="k is 0"):
        TeacherTopK(k=0)


@pytest.mark.parametrize(("status", "said"), [(200, "log-probabilities of the 2 tokens"), (400, "too many logprobs")])
def test_an_endpoint_is_asked_before_any_rollout(status: int, said: str) -> None:
    with judge_server(lambda _: (status, "too many logprobs"), ["some-model"]) as server:
        operator = TeacherTopK(k=30)
        operator.set_auxiliary_model({"teacher": [OpenAIModel(server.url, "some-model").get_openai_async_client()]})
        with pytest.raises(ConfigError, match=rf"{server.url} does not say .*{said}(.|\n)*--max-logprobs 30 or more"):
            asyncio.run(operator.prepare())
    assert server.requests[0]["prompt_logprobs"] == 30

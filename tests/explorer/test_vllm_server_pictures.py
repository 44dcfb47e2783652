"""Pictures with a vLLM server, in float32."""

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import fork_servers
from support.picture_promises import VLLMPicturePromises, prompts
from support.pictures import plain_logprobs, plain_model, prompt_of, random_picture
from support.runs import Commands
from support.tiny_model import train_a_little
from support.under_way import begun, check_spans, until_drawn

from trinity_lightning.common.inference import Completion
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.config.engines import EngineDtype
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.server import ServerClient
from trinity_lightning.explorer.models.server_requests import KEEPING
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine
from trinity_lightning.sync.stream import weight_stream

pytestmark = pytest.mark.usefixtures("needs_vllm")


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def engine(driver: Driver, run_train: Commands, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServerEngine]:
    log: Path = tmp_path_factory.mktemp("server") / "server.log"
    settings = {"dtype": EngineDtype.fp32, "max_model_len": 512, "max_num_seqs": 16, "kv_cache_gb": 0.1}
    # A server elsewhere has vLLM's own cache, unless it is told to have none.
    args = {"mm_processor_cache_gb": 0.1, "middleware": [KEEPING]}
    engine = VLLMServerEngine("tiny_vision", log=log, args=args, **settings)
    with pytest.MonkeyPatch.context() as patch:
        fork_servers(run_train.address, patch.setattr)
        driver.run(engine.load())
        yield engine
        driver.run(engine.shutdown())


class TestPictures(VLLMPicturePromises):
    def test_pictures_are_sent_once(
        self, engine: VLLMServerEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent = []
        post = ServerClient.post

        async def posted(self: ServerClient, path: str, body: dict) -> object:
            sent.append("pictures" in str(body))
            return await post(self, path, body)

        monkeypatch.setattr(ServerClient, "post", posted)
        prompt = prompt_of("<image>once", [random_picture(200)])
        for longer in (prompt, PicturePrompt.joined(prompt, [20, 21])):
            driver.run(engine.generate(longer, n=2, max_tokens=1, seed=0))
        assert sent == [False, True, False, False]

    def test_a_copy_in_another_process_takes_pictures(self, engine: VLLMServerEngine, driver: Driver) -> None:
        copy = pickle.loads(pickle.dumps(engine))  # noqa: S301  # written here
        prompt = prompt_of("<image>copy", [random_picture(201)])
        mine, its = (driver.run(one.generate(prompt, seed=3, max_tokens=6)) for one in (engine, copy))
        assert mine == its
        driver.run(copy.shutdown())

    def test_requests_with_pictures_go_on_with_another_tower(
        self, engine: VLLMServerEngine, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        models = {30: plain_model(), 31: plain_model()}
        train_a_little(models[31])

        async def sync() -> list[list[Completion]]:
            await engine.sync_weights(weight_stream(models[30]), 30)
            asked = [engine.generate(prompt, seed=1, max_tokens=200, ignore_eos=True) for prompt in prompts(3, seed=90)]
            samples = asyncio.gather(*await begun(engine, 3, *asked))
            await until_drawn(engine, 3)
            await engine.sync_weights(weight_stream(models[31]), 31)
            return await samples

        monkeypatch.setattr(engine, "_keeps_requests", True)
        try:
            completions = driver.run(sync())
        finally:
            driver.run(engine.sync_weights(weight_stream(plain_model()), 32))
        for (completion,) in completions:
            prompt = completion.prompt_token_ids
            assert isinstance(prompt, PicturePrompt)
            assert [version for _, version in completion.versions] == [30, 31]

            def exact(version: int, tokens: list[int], inputs: Any = prompt.inputs) -> list[float]:
                with torch.no_grad():
                    return plain_logprobs(models[version], tokens, inputs).tolist()

            check_spans(completion, exact)

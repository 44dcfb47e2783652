"""Pictures with a vLLM server, in float32."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked import fork_servers
from support.picture_promises import VLLMPicturePromises
from support.pictures import prompt_of, random_picture
from support.runs import Commands

from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.config.engines import EngineDtype
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.server import ServerClient
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine

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
    args = {"mm_processor_cache_gb": 0.1}  # a server elsewhere has vLLM's own cache, unless it is told to have none
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

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import WandbLogger
from omegaconf import OmegaConf
from PIL import Image
from support.compose import composed
from support.errors import refuses
from support.picture_models import refused_folder

from trinity_lightning.build import eval_sources, finish, logging_to, train_source
from trinity_lightning.config.run import typed_config
from trinity_lightning.engines import check_pictures, most_pictures


class FullDisk(WandbLogger):
    """One that cannot write any more."""

    def __init__(self) -> None:
        """No run of W&B."""

    def log_hyperparams(self, params: Any) -> None:
        """Nowhere."""

    def save(self) -> None:
        raise OSError("the disk is full")


class Saves(FullDisk):
    saved = False

    def save(self) -> None:
        self.saved = True


def test_every_logger_saves_though_another_cannot() -> None:
    first, last = Saves(), Saves()
    with pytest.raises(OSError, match="the disk is full"):
        finish([first, FullDisk(), last])
    assert first.saved
    assert last.saved


def test_a_run_of_wandb_ends_though_another_logger_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("wandb.finish", lambda exit_code: codes.append(exit_code))
    with pytest.raises(RuntimeError, match="why it failed"), logging_to([FullDisk()], OmegaConf.create({})):
        raise RuntimeError("why it failed")
    with pytest.raises(OSError, match="the disk is full"):
        finish([FullDisk()])
    assert codes == [1, 0]


VARIABLES = "+model.chat_template_kwargs.mood=calm"


def test_variables_of_the_chat_template_go_to_every_task(caplog: pytest.LogCaptureFixture) -> None:
    config = typed_config(composed("+recipe=grpo", "model=tiny", VARIABLES))
    sources = [train_source(config), *eval_sources(config)]
    tasks = [sources[0].next_tasks(1)[0], *(source.all_tasks()[0] for source in sources[1:])]
    assert len(tasks) > 1
    assert all(task.chat_template_kwargs == {"mood": "calm"} for task in tasks)
    assert "the model's chat template does not read mood" in caplog.text


def test_a_variable_that_is_an_argument_of_rendering_is_refused() -> None:
    with refuses("model.chat_template_kwargs"):
        typed_config(composed("+recipe=grpo", "model=tiny", "+model.chat_template_kwargs.tokenize=false"))


ADAPTERS_ALONE = ("model.lora.r=4", "synchronizer.lora=adapter")


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["model=tiny"], "model.name"),
        (["model=tiny_vision", "engine.name=my_engine.PlainEngine"], "engine.name"),
        (["model=tiny_vision", "+model.processor_args.nosuch=1"], "model.processor_args.nosuch"),
        (["model=tiny_vision", "+engine.args.mm_processor_cache_gb=1"], "engine.args.mm_processor_cache_gb"),
        (["model=tiny_vision", "+engine.args.mm_processor_kwargs.size=8"], "engine.args.mm_processor_kwargs"),
        (["model=tiny_vision", "algorithm=ppo_critic", "algorithm.critic.model=tiny"], "algorithm.critic.model"),
        (["model=tiny_vision", "operators=teacher_top_k", "+auxiliary_models.teacher.model=tiny"], "operators"),
        (["model=tiny_vision", "engine.per_rank=true", "trainer=ddp"], "engine.per_rank"),
        (["model=tiny_vision", "engine=vllm_server", *ADAPTERS_ALONE], "synchronizer.lora"),
    ],
)
def test_tasks_with_pictures_are_refused_where_an_engine_would_not_get_them(arguments: list[str], key: str) -> None:
    config = typed_config(composed("+recipe=grpo_vision", *arguments))
    with refuses(key):
        check_pictures(config, [train_source(config)])


def test_vllm_in_this_process_computes_with_adapters_of_a_model_that_reads_pictures() -> None:
    config = typed_config(composed("+recipe=grpo_vision", "model=tiny_vision", *ADAPTERS_ALONE))
    check_pictures(config, [train_source(config)])


def test_a_family_that_reads_pictures_by_other_means_is_for_tasks_of_text(tmp_path: Path) -> None:
    folder = refused_folder(tmp_path / "model")
    config, of_text = (
        typed_config(composed(f"+recipe={recipe}", "model=custom", f"model.name={folder}"))
        for recipe in ("grpo_vision", "grpo")
    )
    with refuses("model.name") as refused:
        check_pictures(config, [train_source(config)])
    assert "qwen3_vl" in str(refused.value)
    check_pictures(of_text, [train_source(of_text)])


@pytest.mark.parametrize(
    ("images", "arguments", "most"),
    [
        ([1, 0, 3], [], 3),
        ([0, 0], [], 0),
        ([1], ["workflow=multi_turn"], None),
        ([1], ["eval_workflow=my.Workflow"], None),
        ([1], ["taskset=drawings"], None),
    ],
)
def test_an_engine_is_told_of_the_most_pictures(
    images: list[int], arguments: list[str], most: int | None, tmp_path: Path
) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    entries = [{"prompt": "?", "images": ["a.png"] * count, "answer": "1"} for count in images]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, entries)))
    data = ["taskset=dataset", f"taskset.path={tmp_path}/data.jsonl"]
    if "taskset=drawings" in arguments:
        data = []
    config = typed_config(composed("+recipe=grpo_vision", "model=tiny_vision", *data))
    names = dict(argument.split("=") for argument in arguments)
    workflow = replace(config.workflow, name=names.get("workflow", config.workflow.name))
    changed = replace(config, workflow=workflow, eval_workflow=names.get("eval_workflow"))
    assert most_pictures(changed, [train_source(config)]) == most


@pytest.mark.parametrize(("field", "warns"), [("pics", True), ("images", False)])
def test_entries_whose_pictures_are_in_another_column_are_told_of(
    field: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "?", field: ["a.png"], "answer": "1"}))
    data = ["taskset=dataset", f"taskset.path={tmp_path}/data.jsonl", "eval_tasksets={}"]
    config = typed_config(composed("+recipe=grpo_vision", "model=tiny_vision", *data))
    check_pictures(config, [train_source(config)])
    assert ("taskset.images_field" in caplog.text) is warns


def test_tasks_of_text_are_for_every_model_and_engine() -> None:
    config = typed_config(composed("+recipe=grpo", "model=tiny", "engine=vllm_server"))
    check_pictures(config, [train_source(config), *eval_sources(config)])

"""Expert data from the configuration: prompts and answers, or stored experiences, and whole runs that mix them in."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.compose import composed
from support.errors import refuses
from support.runs import SMALL, RunTrain

from trinity_lightning.buffer.offline import AnswerReader, expert_data
from trinity_lightning.buffer.step_files import keep_step, read_experiences
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import is_expert
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.config.run import TrainConfig, typed_config, validate
from trinity_lightning.errors import StorageError
from trinity_lightning.explorer.tasks.taskset import Taskset

CONVERSATION = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("tiny")


def config_of(*arguments: str) -> TrainConfig:
    config = composed("+recipe=mix", "model=tiny", "engine=transformers", *arguments)
    config.output_dir = "."
    validate(config)
    return typed_config(config)


def write_lines(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def of_dataset(path: Path, *arguments: str) -> tuple[str, ...]:
    return ("buffer.expert.dataset.source=dataset", f"buffer.expert.dataset.path={path}", *arguments)


def test_an_answer_becomes_a_response_that_ends(tokenizer: Any) -> None:
    taskset = Taskset([{"prompt": "What is 1 + 1?", "answer": 2}], name="sums")
    (experience,) = AnswerReader(taskset, tokenizer).read(1)
    prompt = "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(experience.tokens[: experience.prompt_length]) == prompt
    assert tokenizer.decode(experience.tokens[experience.prompt_length :]) == "2<|im_end|>"
    assert experience.action_mask is not None
    assert experience.action_mask.all()
    assert (experience.prompt_text, experience.response_text) == ("What is 1 + 1?", "2")
    assert experience.info["task_index"] == {"taskset_id": "sums", "index": 0}


def test_a_conversation_ends_with_the_response(tokenizer: Any) -> None:
    (experience,) = AnswerReader(Taskset([{"messages": CONVERSATION}]), tokenizer, {"system_prompt": "no"}).read(1)
    assert tokenizer.decode(experience.tokens[experience.prompt_length :]) == "Hello.<|im_end|>"
    (prompted,) = AnswerReader(
        Taskset([{"prompt": "x", "answer": "y"}]), tokenizer, {"system_prompt": "Be brief."}
    ).read(1)
    assert tokenizer.decode(prompted.tokens).startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_an_entry_without_a_response_is_found_wherever_it_is(tokenizer: Any) -> None:
    entries = [{"prompt": "x", "answer": "y" * (n < 3)} for n in range(12)]
    with refuses("buffer.expert.dataset.answer_field") as refused:
        AnswerReader(Taskset(entries), tokenizer)
    assert re.search("9 of 12 entries .* entry 3, entry 4, .*, entry 7", str(refused.value))


@pytest.mark.parametrize(
    "entry",
    [
        {"prompt": "x"},
        {"prompt": "x", "answer": " "},
        {"messages": CONVERSATION[:1]},
        {"messages": CONVERSATION[1:]},
    ],
)
def test_an_entry_without_a_response_is_refused_at_once(entry: dict[str, Any], tokenizer: Any) -> None:
    with refuses("buffer.expert.dataset.answer_field"):
        AnswerReader(Taskset([entry]), tokenizer)


@pytest.mark.slow
def test_a_file_of_prompts_and_answers(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "expert.jsonl", [{"question": f"{i}?", "solution": f"{i}!"} for i in range(5)])
    fields = ("buffer.expert.dataset.prompt_field=question", "buffer.expert.dataset.answer_field=solution")
    experts = expert_data(config_of(*of_dataset(path, *fields, "buffer.expert.per_step=5")))
    assert experts is not None
    first = [e.response_text for e in experts.read(1)]
    assert sorted(map(str, first)) == [f"{i}!" for i in range(5)]
    assert first != sorted(map(str, first))  # shuffled, by the seed
    experts.commit()
    resumed = expert_data(config_of(*of_dataset(path, *fields, "buffer.expert.per_step=5")))
    assert resumed is not None
    resumed.load_state_dict(experts.state_dict())
    assert [e.response_text for e in resumed.read(2)] == [e.response_text for e in experts.read(2)] != first


def test_what_another_run_kept(tmp_path: Path) -> None:
    stored = [Experience(tokens=[1, 2, 3 + i], prompt_length=1, logprobs=[-1.0, -2.0]) for i in range(3)]
    keep_step(tmp_path, 1, stored)
    experts = expert_data(
        config_of("buffer.expert.storage=file", f"buffer.expert.path={tmp_path}", "buffer.expert.per_step=4")
    )
    assert experts is not None
    got = experts.read(1)
    assert [int(e.tokens[2]) for e in got] == [3, 4, 5, 3]
    assert all(is_expert(e) and e.logprobs is None for e in got)


def test_a_database_that_cannot_be_read_is_refused_by_its_own_key() -> None:
    database = ("buffer.expert.storage=sql", "buffer.expert.url=nonsense://host/name", "buffer.expert.per_step=4")
    with refuses("buffer.expert.url"):
        expert_data(config_of(*database))


def test_the_place_among_expert_data_is_kept_under_another_system_prompt(tokenizer: Any) -> None:
    entries = [{"prompt": f"{i}", "answer": "y"} for i in range(3)]
    first, second = (AnswerReader(Taskset(entries), tokenizer, {"system_prompt": prompt}) for prompt in ("a", "b"))
    first.read(1)
    second.load_state_dict(first.state_dict())
    after, expected = (str(reader.read(1)[0].prompt_text) for reader in (second, first))
    assert after[-1] == expected[-1]
    opaque = ([{"prompt": "x", "answer": "y", "other": value}] for value in (object(), object()))
    one, other = (AnswerReader(Taskset(entries), tokenizer) for entries in opaque)
    other.load_state_dict(one.state_dict())


def test_the_place_among_other_expert_data_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        write_lines(tmp_path / f"{name}.jsonl", [{"prompt": "x", "answer": f"{name}{i}"} for i in range(3)])
        keep_step(tmp_path / name, 1, [Experience(tokens=[1, 2], prompt_length=1)])
    files = [of_dataset(tmp_path / f"{name}.jsonl") for name in "ab"]
    folders = [("buffer.expert.storage=file", f"buffer.expert.path={tmp_path / name}") for name in "ab"]
    saved, other = (expert_data(config_of(*place)) for place in files)
    stored, elsewhere = (expert_data(config_of(*place)) for place in folders)
    for experts in (saved, stored):
        experts.read(1)
        experts.commit()
    saved.load_state_dict(saved.state_dict())
    with refuses("buffer.expert.dataset"):
        other.load_state_dict(saved.state_dict())
    with pytest.raises(StorageError, match=r"belongs to another buffer .* Give the path it was saved with"):
        elsewhere.load_state_dict(stored.state_dict())
    with refuses("buffer.expert.storage"):
        stored.load_state_dict(saved.state_dict())
    with refuses("buffer.expert.storage"):
        saved.load_state_dict(stored.state_dict())
    earlier = {name: value for name, value in saved.state_dict().items() if name != "source"}
    saved.load_state_dict(earlier)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("buffer.expert.per_step=0",), "algorithm.policy_loss"),
        (("algorithm.policy_loss=ppo",), "buffer.expert.per_step"),
        (("buffer.expert.per_step=-1",), "buffer.expert.per_step"),
        (("buffer.expert.storage=fille",), "buffer.expert.storage"),
        (("buffer.expert.storage=file",), "buffer.expert.storage"),
        (("buffer.expert.storage=sql", "buffer.expert.path=missing.db"), "buffer.expert.path"),
        (("buffer.expert.dataset.source=dataset",), "buffer.expert.dataset"),
        (("buffer.expert.dataset.path=only.jsonl",), "buffer.expert.dataset.path"),
        (of_dataset(Path("no.jsonl")), "buffer.expert.dataset.path"),
        (("buffer=file", "buffer.path=."), "buffer.expert"),
    ],
)
def test_what_cannot_work_is_refused(arguments: tuple[str, ...], key: str) -> None:
    with refuses(key):
        config_of(*arguments)


# One task at a time: the transformers engine decodes what waits together, and a batch's rows round by their number.
RUN = ("+recipe=mix", *SMALL, "engine=transformers", "explorer.runner_per_model=1", "buffer.keep=true")
RUN += ("optimizer.lr=1e-3", "buffer.expert.per_step=3")


def test_a_resumed_run_goes_on_with_the_next_expert_data(run_train: RunTrain, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    path = write_lines(tmp_path / "expert.jsonl", [{"prompt": f"{i}?", "answer": str(i)} for i in range(7)])
    arguments = (*RUN, *of_dataset(path))
    for folder, steps in ((whole, (("steps=4",))), (parts, ("steps=2",)), (parts, ("steps=4", "ckpt_path=last"))):
        folder.mkdir(exist_ok=True)
        done = run_train(folder, *arguments, *([steps] if isinstance(steps, str) else steps))
        assert done.returncode == 0, done.stdout[-4000:]
    runs = [next(folder.glob("outputs/mix/*")) for folder in (whole, parts)]
    responses = [[e.response_text for e in read_experiences(run / "experiences") if is_expert(e)] for run in runs]
    assert responses[0] == responses[1]
    assert len(responses[0]) == 12
    assert set(responses[0][:7]) == set(map(str, range(7)))  # each once before one comes again
    weights = [load_file(run / "model" / "model.safetensors") for run in runs]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    with (runs[0] / "metrics.csv").open() as file:
        losses = [float(row["actor/sft_loss"]) for row in csv.DictReader(file) if row["actor/sft_loss"]]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    write_lines(path, [{"prompt": f"{i}?", "answer": "1"} for i in range(7)])
    refused = run_train(parts, *arguments, "steps=5", "ckpt_path=last")
    assert refused.returncode == 2
    assert "buffer.expert.dataset: " in refused.stdout
    assert "have changed" in refused.stdout

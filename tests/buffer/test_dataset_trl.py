"""TRL's DPOTrainer and SFTTrainer are oracles: the same dataset has the same loss and gradient of every weight."""

import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from support.dataset import GENERATION, assistant, user
from support.policy import Gradients, assert_same_gradients, batch_of, fit, load_plain, moved_policy, naive_gradients

from trinity_lightning.buffer.dataset import Example
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.trainer.policy import PolicyModule

# TRL also trains on what a template writes behind the end token of a completion, such as a newline, which no rollout
# has: the two are compared on a template that writes its newlines before a turn.
BETWEEN = GENERATION.replace("{{ '\n' }}", "").replace(
    "{{ '<|im_start|>'", "{{ ('' if loop.first else '\n') + '<|im_start|>'", 1
)
BETWEEN = BETWEEN.replace("{{ '<|im_start|>assistant", "{{ '\n<|im_start|>assistant")
WORDS = ("one", "twenty two", "3", "fo ur", "5 and 6", "7")


def settings(folder: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 6,
        "disable_tqdm": True,
        "max_length": None,
    }


def of_trl(trainer: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole dataset as one batch."""
    model = trainer.model.train()
    loss = trainer.compute_loss(model, next(iter(trainer.get_train_dataloader())))
    return float(loss), naive_gradients(model, loss)


def of_ours(policy: PolicyModule, examples: list[Any]) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    seen = Gradients()
    trainer = fit(policy, [batch_of(examples)], seen)
    return seen.losses[0], seen.steps[0], {name: float(value) for name, value in trainer.logged_metrics.items()}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's imports and set-up warn of matters that are not ours
        yield


def pairs(kind: str) -> list[dict[str, Any]]:
    texts = [{"prompt": f"say {i}:", "chosen": word, "rejected": word[::-1] + "?"} for i, word in enumerate(WORDS)]
    chats = [
        {
            "prompt": [user(text["prompt"])],
            "chosen": [assistant(text["chosen"])],
            "rejected": [assistant(text["rejected"])],
        }
        for text in texts
    ]
    implicit = [{name: [*chat["prompt"], *chat[name]] for name in ("chosen", "rejected")} for chat in chats]
    return {"text": texts, "chat": chats, "implicit": implicit}[kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("text", {"loss_type": "sigmoid", "beta": 0.1}),
        ("chat", {"loss_type": "ipo", "beta": 0.2}),
        ("implicit", {"loss_type": "hinge", "beta": 0.5}),
    ],
)
def test_dpo_equals_trl(kind, arguments, tmp_path):
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    entries, tokenizer = pairs(kind), load_tokenizer("tiny")
    tokenizer.chat_template = BETWEEN
    policy = moved_policy(policy_loss={"name": "dpo", "args": arguments})
    model = load_plain()
    model.load_state_dict(policy.policy.state_dict())
    theirs = {"loss_type": [arguments["loss_type"]], "beta": arguments["beta"]}
    trainer = DPOTrainer(
        model=model,
        ref_model=load_plain(),
        args=DPOConfig(**settings(tmp_path), **theirs),
        train_dataset=Dataset.from_list(entries),
        processing_class=tokenizer,
    )
    loss, gradients = of_trl(trainer)
    our_loss, our_gradients, metrics = of_ours(policy, [Example(tokenizer, entry).pair() for entry in entries])
    assert our_loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(our_gradients, gradients)
    measured = {name: values[0] for name, values in trainer._metrics["train"].items() if "rewards/" in name}
    assert len(measured) == 4
    assert {name: metrics[f"actor/{name}"] for name in measured} == pytest.approx(measured, rel=1e-4, abs=1e-5)


def responses(kind: str) -> list[dict[str, Any]]:
    texts = [{"prompt": f"say {i}:", "completion": word} for i, word in enumerate(WORDS)]
    chats = [{"prompt": [user(e["prompt"])], "completion": [assistant(e["completion"])]} for e in texts]
    turns = [{"messages": [*e["prompt"], *e["completion"]] * (1 + i % 3)} for i, e in enumerate(chats)]
    return {"text": texts, "chat": chats, "turns": turns, "whole": [{"text": word} for word in WORDS]}[kind]


@pytest.mark.parametrize("kind", ["text", "chat", "turns", "whole"])
def test_sft_equals_trl(kind, tmp_path):
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    entries, tokenizer, marking = responses(kind), load_tokenizer("tiny"), load_tokenizer("tiny")
    marking.chat_template = BETWEEN
    tokenizer.chat_template = re.sub(r"{% (end)?generation %}", "", BETWEEN)
    policy = moved_policy(policy_loss="sft")
    model = load_plain()
    model.load_state_dict(policy.policy.state_dict())
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**settings(tmp_path), assistant_only_loss=kind == "turns"),
        train_dataset=Dataset.from_list(entries),
        processing_class=marking,
    )
    loss, gradients = of_trl(trainer)
    our_loss, our_gradients, _ = of_ours(policy, [Example(tokenizer, entry).response() for entry in entries])
    assert our_loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(our_gradients, gradients)


# -- the tokens themselves, and which are trained on -------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}
MOODY = BETWEEN.replace("{% for", "{{ mood }}{{ tools | length if tools else '' }}{% for", 1)


def asked(i: int, *turns: str) -> list[dict[str, str]]:
    """A conversation that begins with a question, and goes on with these turns."""
    return [user(f"say {i}"), *((assistant, user)[place % 2](text) for place, text in enumerate(turns))]


# By format: entries as a dataset has them, and whether TRL is to train on the assistant's turns alone.
PREFERENCES: dict[str, list[dict[str, Any]]] = {
    "text": [{"prompt": "2+2=", "chosen": "4", "rejected": "five"}, {"prompt": "a", "chosen": "b", "rejected": ""}],
    "text with an implicit prompt": [{"chosen": "Is it so? yes", "rejected": "Is it so? no"}],
    "messages": [{"prompt": asked(1), "chosen": [assistant("1")], "rejected": [assistant("2")]}],
    "messages with an implicit prompt": [{"chosen": asked(1, "a", "b", "1"), "rejected": asked(1, "a", "b", "2")}],
    "messages of which one conversation begins with the other": [
        {"chosen": asked(1, "a"), "rejected": asked(1, "a", "b", "c")},
        {"chosen": asked(1, "a", "b", "c"), "rejected": asked(1, "a")},
    ],
    "text of which one begins with the other": [{"chosen": "6 times 7? 42", "rejected": "6 times 7? 42, or 43"}],
    "an empty turn in the prompt": [{"chosen": asked(1, "", "b", "1"), "rejected": asked(1, "", "b", "2")}],
    "several turns behind the prompt": [
        {"prompt": asked(1), "chosen": asked(2, "1", "why?", "so")[1:], "rejected": asked(2, "2", "why?", "no")[1:]}
    ],
    "tools": [{"prompt": asked(1), "chosen": [assistant("1")], "rejected": [assistant("2")], "tools": [TOOL]}],
    "tools as JSON": [
        {"prompt": asked(1), "chosen": [assistant("1")], "rejected": [assistant("2")], "tools": json.dumps([TOOL])}
    ],
    "variables": [
        {
            "prompt": asked(1),
            "chosen": [assistant("1")],
            "rejected": [assistant("2")],
            "chat_template_kwargs": {"mood": "calm"},
        }
    ],
}
IMITATED: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "text": ([{"text": "once"}, {"text": "twice<|im_end|>"}], False),
    "prompt and completion": ([{"prompt": "2+2=", "completion": "4"}], False),
    "messages behind a prompt": ([{"prompt": asked(1), "completion": [assistant("1")]}], False),
    "several turns behind a prompt": ([{"prompt": asked(1), "completion": asked(2, "1", "why?", "so")[1:]}], False),
    "messages": ([{"messages": asked(1, "a", "b", "c")}, {"messages": asked(2, "d", "e")}], True),
    "from and value": (
        [{"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]}],
        True,
    ),
    "tools": ([{"messages": asked(1, "a"), "tools": [TOOL]}], True),
    "variables": ([{"messages": asked(1, "a"), "chat_template_kwargs": {"mood": "calm"}}], True),
}


def prepared(kind: Any, rows: Any, tokenizer: Any, **settings: Any) -> Any:
    """The dataset as a trainer of TRL prepares it for training, made without the trainer."""
    bare = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss="prompt" in rows.column_names)
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, dataset_text_field="text", shuffle_dataset=False)
    args.__dict__.update(settings)
    more = {"packing": False, "formatting_func": None} if "assistant_only_loss" in settings else {}
    return kind._prepare_dataset(bare, rows, tokenizer, args, dataset_name="train", **more)


@pytest.fixture
def moody() -> Any:
    """A tokenizer whose chat template shows tools and variables, and marks what the assistant writes."""
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = MOODY
    return tokenizer


@pytest.mark.parametrize("form", PREFERENCES)
def test_pairs_have_the_tokens_that_trl_gives_them(form: str, moody: Any) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    rows: Any = Dataset.from_list(PREFERENCES[form])
    for entry, theirs in zip(rows, prepared(DPOTrainer, rows, moody), strict=True):
        ours: Any = Example(moody, entry).pair()
        for part in ("chosen", "rejected"):
            assert [ours.tokens.tolist(), getattr(ours, part).tolist()] == [theirs["prompt_ids"], theirs[f"{part}_ids"]]


def assert_imitated_as_by_trl(entries: list[dict[str, Any]], assistant_only: bool, tokenizer: Any) -> None:
    from trl.trainer.sft_trainer import SFTTrainer

    rows: Any = Dataset.from_list(entries)
    for entry, theirs in zip(
        rows, prepared(SFTTrainer, rows, tokenizer, assistant_only_loss=assistant_only), strict=True
    ):
        ours: Any = Example(tokenizer, entry).response()
        assert ours.tokens.tolist() == theirs["input_ids"]
        trained = [False] * ours.prompt_length + ours.action_mask.tolist()
        learned = [label != -100 for label in theirs["labels"]]
        if assistant_only:  # newlines that the prompt of rollouts has already, and those behind an end token
            end, newline = tokenizer.encode("<|im_end|>\n")
            pairs = zip(theirs["input_ids"], [False, *learned], [None, *theirs["input_ids"]], strict=False)
            apart = [token == newline and (before == end or not marked) for token, marked, before in pairs]
            learned = [marked and not no for marked, no in zip(learned, apart, strict=True)]
        assert trained[1:] == learned[1:]  # no token predicts the first


@pytest.mark.parametrize("form", IMITATED)
def test_what_is_imitated_has_the_tokens_and_the_mask_that_trl_gives_it(form: str, moody: Any) -> None:
    assert_imitated_as_by_trl(*IMITATED[form], moody)


def test_calls_of_tools_are_rendered_as_by_trl(moody: Any) -> None:
    moody.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5_training.jinja").read_text()
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": number}}} for number in (1, 2)]
    turns = [{"role": "assistant", "tool_calls": [call]} for call in calls]
    results = [{"role": "tool", "content": "2"}, {"role": "tool", "content": "3"}]
    talk = [message for pair in zip(turns, results, strict=True) for message in pair]
    messages = [*asked(1), *talk, assistant("2 and 3")]
    assert_imitated_as_by_trl([{"messages": messages, "tools": [TOOL]}], True, moody)

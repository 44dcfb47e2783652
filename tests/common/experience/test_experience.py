"""Experiences check every field, derive type and mask, compare by value, and are grouped by their identity."""

import ast
import copy
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trinity_lightning.common.experience import EID, Experience, ExperienceError, group_by

FIELDS = ["eid", "tokens", "prompt_length", "logprobs", "reward", "token_level_reward", "advantages", "returns"]
FIELDS += ["truncate_status", "info", "metrics", "response_text", "prompt_text", "action_mask", "messages", "tools"]
FIELDS += ["chosen", "rejected", "chosen_messages", "rejected_messages", "multi_modal_inputs", "teacher_logprobs"]
FIELDS += ["custom_fields"]
PER_TOKEN = ["logprobs", "token_level_reward", "advantages", "returns", "teacher_logprobs"]


def mask_of(experience: Experience) -> list[bool]:
    assert experience.action_mask is not None
    assert experience.action_mask.dtype == torch.bool
    return experience.action_mask.tolist()


def test_fields_and_constructor_are_those_of_the_contract():
    assert [field.name for field in dataclasses.fields(Experience)] == FIELDS
    parameters = inspect.signature(Experience).parameters
    assert set(parameters) == set(FIELDS)
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    defaults = {name: p.default for name, p in parameters.items() if p.default is not None}
    assert defaults == {"tokens": inspect.Parameter.empty, "prompt_length": 1}


def test_single_turn():
    experience = Experience(tokens=[1, 2, 3, 4], prompt_length=1, reward=1)
    assert experience.experience_type == "single_turn"
    assert mask_of(experience) == [True, True, True]
    assert experience.info == {}
    assert experience.metrics == {}
    assert experience.custom_fields == []


def test_truncated_prompt_takes_its_length_from_logprobs():
    experience = Experience(
        tokens=[1, 2, 3], prompt_length=3, logprobs=[0.0, 0.0], advantages=[1, 2], truncate_status="prompt_truncated"
    )
    assert experience.experience_type == "single_turn"
    assert mask_of(experience) == [False, False]
    with pytest.raises(ExperienceError, match="logprobs"):
        Experience(tokens=[1, 2, 3], truncate_status="prompt_truncated")


def test_multi_turn_may_have_an_empty_response():
    assert Experience(tokens=[1, 2], prompt_length=2, action_mask=[]).experience_type == "multi_turn"
    assert mask_of(Experience(tokens=[1, 2], prompt_length=0, action_mask=[1, 0])) == [True, False]


def test_preference_pair():
    experience = Experience(tokens=[1, 2, 3], chosen=[4], rejected=[5, 6])
    assert experience.experience_type == "dpo"
    assert experience.prompt_length == 3
    assert experience.action_mask is None


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_lists_become_tensors_of_fixed_dtypes(make):
    experience = Experience(
        tokens=make([1, 2, 3]), prompt_length=1, action_mask=make([1, 0]), **{name: make([1, 2]) for name in PER_TOKEN}
    )
    assert experience.tokens.dtype == torch.int32
    assert experience.action_mask is not None
    assert experience.action_mask.dtype == torch.bool
    assert {getattr(experience, name).dtype for name in PER_TOKEN} == {torch.float32}
    pair = Experience(tokens=make([1]), chosen=make([2]), rejected=make([3]))
    assert pair.chosen is not None
    assert pair.chosen.dtype == torch.int32


def test_tensors_keep_their_dtype_and_identity():
    tokens, logprobs = torch.arange(3), torch.zeros(2, dtype=torch.bfloat16)
    experience = Experience(tokens=tokens, logprobs=logprobs)
    assert experience.tokens is tokens
    assert experience.logprobs is logprobs


def test_multi_modal_values_become_tensors():
    experience = Experience(tokens=[1, 2], multi_modal_inputs={"a": [[1, 2]], "b": np.ones(2)})
    assert experience.multi_modal_inputs is not None
    assert experience.multi_modal_inputs["a"].shape == (1, 2)
    assert experience.multi_modal_inputs["b"].dtype == torch.float64


@pytest.mark.parametrize("reward", [torch.tensor(0.5), np.float32(0.5), np.array(0.5), 0.5])
def test_rewards_become_floats(reward):
    experience = Experience(tokens=[1, 2], reward=reward)
    assert type(experience.reward) is float
    assert experience.reward == 0.5


def test_eid_is_fresh_or_made_of_a_dict():
    assert Experience(tokens=[1, 2]).eid != Experience(tokens=[1, 2]).eid
    eid = EID(batch=3, suffix="x")
    assert Experience(tokens=[1, 2], eid=eid).eid is eid
    assert Experience(tokens=[1, 2], eid=eid.to_dict()).eid == eid


BAD = {
    "tokens": [None, 5, "ab", [1.5, 2.0], [[1, 2]], [[1], [2, 3]], [1, 2**31], torch.zeros(3), torch.ones(2, 2)],
    "prompt_length": [0, -1, 3, 4, 1.0, True, "1", None, float("inf"), float("nan")],
    "logprobs": [[0.0], torch.zeros(3), torch.zeros(2, 1), ["a", "b"], 1.0],
    "advantages": [[0.0], [None, 1.0]],
    "returns": [np.zeros(3)],
    "token_level_reward": [[1.0, 2.0, 3.0]],
    "teacher_logprobs": [{}],
    "action_mask": [[True], [0, 2], [[True, False]], torch.ones(3, dtype=torch.bool)],
    "reward": ["1", [1.0], torch.ones(1), 1j, 10**400],
    "info": [[], "x"],
    "metrics": [[("a", 1)]],
    "eid": ["1/2", 5, {"run_id": 1}],
    "chosen": [[1.0], 3],
    "rejected": ["abc"],
    "truncate_status": [True],
    "prompt_text": [b"bytes"],
    "response_text": [5],
    "messages": ["hello", {"role": "user"}],
    "tools": [5],
    "multi_modal_inputs": [[torch.ones(2)], {"a": "text"}, {1: torch.ones(1)}],
    "custom_fields": [["name"], "name"],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_every_field_is_checked_and_named(field, value):
    with pytest.raises(ExperienceError) as error:
        Experience(**{"tokens": [1, 2, 3], "prompt_length": 1, field: value})
    assert field in str(error.value)


def test_errors_name_the_experience():
    with pytest.raises(ExperienceError, match=r"7/8/0/0/x.*logprobs.*2.*1"):
        Experience(eid=EID(7, 8, suffix="x"), tokens=[1, 2, 3], logprobs=[0.0])


def test_validation_does_not_depend_on_asserts():
    for path in Path(inspect.getfile(Experience)).parent.glob("*.py"):
        assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]


def test_equality_is_by_field_and_nan_equals_nan():
    experience = Experience(tokens=[1, 2, 3], logprobs=[float("nan"), 1.0], info={"a": [torch.ones(2), np.ones(2)]})
    twin = copy.deepcopy(experience)
    assert experience == twin
    for change in (
        {"logprobs": torch.tensor([float("nan"), 2.0])},
        {"logprobs": torch.tensor([float("nan"), 1.0], dtype=torch.float64)},
        {"logprobs": None},
        {"info": {"a": [torch.zeros(2), np.ones(2)]}},
        {"info": {"a": [torch.ones(2), np.ones(2, dtype=np.float32)]}},
        {"reward": float("nan")},
    ):
        other = copy.copy(experience)
        vars(other).update(change)
        assert experience != other
    assert experience != "experience"
    with pytest.raises(TypeError, match="unhashable"):
        hash(experience)


def test_asdict_works():
    assert dataclasses.asdict(Experience(tokens=[1, 2], reward=2.0))["reward"] == 2.0


def test_to_dict_leaves_out_what_is_none():
    eid = EID(1, 2, 3, 4, "x")
    experience = Experience(eid=eid, tokens=[1, 2, 3], prompt_length=2, info={"a": 1}, metrics={"b": 2.0})
    short = {
        "eid": eid.to_dict(),
        "type": "single_turn",
        "prompt_length": 2,
        "response_length": 1,
        "info": {"a": 1},
        "metrics": {"b": 2.0},
    }
    assert experience.to_dict() == short
    optional = {
        "prompt_text": "p",
        "response_text": "r",
        "messages": [{"role": "user"}],
        "tools": [],
        "chosen_messages": [],
        "rejected_messages": [],
        "reward": 1.0,
        "truncate_status": "response_truncated",
    }
    full = Experience(eid=eid, tokens=[1, 2, 3], prompt_length=2, info={"a": 1}, metrics={"b": 2.0}, **optional)
    assert full.to_dict() == short | optional


def test_identifiers_of_an_eid():
    eid = EID(batch=1, task=2, run=3, step=4, suffix="abc123")
    assert eid.uid == str(eid) == "1/2/3/4/abc123"
    assert (eid.sid, eid.rid, eid.tid) == ("1/2/4", "1/2/3", "1/2")
    assert repr(eid) == "EID(batch=1, task=2, run=3, step=4, uuid=abc123)"
    assert eid.to_dict() == {"batch": 1, "task": 2, "run": 3, "step": 4, "suffix": "abc123"}
    assert EID(**eid.to_dict()) == eid


def test_default_suffixes_are_12_hex_digits_and_do_not_collide():
    suffixes = {EID().suffix for _ in range(20_000)}
    assert len(suffixes) == 20_000
    assert all(len(suffix) == 12 and int(suffix, 16) >= 0 for suffix in suffixes)


def test_groups_keep_the_order_of_first_appearance():
    eids = [EID(1, "b", 0, 1), EID(1, "a", 0, 0), EID(1, "b", 1, 1), EID(1, "b", 0, 0)]
    experiences = [Experience(eid=eid, tokens=[1, 2]) for eid in eids]
    first, other, second, third = experiences
    assert list(group_by(experiences, "task").items()) == [("1/b", [first, second, third]), ("1/a", [other])]
    assert list(group_by(experiences, "run").items()) == [
        ("1/b/0", [first, third]),
        ("1/a/0", [other]),
        ("1/b/1", [second]),
    ]
    assert list(group_by(experiences, "step")) == ["1/b/1", "1/a/0", "1/b/0"]
    assert group_by([], "task") == {}


def test_unknown_identifier():
    kind: Any = "batch"
    with pytest.raises(ValueError, match=r"'batch'.*task, run, step"):
        group_by([], kind)

import copy
from typing import Any

import pytest
import torch

from trinity_lightning.common.experience import (
    EID,
    CustomField,
    Experience,
    ExperienceError,
    gather_experiences,
)

MASK = CustomField("is_expert", "expert_mask", torch.bool)


def _single(suffix: str, tokens: int, prompt: int, **fields: Any) -> Experience:
    return Experience(eid=EID(suffix=suffix), tokens=list(range(tokens)), prompt_length=prompt, **fields)


def test_a_padded_batch():
    first = _single("a", 5, 2, reward=1.0, logprobs=[1, 2, 3], advantages=[1, 1, 1])
    second = _single("b", 6, 4, reward=2.0, logprobs=[4, 5], advantages=[2, 2])
    batch = gather_experiences([first, second], pad_token_id=99)
    assert batch.batch_size == 2
    assert batch.prompt_length == 4
    assert batch.eids == [first.eid, second.eid]
    assert batch.tokens.tolist() == [[99, 99, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 99]]
    assert batch.attention_masks.sum().item() == 11
    assert batch.action_masks.tolist() == [[True] * 3, [True, True, False]]
    assert batch.rewards is not None
    assert batch.rewards.dtype == torch.float32
    assert batch["rewards"].tolist() == [1.0, 2.0]
    assert batch["logprobs"].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch["advantages"].tolist() == [[1, 1, 1], [2, 2, 0]]
    for name in ("returns", "token_level_rewards", "teacher_logprobs", "multi_modal_inputs"):
        assert batch[name] is None


def test_custom_fields_are_attributes_and_keys():
    experiences = [_single(str(i), 3, 1, info={"is_expert": i == 1, "weight": i}, custom_fields=[MASK]) for i in (0, 1)]
    batch = gather_experiences(experiences, 0)
    assert batch.expert_mask is batch["expert_mask"]
    assert batch.expert_mask.tolist() == [False, True]
    assert batch.expert_mask.dtype == torch.bool
    given = gather_experiences(experiences, 0, custom_fields=[CustomField("weight", "weights", torch.float64)])
    assert given.weights.tolist() == [0.0, 1.0]
    assert given.weights.dtype == torch.float64
    assert copy.deepcopy(given).weights.tolist() == [0.0, 1.0]
    with pytest.raises(AttributeError, match=r"no field 'expert_mask'. Custom fields: \['weights'\]"):
        _ = given.expert_mask
    with pytest.raises(KeyError, match="expert_mask"):
        _ = given["expert_mask"]


def test_preference_pairs_are_split_first():
    pair = Experience(tokens=[1, 2], chosen=[3], rejected=[4, 5], reward=1.0, eid=EID(4, 5))
    batch = gather_experiences([pair], 0)
    assert batch.tokens.tolist() == [[1, 2, 3, 0], [1, 2, 4, 5]]
    assert batch.prompt_length == 2
    assert [eid.tid for eid in batch.eids] == ["4/5", "4/5"]


def test_a_truncated_prompt_is_padded_like_the_others():
    cut = _single("cut", 3, 3, logprobs=[0.0, 0.0], truncate_status="prompt_truncated")
    batch = gather_experiences([cut, _single("b", 4, 2, logprobs=[1, 2])], 9)
    assert batch.tokens.tolist() == [[0, 1, 2, 9, 9], [9, 0, 1, 2, 3]]
    assert batch.action_masks.tolist() == [[False, False], [True, True]]


FAILURES = {
    "empty": ([], "empty list"),
    "mixed types": (
        [_single("a", 3, 1), Experience(tokens=[1], chosen=[2], rejected=[3])],
        "pairs only or none, got 1",
    ),
    "some rewards": ([_single("a", 3, 1, reward=1.0), _single("b", 3, 1)], "reward: .*/a has it, .*/b does not"),
    "some logprobs": (
        [_single("a", 3, 1), _single("b", 3, 1, logprobs=[0, 0])],
        "logprobs: .*/b has it, .*/a does not",
    ),
    "missing key": (
        [_single("a", 3, 1, custom_fields=[MASK], info={"other": 1})],
        r"/a: custom field 'expert_mask': expected the key 'is_expert' in info, got \['other'\]",
    ),
    "differing fields": (
        [_single("a", 3, 1, info={"is_expert": 1}, custom_fields=[MASK]), _single("b", 3, 1)],
        "/b: custom_fields: expected",
    ),
    "not a number": (
        [_single("a", 3, 1, custom_fields=[MASK], info={"is_expert": "yes"})],
        "custom field 'expert_mask'",
    ),
    "name taken": (
        [_single("a", 3, 1, info={"x": 1}, custom_fields=[CustomField("x", "tokens", torch.int64)])],
        "custom field 'tokens': the batch has a field of that name",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_is_no_batch_is_named(case):
    experiences, message = FAILURES[case]
    with pytest.raises(ExperienceError, match=message):
        gather_experiences(experiences, 0)

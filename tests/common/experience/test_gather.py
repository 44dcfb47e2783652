"""Experiences become padded tensors, field by field and as whole batches; bad ones are named."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_lightning.common.experience import (
    EID,
    CustomField,
    Experience,
    ExperienceError,
    gather_action_masks,
    gather_attention_masks,
    gather_experiences,
    gather_multi_modal_inputs,
    gather_response_attrs,
    gather_token_ids,
    split_dpo_experience_to_single_turn,
)

PAIR = [
    Experience(tokens=[0, 1, 2, 3, 4], prompt_length=2, eid=EID(suffix="first")),
    Experience(tokens=[0, 1, 2, 3, 4, 5], prompt_length=4, eid=EID(suffix="second")),
]


def test_worked_example():
    tokens = gather_token_ids(PAIR, 4, 4, 99)
    assert tokens.tolist() == [[99, 99, 0, 1, 2, 3, 4, 99], [0, 1, 2, 3, 4, 5, 99, 99]]
    assert tokens.dtype == torch.int32
    attention = gather_attention_masks(PAIR, 4, 4)
    assert attention.dtype == torch.bool
    assert attention.int().tolist() == [[0, 0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0, 0]]
    actions = gather_action_masks(PAIR, 4)
    assert actions.dtype == torch.bool
    assert actions.int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]


@st.composite
def ragged(draw: st.DrawFn) -> tuple[list[Experience], int, int]:
    sizes = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6))
    experiences = [
        Experience(
            tokens=list(range(prompt + response)),
            prompt_length=prompt,
            action_mask=[(prompt + i) % 2 for i in range(response)],
            logprobs=torch.arange(response, dtype=torch.float64) - 0.5,
        )
        for prompt, response in sizes
    ]
    width = [max(column) + draw(st.integers(0, 2)) for column in zip(*sizes, strict=True)]
    return experiences, width[0], width[1]


@settings(deadline=None, max_examples=100)
@given(ragged())
def test_agrees_with_padding_row_by_row(case: tuple[list[Experience], int, int]):
    experiences, prompt, response = case
    tokens, attention, actions, logprobs = [], [], [], []
    for e in experiences:
        size = len(e.tokens) - e.prompt_length
        left, right = [0] * (prompt - e.prompt_length), [0] * (response - size)
        tokens.append([-1] * len(left) + e.tokens.tolist() + [-1] * len(right))
        attention.append(left + [1] * len(e.tokens) + right)
        assert e.action_mask is not None
        assert e.logprobs is not None
        actions.append(e.action_mask.int().tolist() + right)
        logprobs.append(e.logprobs.tolist() + [7.5] * len(right))
    assert gather_token_ids(experiences, prompt, response, -1).tolist() == tokens
    assert gather_attention_masks(experiences, prompt, response).int().tolist() == attention
    assert gather_action_masks(experiences, response).int().tolist() == actions
    gathered = gather_response_attrs(experiences, "logprobs", response, 7.5)
    assert gathered.tolist() == logprobs
    assert gathered.dtype == torch.float64


def test_rows_are_copied_and_carry_no_gradient():
    logprobs = torch.zeros(2, requires_grad=True)
    gathered = gather_response_attrs([Experience(tokens=[1, 2, 3], logprobs=logprobs)], "logprobs", 2)
    assert not gathered.requires_grad
    assert gathered.data_ptr() != logprobs.data_ptr()


def test_integer_masks_become_booleans():
    experience = Experience(tokens=[1, 2, 3], action_mask=torch.tensor([1, 0]))
    assert gather_action_masks([experience], 3).tolist() == [[True, False, False]]


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_device_and_pinned_memory_are_accepted_without_a_gpu(device):
    tokens = gather_token_ids(PAIR, 4, 4, 0, device=device, pin_memory=True)
    attention = gather_attention_masks(PAIR, 4, 4, device=device, pin_memory=True)
    assert tokens.device.type == attention.device.type == "cpu"


def test_equal_rows_are_padded_alike():
    alike = [Experience(tokens=[1, 2, 3], prompt_length=1) for _ in range(3)]
    assert gather_token_ids(alike, 1, 2, 9).tolist() == [[1, 2, 3]] * 3
    assert gather_token_ids(alike, 2, 3, 9).tolist() == [[9, 1, 2, 3, 9]] * 3
    assert gather_attention_masks(alike, 2, 3).int().tolist() == [[0, 1, 1, 1, 0]] * 3


def test_multi_modal_inputs_are_concatenated():
    rows = [{"pixels": torch.full((n, 2), float(n)), "grid": torch.tensor([[1, n]])} for n in (1, 3)]
    batch = gather_multi_modal_inputs([Experience(tokens=[1, 2], multi_modal_inputs=row) for row in rows])
    assert batch["pixels"].tolist() == [[1, 1], [3, 3], [3, 3], [3, 3]]
    assert batch["grid"].tolist() == [[1, 1], [1, 3]]


def _with(suffix: str, **fields: Any) -> Experience:
    return Experience(tokens=[1, 2, 3], eid=EID(suffix=suffix), **fields)


def _gather_inputs(first: dict[str, Any], second: dict[str, Any] | None) -> None:
    gather_multi_modal_inputs([_with("first", multi_modal_inputs=first), _with("second", multi_modal_inputs=second)])


IMAGE, WIDER = {"image": torch.ones(1, 2)}, {"image": torch.ones(1, 3)}
MIXED = [_with("first"), Experience(tokens=torch.arange(3), eid=EID(suffix="second"))]
# A call that fails, and what the error names.
FAILURES = {
    "empty": (lambda: gather_token_ids([], 1, 1, 0), "empty"),
    "empty attention": (lambda: gather_attention_masks([], 1, 1), "empty"),
    "empty inputs": (lambda: gather_multi_modal_inputs([]), "empty"),
    "prompt": (lambda: gather_token_ids(PAIR, 3, 4, 0), "second.*3.*4"),
    "response": (lambda: gather_token_ids(PAIR, 4, 2, 0), "first.*2.*3"),
    "attention": (lambda: gather_attention_masks(PAIR, 3, 4), "second.*3.*4"),
    "actions": (lambda: gather_action_masks(PAIR, 2), "first.*action_mask.*2.*3"),
    "missing": (
        lambda: gather_response_attrs([_with("first", logprobs=[1, 2]), _with("second")], "logprobs", 2),
        "second.*logprobs.*float32.*None",
    ),
    "unknown": (lambda: gather_response_attrs(PAIR, "logprob", 4), "first.*logprob"),
    "dtypes": (lambda: gather_token_ids(MIXED, 2, 2, 0), "second.*tokens.*int32.*int64"),
    "no inputs": (lambda: _gather_inputs(IMAGE, None), "second.*image.*None"),
    "other inputs": (lambda: _gather_inputs(IMAGE, {"video": torch.ones(1)}), "second.*image.*video"),
    "shapes": (lambda: _gather_inputs(IMAGE, WIDER), r"image.*\(1, 2\), \(1, 3\)"),
    "input dtypes": (lambda: _gather_inputs(IMAGE, {"image": torch.ones(1, 2).double()}), "image.*float32.*float64"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_cannot_be_gathered_is_named(case):
    gather, named = FAILURES[case]
    with pytest.raises(ExperienceError, match=named):
        gather()


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
    chosen = gather_experiences(experiences, 0, custom_fields=[CustomField("weight", "weights", torch.float64)])
    assert chosen.weights.tolist() == [0.0, 1.0]
    assert chosen.weights.dtype == torch.float64
    assert copy.deepcopy(chosen).weights.tolist() == [0.0, 1.0]
    with pytest.raises(AttributeError, match=r"'expert_mask'.*'weights'"):
        _ = chosen.expert_mask
    with pytest.raises(KeyError, match="expert_mask"):
        _ = chosen["expert_mask"]


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


# Experiences that make no batch, and what the error names.
NO_BATCH = {
    "empty": ([], "empty"),
    "mixed types": ([_single("a", 3, 1), Experience(tokens=[1], chosen=[2], rejected=[3])], "1 among 2"),
    "some rewards": ([_single("a", 3, 1, reward=1.0), _single("b", 3, 1)], "reward.*/a.*/b"),
    "some logprobs": ([_single("a", 3, 1), _single("b", 3, 1, logprobs=[0, 0])], "logprobs.*/b.*/a"),
    "missing key": (
        [_single("a", 3, 1, custom_fields=[MASK], info={"other": 1})],
        "/a.*'expert_mask'.*'is_expert'.*'other'",
    ),
    "differing fields": (
        [_single("a", 3, 1, info={"is_expert": 1}, custom_fields=[MASK]), _single("b", 3, 1)],
        "/b.*custom_fields",
    ),
    "not a number": ([_single("a", 3, 1, custom_fields=[MASK], info={"is_expert": "yes"})], "'expert_mask'"),
    "name taken": (
        [_single("a", 3, 1, info={"x": 1}, custom_fields=[CustomField("x", "tokens", torch.int64)])],
        "'tokens'",
    ),
}


@pytest.mark.parametrize("case", NO_BATCH)
def test_what_is_no_batch_is_named(case):
    experiences, named = NO_BATCH[case]
    with pytest.raises(ExperienceError, match=named):
        gather_experiences(experiences, 0)


def test_masks_are_in_host_memory_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        masks = gather_attention_masks([_single("a", 4, 2), _single("b", 3, 2)], 4, 4)
    assert masks.device.type == "cpu"
    assert masks.tolist()[1] == [False, False, True, True, True, False, False, False]


@pytest.mark.parametrize("length", [1.9, 2**70])
def test_a_prompt_length_that_was_made_impossible_is_named(length: float) -> None:
    bad = _single("a", 4, 2)
    bad.prompt_length = length  # type: ignore[assignment]
    for gather in (
        lambda: gather_token_ids([_single("b", 4, 2), bad], 4, 4, 0),
        lambda: gather_attention_masks([bad], 4, 4),
    ):
        with pytest.raises(ExperienceError, match=f"{bad.eid.uid}.*prompt_length"):
            gather()


# -- preference pairs --------------------------------------------------------------------------------------------------


def test_a_pair_becomes_two_single_turns():
    custom = [CustomField("a", "b", torch.int64)]
    pair = Experience(
        eid=EID(1, 2, 3, 4),
        tokens=[1, 2],
        chosen=[3, 4],
        rejected=[5],
        chosen_messages=[{"content": "good"}],
        rejected_messages=[{"content": "bad"}],
        reward=0.5,
        info={"a": 1},
        metrics={"m": 2.0},
        prompt_text="p",
        tools=[{"name": "t"}],
        multi_modal_inputs={"x": torch.ones(1)},
        custom_fields=custom,
    )
    singles = split_dpo_experience_to_single_turn([pair, pair])
    assert [single.tokens.tolist() for single in singles] == [[1, 2, 3, 4], [1, 2, 5]] * 2
    assert len({single.eid.suffix for single in singles} | {pair.eid.suffix}) == 5
    for single, messages in zip(singles, [pair.chosen_messages, pair.rejected_messages] * 2, strict=True):
        assert single.experience_type == "single_turn"
        assert single.prompt_length == 2
        assert (single.eid.rid, single.eid.step) == ("1/2/3", 4)
        assert (single.reward, single.info, single.metrics) == (0.5, {"a": 1}, {"m": 2.0})
        assert (single.prompt_text, single.messages, single.tools) == ("p", messages, pair.tools)
        assert single.multi_modal_inputs == pair.multi_modal_inputs
        assert single.custom_fields == custom
    singles[0].info["a"] = 5
    assert singles[1].info == pair.info == {"a": 1}


@pytest.mark.parametrize(("name", "missing"), [("chosen", "rejected"), ("rejected", "chosen")])
def test_half_a_pair_cannot_be_split(name, missing):
    fields: dict[str, Any] = {name: [3]}
    half = Experience(tokens=[1, 2], **fields)
    with pytest.raises(ExperienceError, match=missing):
        split_dpo_experience_to_single_turn([half])

from typing import Any

import pytest
import torch

from trinity_lightning.common.experience import (
    EID,
    CustomField,
    Experience,
    ExperienceError,
    group_by,
    split_dpo_experience_to_single_turn,
)


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
    with pytest.raises(ValueError, match=r"unknown id_type 'batch'. Known: task, run, step"):
        group_by([], kind)


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


@pytest.mark.parametrize(("given", "missing"), [("chosen", "rejected"), ("rejected", "chosen")])
def test_half_a_pair_cannot_be_split(given, missing):
    fields: dict[str, Any] = {given: [3]}
    half = Experience(tokens=[1, 2], **fields)
    with pytest.raises(ExperienceError, match=f"{missing}: expected token ids to split"):
        split_dpo_experience_to_single_turn([half])

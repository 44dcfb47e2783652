"""Experiences come back from rows of a dataset as they were, and people can read the rows."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.experiences import experiences, sample
from support.tiers import examples

from trinity_lightning.common.experience import (
    EID,
    Experience,
    ExperienceError,
    ExperienceFormatError,
    from_hf_datasets,
    to_hf_datasets,
)

datasets = pytest.importorskip("datasets")


@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(experiences(), max_size=3))
def test_everything_comes_back(batch: list[Experience]):
    again = from_hf_datasets(to_hf_datasets(batch))
    assert again == batch
    assert [repr(e.info) for e in again] == [repr(e.info) for e in batch]


def test_readable_columns():
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    experience = Experience(
        eid=EID(3, "4", 1, 0, "x"),
        tokens=[1, 2, 3],
        prompt_length=1,
        logprobs=[-0.5, -1.0],
        reward=1.0,
        prompt_text="2 + 2?",
        response_text="4",
        messages=chat,
        info={"model_version": 2},
    )
    table: Any = to_hf_datasets([experience]).to_pandas()
    row = table.iloc[0]
    assert row["tokens"].tolist() == [1, 2, 3]
    assert row["logprobs"].tolist() == [-0.5, -1.0]
    assert row["reward"] == 1.0
    assert (row["prompt_text"], row["response_text"]) == ("2 + 2?", "4")
    assert list(row["messages"]) == chat
    assert row["info"] == '{"model_version": 2}'
    assert row["eid"] == {"batch": "3", "task": "4", "run": 1, "step": 0, "suffix": "x"}


def test_edited_columns_are_read():
    dataset = to_hf_datasets([Experience(tokens=[1, 2], reward=1.0)]).map(lambda row: {"reward": row["reward"] + 1})
    assert [e.reward for e in from_hf_datasets(dataset)] == [2.0]


@pytest.mark.parametrize("ids", [(1, "1"), ("a", 0), ("", -5), ("01", "1/eval"), (2**70, "+1")])
def test_ids_keep_their_types(ids):
    batch = [Experience(eid=EID(*ids), tokens=[1, 2])]
    if ids[0] == 2**70:
        with pytest.raises(ExperienceError, match="64 bits"):
            to_hf_datasets(batch)
    else:
        assert from_hf_datasets(to_hf_datasets(batch)) == batch


def test_rows_stand_alone(tmp_path):
    batch = [*sample(), Experience(tokens=torch.arange(3), returns=torch.ones(2).double(), info={"a": np.ones(2)})]
    dataset = to_hf_datasets(batch)
    assert from_hf_datasets(dataset.select([2, 0])) == [batch[2], batch[0]]
    order = np.random.default_rng(0).permutation(len(batch))
    assert from_hf_datasets(dataset.select(order)) == [batch[i] for i in order]
    assert len(from_hf_datasets(dataset.shuffle(seed=0))) == len(batch)
    both = datasets.concatenate_datasets([dataset, to_hf_datasets([]), to_hf_datasets(batch[:1])])
    assert from_hf_datasets(both) == [*batch, batch[0]]
    dataset.save_to_disk(tmp_path / "disk")
    assert from_hf_datasets(datasets.load_from_disk(tmp_path / "disk")) == batch
    dataset.to_parquet(tmp_path / "rows.parquet")
    loaded = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache"))
    assert from_hf_datasets(loaded) == batch
    assert from_hf_datasets(dataset.with_format("torch")) == batch


def test_foreign_datasets_and_edited_lengths_are_errors():
    with pytest.raises(ExperienceError, match="'eid'"):
        from_hf_datasets(datasets.Dataset.from_dict({"tokens": [[1, 2]]}))
    dataset = to_hf_datasets([Experience(tokens=[1, 2, 3], logprobs=[0, 0])])
    with pytest.raises(ExperienceError, match="logprobs"):
        from_hf_datasets(dataset.map(lambda row: {"logprobs": [0.0]}))


@pytest.mark.parametrize(
    "change",
    [{"exact": b"TRXP"}, {"info": "{"}, {"custom_fields": "[[1]]"}, {"tokens": None}, {"custom_fields": "[5]"}],
)
def test_damaged_cells_are_refused(change):
    dataset = to_hf_datasets([Experience(tokens=[1, 2, 3])])
    damaged = datasets.Dataset.from_list([dataset[0] | change], features=dataset.features)
    with pytest.raises((ExperienceFormatError, ExperienceError)):
        from_hf_datasets(damaged)


@pytest.mark.parametrize(
    ("change", "cell"),
    [
        ({"experience_type": "nonsense"}, "'nonsense'"),
        ({"experience_type": None}, "None"),
        ({"experience_type": "dpo"}, "'dpo'"),
        ({"experience_type": "multi_turn", "action_mask": None}, "'multi_turn'"),
        ({"action_mask": None}, "'single_turn'"),
    ],
)
def test_a_type_that_the_other_cells_do_not_fit_is_refused(change: dict[str, Any], cell: str):
    dataset = to_hf_datasets([Experience(eid=EID(1, 2), tokens=[1, 2, 3])])
    edited = datasets.Dataset.from_list([dataset[0] | change], features=dataset.features)
    with pytest.raises(ExperienceFormatError, match=f"1/2/.*experience_type.*{cell}"):
        from_hf_datasets(edited)


def test_what_cannot_be_encoded_is_named():
    with pytest.raises(ExperienceError, match=r"1/2/.*info.*object"):
        to_hf_datasets([Experience(eid=EID(1, 2), tokens=[1, 2], info={"x": object()})])

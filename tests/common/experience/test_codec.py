"""Experiences come back from a payload as they were; what cannot be written is named."""

import copy
import dataclasses
import enum
import json
import struct
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.experiences import experiences, fixed, sample
from support.tiers import examples

from trinity_lightning.common.experience import EID, CustomField, Experience, ExperienceError, ExperienceFormatError
from trinity_lightning.common.experience.codec import COLUMN_TYPES, TENSOR_FIELDS
from trinity_lightning.common.experience.payload import TORCH_DTYPES


def round_trip(experience: Experience) -> Experience:
    return Experience.deserialize(experience.serialize())


def info_after_round_trip(value: Any) -> Any:
    return round_trip(Experience(tokens=[1, 2], info={"value": value})).info["value"]


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(experiences(), max_size=4))
def test_everything_comes_back(batch: list[Experience]):
    again = Experience.deserialize_many(Experience.serialize_many(batch))
    assert again == batch
    assert [repr(e.info) for e in again] == [repr(e.info) for e in batch]  # types and order too: 1 is not 1.0 there
    assert [e.experience_type for e in again] == [e.experience_type for e in batch]


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_comes_back(name):
    tensor = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(TORCH_DTYPES[name])
    inputs, field = {"x": tensor}, tensor[0]
    experience = Experience(tokens=[1, 2, 3, 4], returns=field, multi_modal_inputs=inputs, info={"y": tensor.T})
    again = round_trip(experience)
    assert again.returns is not None
    assert again.multi_modal_inputs is not None
    for mine, theirs in ((again.returns, field), (again.multi_modal_inputs["x"], tensor), (again.info["y"], tensor.T)):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert (
            mine.tolist() == theirs.tolist()
            if not name.startswith("float8")
            else bool((mine.float() == theirs.float()).all())
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int16])
def test_token_dtypes_mix_in_a_payload(dtype):
    batch = [Experience(tokens=[1, 2]), Experience(tokens=torch.arange(5).to(dtype)), Experience(tokens=[3, 4, 5])]
    assert Experience.deserialize_many(Experience.serialize_many(batch)) == batch


def test_every_field_has_a_column_or_is_a_tensor():
    columns = {name.partition(".")[0] for name in COLUMN_TYPES}
    names = [field.name for field in dataclasses.fields(Experience)]
    assert columns | {*TENSOR_FIELDS} == {*names, "experience_type"}
    assert not columns & {*TENSOR_FIELDS}


def test_experience_types_come_back():
    kinds = [round_trip(experience).experience_type for experience in sample()]
    assert kinds == ["single_turn", "multi_turn", "dpo"]


def test_empty_list_and_empty_inputs():
    assert Experience.deserialize_many(Experience.serialize_many([])) == []
    assert round_trip(Experience(tokens=[1, 2], multi_modal_inputs={})).multi_modal_inputs == {}
    assert round_trip(Experience(tokens=[1, 2])).multi_modal_inputs is None


def test_zero_rewards_and_none_are_told_apart():
    batch = [Experience(tokens=[1, 2], reward=reward) for reward in (0.0, 0.0)]
    assert [e.reward for e in Experience.deserialize_many(Experience.serialize_many(batch))] == [0.0, 0.0]
    batch[0].reward = None
    assert [e.reward for e in Experience.deserialize_many(Experience.serialize_many(batch))] == [None, 0.0]


def test_shared_tensors_come_back_by_value():
    experience = Experience(tokens=[1, 2, 3], advantages=[1.0, 2.0])
    experience.returns = experience.advantages
    assert round_trip(experience) == experience


def test_views_carry_only_their_own_elements_and_gradients_are_left_behind():
    large = torch.zeros(1_000_000)
    experience = Experience(tokens=[1, 2, 3], logprobs=large[::500_000].requires_grad_(), info={"view": large[:2]})
    payload = experience.serialize()
    assert len(payload) < 2_000
    again = Experience.deserialize(payload)
    assert again.logprobs is not None
    assert not again.logprobs.requires_grad
    assert again.logprobs.untyped_storage().nbytes() == 8


def test_rows_have_storage_of_their_own_and_do_not_alias_the_payload():
    batch = [Experience(tokens=list(range(5)), info={"array": np.arange(4)}) for _ in range(3)]
    payload = bytearray(Experience.serialize_many(batch))
    again = Experience.deserialize_many(payload)
    payload[:] = b"\xff" * len(payload)
    again[0].tokens.zero_()
    again[0].info["array"][:] = 0
    assert again[1:] == batch[1:]
    assert again[1].tokens.untyped_storage().nbytes() == 20


@pytest.mark.parametrize("lengths", [[0], [0, 0], [2, 0, 1], [1, 3, 0]])
def test_rows_without_items_come_back(lengths):
    batch = [Experience(tokens=[1, 2, 3], prompt_length=3 - n, action_mask=[True] * n) for n in lengths]
    assert Experience.deserialize_many(Experience.serialize_many(batch)) == batch


def test_large_payloads_come_back():
    generator = torch.Generator().manual_seed(0)
    lengths = [*range(1, 1500, 5), 100_000, 2, 900_000]  # several blocks of rows, and rows larger than a block
    batch = [Experience(tokens=torch.randint(0, 2**31, (n + 1,), generator=generator)) for n in lengths]
    payload = Experience.serialize_many(batch)
    assert len(payload) > 9_000_000
    assert Experience.deserialize_many(payload) == batch


@pytest.mark.parametrize(
    "value",
    [
        (1, (2, [3, ()])),
        {(1, "a"): {None: 1, 2.5: b"x", True: "y"}},
        float("inf"),
        -(2**63),
        2**64 - 1,
        "a\ud800b",
        np.float32(1.5),
        np.bool_(True),
        np.array(3),
        np.zeros((0, 3), dtype=np.int8),
        torch.tensor(3.5),
        torch.zeros(2, 0),
        [[]],
    ],
)
def test_values_of_info_come_back_with_their_types(value):
    again = info_after_round_trip(value)
    assert type(again) is type(value)
    assert repr(again) == repr(value)


class Color(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize("value", [OrderedDict(a=1), Color.RED, bytearray(b"x"), torch.Size([1, 2])])
def test_subclasses_come_back_as_the_plain_values_they_equal(value):
    assert info_after_round_trip(value) == value


def _cycle() -> list[Any]:
    cycle: list[Any] = []
    cycle.append((cycle,))
    return cycle


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({1, 2}, r"info\['value'\]: .*set"),
        ({"a": [0, object()]}, r"info\['value'\]\['a'\]\[1\]: .*object"),
        (2**64, r"info\['value'\]: .*64 bits"),
        (-(2**63) - 1, "64 bits"),
        (_cycle(), "contains itself"),
        ({frozenset(): 1}, r"info\['value'\]: .*frozenset"),
        (np.array([object()]), "dtype object"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.zeros(2, device="meta"), "meta"),
        (1j, "complex"),
    ],
)
def test_what_cannot_be_encoded_is_named(value, named):
    experience = Experience(eid=EID(1, 2, suffix="x"), tokens=[1, 2], info={"value": value})
    with pytest.raises(ExperienceError, match=f"1/2/0/0/x: .*{named}"):
        Experience.serialize_many([Experience(tokens=[1, 2]), experience])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("advantages", torch.zeros(3)),
        ("advantages", torch.zeros(2, 1)),
        ("advantages", [0.0, 0.0]),
        ("tokens", None),
        ("prompt_length", 9),
        ("prompt_length", 2**70),
        ("prompt_length", -(2**63)),
        ("info", []),
        ("response_text", b""),
        ("experience_type", "other"),
    ],
)
def test_fields_assigned_wrongly_are_named(field, value):
    experience = Experience(eid=EID(1, 2, suffix="x"), tokens=[1, 2, 3])
    setattr(experience, field, value)
    with pytest.raises(ExperienceError, match=f"1/2/0/0/x: {field}"):
        experience.serialize()


def test_a_custom_field_of_an_unknown_dtype_is_named():
    experience = Experience(tokens=[1, 2, 3], custom_fields=[CustomField("a", "b", torch.qint8)])
    with pytest.raises(ExperienceError, match=r"'b'.*qint8"):
        experience.serialize()


def test_what_is_no_experience_is_refused():
    wrong: Any = [Experience(tokens=[1, 2]), 1]
    with pytest.raises(ExperienceError, match="int"):
        Experience.serialize_many(wrong)


def test_numpy_scalars_assigned_to_fields_are_taken():
    experience = Experience(tokens=[1, 2, 3], eid=EID(1, 2))
    position: Any = np.int64(2)
    experience.reward, experience.eid.task = np.float64(0.5), position
    again = round_trip(experience)
    assert (again.reward, again.eid.task) == (0.5, 2)
    assert type(again.reward) is float


def test_deserialize_wants_exactly_one():
    for batch in ([], [Experience(tokens=[1, 2])] * 2):
        with pytest.raises(ExperienceError, match=f"got {len(batch)}"):
            Experience.deserialize(Experience.serialize_many(batch))


def test_bytes_bytearray_and_memoryview_are_read():
    batch = sample()
    payload = Experience.serialize_many(batch)
    strided = memoryview(bytes(byte for pair in zip(payload, payload, strict=True) for byte in pair))[::2]
    for data in (payload, bytearray(payload), memoryview(payload), memoryview(b"x" + payload)[1:], strided):
        assert Experience.deserialize_many(data) == batch
    text: Any = "TRXP"
    with pytest.raises(ExperienceFormatError, match="str"):
        Experience.deserialize_many(text)


def test_tensors_are_a_safetensors_file_with_one_flat_tensor_a_field():
    batch = [Experience(tokens=[1, 2, 3], prompt_length=1, logprobs=[0.1, 0.2]) for _ in range(5)]
    payload = Experience.serialize_many(batch)
    assert payload[:5] == b"TRXP\x02"
    size = struct.unpack_from("<Q", payload, 8)[0]
    tensors = safetensors.torch.load(payload[32 : 32 + size])
    assert {name: len(tensor) for name, tensor in tensors.items()} == {
        "tokens.int32": 15,
        "logprobs.float32": 10,
        "action_mask.bool": 10,
    }
    header = json.loads(payload[40 : 40 + struct.unpack_from("<Q", payload, 32)[0]])
    assert all(entry["data_offsets"][0] % 2 == 0 for entry in header.values())


def test_serializing_takes_hardly_more_memory_than_the_payload():
    batch = [Experience(tokens=torch.ones(20_000, dtype=torch.int64), logprobs=torch.ones(19_999)) for _ in range(50)]
    batch[0].serialize()
    tracemalloc.start()
    payload = Experience.serialize_many(batch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 1.2 * len(payload)


def test_payloads_of_earlier_versions_are_read_and_those_of_text_written_to_the_byte():
    folder = Path(__file__).parent
    assert Experience.deserialize_many((folder / "version_2.bin").read_bytes()) == fixed()
    text = [experience for experience in fixed() if experience.multi_modal_inputs is None]
    for name, batch in (("version_2_text.bin", text), ("version_3.bin", fixed())):
        payload = (folder / name).read_bytes()
        assert Experience.deserialize_many(payload) == batch
        assert Experience.serialize_many(batch) == payload


def test_serializing_leaves_the_experience_alone():
    batch = sample()
    before = copy.deepcopy(batch)
    Experience.serialize_many(batch)
    assert batch == before


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), np.array([None]), np.array([])])
@pytest.mark.parametrize("first", [True, False])
def test_an_array_in_a_place_of_none_is_refused(value: np.ndarray, first: bool) -> None:
    good, bad = (Experience(tokens=[1, 2, 3]) for _ in range(2))
    bad.messages = value  # type: ignore[assignment]
    with pytest.raises(ExperienceError, match="messages"):
        Experience.serialize_many([bad, good] if first else [good, bad])

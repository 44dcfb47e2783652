"""Multi-modal inputs: places of pictures are checked, and equal tensors are written once and read back as one."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.experiences import pictured
from torch import Tensor

from trinity_lightning.common.experience import EID, Experience, ExperienceError, ExperienceFormatError
from trinity_lightning.common.experience.inputs import hash_of, share_inputs
from trinity_lightning.common.experience.payload import TORCH_DTYPES
from trinity_lightning.common.pictures.prompt import PLACES


def inputs_of(experience: Experience) -> dict[str, Tensor]:
    assert experience.multi_modal_inputs is not None
    return experience.multi_modal_inputs


def round_trip(batch: list[Experience]) -> list[Experience]:
    return Experience.deserialize_many(Experience.serialize_many(batch))


# -- places ------------------------------------------------------------------------------------------------------------


def placed(places: Any, **changes: Any) -> Experience:
    fields: dict[str, Any] = {"tokens": [1, 2, 3, 4, 5, 6], "prompt_length": 4, "eid": EID(7, 8, suffix="x")}
    fields |= {"multi_modal_inputs": {PLACES: places}, **changes}
    return Experience(**fields)


@pytest.mark.parametrize("places", [[0, 1, 3], (2,), np.array([1, 3]), [], torch.tensor([3], dtype=torch.uint8)])
def test_places_in_the_prompt_are_taken(places):
    tensor = inputs_of(placed(places))[PLACES]
    assert tensor.tolist() == list(places)
    assert not tensor.is_floating_point()


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (torch.tensor([0.0, 1.0]), r"integers.*float32"),
        (torch.tensor([True]), r"integers.*bool"),
        (torch.zeros(1, 2, dtype=torch.int64), r"1-D.*\(1, 2\)"),
        (torch.tensor(1), "1-D"),
        (torch.empty(2, dtype=torch.int64, device="meta"), "1-D tensor of integers"),
        ([2, 1], r"rising.*\[2, 1\]"),
        ([1, 1], "rising"),
        (torch.tensor([3, 1], dtype=torch.uint8), "rising"),
        ([-1, 2], "rising places among 6"),
        ([3, 6], "rising places among 6"),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), "rising places among 6"),
        ([1, 4], "trained.*got 4"),
        ([5], "trained.*got 5"),
    ],
)
def test_wrong_places_are_refused_by_name(places, message):
    with pytest.raises(ExperienceError, match=rf"7/8/0/0/x: multi_modal_inputs\['picture_places'\]: .*{message}"):
        placed(places)


def test_places_in_a_response_of_several_turns_are_those_of_an_environment():
    assert placed([0, 4], action_mask=[False, True]).experience_type == "multi_turn"
    assert placed([4], action_mask=torch.tensor([0.0, 1.0], dtype=torch.bfloat16)).experience_type == "multi_turn"
    with pytest.raises(ExperienceError, match=r"picture_places.*trained.*got 5"):
        placed([4, 5], action_mask=[False, True])
    with pytest.raises(ExperienceError, match="rising places among 6"):
        placed([4, 6], action_mask=[False, True])


def test_places_of_pairs_and_of_truncated_prompts_lie_in_the_prompt():
    pair = {"chosen": [1], "rejected": [2]}
    assert placed([5], **pair).experience_type == "dpo"
    with pytest.raises(ExperienceError, match="rising places among 6"):
        placed([6], **pair)
    cut = {"truncate_status": "prompt_truncated", "logprobs": [0.0]}
    for prompt_length in (2, 6):
        assert inputs_of(placed([5], prompt_length=prompt_length, **cut))[PLACES].tolist() == [5]


def test_places_that_no_longer_fit_are_refused_at_writing_and_reading():
    experience = placed([1, 4], action_mask=[False, True])
    payload = bytearray(experience.serialize())
    experience.action_mask = torch.tensor([True, True])
    with pytest.raises(ExperienceError, match=r"7/8/0/0/x: multi_modal_inputs\['picture_places'\].*trained"):
        experience.serialize()
    experience = placed([1], action_mask=[False, True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trinity_lightning.common.experience.codec.misplaced", lambda *_: None)
        experience.multi_modal_inputs = {PLACES: torch.tensor([9])}
        payload = experience.serialize()
    with pytest.raises(ExperienceFormatError, match=r"experience 0: multi_modal_inputs\['picture_places'\].*rising"):
        Experience.deserialize(payload)


# -- one object --------------------------------------------------------------------------------------------------------


def test_rollouts_that_are_given_one_dict_share_it():
    inputs = {"pixels": torch.ones(2, 3), PLACES: torch.tensor([0])}
    group = [Experience(tokens=[1, 2], multi_modal_inputs=inputs) for _ in range(3)]
    assert all(experience.multi_modal_inputs is inputs for experience in group)


def test_a_dict_whose_values_become_tensors_stays_as_it_was():
    inputs = {"a": [1, 2], "b": torch.ones(1)}
    experience = Experience(tokens=[1, 2], multi_modal_inputs=inputs)
    assert inputs["a"] == [1, 2]
    assert inputs_of(experience)["a"].tolist() == [1, 2]
    assert inputs_of(experience)["b"] is inputs["b"]


def test_equal_inputs_become_one_object_and_others_stay():
    others = [Experience(tokens=[1, 2], multi_modal_inputs=inputs) for inputs in (None, {})]
    batch = [*pictured(groups=2, size=2), *others]
    before = copy.deepcopy(batch)
    share_inputs(batch)
    assert batch == before
    first, twin, other, its_twin, text, empty = batch
    assert first.multi_modal_inputs is twin.multi_modal_inputs
    assert other.multi_modal_inputs is its_twin.multi_modal_inputs
    assert inputs_of(first)["pixels"] is not inputs_of(other)["pixels"]
    assert inputs_of(first)[PLACES] is inputs_of(other)[PLACES]
    assert (text.multi_modal_inputs, empty.multi_modal_inputs) == (None, {})


def test_assigned_inputs_that_are_no_tensors_are_named():
    for wrong in ({"pixels": [1.0]}, {1: torch.ones(1)}, {"pixels": np.ones(2)}):
        experience = Experience(eid=EID(1, 2, suffix="x"), tokens=[1, 2])
        experience.multi_modal_inputs = wrong  # type: ignore[assignment]
        for use in (experience.serialize, lambda experience=experience: share_inputs([experience])):
            with pytest.raises(ExperienceError, match=r"1/2/0/0/x: multi_modal_inputs\[.*expected tensors by name"):
                use()


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
    ],
)
def test_tensors_that_cannot_be_written_are_named(tensor, reason):
    experience = Experience(eid=EID(1, 2, suffix="x"), tokens=[1, 2], multi_modal_inputs={"pixels": tensor})
    with pytest.raises(ExperienceError, match=rf"1/2/0/0/x: multi_modal_inputs\['pixels'\]: .*{reason}"):
        Experience.serialize_many([Experience(tokens=[1, 2]), experience])


# -- payloads ----------------------------------------------------------------------------------------------------------


def test_a_group_takes_hardly_more_bytes_than_one_rollout_and_shares_its_picture_again():
    group = pictured(groups=1, size=8, pixels=50_000)
    payload, of_one = Experience.serialize_many(group), group[0].serialize()
    assert payload[4] == 3
    assert len(payload) < len(of_one) + 1_500
    again = Experience.deserialize_many(payload)
    assert again == group
    assert all(experience.multi_modal_inputs is again[0].multi_modal_inputs for experience in again)


def test_one_object_in_memory_and_equal_ones_make_the_same_bytes():
    apart, together = pictured(groups=2), pictured(groups=2)
    share_inputs(together)
    assert Experience.serialize_many(apart) == Experience.serialize_many(together)


def test_dicts_share_the_tensors_that_they_have_in_common():
    pixels = torch.rand(2, 3)
    dicts = [
        {"pixels": pixels, PLACES: torch.tensor([0])},
        {"pixels": pixels.clone(), PLACES: torch.tensor([1])},
        {PLACES: torch.tensor([1]), "pixels": pixels.clone()},  # equal, in another order
        {"mask": pixels[:1].clone(), "pixels": pixels[:1]},
        {},
    ]
    batch = [Experience(tokens=[1, 2, 3], prompt_length=2, multi_modal_inputs=inputs) for inputs in dicts]
    again = round_trip([*batch, Experience(tokens=[1, 2])])
    assert again[:5] == batch
    assert [list(inputs_of(experience)) for experience in again[:5]] == [list(inputs) for inputs in dicts]
    assert (again[4].multi_modal_inputs, again[5].multi_modal_inputs) == ({}, None)
    first, second, turned, single = map(inputs_of, again[:4])
    assert first["pixels"] is second["pixels"] is turned["pixels"]
    assert second[PLACES] is turned[PLACES]
    assert single["mask"] is single["pixels"]


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0,), (2, 0, 3)])
def test_tensors_of_every_dtype_and_shape_are_shared(name, shape):
    def make() -> Tensor:
        return (torch.arange(6)[: int(np.prod(shape))] % 2).reshape(shape).to(TORCH_DTYPES[name])

    batch = [Experience(tokens=[1, 2], multi_modal_inputs={"x": make()}) for _ in range(3)]
    again = round_trip(batch)
    tensors = [inputs_of(experience)["x"] for experience in again]
    assert (tensors[0].dtype, tensors[0].shape) == (TORCH_DTYPES[name], shape)
    assert repr(tensors[0]) == repr(make())
    assert tensors[0] is tensors[1] is tensors[2]


def test_equal_bytes_of_another_dtype_or_shape_are_not_equal():
    variants = [torch.zeros(4), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2), torch.zeros(2).double()]
    variants += [torch.tensor([0.0, -0.0, 0.0, 0.0]), torch.tensor([0.0, float("nan"), 0.0, 0.0])]
    batch = [Experience(tokens=[1, 2], multi_modal_inputs={"x": tensor}) for tensor in variants * 2]
    again = [inputs_of(experience)["x"] for experience in round_trip(batch)]
    for tensor, variant in zip(again, variants * 2, strict=True):
        assert (tensor.dtype, tensor.shape, repr(tensor)) == (variant.dtype, variant.shape, repr(variant))
    assert [id(tensor) for tensor in again[:6]] == [id(tensor) for tensor in again[6:]]
    assert len({id(tensor) for tensor in again}) == 6


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "part": lambda large: large[10:13],
    "stride": lambda large: large[::400_000],
    "transposed": lambda large: large[:6].reshape(2, 3).T,
    "expanded": lambda large: large[:1].expand(3, 3),
    "flipped imaginary part": lambda large: torch.complex(large[:2], large[1:3]).conj(),
    "negated": lambda large: torch.complex(large[:2], large[1:3]).conj().imag,
    "with a gradient": lambda large: large[:3].clone().requires_grad_(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_carry_only_their_own_elements(view):
    tensor = VIEWS[view](torch.arange(1_000_000.0))
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    batch = [Experience(tokens=[1, 2], multi_modal_inputs={"x": value}) for value in (tensor, plain)]
    payload = Experience.serialize_many(batch)
    assert len(payload) < 2_000
    first, second = (inputs_of(experience)["x"] for experience in Experience.deserialize_many(payload))
    assert first is second
    assert torch.equal(first, plain)
    assert not first.requires_grad


def test_tensors_that_were_read_do_not_alias_the_payload():
    batch = pictured()
    payload = bytearray(Experience.serialize_many(batch))
    again = Experience.deserialize_many(payload)
    payload[:] = b"\xff" * len(payload)
    assert again == batch


def test_equal_pictures_of_version_2_are_read_as_one():
    payload = Path(__file__).with_name("version_2_pictures.bin").read_bytes()
    again = Experience.deserialize_many(payload)
    assert (payload[4], again) == (2, pictured(groups=2))
    dicts = [id(experience.multi_modal_inputs) for experience in again]
    assert dicts[:3] == dicts[:1] * 3
    assert dicts[3:] == dicts[3:4] * 3
    assert dicts[0] != dicts[3]


def test_text_is_of_version_2():
    assert Experience(tokens=[1, 2]).serialize()[4] == 2
    assert Experience(tokens=[1, 2], multi_modal_inputs={}).serialize()[4] == 2


def test_the_bytes_of_a_picture_that_rollouts_share_are_gone_through_once(monkeypatch):
    hashed: list[int] = []
    monkeypatch.setattr(
        f"{share_inputs.__module__}.hash_of", lambda tensor: hashed.append(tensor.numel()) or hash_of(tensor)
    )
    shared = {"pixels": torch.zeros(1000), PLACES: torch.tensor([0])}
    group = [Experience(tokens=[1, 2], multi_modal_inputs=shared) for _ in range(8)]
    group += [Experience(tokens=[1, 2], multi_modal_inputs=dict(shared)) for _ in range(8)]
    assert round_trip(group) == group
    assert hashed == [1000, 1]

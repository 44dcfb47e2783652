"""What is checked in bulk is checked as strictly as one by one."""

import numpy as np
import pytest
import torch

from trinity_lightning.common.experience import Experience, ExperienceError, gather_attention_masks, gather_token_ids


def made(length: int = 4) -> Experience:
    return Experience(tokens=list(range(length)), prompt_length=2)


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), np.array([None]), np.array([])])
@pytest.mark.parametrize("first", [True, False])
def test_an_array_in_a_place_of_none_is_refused(value: np.ndarray, first: bool) -> None:
    good, bad = made(), made()
    bad.messages = value  # type: ignore[assignment]
    with pytest.raises(ExperienceError):
        Experience.serialize_many([bad, good] if first else [good, bad])


def test_masks_are_in_host_memory_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        masks = gather_attention_masks([made(4), made(3)], 4, 4)
    assert masks.device.type == "cpu"
    assert masks.tolist()[1] == [False, False, True, True, True, False, False, False]


@pytest.mark.parametrize("length", [1.9, 2**70])
def test_a_prompt_length_that_was_made_impossible_is_told(length: float) -> None:
    bad = made()
    bad.prompt_length = length  # type: ignore[assignment]
    for gather in (lambda: gather_token_ids([made(), bad], 4, 4, 0), lambda: gather_attention_masks([bad], 4, 4)):
        with pytest.raises(ExperienceError, match=f"{bad.eid.uid}.*prompt_length"):
            gather()

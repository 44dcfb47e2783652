"""Families of picture models: losses and every gradient are those of transformers' own forward pass, row by row."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.picture_families import assert_same_gradients, family_folder, own_loss, rollouts
from support.policy import Gradients, batch_of, fit, make_policy

from trinity_lightning.config.algorithm import Layout

SHARING = ("qwen2_vl", "qwen2_5_vl")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of each family's model, and its loss and gradients, once they are asked for."""
    made: dict[str, tuple[str, Any]] = {}

    def of(family: str) -> tuple[str, Any]:
        if family not in made:
            folder = family_folder(family, tmp_path_factory.mktemp(family))
            made[family] = folder, own_loss(folder, rollouts(family))
        return made[family]

    return of


@pytest.mark.parametrize(
    ("family", "layout", "tokens"),
    [(family, layout, 70) for family in SHARING for layout in (Layout.padded, Layout.shared_prefix)]
    + [("qwen2_vl", Layout.shared_prefix, 10_000), ("llava", Layout.padded, 120), ("gemma3", Layout.padded, 70)],
)
def test_loss_and_gradients_are_transformers_own(family: str, layout: Layout, tokens: int, folders: Any) -> None:
    seen = Gradients()
    folder, (loss, gradients) = folders(family)
    settings = {"layout": layout, "max_tokens_per_micro_batch": tokens, "policy_loss": "reinforce"}
    fit(make_policy(name=folder, **settings), [batch_of(rollouts(family))], seen)
    assert seen.losses[0] == pytest.approx(loss, abs=1e-5)
    assert_same_gradients(seen.steps[0], gradients)

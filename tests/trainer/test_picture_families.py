"""Families of picture models: losses and every gradient are those of transformers' own forward pass, row by row."""

from typing import Any

import pytest
import torch
from support.errors import refuses
from support.picture_families import assert_same_gradients, family_folder, own_loss, rollouts
from support.policy import Gradients, batch_of, fit, make_policy

from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.common.pictures.prompt import PLACES
from trinity_lightning.common.pictures.states import with_states
from trinity_lightning.config.algorithm import Layout
from trinity_lightning.errors import ModelLoadError
from trinity_lightning.trainer.layout import collate, cut
from trinity_lightning.trainer.model import logprobs_by_head
from trinity_lightning.trainer.passes import in_one_row

CPU = torch.device("cpu")
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


@pytest.mark.parametrize(
    ("family", "layout", "frozen"),
    [("qwen2_vl", Layout.shared_prefix, "visual"), ("gemma3", Layout.padded, "vision")],
)
def test_a_frozen_tower_leaves_other_gradients_as_they_are(
    family: str, layout: Layout, frozen: str, folders: Any
) -> None:
    seen = Gradients()
    folder, (loss, gradients) = folders(family)
    policy = make_policy(name=folder, model={"freeze": [frozen]}, layout=layout, policy_loss="reinforce")
    policy.configure_model()
    passes: list[str] = []
    for name, module in policy.policy.named_modules():
        if name.endswith(("patch_embed", "patch_embedding")):
            module.register_forward_hook(lambda *_, name=name: passes.append(name))
    fit(policy, [batch_of(rollouts(family))], seen)
    assert seen.losses[0] == pytest.approx(loss, abs=1e-5)
    others = {name: gradient for name, gradient in gradients.items() if frozen not in name}
    assert len(others) < len(gradients)
    assert len(passes) == 3  # once a picture
    assert_same_gradients(seen.steps[0], others)


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_a_family_of_padded_rows_says_so_at_the_start(family: str, folders: Any, caplog: Any) -> None:
    folder, _ = folders(family)
    policy = make_policy(name=folder, layout=Layout.auto)
    policy.configure_model()
    with caplog.at_level("INFO"):
        assert policy.passes().layout is Layout.padded
    assert f"({family}) takes pictures" in caplog.text
    policy = make_policy(name=folder, layout=Layout.shared_prefix)
    policy.configure_model()
    with refuses("algorithm.layout"):
        policy.passes()


# Positions by a model's own rule


def positions(rows: list[Experience], layout: Layout, rule: Any) -> torch.Tensor | None:
    batch = OptimizerBatch.of(rows, 0)
    (part,) = cut(batch, range(len(rows)), 10_000, layout)
    return collate(batch, part, CPU, rule).inputs.get("position_ids")


def test_rows_without_pictures_have_the_positions_of_text(folders: Any) -> None:
    policy = make_policy(name=folders("qwen2_vl")[0])
    policy.configure_model()
    rule = policy.passes().position_rule
    text = [row for row in rollouts("qwen2_vl") if row.multi_modal_inputs is None]
    assert positions(text, Layout.padded, rule) is None
    shared, plain = (positions(text, Layout.shared_prefix, own_rule) for own_rule in (rule, None))
    assert shared is not None
    assert plain is not None
    assert torch.equal(shared, plain)
    among_others = positions([*rollouts("qwen2_vl")[:2], text[0]], Layout.padded, rule)
    assert among_others is not None
    length = len(text[0].tokens)
    (row,) = (row for row in range(3) if not among_others[:, row, length:].any())
    assert torch.equal(among_others[:, row, :length], torch.arange(length).expand(3, -1))


def test_pictures_without_positions_by_the_rule_are_an_error(folders: Any) -> None:
    policy = make_policy(name=folders("qwen2_vl")[0])
    policy.configure_model()
    batch = OptimizerBatch.of(rollouts("qwen2_vl")[:1], 0)
    (part,) = cut(batch, [0], 10_000, Layout.padded)
    with pytest.raises(ModelLoadError, match="positions"):
        with_states(policy.policy, collate(batch, part, CPU).inputs)


def test_grids_that_do_not_fit_their_places_are_refused(folders: Any) -> None:
    """Two pictures without a token between them are one run of places."""
    policy = make_policy(name=folders("qwen2_vl")[0])
    policy.configure_model()
    row = rollouts("qwen2_vl")[6]
    assert row.multi_modal_inputs is not None
    count = len(row.multi_modal_inputs[PLACES])
    row.multi_modal_inputs = row.multi_modal_inputs | {PLACES: torch.arange(count)}
    with pytest.raises(ExperienceError, match="image_grid_thw"):
        positions([row], Layout.padded, policy.passes().position_rule)


def test_rows_in_one_row_keep_their_positions(folders: Any) -> None:
    """As compiled layers compute padded rows."""
    policy = make_policy(name=folders("qwen2_vl")[0])
    policy.configure_model()
    batch = OptimizerBatch.of(rollouts("qwen2_vl"), 0)
    (part,) = cut(batch, range(15), 10_000, Layout.padded)
    micro = collate(batch, part, CPU, policy.passes().position_rule)
    others = micro.states, micro.targets, micro.temperature[micro.rows]
    with torch.no_grad():
        whole, in_one = (
            logprobs_by_head(policy.policy, inputs, *others)[0] for inputs in (micro.inputs, in_one_row(micro.inputs))
        )
    torch.testing.assert_close(in_one, whole, rtol=0, atol=1e-5)

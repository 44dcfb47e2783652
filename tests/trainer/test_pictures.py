"""Training on pictures: losses and every gradient are those of transformers' own forward pass, row by row."""

from typing import Any

import pytest
import torch
from support.pictures import (
    experience,
    picture_groups,
    plain_logprobs,
    plain_model,
    processor,
    prompt_in_tiles,
    prompt_of,
    random_picture,
)
from support.policy import Gradients, batch_of, fit, make_policy

from trinity_lightning.common.experience import EID, Experience, ExperienceError
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.common.pictures.prompt import PLACES, PicturePrompt
from trinity_lightning.common.pictures.tensors import GRID, MASK, PIXELS, PictureTensors, identity_of
from trinity_lightning.config.algorithm import Layout
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.trainer.layout import _common_prefix, collate, cut, prefix_groups
from trinity_lightning.trainer.model import logprobs_by_head
from trinity_lightning.trainer.passes import in_one_row

CPU = torch.device("cpu")


def expected(rows: list[Experience]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of plain policy gradients, by transformers, one row after the other."""
    model, total = plain_model(), torch.zeros(())
    tokens = sum(int(row.action_mask.sum()) for row in rows if row.action_mask is not None)
    for row in rows:
        logprobs = plain_logprobs(model, row.tokens.tolist(), row.multi_modal_inputs)[row.prompt_length - 1 :]
        assert row.advantages is not None
        total = total - (row.advantages * logprobs).sum() / tokens
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def rows_of_all_kinds() -> list[Experience]:
    """Ragged rollouts with pictures and without; two prompts have a picture that is cut up, and is partly padding.

    The two cut up pictures differ in one tile.
    """
    rows = picture_groups()
    prompt = prompt_in_tiles("<image>What?", random_picture(3, (128, 128)))
    mask = prompt.inputs[MASK].clone()
    mask[:, :, 48:] = False
    other = prompt.inputs[PIXELS].clone()
    other[-1] += 0.5
    for task, pixels in enumerate((prompt.inputs[PIXELS], other), start=5):
        for run in range(2):
            row = experience(prompt, [5 + task, 7, 8][: 1 + run], task, run)
            row.multi_modal_inputs = {**prompt.inputs, PIXELS: pixels, MASK: mask}
            rows.append(row)
    return rows


@pytest.fixture(scope="module")
def wanted() -> tuple[float, dict[str, torch.Tensor]]:
    return expected(rows_of_all_kinds())


@pytest.mark.parametrize("tokens", [60, 10_000])
@pytest.mark.parametrize("layout", [Layout.padded, Layout.shared_prefix])
def test_loss_and_gradients_are_transformers_own(layout: Layout, tokens: int, wanted: Any) -> None:
    seen = Gradients()
    settings = {"layout": layout, "max_tokens_per_micro_batch": tokens, "policy_loss": "reinforce"}
    fit(make_policy(name="tiny_vision", **settings), [batch_of(rows_of_all_kinds())], seen)
    loss, gradients = wanted
    assert seen.losses[0] == pytest.approx(loss, abs=1e-5)
    assert seen.steps[0].keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(seen.steps[0][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def later_turns(runs: int = 3) -> list[Experience]:
    """Rollouts of two prompts, one of them with a picture, in which the environment answers with one or two pictures.

    The policy has sampled a picture's token before them.
    """
    first = prompt_of("<image>How many?", [random_picture(1)])
    plain = load_tokenizer("tiny_vision").encode("<|im_start|>user\nLook.<|im_end|>\n", add_special_tokens=False)
    rows = []
    for task, prompt in enumerate((first, plain)):
        for run in range(runs):
            answer, other = [5, 6 + run, processor().token_id], [9] * (run + 1)
            count = 1 + run % 2
            shown = processor().expand("<image>and" * count, [random_picture(10 + run)] * count)
            whole = PicturePrompt.joined(prompt, answer, shown, other)
            mask = [True] * len(answer) + [False] * len(shown.token_ids) + [True] * len(other)
            rows.append(
                Experience(
                    eid=EID(batch=1, task=task, run=run),
                    tokens=list(whole),
                    prompt_length=len(prompt),
                    multi_modal_inputs=whole.inputs,
                    action_mask=mask,
                    advantages=[(-1.0) ** run * trained for trained in mask],
                )
            )
    return rows


@pytest.mark.parametrize("layout", [Layout.padded, Layout.shared_prefix])
def test_pictures_in_later_turns_have_transformers_own_gradients(layout: Layout) -> None:
    rows, seen = later_turns(), Gradients()
    settings = {"layout": layout, "max_tokens_per_micro_batch": 300, "policy_loss": "reinforce"}
    fit(make_policy(name="tiny_vision", **settings), [batch_of(rows)], seen)
    loss, gradients = expected(rows)
    assert seen.losses[0] == pytest.approx(loss, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(seen.steps[0][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_equal_tokens_with_different_pictures_share_nothing_behind_the_first_place() -> None:
    rows = picture_groups(runs=2)
    groups = prefix_groups(rows, range(4), max_tokens=10_000)
    assert {(tuple(sorted(group.rows)), group.prefix) for group in groups} == {
        ((0, 1), rows[0].prompt_length),
        ((2, 3), rows[2].prompt_length),
    }


def test_a_prefix_of_different_prompts_ends_before_or_behind_a_picture() -> None:
    first, second = random_picture(1), random_picture(2)
    prompts = [prompt_of("<image>How many?", [first]), prompt_of("<image>How red?", [first])]
    prompts.append(prompt_of("<image>How many?", [second]))
    tokens = [identity_of(experience(prompt, [5])) for prompt in prompts]
    assert [_common_prefix(tokens[0], other) for other in tokens[1:]] == [
        int(prompts[0].inputs[PLACES][-1]) + 2 + len("How "),  # a token ends the picture
        int(prompts[0].inputs[PLACES][0]),
    ]


def test_a_picture_of_several_rows_is_computed_once() -> None:
    rows = picture_groups(runs=3)
    for layout in (Layout.padded, Layout.shared_prefix):
        batch = OptimizerBatch.of(rows, 0)
        (part,) = cut(batch, range(len(rows)), 10_000, layout)
        pictures = collate(batch, part, CPU).inputs["pictures"]
        assert pictures.arguments["pixel_values"].shape[:2] == (1, 2)


def test_prefixes_are_shared_up_to_the_first_tile_that_differs() -> None:
    rows = rows_of_all_kinds()[-3:]
    (tiles,) = {len(row.multi_modal_inputs[PIXELS]) for row in rows if row.multi_modal_inputs}
    shared = _common_prefix(identity_of(rows[0]), identity_of(rows[1]))
    pictures = PictureTensors.of_experience(rows[0])
    assert pictures is not None
    assert len(pictures.places) == tiles == 5
    assert shared == int(pictures.places[-1][0])


def test_equal_pixels_with_another_mask_are_another_picture() -> None:
    prompt = prompt_of("<image>How many?", [random_picture(1)])
    masked = {**prompt.inputs, MASK: prompt.inputs[MASK] & (torch.arange(64) < 32)}
    pictures = [PictureTensors.of(inputs) for inputs in (prompt.inputs, masked, {**prompt.inputs})]
    hashes = [picture.hashes for picture in pictures if picture is not None]
    assert hashes[0] == hashes[2]
    assert hashes[0] != hashes[1]


def test_equal_patches_in_another_grid_are_another_picture() -> None:
    patches, places = torch.ones(8, 12), torch.arange(2)
    grids = [torch.tensor([[1, *edges]]) for edges in ((2, 4), (4, 2))]
    both = [PictureTensors.of({PIXELS: patches, GRID: grid, PLACES: places}) for grid in grids]
    assert both[0] is not None
    assert both[1] is not None
    assert both[0].hashes != both[1].hashes


def test_the_same_pass_has_the_same_bits_again() -> None:
    """Gradients of states that many tokens have are added up in one order, on any number of threads."""
    policy = make_policy(name="tiny_vision")
    policy.configure_model()
    prompts = [prompt_of("<image>How many?", [random_picture(seed)]) for seed in range(4)]
    rows = [experience(prompt, [5] * (run + 1), task, run) for task, prompt in enumerate(prompts) for run in range(8)]
    batch = OptimizerBatch.of(rows, 0)
    (part,) = cut(batch, range(len(rows)), 10_000, Layout.padded)
    micro = collate(batch, part, CPU)
    weight = policy.policy.get_parameter("model.connector.modality_projection.proj.weight")

    def gradient() -> torch.Tensor:
        others = micro.states, micro.targets, micro.temperature[micro.rows]
        return torch.autograd.grad(logprobs_by_head(policy.policy, micro.inputs, *others)[0].sum(), weight)[0]

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(5))
    finally:
        torch.set_num_threads(threads)


def test_a_micro_batch_without_pictures_has_none() -> None:
    rows = picture_groups()[-3:]
    batch = OptimizerBatch.of(rows, 0)
    (part,) = cut(batch, range(3), 10_000, Layout.padded)
    assert "pictures" not in collate(batch, part, CPU).inputs


@pytest.mark.parametrize("places", [None, 31])
def test_tensors_and_places_that_do_not_fit_are_refused(places: int | None) -> None:
    row = experience(prompt_of("<image><image>", [random_picture(1), random_picture(2)]), [5])
    inputs = dict(row.multi_modal_inputs or {})  # the row's own are those of all rows of that prompt
    removed = inputs.pop(PLACES)
    row.multi_modal_inputs = inputs if places is None else {**inputs, PLACES: removed[:places]}
    with pytest.raises(ExperienceError, match=PLACES):
        PictureTensors.of_experience(row)


def test_places_that_fit_in_sum_alone_are_refused() -> None:
    """One row has too few places for its picture, and another as many too many."""
    policy = make_policy(name="tiny_vision", policy_loss="reinforce")
    rows = [experience(prompt_of("<image>a", [random_picture(seed)]), [5], seed) for seed in range(2)]
    for row, places in zip(rows, (torch.arange(8), torch.arange(24)), strict=True):
        row.tokens = torch.cat([torch.full((24,), 5), row.tokens[-1:]])
        row.prompt_length = 24
        row.multi_modal_inputs = {**(row.multi_modal_inputs or {}), PLACES: places}
    with pytest.raises(ExperienceError, match="16 states"):
        fit(policy, [batch_of(rows)], Gradients())


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {MASK: torch.ones(1, 4)},
        {PIXELS: torch.tensor(1.0)},
        {PIXELS: torch.ones(2, 4), MASK: torch.ones(1, 4)},
        {PIXELS: torch.ones(2, 4), GRID: torch.tensor([[1, 1, 3]])},
    ],
)
def test_tensors_that_are_no_pictures_are_refused(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ExperienceError, match="multi_modal_inputs"):
        PictureTensors.of({**tensors, PLACES: torch.arange(4)})


def test_rows_in_one_row_keep_their_pictures() -> None:
    """As compiled layers compute padded rows."""
    policy = make_policy(name="tiny_vision")
    policy.configure_model()
    rows = picture_groups()
    batch = OptimizerBatch.of(rows, 0)
    (part,) = cut(batch, range(len(rows)), 10_000, Layout.padded)
    micro = collate(batch, part, CPU)
    others = micro.states, micro.targets, micro.temperature[micro.rows]
    with torch.no_grad():
        whole, in_one = (
            logprobs_by_head(policy.policy, inputs, *others)[0] for inputs in (micro.inputs, in_one_row(micro.inputs))
        )
    torch.testing.assert_close(in_one, whole, rtol=0, atol=1e-5)

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
    prompt_of,
    random_picture,
)
from support.policy import Gradients, batch_of, fit, make_policy

from trinity_lightning.common.experience import EID, Experience, ExperienceError
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.common.pictures.prompt import PLACES, PicturePrompt
from trinity_lightning.common.pictures.tensors import PictureTensors, identity_of
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


@pytest.fixture(scope="module")
def wanted() -> tuple[float, dict[str, torch.Tensor]]:
    return expected(picture_groups())


@pytest.mark.parametrize("tokens", [60, 10_000])
@pytest.mark.parametrize("layout", [Layout.padded, Layout.shared_prefix])
def test_loss_and_gradients_are_transformers_own(layout: Layout, tokens: int, wanted: Any) -> None:
    seen = Gradients()
    settings = {"layout": layout, "max_tokens_per_micro_batch": tokens, "policy_loss": "reinforce"}
    fit(make_policy(name="tiny_vision", **settings), [batch_of(picture_groups())], seen)
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

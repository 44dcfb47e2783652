"""Arguments of built-in losses, read from the source before torch is imported, as they are once it is."""

import pytest
from support.compose import composed
from support.errors import refuses

from trinity_lightning.config.loss_arguments import loss_arguments, signature_in_source, signature_of
from trinity_lightning.config.registry import PARTS, import_object
from trinity_lightning.config.run import validate
from trinity_lightning.errors import ArgumentError

ARGS = "algorithm.policy_loss.args"


@pytest.mark.parametrize("loss", PARTS["policy loss"])
def test_the_source_of_a_loss_has_the_arguments_of_the_loss(loss: str) -> None:
    path = PARTS["policy loss"][loss]
    read = loss_arguments(signature_in_source(path))
    imported = loss_arguments(signature_of(import_object(path)))  # type: ignore[arg-type]
    assert list(read) == list(imported)
    for name, parameter in imported.items():
        annotation, empty = parameter.annotation, parameter.empty
        assert str(read[name].annotation) == str(annotation).replace("[str, typing.Any]", "")
        assert (read[name].default is empty) == (parameter.default is empty)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["+recipe=grpo", f"{ARGS}.clipp=0.2"], f"{ARGS}.clipp"),
        (["+recipe=grpo", f"{ARGS}.clip_range_low=abc"], f"{ARGS}.clip_range_low"),
        (["+recipe=grpo", f"{ARGS}.dual_clip=[1]"], f"{ARGS}.dual_clip"),
        (["+recipe=mix", f"{ARGS}.usual_args=3"], f"{ARGS}.usual_args"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_configuration(overrides: list[str], key: str) -> None:
    with refuses(key, ArgumentError):
        validate(composed(*overrides, "model=tiny", "engine=transformers"))


def test_an_average_of_a_loss_that_has_its_own_is_refused() -> None:
    pairs = ("algorithm=dpo", "buffer=dataset", "buffer.path=pairs")
    with refuses("algorithm.loss_agg_mode"):
        validate(composed("+recipe=grpo", "model=tiny", *pairs, "algorithm.loss_agg_mode=token-mean"))

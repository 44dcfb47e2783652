"""The processor that engine and trainer share: one expansion for equal prompts, and a bound on what it keeps."""

import asyncio
import pickle
import threading
from typing import Any

import pytest
import torch
from PIL import Image
from support.errors import refuses
from support.pictures import processor, random_picture

from trinity_lightning.common.experience import ExperienceError
from trinity_lightning.common.pictures import processor as module
from trinity_lightning.common.pictures.picture import FIELD, Picture
from trinity_lightning.common.pictures.processor import AS_TEXT, PictureProcessor, marked_as_text
from trinity_lightning.common.pictures.prompt import PLACES
from trinity_lightning.common.pictures.tensors import MASK


@pytest.fixture
def fresh() -> PictureProcessor:
    return PictureProcessor(processor()._processor)


def test_equal_prompts_share_one_expansion(fresh: PictureProcessor) -> None:
    first, again = (fresh.expand("<image>a", [random_picture(1)]) for _ in range(2))
    assert first is again
    assert fresh.expand("<image>a", [random_picture(2)]) is not first
    assert fresh.expand("<image>b", [random_picture(1)]) is not first


def test_places_are_the_tokens_of_the_pictures(fresh: PictureProcessor) -> None:
    expansion = fresh.expand("a<image>b<image>", [random_picture(1), random_picture(2)])
    tokens = [place for place, token in enumerate(expansion.token_ids) if token == fresh.token_id]
    assert expansion.inputs[PLACES].tolist() == tokens
    assert len(tokens) == 2 * 16
    assert expansion.unexpanded.count(fresh.token_id) == 2
    assert {name: len(tensor) for name, tensor in expansion.inputs.items() if name != PLACES} == {
        "pixel_values": 2,
        "pixel_attention_mask": 2,
    }


@pytest.mark.parametrize(("text", "count"), [("<image>", 0), ("<image>", 2), ("none", 1)])
def test_places_and_pictures_must_be_as_many(fresh: PictureProcessor, text: str, count: int) -> None:
    with refuses(FIELD):
        fresh.expand(text, [random_picture(seed) for seed in range(count)])


def test_the_token_of_pictures_is_text_where_a_text_has_it(
    fresh: PictureProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = [random_picture(1), random_picture(2)]
    assert fresh.pieces("a<image>b<image>", pictures) == [fresh.expand("a<image>b<image>", pictures)]
    pieces = fresh.pieces(f"{AS_TEXT}a<image>{AS_TEXT}<image>", pictures)
    first, second = fresh.expand("a<image>", pictures[:1]), fresh.expand("<image>", pictures[1:])
    assert pieces == [[], [fresh.token_id], first, [fresh.token_id], second]
    for text in (f"{AS_TEXT}<image>", f"<image>{AS_TEXT}<image>a<image>"):
        with refuses(FIELD):
            fresh.pieces(text, pictures)
    encode = fresh._encode
    monkeypatch.setattr(fresh, "_encode", lambda text: [0, *encode(text)])  # begins each text with a space, say
    with refuses("model.name"):
        fresh.pieces(f"{AS_TEXT}<image>", pictures[:1])


def test_marks_are_in_texts_alone() -> None:
    picture = random_picture(1)
    value = {"<image>": ["a<image>b", 3, None, {"image": picture}], "c": ("<image>",)}
    assert marked_as_text(value, "<image>") == {
        "<image>": [f"a{AS_TEXT}b", 3, None, {"image": picture}],
        "c": [AS_TEXT],
    }


def test_old_expansions_are_forgotten_once_they_take_too_much_memory(
    fresh: PictureProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = module._bytes_of(fresh.expand("<image>", [random_picture(0, (64, 64))]))
    monkeypatch.setattr(module, "MOST_BYTES", 3 * one)
    expansions = [fresh.expand("<image>", [random_picture(seed, (64, 64))]) for seed in range(1, 6)]
    assert fresh.expand("<image>", [random_picture(5, (64, 64))]) is expansions[-1]
    assert fresh.expand("<image>", [random_picture(1, (64, 64))]) is not expansions[0]
    assert fresh._bytes <= 3 * one


def test_a_picture_that_the_model_would_take_for_padding_is_refused() -> None:
    black = Picture(Image.new("RGB", (64, 64)))
    processor_of = PictureProcessor(processor()._processor, {"do_normalize": False})
    with refuses("model.processor_args"):
        processor_of.expand("<image>", [black])
    assert processor().expand("<image>", [black]).inputs[MASK].dtype == torch.bool


def test_other_rollouts_go_on_while_pictures_are_read(fresh: PictureProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor waits here until another coroutine has run."""
    others_ran, process = threading.Event(), fresh._processed

    def waiting(*arguments: Any) -> Any:
        assert others_ran.wait(30)
        return process(*arguments)

    async def both() -> list[Any]:
        texts = [fresh.pieces_of("<image>a", [random_picture(1)]) for _ in range(2)]
        tasks = [asyncio.ensure_future(text) for text in texts]
        await asyncio.sleep(0)
        others_ran.set()
        return await asyncio.gather(*tasks)

    monkeypatch.setattr(fresh, "_processed", waiting)
    [first], [again] = asyncio.run(both())
    assert first is again


def test_a_copy_of_a_processor_in_another_process_works(fresh: PictureProcessor) -> None:
    asyncio.run(fresh.pieces_of("<image>a", [random_picture(1)]))
    copy = pickle.loads(pickle.dumps(fresh))  # noqa: S301 - as Ray does
    assert asyncio.run(copy.pieces_of("<image>a", [random_picture(1)]))[0].token_ids


def test_as_many_places_as_the_model_has_states(fresh: PictureProcessor) -> None:
    inputs = fresh.expand("a<image>b<image>", [random_picture(1), random_picture(2)]).inputs
    fresh.check(inputs)
    with pytest.raises(ExperienceError, match=r"30 places.* 32 states"):
        fresh.check({**inputs, PLACES: inputs[PLACES][:-2]})

"""Pictures in examples of a dataset: where they are, what they cost the loss, and when they are read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compose import composed
from support.dataset import GENERATION, assistant, user
from support.errors import refuses
from support.picture_models import refused_folder
from support.pictures import plain_logprobs, plain_model, processor, random_picture
from support.policy import Gradients, batch_of, fit, make_policy
from torch.nn.functional import logsigmoid

from trinity_lightning.buffer.dataset import Example, ExampleReader, Examples, examples_of, read_examples
from trinity_lightning.buffer.example_pictures import ExamplePictures
from trinity_lightning.buffer.held_out import held_out_of_run
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.pictures.processor import load_processor
from trinity_lightning.common.pictures.prompt import PLACES
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.config.run import typed_config
from trinity_lightning.errors import ConfigError, ForeignPositionError, StorageError

FIRST, SECOND = random_picture(1, (64, 64)), random_picture(2, (40, 90))
PLACE: dict[str, Any] = {"type": "image"}
OPENING, CLOSING = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def said(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def example(entry: dict[str, Any], sees: Any = None, template: str | None = None) -> Example:
    tokenizer = load_tokenizer("tiny_vision")
    tokenizer.chat_template = template or tokenizer.chat_template
    return Example(tokenizer, entry, processor=sees or processor())


def whole(made: Experience) -> list[int]:
    return made.tokens.tolist() if made.chosen is None else torch.cat([made.tokens, made.chosen]).tolist()


TILES = {"do_image_splitting": True, "size": {"longest_edge": 128}}
TURNS = [said(PLACE, text("a")), assistant("3"), said(text("b"), PLACE), assistant("4")]
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "a picture before the user's text": (
        {"prompt": [user("Hm?")], "completion": [assistant("3")], "images": [FIRST]},
        f"{OPENING}<image>Hm?{CLOSING}3<|im_end|>",
    ),
    "parts": (
        {"prompt": [said(text("Is "), PLACE, text(" as "), PLACE)], "completion": [assistant("3")]}
        | {"images": [FIRST, SECOND]},
        f"{OPENING}Is <image> as <image>{CLOSING}3<|im_end|>",
    ),
    "pictures of the parts": (
        {"messages": [said({**PLACE, "image": FIRST}, text("Hm?")), assistant("3")]},
        f"{OPENING}<image>Hm?{CLOSING}3<|im_end|>\n",
    ),
    "text": ({"prompt": "Look <image>:", "completion": " 3", "image": FIRST}, "Look <image>: 3<|im_end|>"),
    "two turns": (
        {"messages": TURNS, "images": [FIRST, SECOND]},
        f"{OPENING}<image>a{CLOSING}3<|im_end|>\n{OPENING}b<image>{CLOSING}4<|im_end|>\n",
    ),
    "a pair": (
        {"prompt": [user("Hm?")], "images": [FIRST, SECOND]}
        | {"chosen": [assistant("3")], "rejected": [assistant("4")]},
        f"{OPENING}<image><image>Hm?{CLOSING}3<|im_end|>",
    ),
    "a pair of whole conversations": (
        {"chosen": [user("Hm?"), assistant("3")], "rejected": [user("Hm?"), assistant("4")], "images": [FIRST]},
        f"{OPENING}<image>Hm?{CLOSING}3<|im_end|>",
    ),
}


def made_of(entry: dict[str, Any], **settings: Any) -> tuple[Experience, list[Picture]]:
    read = example(entry, **settings)
    return (read.pair() if "chosen" in entry else read.response()), read.pictures


@pytest.mark.parametrize("args", [{}, TILES], ids=["one", "tiles"])
@pytest.mark.parametrize("form", FORMS)
def test_the_tokens_are_those_that_the_processor_makes_of_the_whole_text(form: str, args: dict[str, Any]) -> None:
    entry, shown = FORMS[form]
    sees = load_processor("tiny_vision", args)
    assert sees is not None
    made, pictures = made_of(entry, sees=sees)
    expected = sees.expand(shown, pictures)
    assert whole(made) == list(expected.token_ids)
    assert made.multi_modal_inputs is not None
    assert made.multi_modal_inputs.keys() == {PLACES}
    assert torch.equal(made.multi_modal_inputs[PLACES], expected.inputs[PLACES])
    assert [picture.source for picture in pictures] == [FIRST.source, SECOND.source][: len(pictures)]


def test_marks_of_a_template_stand_where_they_do_without_pictures() -> None:
    template = GENERATION.replace(
        "message['content'] + '<|im_end|>' }}{% endif",
        "(message['content'] if message['content'] is string else message['content'] | map(attribute='text', "
        "default='<image>') | join) + '<|im_end|>' }}{% endif",
    )
    entry, _ = FORMS["two turns"]
    plain, marked = (made_of(entry, template=template)[0] for template in (None, template))
    assert whole(marked) == whole(plain)
    assert marked.action_mask is not None
    assert plain.action_mask is not None
    assert torch.equal(marked.action_mask, plain.action_mask)
    assert marked.action_mask.sum() == 4


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ({"messages": TURNS, "images": [FIRST]}, ".images_field"),
        ({"messages": TURNS}, ".images_field"),
        ({"messages": [user("a"), {"role": "assistant", "content": [PLACE]}], "image": FIRST}, None),
        ({"prompt": [user("a")], "completion": [said(PLACE), assistant("3")], "image": FIRST}, None),
        ({"text": "once", "image": FIRST}, None),
        ({"chosen": [user("a"), assistant("3")], "rejected": [user("b"), assistant("4")], "image": FIRST}, None),
        ({"prompt": [user("<image>")], "completion": [assistant("<image>")], "image": FIRST}, "buffer.path"),
        ({"prompt": [user("a")], "completion": [assistant("3")], "image": "none.png"}, None),
    ],
    ids=["too few", "none", "answer", "later turn", "text", "nothing shared", "written by hand", "no file"],
)
def test_what_does_not_fit_is_refused_by_its_place(entry: dict[str, Any], key: str | None) -> None:
    rows = [FORMS["text"][0], entry]
    with pytest.raises(ConfigError, match="data, entry 1: ") as refused:
        read_examples(rows, lambda index: made_of(rows[index])[0], "data", 1000, "refuse")
    assert refused.value.key == key


def test_a_text_model_and_a_misspelt_column_are_refused() -> None:
    entry, _ = FORMS["two turns"]
    for fields in (entry, {"messages": entry["messages"]}, {"messages": [user("a")], "image": FIRST}):
        with pytest.raises(ConfigError):
            Example(load_tokenizer("tiny"), fields)
    with refuses(".images_field"):
        Example(load_tokenizer("tiny_vision"), entry, processor=processor(), images_field="imagse")


def test_what_is_too_long_is_cut_behind_its_pictures_or_left_out() -> None:
    entry = FORMS["a picture before the user's text"][0] | {"completion": [assistant("3456")]}
    made = made_of(entry)[0]

    def read(most: int) -> list[Experience]:
        return read_examples([entry], lambda _: made_of(entry)[0], "data", most, "truncate")

    [cut] = read(len(made.tokens) - 2)
    assert cut.tokens.tolist() == made.tokens.tolist()[:-2]
    with refuses("buffer.dataset.max_length"):
        read(int((made.multi_modal_inputs or {})[PLACES][-1]))


# -- losses ------------------------------------------------------------------------------------------------------------


def with_tensors(*forms: str) -> list[Experience]:
    entries = [FORMS[form][0] for form in forms]
    read = ExamplePictures(lambda index: made_of(entries[index])[1], processor(), str)
    examples = read_examples(entries, lambda index: made_of(entries[index])[0], "data", 1000, "refuse")
    return list(map(read.complete, examples))


def logprobs_of(model: Any, row: Experience) -> torch.Tensor:
    """Log-probabilities of the trained tokens of a row, by transformers."""
    logprobs = plain_logprobs(model, row.tokens.tolist(), row.multi_modal_inputs)[row.prompt_length - 1 :]
    return logprobs if row.action_mask is None else logprobs[row.action_mask]


def assert_gradients_of(model: Any, seen: Gradients) -> None:
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert seen.steps[0].keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(seen.steps[0][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_the_loss_of_sft_and_its_gradients_are_transformers_own() -> None:
    rows = with_tensors(*(form for form in FORMS if "pair" not in form))
    seen, model = Gradients(), plain_model()
    fit(make_policy(name="tiny_vision", policy_loss="sft"), [batch_of(rows)], seen)
    loss = -torch.cat([logprobs_of(model, row) for row in rows]).mean()
    loss.backward()
    assert seen.losses[0] == pytest.approx(loss.item(), abs=1e-5)
    assert_gradients_of(model, seen)


def test_the_loss_of_dpo_and_its_gradients_are_transformers_own() -> None:
    policy, model = make_policy(name="tiny_vision", policy_loss={"name": "dpo", "args": {"beta": 5.0}}), plain_model()
    policy.configure_model()
    with torch.no_grad():
        for parameter in policy.policy.parameters():  # it leaves its reference
            parameter *= 1.03
    model.load_state_dict(policy.policy.state_dict())
    pairs = with_tensors("a pair", "a pair of whole conversations")
    seen = Gradients()
    fit(policy, [batch_of(pairs)], seen)
    rows, reference = OptimizerBatch.of(pairs, 1).experiences, plain_model()
    gains = [logprobs_of(model, row).sum() - logprobs_of(reference, row).sum().detach() for row in rows]
    loss = -logsigmoid(5 * (torch.stack(gains[::2]) - torch.stack(gains[1::2]))).mean()
    loss.backward()
    assert seen.losses[0] == pytest.approx(loss.item(), abs=1e-5)
    assert abs(seen.losses[0] - 0.6931) > 1e-3
    assert_gradients_of(model, seen)


# -- a run's dataset ---------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "p").mkdir()
    for name, count in (("data", 4), ("other", 2)):
        lines = []
        for i in range(count):
            random_picture(i, (32, 32)).image.save(tmp_path / f"p/{i}.bmp")
            lines.append({"prompt": [user("Hm?")], "completion": [assistant("3")], "images": [f"p/{i}.bmp"]})
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "data.jsonl"


def run_on(data: Path, *settings: str) -> Any:
    return typed_config(composed("+recipe=sft", "model=tiny_vision", f"buffer.path={data}", *settings))


def reader_of(data: Path) -> ExampleReader:
    return ExampleReader(examples_of(run_on(data), str(data), "train", pairs=False), "data", seed=1)


def test_examples_whose_pictures_are_in_another_column_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "?", "pics": ["a.png"], "completion": "1"}))
    examples_of(run_on(data), str(data), "train", pairs=False)
    assert "buffer.dataset.images_field" in caplog.text


def test_pixels_are_read_when_an_example_is_taken(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = examples_of(run_on(data), str(data), "train", pairs=False)
    assert all((example.multi_modal_inputs or {}).keys() == {PLACES} for example in examples)
    rendered: list[int] = []
    make = Example.__init__
    monkeypatch.setattr(Example, "__init__", lambda *args, **options: rendered.append(1) or make(*args, **options))
    read = ExampleReader(examples, "data", repeat=False).read(9)
    assert len(rendered) == 4  # once each, for checksum and tensors
    expected = [processor().expand(f"{OPENING}<image>Hm?", [random_picture(i, (32, 32))]).inputs for i in range(4)]
    for example, inputs in zip(read, expected, strict=True):
        assert example.multi_modal_inputs is not None
        assert example.multi_modal_inputs.keys() == inputs.keys()
        assert all(torch.equal(tensor, inputs[name]) for name, tensor in example.multi_modal_inputs.items())
    assert all((example.multi_modal_inputs or {}).keys() == {PLACES} for example in examples)  # nothing is kept


def test_a_resumed_run_refuses_pictures_that_have_changed_since_they_were_read(data: Path) -> None:
    reader = reader_of(data)
    read, ahead = ({int(example.eid.suffix) for example in reader.read(2)} for _ in range(2))
    reader = reader_of(data)
    reader.read(2)
    state = reader.state_dict()
    for index in (*ahead, *read):
        random_picture(50, (32, 32)).image.save(data.parent / f"p/{index}.bmp")
        if index in ahead:
            reader_of(data).load_state_dict(state)
    with refuses("buffer.path") as refused:
        reader_of(data).load_state_dict(state)
    assert f"line {min(read) + 1} of" in str(refused.value)
    random_picture(50, (34, 32)).image.save(data.parent / f"p/{min(ahead)}.bmp")  # a file of another size
    with pytest.raises(ForeignPositionError):
        reader_of(data).load_state_dict(state)


def test_pictures_with_other_tokens_than_at_the_start_end_the_run(data: Path) -> None:
    sees = load_processor("tiny_vision", TILES)
    assert sees is not None
    made, pictures = made_of(FORMS["text"][0], sees=sees)
    made.eid.suffix = "0"
    read = ExamplePictures(lambda _: [random_picture(3, (10, 100)), *pictures[1:]], sees, str)
    with pytest.raises(StorageError):
        read.complete(made)


def test_a_family_that_reads_pictures_by_other_means_is_refused(data: Path, tmp_path: Path) -> None:
    folder = refused_folder(tmp_path / "model")
    with refuses("model.name"):
        examples_of(run_on(data, f"model.name={folder}"), str(data), "train", pairs=False)


def test_held_out_examples_with_pictures_of_their_own_are_not_trained_on(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All have the same text, and files of one size; two have the same picture."""
    config = run_on(data, "buffer.dataset.held_out.share=0.5")
    examples = examples_of(config, str(data), "train", pairs=False)
    trained, held_out = held_out_of_run(config, examples, pairs=False)
    assert (len(trained), len(held_out)) == (2, 2)
    assert isinstance(held_out, Examples)
    assert not caplog.messages
    config = run_on(data, f"buffer.dataset.held_out.path={data.parent / 'other.jsonl'}")
    held_out_of_run(config, examples, pairs=False)
    assert "2 of 2 held-out examples" in caplog.text

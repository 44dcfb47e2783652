"""Models that read pictures: the small built-in one, their processors, and what is refused of them at the start."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.compose import composed
from support.errors import refuses
from support.picture_models import change_json, family_config, smolvlm_folder, write_json
from support.pictures import random_picture
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, LlamaConfig

from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.pictures.processor import PictureProcessor, load_processor
from trinity_lightning.config.model import ModelConfig
from trinity_lightning.config.models import (
    check_trainable,
    is_picture_model,
    load_tokenizer,
    model_class,
    reads_pictures,
    resolve_model,
)
from trinity_lightning.config.run import validate
from trinity_lightning.errors import ModelLoadError

SPLIT: dict[str, Any] = {"do_image_splitting": True, "size": {"longest_edge": 128}}


def processor_of(name: str | Path, **args: Any) -> PictureProcessor:
    processor = load_processor(str(name), args)
    assert processor is not None
    return processor


# The small model


def test_the_small_model_is_the_same_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, first = torch.get_rng_state(), Path(resolve_model("tiny_vision"))
    monkeypatch.setenv("TRINITY_LIGHTNING_CACHE", str(tmp_path))
    again = Path(resolve_model("tiny_vision"))
    assert torch.equal(torch.get_rng_state(), before)
    assert again != first
    for file in sorted(first.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_small_model_is_loaded_by_transformers_alone_and_small() -> None:
    folder = resolve_model("tiny_vision")
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    assert model.num_parameters() < 600_000
    assert model.config.text_config.head_dim == 32
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert processor.tokenizer.get_vocab() == load_tokenizer("tiny_vision").get_vocab()
    assert model.config.text_config.vocab_size == len(processor.tokenizer)


def test_a_message_is_a_text_or_parts_for_the_small_model() -> None:
    tokenizer: Any = load_tokenizer("tiny_vision")
    question = "How many?"
    parts = [{"type": "image"}, {"type": "text", "text": question}]
    shown = [
        tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        for content in (f"<image>{question}", parts)
    ]
    assert shown[0] == shown[1] == f"<|im_start|>user\n<image>{question}<|im_end|>\n"


def test_a_small_picture_is_sixteen_tokens() -> None:
    processor = processor_of("tiny_vision")
    for size in ((64, 64), (2, 2), (300, 20)):
        expansion = processor.expand("<image>?", [Picture(Image.new("RGB", size, "red"))])
        assert expansion.token_ids.count(processor.token_id) == 16
        assert expansion.inputs["pixel_values"].shape == (1, 3, 64, 64)


# Which models read pictures


@pytest.mark.parametrize("family", ["smolvlm", "llava", "gemma3", "qwen2_vl", "qwen2_5_vl"])
def test_a_configuration_tells_that_its_model_reads_pictures(family: str, tmp_path: Path) -> None:
    config = family_config(family)
    assert is_picture_model(config)
    assert not is_picture_model(config.get_text_config())
    config.save_pretrained(tmp_path)
    assert model_class(tmp_path) is AutoModelForImageTextToText
    assert reads_pictures(str(tmp_path)) is True


def test_a_text_model_is_none(tmp_path: Path) -> None:
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert model_class(tmp_path) is AutoModelForCausalLM
    assert not is_picture_model(AutoConfig.for_model("mistral4"))  # which transformers lists among those that see
    assert reads_pictures(str(tmp_path)) is False
    assert load_processor("tiny") is None
    assert [reads_pictures(name) for name in ("tiny", "smollm2", "tiny_vision", "org/name")] == [
        False,
        False,
        True,
        None,
    ]


# Processors


def test_smolvlm_has_a_processor_without_the_packages_that_its_videos_need(tmp_path: Path) -> None:
    """Its checkpoints keep the template and the parts of the processor in files of their own."""
    folder = smolvlm_folder(tmp_path / "smolvlm")
    assert AutoConfig.from_pretrained(folder).model_type == "smolvlm"
    for args in ({}, SPLIT):
        ours, expected = (
            processor_of(name, **args).expand("<image> and <image>", [random_picture(1), random_picture(2)])
            for name in (folder, "tiny_vision")
        )
        assert ours.token_ids == expected.token_ids
        for name, tensor in expected.inputs.items():
            torch.testing.assert_close(ours.inputs[name], tensor, rtol=0, atol=0)
    assert load_tokenizer(str(folder)).chat_template == load_tokenizer("tiny_vision").chat_template


def test_arguments_of_the_processor_change_what_a_picture_becomes() -> None:
    picture = Picture(Image.new("RGB", (128, 100), "blue"))
    whole = processor_of("tiny_vision").expand("<image>", [picture])
    split = processor_of("tiny_vision", **SPLIT).expand("<image>", [picture])
    assert len(split.inputs["pixel_values"]) == 5  # four tiles, and the whole picture scaled
    assert split.token_ids.count(100) == 5 * whole.token_ids.count(100)


def test_arguments_that_a_processor_lacks_are_refused() -> None:
    with refuses("model.processor_args.max_pixels"):  # Qwen-VL has it
        load_processor("tiny_vision", {"max_pixels": 1000})
    with refuses("model.processor_args"):
        load_processor("tiny", {"size": {"longest_edge": 64}})


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"return_tensors": "np"}, ".return_tensors"),
        ({"images": []}, ".images"),
        ({"max_pixels": 0}, ".max_pixels"),
        ({"min_pixels": 2.5}, ".min_pixels"),
        ({"min_pixels": 10, "max_pixels": 9}, ".min_pixels"),
        ({"size": 64}, ".size"),
        ({"size": {"longest_edge": -1}}, ".size.longest_edge"),
        ({"do_image_splitting": "no"}, ".do_image_splitting"),
    ],
    ids=str,
)
def test_arguments_that_no_processor_may_be_given_are_refused(args: dict[str, Any], key: str) -> None:
    with refuses(f"model.processor_args{key}"):
        ModelConfig(name="tiny_vision", processor_args=args)


def test_a_text_model_has_no_arguments_of_a_processor() -> None:
    with refuses("model.processor_args"):
        validate(composed("+recipe=grpo", "model=tiny", "+model.processor_args.do_image_splitting=false"))


# Folders that lack something


def test_a_folder_without_a_processor_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny_vision"), folder)
    check_trainable(str(folder))
    (folder / "processor_config.json").unlink()
    with refuses("model.name"):
        check_trainable(str(folder))
    with pytest.raises(ModelLoadError, match="processor"):
        load_processor(str(folder))


def test_a_processor_that_is_of_no_kind_known_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny_vision"), folder)
    write_json(folder / "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": 16})
    with pytest.raises(ModelLoadError, match="processor"):
        load_processor(str(folder))


def test_a_model_whose_pictures_need_a_package_that_is_missing_is_refused_by_its_name(tmp_path: Path) -> None:
    """Qwen-VL's processor reads videos, too."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny_vision"), folder)
    family_config("qwen2_vl").save_pretrained(folder)
    write_json(folder / "preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"})
    write_json(folder / "processor_config.json", {"processor_class": "Qwen2VLProcessor"})
    change_json(folder / "tokenizer_config.json", processor_class="Qwen2VLProcessor")
    with pytest.raises(ModelLoadError, match="orchvision"):
        load_processor(str(folder))

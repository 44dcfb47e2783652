"""A trained policy is saved as its model's folder; models that cannot be saved are refused before training."""

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from support.errors import refuses
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.llama.configuration_llama import LlamaConfig

from trinity_lightning.config.models import resolve_model
from trinity_lightning.errors import DiskFullError
from trinity_lightning.trainer.policy import PolicyModule

SETTINGS: list[dict[str, Any] | str] = [
    {"eos_token_id": 3, "temperature": 0.9, "top_p": 0.6},
    {"eos_token_id": [3, 2], "top_k": 5},
    {"min_p": 0.1, "typical_p": 0.5, "epsilon_cutoff": 0.1},
    {"pad_token_id": -1, "forced_bos_token_id": 1, "forced_eos_token_id": 2, "suppress_tokens": [1]},
    {"cache_implementation": "hybrid"},
    {"cache_implementation": "of another version"},
    {"early_stopping": True, "length_penalty": 2.0, "num_return_sequences": 4},
    {"output_scores": True, "max_new_tokens": -3, "compile_config": {"mode": "x"}},
    {"a_key_of_mine": {"nested": [None]}, "transformers_version": "4.28.1", "_from_model_config": True},
    '{"temperature": NaN,\r\n  "temperature": 0.5}',
    "no JSON",
]


def model_folder(folder: Path, generation: dict[str, Any] | str | None = None) -> Path:
    """The tiny model with this generation_config.json; with none without one."""
    shutil.copytree(resolve_model("tiny"), folder)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (folder / "generation_config.json").write_bytes(text.encode())
    return folder


def loaded(model: Path, **settings: Any) -> PolicyModule:
    policy = PolicyModule(str(model), dtype="fp32", **settings)
    policy.configure_model()
    return policy


@pytest.mark.parametrize("generation", SETTINGS, ids=str)
def test_a_model_keeps_its_generation_config_to_the_byte(generation: dict[str, Any] | str, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", generation)
    policy = loaded(model)
    policy.try_saving(tmp_path)
    policy.save_pretrained(tmp_path / "saved")
    saved = (tmp_path / "saved" / "generation_config.json").read_bytes()
    assert saved == (model / "generation_config.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "saved"]  # the trial left nothing


def test_the_end_tokens_of_the_generation_config_are_the_models(tmp_path: Path) -> None:
    policy = loaded(model_folder(tmp_path / "model", {"eos_token_id": [3, 2], "temperature": 0.9}))
    policy.save_pretrained(tmp_path / "saved")
    assert policy.policy.generation_config.eos_token_id == [3, 2]
    assert policy.policy.generation_config.temperature is None


def test_a_model_without_a_generation_config_has_none_once_saved(tmp_path: Path) -> None:
    loaded(model_folder(tmp_path / "model")).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "generation_config.json").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").generation_config.eos_token_id is not None


def test_the_generation_config_is_there_though_the_models_folder_is_gone(tmp_path: Path) -> None:
    policy = loaded(model_folder(tmp_path / "model", {"top_k": 5}))
    policy.try_saving(tmp_path)
    shutil.rmtree(tmp_path / "model")
    policy.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text()) == {"top_k": 5}
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token_id is not None


def test_a_tokenizer_that_cannot_be_saved_is_refused_by_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no vocabulary to be\nwritten")

    policy = loaded(model_folder(tmp_path / "model"))
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", refuse)
    with refuses("model"):
        policy.try_saving(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_weights_come_before_a_tokenizer_that_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = loaded(model_folder(tmp_path / "model"))
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError) as failed:
        policy.save_pretrained(tmp_path / "saved")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").num_parameters() > 0
    assert f"'{tmp_path / 'saved'}', whole" in failed.value.__notes__[0]


def test_a_configuration_that_cannot_be_saved_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The strict checks of transformers, and code of a model's own, may refuse one."""
    policy = loaded(model_folder(tmp_path / "model"))
    monkeypatch.setattr(LlamaConfig, "to_json_file", lambda *_, **__: json.dumps(object()))
    with refuses("model"):
        policy.try_saving(tmp_path)


def test_a_full_disk_is_named_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"a vocabulary")

    policy = loaded(model_folder(tmp_path / "model"))
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(DiskFullError, match=tmp_path.name):
        policy.try_saving(tmp_path)


def test_files_whose_mode_cannot_be_set_are_saved_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have modes of their own."""

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    policy = loaded(model_folder(tmp_path / "model"), lora={"r": 2})
    monkeypatch.setattr(Path, "chmod", refuse)
    policy.try_saving(tmp_path)
    policy.save_pretrained(tmp_path / "saved")
    monkeypatch.undo()
    assert {path.name for path in (tmp_path / "saved").rglob("*.safetensors")} == {
        "model.safetensors",
        "adapter_model.safetensors",
    }
    assert stat.S_IMODE((tmp_path / "saved" / "model.safetensors").stat().st_mode)

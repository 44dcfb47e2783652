"""The tiny model with a tokenizer as SentencePiece's are in `tokenizers`: a space is part of the word behind it."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trinity_lightning.config.models import resolve_model


def metaspace_model(folder: Path) -> Path:
    """A copy of the tiny model in that folder, whose tokens are words, with such a tokenizer."""
    shutil.copytree(resolve_model("tiny"), folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = ["<unk>", "<s>", "</s>", *(f"▁word{number}" for number in range(size - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<s>"}
    for file in folder.glob("*token*"):
        file.unlink()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder

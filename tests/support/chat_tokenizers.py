"""Byte-level tokenizers with special tokens and a chat template of one's own."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(
    template: str | None,
    special: Iterable[str],
    eos: str,
    bos: str | None = None,
    adds: tuple[str, str] = ("", ""),
    plain: Iterable[str] = (),
) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes, and added tokens.

    Args:
        template: its chat template.
        special: tokens that are special, beside `eos` and `bos`.
        eos, bos: its end and its beginning.
        adds: special tokens that it writes before and behind every text; empty: none.
        plain: added tokens that are not special.
    """
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos, pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": [token for token in special if token not in (eos, bos)]})
    tokenizer.add_tokens(list(plain))
    if any(adds):
        ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in adds if token]
        form = " ".join(filter(None, [adds[0], "$A", adds[1]]))
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=ids)
    tokenizer.chat_template = template
    return tokenizer

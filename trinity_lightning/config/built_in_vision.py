"""Builder of `tiny_vision`, a small random model that sees; `models.resolve_model` writes its files into the cache."""

from pathlib import Path
from typing import Any

import torch
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from trinity_lightning.config.built_in_models import TINY_CONTEXT, TINY_SEED, TINY_SPECIALS, tiny_tokenizer

_EDGE, _PATCH, _SHUFFLE = 64, 8, 2  # pixels of a picture's edge and of a patch's; patches of a token's edge
_PICTURE_TOKENS = (_EDGE // _PATCH // _SHUFFLE) ** 2
_SPECIALS = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
_TILES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))  # of a picture that is cut up
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tiny_vision(folder: Path) -> None:
    """Write a random Idefics3 of 0.4M float32 parameters, with a processor that needs no torchvision.

    A picture is scaled to 64 x 64 pixels and read as 16 tokens. The heads of the text's part have the width of `tiny`.
    """
    tokenizer = tiny_tokenizer(_SPECIALS + _TILES)
    tokenizer.chat_template = _CHATML
    edge = {"longest_edge": _EDGE}
    pictures = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(pictures, tokenizer, image_seq_len=_PICTURE_TOKENS, chat_template=_CHATML)
    pad, end = TINY_SPECIALS.index("<|pad|>"), TINY_SPECIALS.index("<|im_end|>")
    special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    config = Idefics3Config(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _EDGE,
            "patch_size": _PATCH,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "max_position_embeddings": TINY_CONTEXT,
            **special,
            "tie_word_embeddings": True,  # vLLM reads it here
        },
        image_token_id=processor.image_token_id,
        scale_factor=_SHUFFLE,
        tie_word_embeddings=True,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(TINY_SEED)
        model = Idefics3ForConditionalGeneration(config)
        # LeCun's normal values, with which a tower for pictures usually begins. Values of 0.02 let pictures through so
        # faintly that nothing is learned from them at first.
        patches = model.get_parameter("model.vision_model.embeddings.patch_embedding.weight")
        torch.nn.init.normal_(patches, std=patches[0].numel() ** -0.5)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)

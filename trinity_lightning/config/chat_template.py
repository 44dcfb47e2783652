"""Variables for chat templates: `chat_template_kwargs`, of the model's section and of an entry of a dataset."""

from collections.abc import Mapping
from typing import Any

from trinity_lightning.errors import ConfigError

# Arguments of transformers' `apply_chat_template`, which are no variables of a template, and what it gives every one.
RENDERING_ARGUMENTS = (
    "self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "kwargs",
)  # fmt: skip


def check_template_variables(key: str, value: Any) -> dict[str, Any]:
    """The variables, without those that are null.

    Raises:
        ConfigError: it is no mapping, or has an argument of rendering itself.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r}: give a mapping, such as {{enable_thinking: false}}.", key=key)
    variables = {str(name): setting for name, setting in value.items() if setting is not None}
    if reserved := sorted(variables.keys() & set(RENDERING_ARGUMENTS)):
        raise ConfigError(
            f"{key} has {reserved[0]}, which is no variable of the chat template", key=key, fix="leave it out"
        )
    return variables

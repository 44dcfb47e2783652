"""Variables of chat templates: the `chat_template_kwargs` of the model's section and of a dataset's entries."""

from collections.abc import Mapping
from typing import Any

from trinity_lightning.errors import ConfigError

# Names that are no variables: arguments of transformers' `apply_chat_template`, and values that every template gets.
RENDERING_ARGUMENTS = (
    "self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "kwargs",
)  # fmt: skip


def check_template_variables(key: str | None, value: Any, label: str = "") -> dict[str, Any]:
    """Check the variables of a chat template, and leave out those that are null.

    A `label` stands for the key in messages.

    Raises:
        ConfigError: the value is no mapping, or holds a name of RENDERING_ARGUMENTS.
    """
    title = label or key
    if not isinstance(value, Mapping):
        raise ConfigError(f"{title} is {value!r}", key=key, fix="give a mapping, such as {enable_thinking: false}")
    variables = {str(name): setting for name, setting in value.items() if setting is not None}
    if reserved := sorted(variables.keys() & set(RENDERING_ARGUMENTS)):
        raise ConfigError(
            f"{title} has {reserved[0]}, which is no variable of the chat template", key=key, fix="leave it out"
        )
    return variables

"""The pictures of a planned step: how many tokens they are, and how much memory their tensors take."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image

from trinity_lightning.common.pictures.picture import Picture
from trinity_lightning.common.pictures.processor import load_processor
from trinity_lightning.common.pictures.prompt import PLACES
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.plan.command import PlanConfig


@dataclass(frozen=True)
class Pictures:
    """The pictures of a step, all different, and of one size. The rollouts of a prompt share its pictures.

    Attributes:
        count: number of pictures of a step.
        tokens: tokens of each, those that the processor writes beside it among them.
        seen: tokens of each that stand for it.
        tensors: bytes of the tensors of all of them, which lie in the host's memory while the step is trained on.
    """

    count: int
    tokens: int
    seen: int
    tensors: int


def pictures_of(run: TrainConfig, plan_config: "PlanConfig", prompts: int, prompt_tokens: int) -> Pictures | None:
    """The pictures of a step; None without any.

    Args:
        run, plan_config: the configuration.
        prompts: number of different prompts of a step.
        prompt_tokens: tokens of each prompt, its pictures' among them.

    Raises:
        ConfigError: the model reads text alone, a prompt is too short for its pictures, or the processor refuses them.
        ModelLoadError: the model's processor cannot be loaded.
    """
    if plan_config.pictures == 0 or (processor := load_processor(run.model.name, run.model.processor_args)) is None:
        if plan_config.pictures:
            raise ConfigError(f"model '{run.model.name}' reads text alone", key="plan.pictures", fix="leave it out")
        return None
    of_a_prompt, edge = plan_config.pictures or 1, plan_config.picture_edge
    expansion = processor.expand(processor.token, [Picture(Image.new("RGB", (edge, edge)))])
    tokens = len(expansion.token_ids)
    if of_a_prompt * tokens >= prompt_tokens:
        raise ConfigError(
            f"a prompt has {prompt_tokens} tokens, and its pictures (plan.pictures={of_a_prompt}) have "
            f"{of_a_prompt * tokens}",
            key="plan.prompt_tokens" if plan_config.prompt_tokens else "plan.pictures",
            fix="raise engine.max_model_len, or have model.processor_args make pictures smaller",
        )
    size = sum(tensor.nbytes for name, tensor in expansion.inputs.items() if name != PLACES)
    count = prompts * of_a_prompt
    return Pictures(count, tokens, len(expansion.inputs[PLACES]), count * size)

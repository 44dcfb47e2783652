"""Rules of expert data among rollouts, and of the losses that learn from them."""

from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.config.streams import check_streams
from trinity_lightning.errors import ConfigError


def check_expert(run: TrainConfig) -> None:
    """Expert data and the loss that learns from them go together."""
    expert, loss, rollouts = run.buffer.expert, run.algorithm.policy_loss.name, run.buffer.has_rollouts
    learns = loss == "mix"
    if loss in ("streams", "teacher_kl"):
        learns = check_streams(run)
    if expert.per_step > 0 and loss in PARTS["policy loss"] and not learns:
        raise ConfigError(
            f"buffer.expert.per_step is {expert.per_step}, and algorithm.policy_loss={loss} learns nothing from expert "
            "data: choose algorithm.policy_loss=mix (or a stream with tokens=expert), or buffer.expert.per_step=0."
        )
    if expert.per_step > 0 and not rollouts:
        raise ConfigError("buffer.expert joins rollouts (buffer.storage=memory): set buffer.expert.per_step=0.")
    if expert.per_step == 0 and learns and rollouts:
        raise ConfigError(
            f"algorithm.policy_loss={loss} needs expert data: give buffer.expert.per_step=8 and "
            "buffer.expert.dataset.path=FILE of prompts and answers."
        )

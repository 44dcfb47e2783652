"""Rules of experiences that weights before the present ones sampled: of some steps ago, or of another run."""

from trinity_lightning.config.engines import Capabilities
from trinity_lightning.config.registry import OFF_POLICY_LOSSES, PARTS
from trinity_lightning.config.schema import ExplorerConfig
from trinity_lightning.config.training import AlgorithmConfig
from trinity_lightning.errors import ConfigError


def needs_correction(algorithm: AlgorithmConfig) -> bool:
    """Whether the policy loss is for the policy that sampled.

    `opmd` and `sft` are made for experiences of any policy, and so may be a loss of one's own. `mix` is as the loss
    of its rollouts, and `streams` as any of its own.
    """
    losses = [algorithm.policy_loss.name]
    if losses == ["mix"]:
        losses = [algorithm.policy_loss.args.get("usual", "ppo")]
    elif losses == ["streams"]:
        from trinity_lightning.config.streams import streams_of

        losses = [stream.loss for stream in streams_of(algorithm).values()]
    return any(loss in PARTS["policy loss"] and loss not in OFF_POLICY_LOSSES for loss in losses)


def check_corrected(algorithm: AlgorithmConfig) -> None:
    """Refuse to train on such experiences with nothing that corrects for it; a ConfigError."""
    corrected = algorithm.old_logprobs == "engine" or algorithm.rollout_correction.level != "none"
    if needs_correction(algorithm) and not corrected:
        raise ConfigError(
            "nothing corrects for experiences of older weights (explorer.sync_interval, sync_offset or stored): "
            "set algorithm.rollout_correction.level=token, or algorithm.old_logprobs=engine."
        )


def check_engine(explorer: ExplorerConfig, engine: str, can: Capabilities) -> None:
    """Refuse an engine that cannot have older weights, or generate while the trainer trains, if it has to.

    Args:
        explorer: how explore steps are run.
        engine: what to call it in the message.
        can: what it can do.

    Raises:
        ConfigError: it cannot.
    """
    if explorer.sync_interval > 1 and can.shares_weights:
        raise ConfigError(
            f"explorer.sync_interval is {explorer.sync_interval}, and {engine} generates with the training model "
            "itself: leave the key out, or choose another engine."
        )
    if explorer.sync_offset > 0 and not can.overlaps_training:
        raise ConfigError(
            f"explorer.sync_offset is {explorer.sync_offset}, and {engine} cannot generate while the trainer trains. "
            "Choose engine=vllm_server."
        )


def check_corrected_once(algorithm: AlgorithmConfig) -> None:
    """Refuse importance weights besides a ratio against the engine; a ConfigError."""
    if algorithm.rollout_correction.level != "none":
        raise ConfigError(
            "algorithm.old_logprobs=engine corrects already, and importance weights would once more: set "
            "algorithm.rollout_correction.level=none."
        )

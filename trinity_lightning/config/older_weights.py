"""Gradients from experiences that older weights sampled: what corrects them, and the refusal where nothing does."""

from typing import Any

from trinity_lightning.config.registry import OFF_POLICY_LOSSES, PARTS
from trinity_lightning.errors import ConfigError


def samples_older_weights(explorer: Any) -> bool:
    """Whether an explorer (`ExplorerConfig`, or that section) trains on rollouts of weights before the present ones."""
    return explorer.sync_interval > 1 or explorer.sync_offset > 0


def needs_correction(algorithm: Any) -> bool:
    """Whether the policy loss of the algorithm (`AlgorithmConfig`, or that section) is for the policy that sampled.

    `opmd` and `sft` are made for experiences of any policy, and so may be a loss of one's own. `mix` is as the loss of
    its rollouts.
    """
    loss = algorithm.policy_loss
    if loss == "mix":
        loss = algorithm.policy_loss_args.get("usual", "ppo")
    return loss in PARTS["policy loss"] and loss not in OFF_POLICY_LOSSES


def check_corrected(algorithm: Any) -> None:
    """Refuse to train on experiences of older weights with nothing that corrects for it; a ConfigError."""
    corrected = algorithm.old_logprobs == "engine" or algorithm.rollout_correction.level != "none"
    if needs_correction(algorithm) and not corrected:
        raise ConfigError(
            "the experiences are of older weights (explorer.sync_interval, explorer.sync_offset or stored ones) and "
            "nothing corrects for that: set algorithm.rollout_correction.level=token, or algorithm.old_logprobs=engine."
        )

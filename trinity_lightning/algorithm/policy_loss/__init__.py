"""Policy losses: pure functions from per-token tensors to a loss and its metrics."""

from trinity_lightning.algorithm.policy_loss.create import POLICY_LOSS_FN, create_policy_loss, declares
from trinity_lightning.algorithm.policy_loss.likelihood import dpo, opmd, reinforce, sft, teacher_kl
from trinity_lightning.algorithm.policy_loss.off_policy import asymre, rec, sppo, topr
from trinity_lightning.algorithm.policy_loss.policy_loss import BatchTotals, PolicyLossFn, aggregate
from trinity_lightning.algorithm.policy_loss.ppo import ppo  # the function, in place of the module
from trinity_lightning.algorithm.policy_loss.ratio import cispo, dppo, gspo, sapo
from trinity_lightning.algorithm.policy_loss.terms import mix, streams
from trinity_lightning.config.algorithm import LOSS_AGG_MODES

grpo = ppo

__all__ = [
    "LOSS_AGG_MODES",
    "POLICY_LOSS_FN",
    "BatchTotals",
    "PolicyLossFn",
    "aggregate",
    "asymre",
    "cispo",
    "create_policy_loss",
    "declares",
    "dpo",
    "dppo",
    "grpo",
    "gspo",
    "mix",
    "opmd",
    "ppo",
    "rec",
    "reinforce",
    "sapo",
    "sft",
    "sppo",
    "streams",
    "teacher_kl",
    "topr",
]

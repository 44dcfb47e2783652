"""Objectives of the policy: pure functions from per-token tensors to a loss and its metrics."""

from trinity_lightning.algorithm.policy_loss.aggregate import LOSS_AGG_MODES as LOSS_AGG_MODES
from trinity_lightning.algorithm.policy_loss.aggregate import BatchTotals as BatchTotals
from trinity_lightning.algorithm.policy_loss.aggregate import aggregate as aggregate
from trinity_lightning.algorithm.policy_loss.cispo import cispo as cispo
from trinity_lightning.algorithm.policy_loss.gspo import gspo as gspo
from trinity_lightning.algorithm.policy_loss.mix import mix as mix
from trinity_lightning.algorithm.policy_loss.opmd import opmd as opmd
from trinity_lightning.algorithm.policy_loss.ppo import ppo as ppo
from trinity_lightning.algorithm.policy_loss.registry import POLICY_LOSS_FN as POLICY_LOSS_FN
from trinity_lightning.algorithm.policy_loss.registry import PolicyLossFn as PolicyLossFn
from trinity_lightning.algorithm.policy_loss.registry import create_policy_loss as create_policy_loss
from trinity_lightning.algorithm.policy_loss.reinforce import reinforce as reinforce
from trinity_lightning.algorithm.policy_loss.sapo import sapo as sapo
from trinity_lightning.algorithm.policy_loss.sft import sft as sft

"""What it was worth: reward functions `(response, task) -> float | dict[str, float]`, sync or async."""

from trinity_lightning.explorer.rewards.scoring import REWARDS as REWARDS
from trinity_lightning.explorer.rewards.scoring import Reward as Reward
from trinity_lightning.explorer.rewards.scoring import RewardFunction as RewardFunction
from trinity_lightning.explorer.rewards.scoring import resolve_rewards as resolve_rewards
from trinity_lightning.explorer.rewards.scoring import score as score

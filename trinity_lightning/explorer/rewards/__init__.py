"""What it was worth: reward functions `(response, task) -> float | dict[str, float]`, sync or async."""

from trinity_lightning.explorer.rewards.countdown import countdown as countdown
from trinity_lightning.explorer.rewards.math import accuracy as accuracy
from trinity_lightning.explorer.rewards.math import math_boxed_or_last as math_boxed_or_last
from trinity_lightning.explorer.rewards.reasoning import reasoning_gym as reasoning_gym
from trinity_lightning.explorer.rewards.scoring import REWARDS as REWARDS
from trinity_lightning.explorer.rewards.scoring import Reward as Reward
from trinity_lightning.explorer.rewards.scoring import RewardFunction as RewardFunction
from trinity_lightning.explorer.rewards.scoring import resolve_rewards as resolve_rewards
from trinity_lightning.explorer.rewards.scoring import score as score
from trinity_lightning.explorer.rewards.text import contains_digits as contains_digits
from trinity_lightning.explorer.rewards.text import exact_match as exact_match
from trinity_lightning.explorer.rewards.text import last_number as last_number
from trinity_lightning.explorer.rewards.text import think_answer_format as think_answer_format

"""Names that the registries of torch code know, for a misspelt one to be refused before torch is imported."""

ADD_STRATEGIES = (
    "asymre",
    "correct_bias",
    "dapo",
    "dr_grpo",
    "duplicate_informative",
    "gigpo",
    "grpo",
    "on_policy_distill",
    "opmd",
    "reinforce",
    "reinforce_plus_plus",
    "reward_variance",
    "rloo",
    "step_wise_grpo",
)
EXPERIENCE_OPERATORS = (
    "dapo_dynamic_sampling",
    "invalid_reward_filter",
    "judge",
    "mask_response_truncated",
    "overlong_penalty",
    "pass_rate_calculator",
    "reward_filter",
    "reward_shaping_mapper",
    "reward_std_filter",
)
STEP_STRATEGIES = ("gigpo", "on_policy_distill", "step_wise_grpo")  # they take a reward a step, or need none
SHAPING_OPERATORS = ("judge", "overlong_penalty", "reward_shaping_mapper")  # they change rewards
FILTERING_STRATEGIES = ("dapo", "duplicate_informative", "reward_variance")  # they set no advantages
POLICY_LOSSES = ("cispo", "grpo", "gspo", "mix", "opmd", "ppo", "reinforce", "sapo", "sft")
OFF_POLICY_LOSSES = ("opmd", "sft")  # made for experiences of any policy: nothing corrects for older weights
OLD_LOGPROBS = ("trainer", "engine")
KL_ESTIMATES = ("abs", "corrected_k3", "k1", "k2", "k3", "low_var_kl", "none")
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
CORRECTION_LEVELS = ("none", "token", "sequence")
CORRECTION_MODES = ("truncate", "mask")
WORKFLOWS = ("evaluation", "judge", "math", "multi_turn", "on_policy_distill", "simple", "tool_use")
# Workflows whose experiences have one response of the policy each.
SINGLE_RESPONSE_WORKFLOWS = ("judge", "math", "on_policy_distill", "simple")
# Workflows that need an auxiliary model, and the argument that says which.
ASKING_WORKFLOWS = {"judge": "judge", "on_policy_distill": "teacher"}
LR_SCHEDULERS = ("constant", "constant_with_warmup", "linear", "cosine", "polynomial", "inverse_sqrt")
TASK_SOURCES = ("addition", "reasoning_gym", "dataset")
TASK_ORDERS = ("sequential", "shuffled", "easy_to_hard", "by_difficulty")
BUFFER_STORAGES = ("memory", "file", "sql")
SYNC_METHODS = ("auto", "memory", "checkpoint", "nccl", "tcp")
WEIGHT_GROUPS = ("nccl", "tcp")  # of these, those that connect trainer and servers
EXPERT_STORAGES = ("dataset", "file", "sql")
BUFFER_ORDERS = ("fifo", "priority", "random")

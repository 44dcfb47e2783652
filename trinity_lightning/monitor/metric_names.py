"""Every metric by name: what it means and its unit. `docs/metrics.md` is generated from this table.

python -m trinity_lightning.monitor.metric_names > docs/metrics.md
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

# The metric that counts explore steps: the axis of every picture, in the CSV file and in W&B.
STEP_METRIC = "explore_step"
# Before the reason, of the metrics that count what is not trained on.
UNTRAINED_PREFIX = "experience_pipeline/untrained/"


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table.

    Attributes:
        pattern: the name; `{a,b}` stands for each of the alternatives, `<x>` for a name given by the configuration.
        unit: "" for a ratio or a plain number.
        meaning: one sentence.
    """

    pattern: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Whether `name` is a metric of this line."""
        parts = re.split(r"(\{[^}]*\}|<[^>]*>)", self.pattern)
        return re.fullmatch("".join(map(_part_regex, parts)), name) is not None


def _part_regex(part: str) -> str:
    if part.startswith("{"):
        return "(?:" + "|".join(map(re.escape, part[1:-1].split(","))) + ")"
    return r".+" if part.startswith("<") else re.escape(part)


METRICS: tuple[Metric, ...] = (
    Metric("explore_step", "", "The explore step (EID.batch) that everything else in the row belongs to."),
    # What was tried
    Metric("rollout/task_run_time/{mean,max,min}", "s", "Time a task took in its runner, retries included."),
    Metric("rollout/time_per_task/{mean,max,min}", "s", "Time of one attempt at a task."),
    Metric("rollout/{tasks,failed_tasks,experiences}", "", "What the step scheduled, lost and got."),
    Metric(
        "rollout/overlap", "", "Time that rollouts and training went on at once, as a share of the shorter of the two."
    ),
    Metric("rollout/engine_restarts", "servers", "Servers of the run that died and were started again."),
    Metric("rollout/refill_tasks", "tasks", "Tried in place of those that add_strategy=dapo left out."),
    Metric("rollout/tokens_per_second", "tokens/s", "Response tokens over the time of the rollouts."),
    Metric("rollout/<metric>/{mean,max,min}", "", "Any other number of workflows or runners, over the step's tasks."),
    Metric(
        "sample/model_version/mean",
        "steps",
        "Explore steps that changed the weights sampled from; one that trained nothing does not count.",
    ),
    Metric(
        "sample/lag/mean", "steps", "How many such steps the weights were behind when training began; 0 is on-policy."
    ),
    Metric("reward/mean", "reward", "Mean reward of the step's rollouts, before any filter."),
    Metric("reward/std", "reward", "Standard deviation of those rewards."),
    Metric("reward/<function>/mean", "reward", "Mean of one reward function's values."),
    Metric(
        "frac_reward_zero_std", "", "Share of groups with equal rewards: less their mean, nothing is left to train on."
    ),
    Metric("response_length/{mean,max,min}", "tokens", "Length of responses."),
    Metric("response_length/clip_ratio", "", "Share of responses cut off at the token limit."),
    Metric("prompt_length/{mean,max,min}", "tokens", "Length of prompts."),
    # What was made of it
    Metric(
        "experience_pipeline/written", "experiences", "What was left to train on after operators and add strategies."
    ),
    Metric("experience_pipeline/expert", "experiences", "Expert data that joined the rollouts behind the strategies."),
    Metric("experience_pipeline/trained", "experiences", "What is trained on: not left out, and with a gradient."),
    Metric(
        "experience_pipeline/untrained/<reason>",
        "experiences",
        "What came and is not trained on: `equal_rewards`, `filtered_by_<operator or strategy>`, ... (see below).",
    ),
    Metric(
        "experience_pipeline/{surplus,missing}_groups",
        "groups",
        "With add_strategy=dapo: refilled groups beyond the step's tasks, which were dropped; and what was lacking.",
    ),
    Metric("experience_pipeline/<operator>/filtered_count", "experiences", "What a filter dropped."),
    Metric(
        "experience_pipeline/<operator>/dropped_all_{correct,wrong}",
        "experiences",
        "What dapo_dynamic_sampling dropped, of groups without any wrong or any right response.",
    ),
    Metric(
        "experience_pipeline/<operator>/masked_truncated_count", "experiences", "Responses cut off, and not trained on."
    ),
    Metric("experience_pipeline/<operator>/overlong_penalty/mean", "reward", "Mean penalty for length."),
    Metric("experience_pipeline/<operator>/reward_diff/{mean,min,max}", "reward", "What shaping added to the rewards."),
    Metric("experience_pipeline/<operator>/skipped_count", "experiences", "What some shaping rule did not apply to."),
    Metric("experience_pipeline/<operator>/selection/pass_rate/{mean,min,max}", "reward", "Mean reward of a task."),
    Metric("experience_pipeline/<operator>/selection/task_count", "tasks", "Tasks whose pass rate was measured."),
    Metric(
        "experience_pipeline/<operator>/selection/skipped_count", "experiences", "What had no reward to measure by."
    ),
    Metric("experience_pipeline/<operator>/score/mean", "", "Mean score that a judge gave, from 0 to 1."),
    Metric("experience_pipeline/<operator>/failed_count", "experiences", "What a judge gave no score."),
    Metric(
        "experience_pipeline/<operator>/failed",
        "",
        "1 if an operator with on_error=skip failed in this step, else 0.",
    ),
    Metric("experience_pipeline/<operator>/<metric>", "", "Anything else an operator counts or measures."),
    Metric("group_advantages/reward_mean/{mean,max,min}", "reward", "Mean reward of a group, over the groups."),
    Metric(
        "group_advantages/reward_std/{mean,max,min}", "reward", "Standard deviation within a group, over the groups."
    ),
    Metric("group_advantages/invalid_group_count", "groups", "Groups left out: a reward was missing, NaN or infinite."),
    Metric("group_advantages/group_baseline/{mean,max,min}", "reward", "Baseline of a group (OPMD), over the groups."),
    Metric(
        "group_advantages/repeated_state_ratio/{mean,max,min}",
        "",
        "Share of a task's steps from a state met more than once (GiGPO), over the tasks.",
    ),
    Metric(
        "group_advantages/reverse_kl/{mean,max,min}",
        "nats",
        "Mean of policy minus teacher log-probability of a task's trained tokens, over the tasks.",
    ),
    Metric("group_advantages/<statistic>/{mean,max,min}", "", "Any other number of an add strategy, over the groups."),
    Metric("filtered_count", "experiences", "What the add strategies left out."),
    Metric("duplicated_count", "experiences", "What the add strategies copied."),
    Metric("add_strategy_time", "s", "Time within a filtering add strategy."),
    # What was learnt
    Metric("actor/pg_loss", "", "Policy loss, clipped and aggregated, of the whole optimizer batch."),
    Metric("actor/sft_loss", "nats", "Mean of minus log-probability of the expert data's tokens (policy_loss=mix)."),
    Metric("actor/kl_loss", "nats", "KL estimate between policy and reference model, before its coefficient."),
    Metric("actor/entropy", "nats", "Mean entropy of the policy at trained tokens."),
    Metric("actor/ppo_kl", "nats", "Mean of old (algorithm.old_logprobs) minus new log-probability."),
    Metric("actor/pg_clipfrac", "", "Share of computed tokens whose ratio the clip range holds back."),
    Metric("actor/pg_clipfrac_{low,high}", "", "The same, at the lower and the upper end of the range."),
    Metric(
        "actor/pg_clipfrac_dual", "", "Share of computed tokens bounded by the dual clip (negative advantages only)."
    ),
    Metric("actor/logprob_diff/{mean,max}", "nats", "Absolute difference of engine and trainer: alarms at sync bugs."),
    Metric("actor/is_weight/{mean,max}", "", "Weights that correct for the difference of engine and trainer."),
    Metric("actor/grad_norm", "", "Norm of the gradient before clipping."),
    Metric("actor/lr", "", "Learning rate of the optimizer step."),
    Metric(
        "actor/trained_rows",
        "experiences",
        "What the optimizer step computed; rows without advantage may be left out, and 0 is an item without a step.",
    ),
    Metric("actor/micro_batches", "", "Parts the optimizer batch was cut into, to stay within the token budget."),
    Metric("actor/skipped_items", "", "Optimizer batches so far that had nothing to train, and took no step."),
    Metric("actor/bad_steps", "", "Optimizer batches so far whose gradient was not finite, and took no step."),
    Metric("actor/<metric>", "", "Any other number of the policy loss."),
    Metric("critic/<metric>", "", "Losses, values and explained variance of the critic (PPO only)."),
    Metric(
        "eval/<taskset>/<metric>/{mean,std,best,worst}@<m>",
        "",
        "As of the reward, of every other number of a workflow (best is largest); of one rollout the mean only.",
    ),
    Metric(
        "eval/<taskset>/mean@<k>", "reward", "Mean reward of a task's k rollouts; a mean over tasks, as all of these."
    ),
    Metric("eval/<taskset>/std@<k>", "reward", "Standard deviation of the rewards of a task's k rollouts."),
    Metric(
        "eval/<taskset>/{best,worst}@<m>",
        "reward",
        "Best and worst reward to be expected of m of the k rollouts; m: 2, 4, ... below k, and k.",
    ),
    Metric("eval/<taskset>/pass@<m>", "", "Share of tasks with a reward of 1 among m rollouts: its unbiased estimate."),
    Metric("eval/<taskset>/failed_tasks", "", "Tasks of the evaluation that failed."),
    Metric("eval/<taskset>/seconds", "s", "How long the evaluation took."),
    # What it cost
    Metric(
        "time/{rollout,operators,add_strategy,collate,train,sync_weight}", "s", "Where the explore step's time went."
    ),
    Metric(
        "sync/probe_diff/{mean,max}",
        "nats",
        "Absolute difference of log-probabilities of engine and trainer on the probe.",
    ),
    Metric("time/step", "s", "The whole explore step, from waiting for its rollouts to the end of its training."),
    Metric("time/wait_for_rollout", "s", "Waiting for rollouts that were begun ahead (sync_offset)."),
    Metric("time/prepare", "s", "Time for log-probabilities needed before the first of several optimizer steps."),
    Metric("time/operator/<index>_<class>", "s", "Time within one operator."),
    Metric("perf/tokens_per_second", "tokens/s", "Prompt and response tokens computed over the time spent training."),
    Metric("perf/trained_tokens_per_second", "tokens/s", "Trained tokens over the time spent training."),
    Metric(
        "perf/padding_ratio", "", "Tokens computed over tokens there are: 1 is no padding; below 1, prompts are shared."
    ),
    Metric(
        "perf/mfu",
        "",
        "Model FLOPs utilization: operations that the training computed (forward and backward, padding included) over "
        "what the device could; its peak is measured on a CPU, and on an unknown GPU the metric is absent.",
    ),
    Metric(
        "perf/computed_tokens", "tokens", "Tokens of the forward passes trained on: with padding, shared prefixes once."
    ),
    Metric("perf/shared_prefix", "", "1 if the optimizer step shared prefixes (algorithm.layout), 0 if it was padded."),
    Metric(
        "perf/other_cores",
        "cores",
        "What other programs used of the CPU while the trainer trained on it; absent where that took under a second.",
    ),
    Metric("perf/peak_memory_gb", "GB", "Peak memory of the process and its children so far (10^9 bytes)."),
)


def find_metric(name: str) -> Metric | None:
    """The first line of the table that a metric's name fits, or None: then it is not documented."""
    return next((metric for metric in METRICS if metric.matches(name)), None)


def headline_metrics(names: Sequence[str]) -> list[str]:
    """Names without the statistics of an evaluation's other metrics: those of the reward have a pass@k beside them."""
    rewards = {name.rpartition("/")[0] for name in names if "/pass@" in name}
    return [name for name in names if "@" not in name or name.rpartition("/")[0] in rewards]


def metric_globs() -> list[str]:
    """What the names come down to when everything below a group is one: `rollout/*`, `frac_reward_zero_std`, ..."""
    globs = (re.sub("/.*", "/*", metric.pattern) for metric in METRICS if metric.pattern != STEP_METRIC)
    return list(dict.fromkeys(globs))


WHY_UNTRAINED = """\
## Why a step trains nothing

1. The run says it. A step of which no response is trained on ends its line with `no rollout trained`; a warning above
   the line, in `train.log` too, counts the responses for each reason, and one says what helps. `report.html` lists such
   steps.
2. The table below says what each reason means.

In `metrics.csv` and W&B, `experience_pipeline/trained` is 0 in such a step, the reasons are counted in
`experience_pipeline/untrained/<reason>`, `actor/trained_rows` is 0, and `actor/skipped_items` has grown. If it is
`actor/bad_steps` that has grown, there was something to train on, and the gradient was not finite: a warning names the
experiences.

Every completion says whether it is `trained` and, if not, the `reason`: in `completions/step_<n>.jsonl`, in the W&B
table and in `report.html`. Where the loss needs no advantage (`policy_loss=sft`, `kl.coef` or `entropy_coef` not 0),
responses without one are trained on, and neither of the first two reasons is given.

| reason | meaning | what helps |
|---|---|---|
"""


def metrics_page() -> str:
    """The page `docs/metrics.md`."""
    from trinity_lightning.common.untrained import REASONS  # late: it needs torch, and reading metrics does not

    reasons = [f"| `{reason}` | {meaning} | {helps} |\n" for reason, (meaning, helps) in REASONS.items()]
    rows = [f"| `{metric.pattern}` | {metric.unit} | {metric.meaning} |" for metric in METRICS]
    return "\n".join(
        [
            "# Metrics",
            "",
            "The same names stand in `metrics.csv` and in W&B, where `explore_step` is the axis.",
            "`{a,b}` stands for each of the alternatives, `<x>` for a name that the configuration or a workflow gives.",
            "",
            "| name | unit | meaning |",
            "|---|---|---|",
            *rows,
            "",
            WHY_UNTRAINED + "".join(reasons),
        ]
    )


if __name__ == "__main__":
    print(metrics_page(), end="")

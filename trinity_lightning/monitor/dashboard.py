"""Sections and panels of the dashboard, as plain data: which metrics, in which order, and why a person looks at them.

`trinity-lightning dashboard` makes saved views of W&B from them; docs/wandb.md shows them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

X_AXIS = "explore_step"
# Summaries of a run that RunMonitor keeps; the name of a held-out metric depends on taskset and number of rollouts.
HELD_OUT_BEST = "held_out/best"
HELD_OUT_LAST = "held_out/last"


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart over explore steps.

    Attributes:
        title: its heading.
        why: the question that it answers, in one sentence.
        metrics: names of metrics.
        regex: pattern of further names, for those that the configuration gives.
        stacked: draw areas on top of each other.
        log: draw the values on a logarithmic scale.
        only: the runs that have these metrics; empty if every run with rollouts has them.
    """

    title: str
    why: str
    metrics: tuple[str, ...] = ()
    regex: str = ""
    stacked: bool = False
    log: bool = False
    only: str = ""

    def matching(self, names: Iterable[str]) -> list[str]:
        """The names that this panel draws."""
        return [name for name in names if name in self.metrics or (self.regex and re.search(self.regex, name))]


@dataclass(frozen=True, slots=True)
class Section:
    """Panels that are looked at together; `is_open` shows them at once."""

    name: str
    panels: tuple[Panel, ...]
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """A column of the parallel coordinates: the key of a setting, or the name of a summary."""

    name: str
    title: str
    is_setting: bool = True
    log: bool = False


# Patterns are of the kind that every engine of regular expressions reads alike. Nothing escapes the slash.
_REWARD_OF_TASKSET = "^eval/[^/]+/mean@[0-9]+$"
_FURTHER_MEANS = "^eval/.+/.+/mean@[0-9]+$"

SECTIONS = (
    Section(
        "Reward and held-out",
        (
            Panel(
                "Reward",
                "Does it learn? The mean reward of a step's rollouts rises; its spread shrinks as tasks are solved.",
                ("reward/mean", "reward/std"),
            ),
            Panel(
                "Held-out reward",
                "Does it learn the skill or the tasks? The mean over k rollouts of tasks that are not trained on.",
                regex=_REWARD_OF_TASKSET,
                only="runs that evaluate (explorer.eval_interval)",
            ),
            Panel(
                "Held-out pass@k",
                "How many held-out tasks are within reach? Flat beside a rising mean: it grew surer, not abler.",
                regex="^eval/.+/pass@[0-9]+$",
                only="evaluated tasksets with a criterion (reward_solved)",
            ),
            Panel(
                "Reward by function",
                "Which part of the reward rises? A format that is learned before the answer looks like progress.",
                regex="^reward/.+/mean$",
            ),
        ),
    ),
    Section(
        "Groups and what was not trained",
        (
            Panel(
                "Groups without signal",
                "Groups whose rewards are all equal teach nothing. Near 1, the tasks are too easy or too hard.",
                ("frac_reward_zero_std",),
                only="runs with explorer.repeat_times above 1",
            ),
            Panel(
                "Experiences received, kept and trained",
                "How much of the rollouts is used? The gap between the lines is work that trains nothing.",
                ("rollout/experiences", "experience_pipeline/written", "experience_pipeline/trained"),
            ),
            Panel(
                "Not trained, by reason",
                "Why is the rest left out: equal rewards, a filter, a response that was cut off?",
                regex="^experience_pipeline/untrained/.+",
                stacked=True,
                only="runs in which something was not trained",
            ),
            Panel(
                "Spread of rewards within a group",
                "How much there is to learn from a group: the advantage of a rollout is its distance from the others.",
                ("group_advantages/reward_std/mean", "group_advantages/reward_std/max"),
                only="add strategies that compare the rollouts of a group",
            ),
            Panel(
                "Tasks that failed",
                "Rollouts that raised an error or ran out of time. The log has the errors.",
                ("rollout/failed_tasks",),
            ),
        ),
    ),
    Section(
        "Lengths and cut-offs",
        (
            Panel(
                "Response length",
                "Do responses grow into the limit, or shrink to nothing? Both are ways to game a reward.",
                ("response_length/mean", "response_length/max", "response_length/min"),
            ),
            Panel(
                "Cut off at the limit",
                "Share of responses without an end, whose answer is lost: raise sampling.max_tokens if it grows.",
                ("response_length/clip_ratio",),
            ),
            Panel("Prompt length", "Are the prompts as long as expected?", ("prompt_length/mean", "prompt_length/max")),
        ),
    ),
    Section(
        "Engine against trainer",
        (
            Panel(
                "Log-probability difference",
                "The alarm for weights that were not synced: rounding makes hundredths, old weights tenths.",
                ("actor/logprob_diff/mean", "actor/logprob_diff/max"),
                log=True,
            ),
            Panel(
                "Importance weights",
                "How strongly the loss corrects for that difference. A mean far from 1 leaves hardly a gradient.",
                ("actor/is_weight/mean", "actor/is_weight/max"),
                only="algorithm.rollout_correction, the default of most recipes",
            ),
            Panel(
                "Probe of the synced weights",
                "Engine and trainer on the same tokens right after a sync: above rounding, the sync is broken.",
                ("sync/probe_diff/mean", "sync/probe_diff/max"),
                log=True,
            ),
            Panel(
                "Age of the sampled weights",
                "Steps that the engine's weights were behind when training began; 0 is on-policy.",
                ("sample/lag/mean",),
            ),
        ),
    ),
    Section(
        "Loss, clipping, KL, entropy, gradient",
        (
            Panel(
                "Gradient norm",
                "Is training stable? A peak before the reward falls says: a lower learning rate, or clipping.",
                ("actor/grad_norm",),
                log=True,
            ),
            Panel(
                "Entropy",
                "Does the policy still explore? An entropy near 0 early on makes all rollouts of a group alike.",
                ("actor/entropy",),
            ),
            Panel(
                "Clipped tokens",
                "Share of tokens whose update the clip range holds back, by its lower and upper end.",
                ("actor/pg_clipfrac", "actor/pg_clipfrac_low", "actor/pg_clipfrac_high"),
                only="losses with a clip range",
            ),
            Panel("KL from the old policy", "How far one explore step moves the policy.", ("actor/ppo_kl",)),
            Panel(
                "KL from the reference",
                "How far training has moved the policy from where it began.",
                ("actor/kl_loss", "critic/kl"),
                only="algorithm.kl, or a KL penalty in the reward",
            ),
            Panel(
                "Loss",
                "A policy loss need not fall: look at it for jumps and for NaN, and at the reward for progress.",
                regex="^actor/(pg_loss|.+_loss)$",
            ),
            Panel("Learning rate", "Is the schedule the one that was meant?", ("actor/lr",)),
            Panel(
                "Optimizer steps without a gradient",
                "Batches so far that took no step: nothing to train, or a gradient that was not finite.",
                regex="^actor/(skipped_items|bad_steps|skipped_steps)$",
            ),
        ),
    ),
    Section(
        "Time and tokens",
        (
            Panel(
                "Parts of a step",
                "Where do the seconds go? The tallest area is the one to make faster.",
                ("time/wait_for_rollout", "time/rollout", "time/operators", "time/add_strategy", "time/train",
                 "time/sync_weight"),
                stacked=True,
            ),
            Panel("Whole step", "Seconds per explore step, for the time that is left.", ("time/step",)),
            Panel(
                "Tokens per second",
                "Written by the engine, computed by the trainer, and trained on.",
                ("rollout/tokens_per_second", "perf/tokens_per_second", "perf/trained_tokens_per_second"),
                log=True,
            ),
            Panel(
                "Use of the device",
                "Share of the device's peak that training reaches, and the padding that is computed for nothing.",
                ("perf/mfu", "perf/padding_ratio"),
            ),
        ),
    ),
    Section(
        "Memory",
        (
            Panel(
                "Memory of the run's processes",
                "Does it grow from step to step? Then something leaks, and the run will be killed.",
                ("perf/peak_memory_gb",),
            ),
            Panel(
                "GPU memory",
                "How much room is left for larger batches or longer responses.",
                ("perf/peak_gpu_memory_gb", "perf/peak_gpu_memory_reserved_gb"),
                only="runs on a GPU",
            ),
        ),
    ),
    Section(
        "Parts that only some runs have",
        (
            Panel("Critic", "Does the critic predict returns? 1 is perfect.", ("critic/explained_variance",),
                  only="a critic (ppo)"),
            Panel("Critic's loss", "Does the critic still learn?", ("critic/value_loss", "critic/grad_norm"), log=True,
                  only="a critic (ppo)"),
            Panel("Preferred responses", "Share of pairs that are ranked as they should be.",
                  ("actor/rewards/accuracies", "eval/accuracy"), only="dpo"),
            Panel("Margin of pairs", "Distance between the rewards of the chosen and the rejected response.",
                  ("actor/rewards/margins", "eval/margin"), only="dpo"),
            Panel("Held-out loss", "Does it begin to learn the examples by heart?", ("eval/loss",),
                  only="buffer=dataset with held_out"),
            Panel("Distance from the teacher", "KL between policy and teacher on the policy's own responses.",
                  ("group_advantages/reverse_kl/mean",), only="on_policy_distill"),
            Panel("Further held-out means", "Means of every other number that the workflow measures.",
                  regex=_FURTHER_MEANS, only="workflows with several numbers"),
            Panel("Left out by operators", "Experiences that each operator or add strategy drops.",
                  regex="^(filtered_count|experience_pipeline/.+/filtered_count)$", only="filters"),
            Panel("Rollouts beside training", "Share of the time that both went on at once.", ("rollout/overlap",),
                  only="explorer.sync_offset above 0"),
            Panel("Age of the trained groups", "Steps from the beginning of a group to its training. It never exceeds "
                  "explorer.max_staleness.", ("sample/staleness/mean", "sample/staleness/max"),
                  only="explorer.max_staleness above 0"),
            Panel("Rollouts under way while training", "Near 0, steps wait for their longest rollouts after all: "
                  "raise explorer.run_ahead.", ("rollout/suspended",), only="explorer.max_staleness above 0"),
            Panel("Tokens computed again", "What weight syncs cost rollouts that go on: their prompts and responses so "
                  "far.", ("rollout/reprefilled_tokens",), only="explorer.max_staleness above 0"),
            Panel("Restarted engines", "Servers that died and were started again.", ("rollout/engine_restarts",),
                  only="engines in processes of their own"),
            Panel("Other programs' cores", "Other programs slow a run on CPUs down.", ("perf/other_cores",),
                  only="runs on CPUs whose training takes over a second"),
        ),
        is_open=False,
    ),
)  # fmt: skip

# Columns of the runs table: statistics that RunLogger asks W&B to keep; see `wandb_logger.SUMMARIES`.
PINNED = (
    HELD_OUT_BEST,
    HELD_OUT_LAST,
    "reward/mean.max",
    "reward/mean.last",
    "frac_reward_zero_std.mean",
    "response_length/clip_ratio.last",
    "actor/logprob_diff/mean.max",
    "actor/grad_norm.max",
    "time/step.mean",
    "perf/peak_memory_gb.max",
)

# What people sweep, and the scores at the right end.
SWEPT = (
    Axis("optimizer.lr", "learning rate", log=True),
    Axis("optimizer.lr_scheduler.name", "schedule"),
    Axis("algorithm.kl.coef", "KL coefficient"),
    Axis("explorer.batch_size", "tasks"),
    Axis("explorer.repeat_times", "group size"),
    Axis("explorer.sync_interval", "sync interval"),
    Axis("sampling.temperature", "temperature"),
    Axis("sampling.max_tokens", "longest response"),
    Axis("model.name", "model"),
    Axis("seed", "seed"),
    Axis("reward/mean.last", "last reward", is_setting=False),
    Axis(HELD_OUT_BEST, "best held-out", is_setting=False),
)

SWEEP_PANELS = (
    Panel("Held-out reward", "The runs over each other, on tasks that are not trained on.", regex=_REWARD_OF_TASKSET),
    Panel("Reward", "The runs over each other.", ("reward/mean",)),
    Panel("Response length", "Did a run buy its reward with longer responses?", ("response_length/mean",)),
    Panel("Groups without signal", "Did a run stop to learn early?", ("frac_reward_zero_std",)),
    Panel("Entropy", "Did a run stop to explore early?", ("actor/entropy",)),
    Panel("Gradient norm", "Was a run unstable?", ("actor/grad_norm",), log=True),
)

"""Single-turn mathematics."""

from trinity_lightning.explorer.workflows.simple import SimpleWorkflow


class MathWorkflow(SimpleWorkflow):
    """Single turn, judged by the boxed answer or the last number where the task names no reward function."""

    default_reward = "math"

"""What is measured, and never trained on."""

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import Completion
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows.single_turn import SimpleWorkflow


class EvaluationWorkflow(SimpleWorkflow):
    """Single turn, for evaluation tasks: it also measures `accuracy` (1 if the reward is at least 1),
    `truncated` (1 if the token limit ended the response) and `response_tokens`.

    With `eval_workflow=evaluation` a policy that is trained by a judge, say, is evaluated by verifiable rewards.
    """

    default_reward = "math"

    def reset(self, task: Task) -> None:
        """Take another task; ConfigError for one to train on."""
        if not task.is_eval:
            raise ConfigError("workflow 'evaluation' is for evaluation tasks: give it as eval_workflow.")
        super().reset(task)

    async def _experience(self, completion: Completion, run: int) -> Experience:
        experience = await super()._experience(completion, run)
        experience.metrics |= {
            "accuracy": float(experience.reward is not None and experience.reward >= 1.0),
            "truncated": float(completion.finish_reason == "length"),
            "response_tokens": float(len(completion.token_ids)),
        }
        return experience

"""The critic of a PolicyModule (algorithm.critic): its values, the advantages made from them, and its loss."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trinity_lightning.algorithm.gae import explained_variance, gae, value_loss, whitened
from trinity_lightning.algorithm.kl import KL_FN
from trinity_lightning.common.experience import Experience, gather_rows
from trinity_lightning.common.optimizer_batch import OptimizerBatch, trained_mask
from trinity_lightning.common.pictures.states import with_states
from trinity_lightning.common.runs import is_valid_reward
from trinity_lightning.config.algorithm import Layout
from trinity_lightning.config.critic import CriticConfig
from trinity_lightning.config.models import check_same_vocabulary
from trinity_lightning.errors import ConfigError, ModelLoadError
from trinity_lightning.trainer.head import lean_embeddings
from trinity_lightning.trainer.layout import MicroBatch
from trinity_lightning.trainer.model import logprob_function, usable_layout
from trinity_lightning.trainer.objective import column
from trinity_lightning.trainer.optim import parameter_groups
from trinity_lightning.trainer.passes import Passes
from trinity_lightning.trainer.placement import WHOLE, Whole

# Rate at which the weight of the KL follows the error of the KL, and bound of that error: Ziegler et al. 2019, arXiv
# 1909.08593, 2.2.
GAIN, MAX_ERROR = 0.1, 0.2


class Critic(nn.Module):
    """A value head in float32, on the last hidden states of the policy or of a value model.

    The head begins with zeros: the first advantages are the rewards to go.

    Args:
        config: the section algorithm.critic.
        policy: the Hugging Face model that is trained; not a part of the critic.
        tokenizer: the policy's tokenizer.
        load: loads a value model by its name.

    Attributes:
        model: the value model; None: the policy's states are used.
        kl_scale: factor by which an adaptive weight of the KL has changed so far, a float64 tensor; it is saved in
            checkpoints as the weights are.
        warms_up: only the critic is trained now.

    Raises:
        ConfigError: the value model has another vocabulary than the policy.
    """

    kl_scale: Tensor

    def __init__(self, config: CriticConfig, policy: Any, tokenizer: Any, load: Callable[[str], Any]) -> None:
        super().__init__()
        self.config = config
        self.model: Any = None
        if config.model is not None:
            check_same_vocabulary("algorithm.critic.model", config.model, tokenizer)
            self.model = load(config.model)
            lean_embeddings(self.model.train())
            output = self.model.get_output_embeddings()
            if output is not None and output.weight is not self.model.get_input_embeddings().weight:
                output.requires_grad_(False)  # no token is predicted
        width = (policy if self.model is None else self.model).config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("kl_scale", torch.ones((), dtype=torch.float64))
        self.warms_up = False

    @property
    def kl_coef(self) -> float:
        """Present weight of the KL in the reward; an adaptive weight has moved away from the configured one."""
        return self.config.kl_coef * (1.0 if self.config.kl_target is None else float(self.kl_scale))

    def check(self, passes: Passes, policy: Any) -> None:
        """Try to compute values, and refuse models that have none; a ModelLoadError."""
        self.columns(passes, policy, OptimizerBatch.of([Experience(tokens=[0, 0], prompt_length=1)], 0))

    def usable_layout(self, layout: Layout) -> Layout:
        """The layout, or `padded` if it is `auto` and the value model needs it.

        Raises as `model.logprob_function` and `model.usable_layout` do.
        """
        return layout if self.model is None else usable_layout(layout, self.model, logprob_function(self.model))

    def groups(self) -> list[dict[str, Any]]:
        """Groups of the critic's parameters for the policy's optimizer, at their own learning rate."""
        return [{**group, "lr": self.config.lr} for group in parameter_groups(self) if group["params"]]

    # -- values -------------------------------------------------------------------------------------------------------

    def with_values(self, passes: Passes) -> Passes:
        """Passes of the policy that also return values [n], after log-probabilities and entropies."""

        def function(model: Any, inputs: dict[str, Any], positions: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            if self.model is not None:
                results = passes.function(model, inputs, positions, *others)
                outputs = [self.model.base_model(**with_states(self.model, inputs), use_cache=False)]
            else:
                outputs = []
                hook = model.base_model.register_forward_hook(lambda module, args, output: outputs.append(output))
                try:
                    results = passes.function(model, inputs, positions, *others)
                finally:
                    hook.remove()
            states = getattr(outputs[0], "last_hidden_state", None) if outputs else None
            if states is None:
                raise ModelLoadError(
                    f"{type(self.model or model).__name__} does not show its last hidden states, which a value head "
                    "needs: give another model as algorithm.critic.model."
                )
            return *results, self._values(states.flatten(0, 1)[positions])

        return replace(passes, function=function)

    @torch.no_grad()
    def columns(
        self, passes: Passes, policy: Any, batch: OptimizerBatch, placement: Whole = WHOLE
    ) -> dict[str, list[Tensor]]:
        """The columns old_logprobs and values, from one pass without dropout."""
        self.train(not passes.switches_mode)
        old_logprobs, values = self.with_values(passes).columns(policy, batch, placement, results=(0, 2))
        self.train(policy.training)
        return {"old_logprobs": old_logprobs, "values": values}

    def _values(self, states: Tensor) -> Tensor:
        if self.warms_up and self.model is None:
            states = states.detach()  # the policy's weights stay
        with torch.autocast(states.device.type, enabled=False):
            return self.head(states.float()).squeeze(-1)

    # -- before a step's first update ----------------------------------------------------------------------------------

    def weigh(self, batch: OptimizerBatch, columns: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """Advantages and returns of an explore step, from the columns values, old_logprobs and ref_logprobs.

        Raises:
            ConfigError: an experience has advantages already, or no reward.
        """
        totals: list[list[float]] = []
        for experience in batch.experiences:
            if experience.advantages is not None or not is_valid_reward(experience.reward):
                fault = "has advantages already" if experience.advantages is not None else "has no finite reward"
                raise ConfigError(
                    f"algorithm.critic makes advantages of rewards, and experience {experience.eid} {fault}",
                    key="algorithm.critic",
                    fix="choose add_strategy=critic",
                )
            totals.append([float(experience.reward)])
        zeros = [torch.zeros(e.response_length) for e in batch.experiences]
        if not any(map(len, zeros)):
            return {"advantages": zeros, "returns": zeros}
        config, mask = self.config, gather_rows([trained_mask(e) for e in batch.experiences])
        rewards = torch.zeros(mask.shape)
        last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(-1, keepdim=True)
        rewards.scatter_(1, last, torch.tensor(totals))
        if config.kl_coef:
            rewards -= self.kl_coef * self._kl(columns, mask)
        advantages, returns = gae(gather_rows(columns["values"]), rewards, mask, config.gamma, config.lam)
        if config.whiten:
            advantages = whitened(advantages, mask)
        return {"advantages": _rows(advantages, batch), "returns": _rows(returns, batch)}

    def adapt(self, batch: OptimizerBatch, columns: dict[str, list[Tensor]]) -> None:
        """Move an adaptive weight of the KL for the next step, by the KL in an explore step's columns."""
        if self.config.kl_target is not None and batch.num_tokens:
            error = self._mean_kl(batch, columns) / self.config.kl_target - 1
            self.kl_scale.mul_(1 + GAIN * max(-MAX_ERROR, min(error, MAX_ERROR)))

    def _mean_kl(self, batch: OptimizerBatch, columns: dict[str, list[Tensor]]) -> float:
        """Mean KL in nats a response, over responses with a trained token."""
        mask = gather_rows([trained_mask(e) for e in batch.experiences])
        return float(self._kl(columns, mask).sum() / mask.any(-1).sum())

    def _kl(self, columns: dict[str, list[Tensor]], mask: Tensor) -> Tensor:
        """Estimates of the KL [B, R] at trained tokens; 0 elsewhere."""
        old = gather_rows(columns["old_logprobs"])
        return KL_FN.get(self.config.kl_name)(old, gather_rows(columns["ref_logprobs"]), old).masked_fill(~mask, 0.0)

    # -- training -----------------------------------------------------------------------------------------------------

    def begin(self, batch: OptimizerBatch, step: int) -> None:
        """Begin optimizer step `step`, from 0, on the batch; a ConfigError if it lacks columns of `prepare_step`."""
        for name in ("values", "returns", "advantages"):
            column(batch.columns, name)
        self.warms_up = step < self.config.warmup_steps

    def joined(
        self, policy_loss: Tensor, values: list[Tensor], micro: MicroBatch, batch: OptimizerBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of policy and critic in a micro-batch, and the critic's metrics; both add up over micro-batches."""
        loss, metrics = value_loss(
            values[0],
            micro.columns["values"],
            micro.columns["returns"],
            micro.action_mask,
            clip_range=self.config.clip_range,
            num_tokens=batch.num_tokens,
        )
        metrics = {f"critic/{name}": value for name, value in metrics.items()}
        return self.config.coef * loss + (0 if self.warms_up else policy_loss), metrics

    def metrics(self, batch: OptimizerBatch) -> dict[str, float]:
        """Metrics of an optimizer batch's values and returns, as they were before the step's first update."""
        masks = [trained_mask(e) for e in batch.experiences]
        values, returns = (
            torch.cat([row[mask] for row, mask in zip(batch.columns[name], masks, strict=True)])
            for name in ("values", "returns")
        )
        metrics = {
            "critic/explained_variance": explained_variance(values, returns),
            "critic/values/mean": float(values.mean()),
            "critic/returns/mean": float(returns.mean()),
            "critic/warming_up": float(self.warms_up),
        }
        if self.config.kl_coef:
            metrics["critic/kl"] = self._mean_kl(batch, batch.columns)
            metrics["critic/kl_coef"] = self.kl_coef
        return metrics


def _rows(values: Tensor, batch: OptimizerBatch) -> list[Tensor]:
    """Values [B, R] as a list of rows [response]."""
    return [row[: e.response_length].clone() for row, e in zip(values, batch.experiences, strict=True)]

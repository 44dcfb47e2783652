"""The critic of a PolicyModule (algorithm.critic): its values, the advantages made of them, and its loss."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trinity_lightning.algorithm.gae import explained_variance, gae, value_loss, whitened
from trinity_lightning.algorithm.kl import KL_FN
from trinity_lightning.common.experience import Experience, gather_rows
from trinity_lightning.common.optimizer_batch import OptimizerBatch, trained_mask
from trinity_lightning.common.runs import is_valid_reward
from trinity_lightning.config.algorithm import CriticConfig, Layout
from trinity_lightning.config.model_files import check_same_vocabulary
from trinity_lightning.errors import ConfigError, ModelLoadError
from trinity_lightning.trainer.layout import MicroBatch, Passes
from trinity_lightning.trainer.model import lean_embeddings, logprob_function, usable_layout
from trinity_lightning.trainer.objective import column
from trinity_lightning.trainer.optim import parameter_groups
from trinity_lightning.trainer.placement import WHOLE, Whole

# How fast the weight of the KL follows its error, and the error's bound: Ziegler et al. 2019, arXiv 1909.08593, 2.2.
GAIN, MAX_ERROR = 0.1, 0.2


class Critic(nn.Module):
    """A value head in float32, on the policy's last hidden states or on those of a value model.

    The head begins with zeros: the first advantages are the rewards to go.

    Args:
        config: the section.
        policy: the Hugging Face model that is trained; not a part of the critic.
        tokenizer: the policy's.
        load: loads a value model by its name.

    Attributes:
        model: the value model; None: there is none.
        kl_scale: what an adaptive weight of the KL has been multiplied by so far, a float64 tensor: in checkpoints, as
            the weights are.

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
                output.requires_grad_(False)  # of tokens: nothing is predicted
        width = (policy if self.model is None else self.model).config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("kl_scale", torch.ones((), dtype=torch.float64))
        self.warms_up = False  # whether only the critic is trained now

    @property
    def kl_coef(self) -> float:
        """Present weight of the KL in the reward: the configured one, which an adaptive one has moved away from."""
        return self.config.kl_coef * (1.0 if self.config.kl_target is None else float(self.kl_scale))

    def check(self, passes: Passes, policy: Any) -> None:
        """Refuse models that no values can be computed of, by trying; a ModelLoadError."""
        self.columns(passes, policy, OptimizerBatch.of([Experience(tokens=[0, 0], prompt_length=1)], 0))

    def usable_layout(self, layout: Layout) -> Layout:
        """The layout, or what the value model can do of it; errors as of `model.logprob_function`, `usable_layout`."""
        return layout if self.model is None else usable_layout(layout, self.model, logprob_function(self.model))

    def groups(self) -> list[dict[str, Any]]:
        """The critic's own parameters for the policy's optimizer, at their own learning rate."""
        return [{**group, "lr": self.config.lr} for group in parameter_groups(self) if group["params"]]

    # -- values -------------------------------------------------------------------------------------------------------

    def with_values(self, passes: Passes) -> Passes:
        """The same passes of the policy, which yield values [n] behind log-probabilities and entropies."""

        def function(model: Any, inputs: dict[str, Any], positions: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            if self.model is not None:
                found = passes.function(model, inputs, positions, *others)
                seen = [self.model.base_model(**inputs, use_cache=False)]
            else:
                seen = []
                hook = model.base_model.register_forward_hook(lambda module, given, result: seen.append(result))
                try:
                    found = passes.function(model, inputs, positions, *others)
                finally:
                    hook.remove()
            states = getattr(seen[0], "last_hidden_state", None) if seen else None
            if states is None:
                raise ModelLoadError(
                    f"{type(self.model or model).__name__} does not show its last hidden states, which a value head "
                    "needs: give another model as algorithm.critic.model."
                )
            return *found, self._values(states.flatten(0, 1)[positions])

        return replace(passes, function=function)

    @torch.no_grad()
    def columns(
        self, passes: Passes, policy: Any, batch: OptimizerBatch, placement: Whole = WHOLE
    ) -> dict[str, list[Tensor]]:
        """The columns old_logprobs and values, of one pass without dropout."""
        self.eval()
        old_logprobs, values = self.with_values(passes).columns(policy, batch, placement, kept=(0, 2))
        self.train(policy.training)
        return {"old_logprobs": old_logprobs, "values": values}

    def _values(self, states: Tensor) -> Tensor:
        if self.warms_up and self.model is None:
            states = states.detach()  # the policy's weights stay
        with torch.autocast(states.device.type, enabled=False):
            return self.head(states.float()).squeeze(-1)

    # -- before a step's first update ----------------------------------------------------------------------------------

    def weigh(self, batch: OptimizerBatch, columns: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """Advantages and returns of an explore step, from the columns values, and old_logprobs and ref_logprobs.

        Raises:
            ConfigError: an experience has advantages already, or no reward.
        """
        given: list[list[float]] = []
        for each in batch.experiences:
            if each.advantages is not None or not is_valid_reward(each.reward):
                lack = "has advantages already" if each.advantages is not None else "has no finite reward"
                raise ConfigError(
                    f"algorithm.critic makes advantages of rewards, and experience {each.eid} {lack}",
                    key="algorithm.critic",
                    fix="choose add_strategy=critic",
                )
            given.append([float(each.reward)])
        nothing = [torch.zeros(each.response_length) for each in batch.experiences]
        if not any(map(len, nothing)):
            return {"advantages": nothing, "returns": nothing}
        config, mask = self.config, gather_rows([trained_mask(each) for each in batch.experiences])
        rewards = torch.zeros(mask.shape)
        last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(-1, keepdim=True)
        rewards.scatter_(1, last, torch.tensor(given))
        if config.kl_coef:
            rewards -= self.kl_coef * self._kl(columns, mask)
        advantages, returns = gae(gather_rows(columns["values"]), rewards, mask, config.gamma, config.lam)
        if config.whiten:
            advantages = whitened(advantages, mask)
        return {"advantages": _rows(advantages, batch), "returns": _rows(returns, batch)}

    def adapt(self, batch: OptimizerBatch, columns: dict[str, list[Tensor]]) -> None:
        """Let an adaptive weight of the KL follow what an explore step's columns say, for the next step."""
        if self.config.kl_target is not None and batch.num_tokens:
            error = self._mean_kl(batch, columns) / self.config.kl_target - 1
            self.kl_scale.mul_(1 + GAIN * max(-MAX_ERROR, min(error, MAX_ERROR)))

    def _mean_kl(self, batch: OptimizerBatch, columns: dict[str, list[Tensor]]) -> float:
        """Nats a response, of those with a trained token."""
        mask = gather_rows([trained_mask(each) for each in batch.experiences])
        return float(self._kl(columns, mask).sum() / mask.any(-1).sum())

    def _kl(self, columns: dict[str, list[Tensor]], mask: Tensor) -> Tensor:
        """Estimates [B, R] of trained tokens; 0 elsewhere."""
        old = gather_rows(columns["old_logprobs"])
        return KL_FN.get(self.config.kl_name)(old, gather_rows(columns["ref_logprobs"]), old).masked_fill(~mask, 0.0)

    # -- training -----------------------------------------------------------------------------------------------------

    def begin(self, batch: OptimizerBatch, step: int) -> None:
        """Optimizer step `step`, from 0, is to train on it; ConfigError if it lacks columns of `prepare_step`."""
        for name in ("values", "returns", "advantages"):
            column(batch.columns, name)
        self.warms_up = step < self.config.warmup_steps

    def joined(
        self, policy_loss: Tensor, values: list[Tensor], micro: MicroBatch, batch: OptimizerBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, of policy and critic, and the critic's metrics; both add up over micro-batches."""
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
        """What values and returns of an optimizer batch were before the step's first update."""
        masks = [trained_mask(each) for each in batch.experiences]
        values, returns = (
            torch.cat([row[mask] for row, mask in zip(batch.columns[name], masks, strict=True)])
            for name in ("values", "returns")
        )
        found = {
            "critic/explained_variance": explained_variance(values, returns),
            "critic/values/mean": float(values.mean()),
            "critic/returns/mean": float(returns.mean()),
            "critic/warming_up": float(self.warms_up),
        }
        if self.config.kl_coef:
            found["critic/kl"] = self._mean_kl(batch, batch.columns)
            found["critic/kl_coef"] = self.kl_coef
        return found


def _rows(values: Tensor, batch: OptimizerBatch) -> list[Tensor]:
    return [row[: each.response_length].clone() for row, each in zip(values, batch.experiences, strict=True)]

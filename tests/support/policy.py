"""Helpers of PolicyModule's tests: ragged experiences, a loader of optimizer batches, a naive GRPO, a Trainer."""

import warnings
from typing import Any

import lightning as L
import torch
from transformers import AutoModelForCausalLM

from support.trainer import quiet_trainer
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.config.models import resolve_model
from trinity_lightning.trainer.policy import PolicyModule

VOCABULARY = 100


def make_experiences(count=8, seed=0, batch=1, temperature=1.0, zero_every=None):
    """Ragged groups of 4 with masks, engine log-probabilities and advantages; each `zero_every`-th has advantage 0."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    experiences = []
    for index in range(count):
        prompt, response = integer(1, 9), integer(1, 12)
        mask = torch.rand(response, generator=generator) < 0.8
        mask[0] = True
        score = 0.0 if zero_every and index % zero_every == 0 else float(torch.randn((), generator=generator))
        experiences.append(
            Experience(
                eid=EID(batch=batch, task=index // 4, run=index % 4),
                tokens=torch.randint(4, VOCABULARY, (prompt + response,), generator=generator),
                prompt_length=prompt,
                action_mask=mask,
                logprobs=-4.6 + 0.3 * torch.randn(response, generator=generator),
                advantages=mask.float() * score,
                info={"temperature": temperature},
            )
        )
    return experiences


def groups(**settings) -> list[Experience]:
    """Ragged rollouts of two tasks, four of each, with engine log-probabilities and masks."""
    rows = make_experiences(**settings)
    for row in rows:
        first = rows[4 * row.eid.task]
        response = row.tokens[row.prompt_length :]
        row.tokens = torch.cat([first.tokens[: first.prompt_length], response])
        row.prompt_length = first.prompt_length
    return rows


def pairs(count=4, seed=0):
    """Ragged preference pairs."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low, high):
        return torch.randint(4, 90, (int(torch.randint(low, high, (), generator=generator)),), generator=generator)

    return [Experience(tokens=tokens(2, 8), chosen=tokens(1, 9), rejected=tokens(1, 9)) for _ in range(count)]


class Items(L.LightningDataModule):
    """Optimizer batches, one epoch each `per_epoch` of them."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def train_dataloader(self):
        return ListLoader(self.batches)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


class ListLoader:
    def __init__(self, items):
        self.items = items
        self.position = 0

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        if self.position >= len(self.items):
            self.position = 0
        for index in range(self.position, len(self.items)):
            self.position = index + 1
            yield self.items[index]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def whole(model: Any, tensor: Any) -> torch.Tensor:
    """A copy of a tensor of the model; of one in shards, all ranks ask for it."""
    return model.shards.gathered(tensor) if hasattr(tensor, "to_local") else tensor.detach().clone()


def local(tensor: Any) -> torch.Tensor:
    """The part of the tensor that lies in this process."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Gradients(L.Callback):
    """Keeps the gradient that each optimizer step used."""

    def __init__(self):
        self.steps = []
        self.losses = []

    def on_before_optimizer_step(self, trainer, pl_module: Any, optimizer):
        named = pl_module.policy.named_parameters()
        self.steps.append({name: whole(pl_module.policy, p.grad) for name, p in named if p.grad is not None})

    def on_train_batch_end(self, trainer, pl_module: Any, outputs: Any, batch, batch_idx):
        self.losses.append(outputs["loss"].item() if outputs else None)


class Weights(L.Callback):
    """Keeps the weights after the first optimizer step."""

    def on_train_batch_end(self, trainer, pl_module: Any, outputs: Any, batch, batch_idx):
        if trainer.global_step == 1:
            self.after_first = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}


def make_policy(optimizer=None, dtype="fp32", model=None, name="tiny", **algorithm):
    """The model of that name, without clipping, 64 tokens a micro-batch; `model`: further arguments of PolicyModule."""
    settings = {"max_grad_norm": None, "max_tokens_per_micro_batch": 64} | algorithm
    optimizer = optimizer or OptimizerConfig(lr=1e-3)
    return PolicyModule(name, AlgorithmConfig(**settings), optimizer, dtype=dtype, **(model or {}))


def load_plain() -> Any:
    """The tiny model by transformers alone, never trained."""
    return AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)


def moved_policy(**algorithm) -> PolicyModule:
    """A policy that has left its reference."""
    policy = make_policy(**algorithm)
    policy.configure_model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy


def fit(policy, batches, *callbacks, ckpt_path=None, **trainer_settings):
    """Train one epoch over the batches; the Trainer."""
    with warnings.catch_warnings():
        # Lightning uses a deprecated check of torch's.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        trainer = quiet_trainer(None, *callbacks, **trainer_settings)
        trainer.fit(policy, Items(batches), ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer


def optimizer_of(policy) -> Any:
    """The optimizer, not Lightning's list of one."""
    return policy.optimizers()


def rate_of(policy) -> float:
    """The learning rate of the next step."""
    return policy.lr_schedulers().get_last_lr()[0]


def load_tiny() -> Any:
    """The tiny model as transformers loads it, never trained."""
    policy = make_policy()
    policy.configure_model()
    return policy.policy


def one_step(experiences, **settings):
    """Loss and gradients of the first optimizer step."""
    seen = Gradients()
    fit(make_policy(**settings), [batch_of(experiences)], seen)
    return seen.losses[0], seen.steps[0]


class Prepare(L.Callback):
    """Does what the explorer's callback does: columns before the first update."""

    def __init__(self, batches):
        self.batches = batches

    def on_train_start(self, trainer, pl_module: Any):
        everything = [e for batch in self.batches for e in batch.experiences]
        columns = pl_module.prepare_step(everything)
        for batch in self.batches:
            count = len(batch.experiences)
            batch.columns = {name: column[:count] for name, column in columns.items()}
            columns = {name: column[count:] for name, column in columns.items()}


def naive_logprobs(model, experiences):
    """Log-probabilities [B, R] of response tokens, from padded logits of the whole batch and an attention mask."""
    width = max(len(e.tokens) for e in experiences)
    response = max(e.response_length for e in experiences)
    tokens = torch.zeros(len(experiences), width, dtype=torch.int64)
    attention = torch.zeros(len(experiences), width, dtype=torch.int64)
    for row, e in enumerate(experiences):
        tokens[row, : len(e.tokens)] = e.tokens
        attention[row, : len(e.tokens)] = 1
    logits = model(input_ids=tokens, attention_mask=attention).logits.float()
    rows = []
    for row, e in enumerate(experiences):
        log_p = torch.log_softmax(logits[row, e.prompt_length - 1 : len(e.tokens) - 1] / e.info["temperature"], -1)
        picked = log_p.gather(-1, e.tokens[e.prompt_length :].long()[:, None]).squeeze(-1)
        rows.append(torch.nn.functional.pad(picked, (0, response - len(picked))))
    return torch.stack(rows)


def padded(experiences, name):
    return torch.nn.utils.rnn.pad_sequence([getattr(e, name) for e in experiences], batch_first=True)


def naive_grpo(model, experiences, *, old=None, ref=None, kl=0.0):
    """Clipped policy loss with importance weights truncated at 2, token mean, plus k3; written out by hand."""
    logprobs = naive_logprobs(model, experiences)
    mask, advantages = padded(experiences, "action_mask").bool(), padded(experiences, "advantages")
    old = logprobs.detach() if old is None else old
    weight = (old - padded(experiences, "logprobs")).exp().clamp(max=2.0)
    ratio = (logprobs - old).exp()
    advantages = advantages * weight
    token = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if ref is not None:
        d = ref - logprobs
        token = token + kl * (d.exp() - d - 1)
    return (token * mask).sum() / mask.sum()


def naive_gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def assert_same_gradients(mine, expected, tolerance=1e-5):
    """Every gradient, relative to its own largest entry."""
    assert mine.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(
            mine[name], gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max()), msg=name
        )


def batch_of(experiences, step=1, **columns):
    batch = OptimizerBatch.of(experiences, explore_step=step)
    batch.columns = columns
    return batch

"""What is done to a Hugging Face model to be trained, and how its log-probabilities are computed."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.model_config import BLOCK_BYTES, CHUNK_BYTES, GPU_BLOCK_BYTES, GPU_CHUNK_BYTES
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.algorithm import Layout
from trinity_lightning.config.model import Dropout
from trinity_lightning.config.model_files import load_generation_config, resolve_model
from trinity_lightning.errors import ConfigError, ModelLoadError
from trinity_lightning.trainer.layers import SHORT_SDPA, attention_implementation, lean_layers
from trinity_lightning.trainer.layout import LogprobFn, collate, cut

logger = logging.getLogger(__name__)


def load_model(
    name: str, dtype: torch.dtype | str, dropout: Dropout, attn_implementation: str, compiles: bool = False
) -> Any:
    """A causal language model of transformers, on the CPU; its layers are lean in bfloat16, if they are not compiled.

    Raises:
        ModelLoadError: it is not there, or no such model.
    """
    from transformers import AutoModelForCausalLM

    path, attention = str(resolve_model(name)), attention_implementation(attn_implementation)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention, generation_config=load_generation_config(name)
        )
    except Exception as error:  # whatever wrong files provoke in transformers
        raise ModelLoadError(f"cannot load the model '{name}': {error or type(error).__name__}") from error
    if dropout is Dropout.off:
        switch_off_dropout(model)
    if model.dtype == torch.bfloat16 and not compiles:
        lean_layers(model)
    return model


@contextmanager
def default_generation_config(model: Any) -> Iterator[None]:
    """Have the model save transformers' defaults in place of its own settings, which it may refuse to save."""
    from transformers import GenerationConfig

    settings, model.generation_config = getattr(model, "generation_config", None), GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings


# -- dropout: the first ratio of a PPO step must be 1 ------------------------------------------------------------------

# Shares and amplitudes, by their names in configurations and modules of transformers: attention_dropout, resid_pdrop,
# attn_drop, layerdrop, drop_path_rate, fusion_droppath, drop_mlp_rate, router_jitter_noise; not xdrope_section.
_RANDOM = re.compile(r"dropout|jitter|layer_?drop|(^|_)drop_?path|(^|_)p?drop(_(\w+_)?(rate|prob|p))?$")


def switch_off_dropout(model: nn.Module) -> None:
    """Set every share of dropout to 0, and noise that routers add, in modules and the configuration that some read."""
    for holder, name in _shares(model):
        setattr(holder, name, 0.0)


def has_dropout(model: nn.Module) -> bool:
    """Whether `switch_off_dropout` would change anything."""
    return any(getattr(holder, name) for holder, name in _shares(model))


def _shares(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Every share of dropout, as an object and its attribute."""
    module: Any
    for module in model.modules():
        if "Dropout" in type(module).__name__ and hasattr(module, "p"):  # torch's own, and those made after them
            yield module, "p"
        for holder in (module, *_configs(getattr(module, "config", None))):
            for name, value in list(vars(holder).items()):
                # A share of 1 may be written as an integer; other integers, and flags such as token_dropout, are none.
                if (isinstance(value, float) or (type(value) is int and value == 1)) and _RANDOM.search(name):
                    yield holder, name


def _configs(config: Any) -> Iterator[Any]:
    """A configuration of transformers and those within it, such as a text model's."""
    from transformers import PretrainedConfig

    if isinstance(config, PretrainedConfig):
        yield config
        for part in vars(config).values():
            yield from _configs(part)


# -- gradients of embeddings and head, added up where they lie ---------------------------------------------------------
# Autograd would make the gradient of a whole matrix for every micro-batch, and pass over it four times. Instead these
# backward passes write into `Tensor.grad`, by blocks of rows (the head) or in the rows that occur (embeddings); on a
# CPU only, since elsewhere their order would change. Hooks on these parameters are not called for such gradients, and
# `torch.autograd.grad` does not return them.

GRADIENT_BLOCK_BYTES = 8 << 20  # of a block of the head's gradient, in float32


def lean_embeddings(model: Any) -> None:
    """Let the input embeddings of a Hugging Face model add up their gradient in place, if they are plain ones."""
    embeddings = model.get_input_embeddings()
    if type(embeddings) is nn.Embedding and not (embeddings.max_norm or embeddings.scale_grad_by_freq):
        embeddings.__class__ = LeanEmbedding


class LeanEmbedding(nn.Embedding):
    """Embeddings whose gradient is added up in place on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.device.type != "cpu":
            return super().forward(input)
        return _Lookup.apply(input, self.weight, self.padding_idx)


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding  # not saved: checkpointing would give back a copy, without its `grad`
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        if ctx.needs_input_grad[1]:
            rows, vectors = ids.flatten(), grads[0].flatten(0, -2)
            if ctx.padding is not None:  # whose vector is not trained as an input
                rows, vectors = rows[rows != ctx.padding], vectors[rows != ctx.padding]
            total = gradient_of(weight)
            total.index_add_(0, rows, vectors.to(total.dtype))
        return None, None, None


class Projection(Function):
    """hidden @ weight.T, whose gradient of the weight is added up in place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden if weight.requires_grad else None)
        ctx.weight = weight  # as above
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        (hidden,), weight = ctx.saved_tensors, ctx.weight
        wants_hidden, wants_weight = ctx.needs_input_grad
        if wants_weight:
            total = gradient_of(weight)
            rows = max(GRADIENT_BLOCK_BYTES // (4 * weight.shape[1]), 1)
            for start in range(0, len(weight), rows):
                total[start : start + rows] += grads[0][:, start : start + rows].T @ hidden
        return grads[0] @ weight if wants_hidden else None, None


def gradient_of(weight: Tensor) -> Tensor:
    """What gradients of a parameter are added to, in the dtype that they are kept in; zeros at first."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype or weight.dtype)
    return weight.grad


# -- the head ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A language-model head: logits = softcap(projection(hidden)) * scale.

    Attributes:
        projection: the output embeddings.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma); None: as they are.
        scale: factor on the logits (Cohere: logit_scale, Granite: 1 / logits_scaling, Falcon H1: lm_head_multiplier).
    """

    projection: nn.Module
    softcap: float | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, model: nn.Module) -> "Head":
        """The head of a Hugging Face causal language model, with what its config says is done to the logits.

        The names may mean something else in another architecture: `logprob_function` verifies the result.
        """
        config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
        scale = scale or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
        return cls(model.get_output_embeddings(), softcap, float(scale))  # type: ignore[operator]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocabulary] of hidden states [n, hidden]: in float32 where anything is done to them."""
        logits = self._project(hidden)
        if self.softcap:
            logits = self.softcap * torch.tanh(logits.float() / self.softcap)
        return logits.float() * self.scale if self.scale != 1.0 else logits

    def bytes_per_token(self, hidden: Tensor) -> int:
        vocabulary = getattr(self.projection, "out_features", hidden.shape[-1])
        return vocabulary * (4 if self.softcap or self.scale != 1.0 else hidden.element_size())

    def _project(self, hidden: Tensor) -> Tensor:
        plain = type(self.projection) is nn.Linear and self.projection.bias is None
        if plain and hidden.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
            return Projection.apply(hidden, self.projection.weight)
        return self.projection(hidden)


def token_logprobs(head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Natural log-probability of each target under softmax(logits / temperature), and that distribution's entropy.

    The logits of the first chunk of tokens are kept for the backward pass, which turns them into their gradient in
    place; those of further chunks are computed again there.

    Args:
        hidden: hidden state at the position *before* each target [n, hidden].
        targets: token ids, int64 [n]; or several of each position [n, m].
        temperature: sampling temperature of each target's rollout, float32 [n].

    Returns:
        Log-probabilities, float32 of the targets' shape, and entropies (in nats), float32 [n], both differentiable.
    """
    if len(targets) == 0:
        return hidden.sum(-1).float(), hidden.new_zeros(0, dtype=torch.float32)  # empty, yet part of the graph
    chunk_bytes = CHUNK_BYTES if hidden.device.type == "cpu" else GPU_CHUNK_BYTES
    chunk = max(chunk_bytes // head.bytes_per_token(hidden), 1)
    parts = []
    for part in zip(*(tensor.split(chunk) for tensor in (hidden, targets, temperature)), strict=True):
        if parts and torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, head, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk(head, *part))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    # Whether nobody else reads the logits: a module of another kind may need them in its backward pass.
    own = type(head.projection) is nn.Linear
    logprobs, entropy = _LogSoftmax.apply(head.logits(hidden), targets.view(len(targets), -1), temperature, own)
    return logprobs.view_as(targets), entropy


class _LogSoftmax(Function):
    """log p(target) [n, m] and entropy [n] of p = softmax(logits / temperature), in float32.

    Autograd makes five float32 tensors [n, vocabulary] in the backward pass. This makes none: it goes through logits
    by blocks of a few tokens, and writes the gradient in their place where they are its `own`. (torch's
    `linear_cross_entropy` took 20 times as long on a CPU in bfloat16, and has no entropy.)
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor, own: bool) -> tuple[Tensor, Tensor]:
        entropy, highest, log_sum = (torch.empty_like(temperature) for _ in range(3))
        logprobs = temperature.new_empty(targets.shape)
        for block, scaled in _blocks(logits, temperature):
            highest[block] = scaled.amax(-1)
            shifted = scaled.sub_(highest[block, None])
            exps = shifted.exp()
            sums = exps.sum(-1)
            log_sum[block] = sums.log()
            logprobs[block] = shifted.gather(-1, targets[block]) - log_sum[block, None]
            entropy[block] = log_sum[block] - exps.mul_(shifted).sum(-1) / sums
        ctx.save_for_backward(logits, targets, temperature, entropy, highest, log_sum)
        ctx.set_materialize_grads(False)
        ctx.own = own
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        logits, targets, temperature, entropy, highest, log_sum = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return None, None, None, None
        # With z = logits / temperature: d log p_t / dz = onehot_t - p, and d entropy / dz = -p (log p + entropy).
        of_target = temperature.new_zeros(targets.shape) if grads[0] is None else grads[0] / temperature[:, None]
        of_entropy = torch.zeros_like(temperature) if grads[1] is None else grads[1] / temperature
        of_logprob = of_target.sum(-1)
        result = logits if ctx.own else torch.empty_like(logits)
        for block, scaled in _blocks(logits, temperature):
            log_p = scaled.sub_(highest[block, None]).sub_(log_sum[block, None])
            if grads[1] is None:
                grad = log_p.exp_().mul_(-of_logprob[block, None])
            else:
                of_p = log_p.add(entropy[block, None]).mul_(of_entropy[block, None]).add_(of_logprob[block, None])
                grad = log_p.exp_().mul_(of_p.neg_())
            grad.scatter_add_(-1, targets[block], of_target[block])
            result[block] = grad.to(result.dtype)
        return result, None, None, None


def _blocks(logits: Tensor, temperature: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of the logits [n, vocabulary] by blocks: which rows, and a copy of logits / temperature in float32."""
    block_bytes = BLOCK_BYTES if logits.device.type == "cpu" else GPU_BLOCK_BYTES
    rows = max(block_bytes // (4 * logits.shape[-1]), 1)
    for start in range(0, len(logits), rows):
        block = slice(start, start + rows)
        copy = torch.empty_like(logits[block], dtype=torch.float32).copy_(logits[block])
        yield block, copy.mul_(temperature[block, None].reciprocal())  # half the time of a division


# -- which log-probabilities are right for a model, found out by trying ------------------------------------------------
# By the base model and a head of ours, on trained positions only and in chunks, which saves most of the memory; or by
# the model's own forward pass. Not every architecture's logits are what its configuration's common names say, so both
# are held against the model's own logits before one is used; and shared prefixes against rows that are whole.

CHECKED_TOKENS = 16
# Mean differences that are rounding, as a share of the largest logit.
FULL_LIMIT, HALF_LIMIT = 1e-4, 5e-3
# A CPU's memory that does not suffice is a plain RuntimeError, of this name.
_CPU_ALLOCATOR = "DefaultCPUAllocator"


def logprobs_by_head(
    model: Any, inputs: dict[str, Any], positions: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """From hidden states of the base model, by `Head.of`: of the logits one chunk at a time."""
    states = model.base_model(**inputs, use_cache=False).last_hidden_state
    return token_logprobs(Head.of(model), states.flatten(0, 1)[positions], targets, temperature)


@torch.no_grad()
def logprob_function(model: Any) -> LogprobFn:
    """`logprobs_by_head`, or else `logprobs_by_forward`: the first that agrees with the model's own logits, by trying.

    Raises:
        ModelLoadError: neither is, a token depends on later ones, or there are no logits: it cannot be trained here.
    """
    was_training = model.training
    model.eval()
    try:
        tokens = _random_tokens(model, alike=CHECKED_TOKENS - 1)
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        limit = _limit(model, logits)
        if float((logits[0, :-1] - logits[1, :-1]).abs().mean()) > limit:  # the rows differ in their last token
            raise ModelLoadError(f"{name_of(model)} is no causal model: what it predicts depends on later tokens.")
        if _agrees(logprobs_by_head, model, tokens, logits, limit):
            return logprobs_by_head
        from trinity_lightning.trainer.other_models import by_own_forward_pass

        return by_own_forward_pass(model, lambda function: _agrees(function, model, tokens, logits, limit))
    except AttributeError as error:
        raise ModelLoadError(f"{name_of(model)} cannot be trained: {error}") from error
    finally:
        model.train(was_training)


def usable_layout(layout: Layout, model: Any, function: LogprobFn) -> Layout:
    """The layout, or `padded` if it is `auto` and the model cannot share prefixes.

    Raises:
        ConfigError: it is `shared_prefix`, and the model cannot; the message says why.
    """
    obstacle = None if layout is Layout.padded else _obstacle(model, function)
    if obstacle is None:
        return layout
    if layout is Layout.shared_prefix:
        raise ConfigError(
            f"algorithm.layout=shared_prefix: {name_of(model)} {obstacle}. Set algorithm.layout=padded.",
            key="algorithm.layout",
        )
    logger.info("%s %s: the padded layout is used.", name_of(model), obstacle)
    return Layout.padded


def _obstacle(model: Any, function: LogprobFn) -> str | None:
    """Why the model's rows cannot share prefixes; None if they can."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    if others := sorted({*kinds} - {"full_attention"}):
        return f"has layers of {', '.join(others)}, and only full attention can share prefixes"
    if config._attn_implementation != SHORT_SDPA:
        return "shares prefixes only with model.attn_implementation=sdpa"
    if model.device.type not in ("cpu", "cuda"):
        return f"shares prefixes on a CPU or an NVIDIA GPU, not on {model.device.type}"
    if has_dropout(model):
        return (
            "has dropout (model.dropout=keep), or its adapters have (model.lora.dropout), which would drop a shared "
            "prefix for all of its rows alike"
        )
    return _fault_of_sharing(model, function)


@torch.inference_mode(False)
@torch.enable_grad()
def _fault_of_sharing(model: Any, function: LogprobFn) -> str | None:
    """What is wrong with shared prefixes when they are tried; None if nothing is.

    Two random responses to one prompt have to have the same log-probabilities and gradient in both layouts: the
    gradient of one parameter, whether it is trained or not.
    """
    tokens = _random_tokens(model, CHECKED_TOKENS // 2)
    batch = OptimizerBatch.of([Experience(tokens=row, prompt_length=CHECKED_TOKENS // 2) for row in tokens.cpu()], 0)
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    probe = _probe(model)

    def with_gradient(model: Any, layout: Layout) -> tuple[Tensor, ...]:
        (part,) = cut(batch, [0, 1], tokens.numel(), layout)
        micro = collate(batch, part, model.device)
        found = function(model, micro.inputs, micro.states, micro.targets, micro.temperature[micro.rows])
        gradients = () if probe is None else torch.autograd.grad(found[0].sum(), probe)
        return (*(each.detach() for each in found), *gradients)

    was_training = model.training
    model.eval()
    for parameter in trained:
        parameter.requires_grad_(parameter is probe)  # embeddings would add up their gradient in place
    try:
        with torch.no_grad():
            limit = _limit(model, model(input_ids=tokens, use_cache=False).logits)
        whole = with_gradient(model, Layout.padded)
        shared = _tried(with_gradient, model, Layout.shared_prefix)
    finally:
        model.train(was_training)
        for parameter, before in trained.items():
            parameter.requires_grad_(before)
    # A gradient is rounded in both passes of every layer.
    limits = (limit, limit, *(4 * _limit(model, gradient) for gradient in whole[2:]))
    if isinstance(shared, Exception):  # no property of the architecture, perhaps: kernels may have failed to compile
        logger.warning("%s: shared prefixes were tried, and failed.", name_of(model), exc_info=shared)
        return f"raises {type(shared).__name__} if prefixes are shared"
    same = all(map(_close, shared, whole, limits))
    return None if same else "computes other log-probabilities if prefixes are shared"


def _probe(model: Any) -> nn.Parameter | None:
    """The parameter whose gradient is compared: the first vector, which is small and needs all layers, or first matrix.

    Not one of the embeddings, whose gradient is no result of the backward pass (`lean_embeddings`); None: all are.
    """
    embeddings = [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]
    left_out = {id(parameter) for layer in embeddings for parameter in layer.parameters()}
    others = [each for each in model.parameters() if id(each) not in left_out]
    return next((each for each in others if each.ndim == 1), others[0] if others else None)


def _random_tokens(model: Any, alike: int) -> Tensor:
    """Two rows [2, S] of token ids, of which so many at the beginning are the same."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    rows = torch.randint(vocabulary, (1, CHECKED_TOKENS), generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    rows[1, alike:] = (rows[0, alike:].flip(0) + 1) % vocabulary
    return rows.to(model.device)


def _limit(model: Any, values: Tensor) -> float:
    """The largest mean difference from these values that is rounding."""
    return (FULL_LIMIT if model.dtype == torch.float32 else HALF_LIMIT) * max(1.0, float(values.abs().max()))


def _tried(function: Callable[..., tuple[Tensor, ...]], model: Any, *arguments: Any) -> tuple[Tensor, ...] | Exception:
    """What the function yields, or raises if the architecture is another than it is for."""
    try:
        return function(model, *arguments)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:  # no such output, or shape
        if isinstance(error, torch.OutOfMemoryError) or _CPU_ALLOCATOR in str(error):
            raise  # memory says nothing of the architecture
        return error


def _agrees(function: LogprobFn, model: Any, tokens: Tensor, logits: Tensor, limit: float) -> bool:
    """Whether it runs, and yields the log-probabilities and entropies that follow from the logits [2, S, V]."""
    positions = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)[:, :-1].flatten()
    targets, temperature = tokens[:, 1:].flatten(), torch.ones(len(positions), device=tokens.device)
    found = _tried(function, model, {"input_ids": tokens}, positions, targets, temperature)
    expected = token_logprobs(Head(nn.Identity()), logits.flatten(0, 1)[positions], targets, temperature)
    if isinstance(found, Exception):
        logger.info("%s has no %s: %s", name_of(model), function.__name__, found)
        return False
    return all(_close(mine, own, limit) for mine, own in zip(found, expected, strict=True))


def _close(found: Tensor, expected: Tensor, limit: float) -> bool:
    return float((found - expected).abs().mean()) <= limit


def name_of(model: Any) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"


def logprobs_by_forward(
    model: Any, inputs: dict[str, Any], positions: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """From the model's own logits, at every place of the sequence where any row has a target: all in memory at once."""
    length = inputs["input_ids"].shape[1]
    rows, places = positions // length, positions % length
    kept, columns = places.unique(return_inverse=True)
    logits = model(**inputs, use_cache=False, logits_to_keep=kept).logits
    return token_logprobs(Head(nn.Identity()), logits[rows, columns], targets, temperature)

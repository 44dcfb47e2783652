"""Loads a Hugging Face model for training, and chooses the function that computes its log-probabilities."""

import inspect
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.common.pictures.families import FAMILIES, family_of
from trinity_lightning.common.pictures.states import with_states
from trinity_lightning.config.algorithm import Layout
from trinity_lightning.config.model import Dropout
from trinity_lightning.config.models import is_picture_model, load_generation_config, model_class, resolve_model
from trinity_lightning.errors import ConfigError, ModelLoadError
from trinity_lightning.trainer.head import Head, token_logprobs
from trinity_lightning.trainer.layers import HALF, SHORT_SDPA, attention_implementation
from trinity_lightning.trainer.layout import collate, cut
from trinity_lightning.trainer.lean import lean_layers
from trinity_lightning.trainer.passes import LogprobFn, in_one_row

logger = logging.getLogger(__name__)


def load_model(name: str, dtype: torch.dtype | str, dropout: Dropout, attn_implementation: str) -> Any:
    """Load a causal language model of transformers on the CPU; with `lean_layers` in 16 bits.

    A model that reads pictures is loaded with its vision tower.

    Raises:
        ModelLoadError: the model does not exist, or is no causal language model.
    """
    path, attention = str(resolve_model(name)), attention_implementation(attn_implementation)
    try:
        model = model_class(path).from_pretrained(
            path, dtype=dtype, attn_implementation=attention, generation_config=load_generation_config(name)
        )
    except Exception as error:  # whatever wrong files provoke in transformers
        raise ModelLoadError(f"cannot load the model '{name}': {error or type(error).__name__}") from error
    if dropout is Dropout.off:
        switch_off_dropout(model)
    if model.dtype in HALF:
        lean_layers(model)
    return model


def name_of(model: Any) -> str:
    """Class and type of a Hugging Face model, for messages."""
    return f"{type(model).__name__} ({model.config.model_type})"


def layers_of(model: Any) -> list[nn.Module]:
    """The layers that transformers can checkpoint one at a time."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


# -- dropout: the first ratio of a PPO step must be 1 ------------------------------------------------------------------

# Names of dropout shares and noise amplitudes in configurations and modules of transformers, such as attention_dropout,
# resid_pdrop, attn_drop, layerdrop, drop_path_rate, fusion_droppath, drop_mlp_rate, router_jitter_noise; it does not
# match xdrope_section.
_RANDOM = re.compile(r"dropout|jitter|layer_?drop|(^|_)drop_?path|(^|_)p?drop(_(\w+_)?(rate|prob|p))?$")


def switch_off_dropout(model: nn.Module) -> None:
    """Set every share of dropout and of routers' noise to 0, in modules and in the configurations that they read."""
    for holder, name in _shares(model):
        setattr(holder, name, 0.0)


def has_dropout(model: nn.Module) -> bool:
    """True if `switch_off_dropout` would change anything."""
    return any(getattr(holder, name) for holder, name in _shares(model))


def _shares(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Every share of dropout, as an object and the name of its attribute."""
    module: Any
    for module in model.modules():
        if "Dropout" in type(module).__name__ and hasattr(module, "p"):  # torch's own, and classes modelled on them
            yield module, "p"
        for holder in (module, *_configs(getattr(module, "config", None))):
            for name, value in list(vars(holder).items()):
                # A share of 1 may be written as an integer. Other integers and flags (token_dropout) are no shares.
                if (isinstance(value, float) or (type(value) is int and value == 1)) and _RANDOM.search(name):
                    yield holder, name


def _configs(config: Any) -> Iterator[Any]:
    """A configuration of transformers, and the configurations within it, such as a text model's."""
    from transformers import PretrainedConfig

    if isinstance(config, PretrainedConfig):
        yield config
        for part in vars(config).values():
            yield from _configs(part)


# -- the function that computes log-probabilities, chosen by trial -----------------------------------------------------
# The first candidate is a head of ours on the base model's states. It computes trained positions only, in chunks, which
# saves most of the memory. The second is the model's own forward pass. The common names in a configuration do not
# describe every architecture's logits, so a candidate is compared with the model's own logits before it is used.
# Results of shared prefixes are compared with those of whole rows.

CHECKED_TOKENS = 16
# Largest mean difference that counts as rounding, as a share of the largest logit: in float32, and in 16 bits.
FULL_LIMIT, HALF_LIMIT = 1e-4, 5e-3
# A CPU without enough memory raises a plain RuntimeError that has this name in it.
_CPU_ALLOCATOR = "DefaultCPUAllocator"


def logprobs_by_head(
    model: Any, inputs: dict[str, Any], positions: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies that `Head` computes from the base model's states; see `LogprobFn`."""
    states = model.base_model(**with_states(model, inputs), use_cache=False).last_hidden_state
    return token_logprobs(Head.of(model), states.flatten(0, 1)[positions], targets, temperature)


def logprobs_by_forward(
    model: Any, inputs: dict[str, Any], positions: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies from the model's own logits; see `LogprobFn`.

    Logits of every row are computed wherever any row has a target, and all are in memory at once.
    """
    length = inputs["input_ids"].shape[1]
    rows, places = positions // length, positions % length
    computed, columns = places.unique(return_inverse=True)
    logits = model(**with_states(model, inputs), use_cache=False, logits_to_keep=computed).logits
    return token_logprobs(Head(nn.Identity()), logits[rows, columns], targets, temperature)


@torch.no_grad()
def logprob_function(model: Any) -> LogprobFn:
    """The first of `logprobs_by_head` and `logprobs_by_forward` that agrees with the model's own logits.

    Raises:
        ModelLoadError: neither agrees, a token depends on later ones, or there are no logits: the model cannot be
            trained here.
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
        chooses_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        if chooses_logits and _agrees(logprobs_by_forward, model, tokens, logits, limit):
            logger.info("%s: logits by its own forward pass, which takes more memory than a head.", name_of(model))
            return logprobs_by_forward
        raise ModelLoadError(
            f"{name_of(model)} cannot be trained: its logits are not those of its base model and output embeddings, "
            "and its forward pass has no logits_to_keep. Use one whose class follows transformers' causal language "
            "models."
        )
    except AttributeError as error:
        raise ModelLoadError(f"{name_of(model)} cannot be trained: {error}") from error
    finally:
        model.train(was_training)


def usable_layout(layout: Layout, model: Any, function: LogprobFn) -> Layout:
    """The layout, or `padded` if it is `auto` and the model cannot share prefixes.

    Raises:
        ConfigError: it is `shared_prefix`, and the model cannot; the message says why.
    """
    obstacle = None if layout is Layout.padded else _obstacle(model, function, function, Layout.shared_prefix)
    if obstacle is None:
        return layout
    if layout is Layout.shared_prefix:
        raise ConfigError(
            f"algorithm.layout=shared_prefix: {name_of(model)} {obstacle}",
            key="algorithm.layout",
            fix="set algorithm.layout=padded",
        )
    logger.info("%s %s: the padded layout is used.", name_of(model), obstacle)
    return Layout.padded


def one_row_obstacle(model: Any, function: LogprobFn) -> str | None:
    """The reason why padded rows of the model cannot be one row (`passes.in_one_row`); None if they can."""

    def in_one(model: Any, inputs: dict[str, Any], *others: Tensor) -> tuple[Tensor, ...]:
        return function(model, in_one_row(inputs), *others)

    return _obstacle(model, function, in_one, Layout.padded)


def _obstacle(model: Any, function: LogprobFn, other: LogprobFn, layout: Layout) -> str | None:
    """The reason why the function `other` in this layout is not `function` with padded rows; None if it is."""
    if is_picture_model(model.config) and not family_of(model.config).shares_prefixes:
        sharing = ", ".join(name for name, family in FAMILIES.items() if family.shares_prefixes)
        return f"takes pictures, and prefixes with pictures are shared only by {sharing}"
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    if other_kinds := sorted({*kinds} - {"full_attention"}):
        return f"has layers of {', '.join(other_kinds)}, and only full attention can share prefixes"
    if config._attn_implementation != SHORT_SDPA:
        return "shares prefixes only with model.attn_implementation=sdpa"
    if model.device.type not in ("cpu", "cuda"):
        return f"shares prefixes on a CPU or an NVIDIA GPU, not on {model.device.type}"
    if has_dropout(model):
        return (
            "has dropout (model.dropout=keep), or its adapters have (model.lora.dropout), which would drop a shared "
            "prefix for all of its rows alike"
        )
    return _difference(model, function, other, layout)


@torch.inference_mode(False)
@torch.enable_grad()
def _difference(model: Any, function: LogprobFn, other: LogprobFn, layout: Layout) -> str | None:
    """Try `other` in this layout, and return what is wrong with it; None if nothing is.

    Two random responses to one prompt must have the same log-probabilities in both layouts, and give one parameter the
    same gradient, whether it is trained or not.
    """
    tokens = _random_tokens(model, CHECKED_TOKENS // 2)
    batch = OptimizerBatch.of([Experience(tokens=row, prompt_length=CHECKED_TOKENS // 2) for row in tokens.cpu()], 0)
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    probe = _probe(model)

    def with_gradient(model: Any, function: LogprobFn, layout: Layout) -> tuple[Tensor, ...]:
        (part,) = cut(batch, [0, 1], tokens.numel(), layout)
        micro = collate(batch, part, model.device)
        results = function(model, micro.inputs, micro.states, micro.targets, micro.temperature[micro.rows])
        gradients = () if probe is None else torch.autograd.grad(results[0].sum(), probe)
        return (*(result.detach() for result in results), *gradients)

    was_training = model.training
    model.eval()
    for parameter in trained:
        parameter.requires_grad_(parameter is probe)  # embeddings would add up their gradient in place
    try:
        with torch.no_grad():
            limit = _limit(model, model(input_ids=tokens, use_cache=False).logits)
        whole = with_gradient(model, function, Layout.padded)
        shared = _results_or_error(with_gradient, model, other, layout)
    finally:
        model.train(was_training)
        for parameter, before in trained.items():
            parameter.requires_grad_(before)
    # A gradient is rounded in both passes of every layer.
    limits = (limit, limit, *(4 * _limit(model, gradient) for gradient in whole[2:]))
    if isinstance(shared, Exception):  # perhaps no property of the architecture: kernels may have failed to compile
        logger.warning("%s: shared prefixes were tried, and failed.", name_of(model), exc_info=shared)
        return f"raises {type(shared).__name__} if prefixes are shared"
    agree = all(map(_close, shared, whole, limits))
    return None if agree else "computes other log-probabilities if prefixes are shared"


def _probe(model: Any) -> nn.Parameter | None:
    """The parameter whose gradient is compared: the first vector, else the first matrix, else None.

    A vector is small, and its gradient needs all layers. Embeddings are left out: their gradient is no result of the
    backward pass (`lean_embeddings`).
    """
    embeddings = [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]
    left_out = {id(parameter) for layer in embeddings for parameter in layer.parameters()}
    # A tower for pictures has no part in log-probabilities of text.
    language = model.get_decoder() if is_picture_model(model.config) else model
    others = [parameter for parameter in language.parameters() if id(parameter) not in left_out]
    return next((parameter for parameter in others if parameter.ndim == 1), others[0] if others else None)


def _random_tokens(model: Any, alike: int) -> Tensor:
    """Two rows of token ids [2, S]; the first `alike` tokens of both are the same."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    rows = torch.randint(vocabulary, (1, CHECKED_TOKENS), generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    rows[1, alike:] = (rows[0, alike:].flip(0) + 1) % vocabulary
    return rows.to(model.device)


def _limit(model: Any, values: Tensor) -> float:
    """The largest mean difference from these values that counts as rounding."""
    return (FULL_LIMIT if model.dtype == torch.float32 else HALF_LIMIT) * max(1.0, float(values.abs().max()))


def _results_or_error(
    function: Callable[..., tuple[Tensor, ...]], model: Any, *arguments: Any
) -> tuple[Tensor, ...] | Exception:
    """Results of the function, or the error that it raises because the model's architecture does not fit."""
    try:
        return function(model, *arguments)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:  # no such output, or shape
        if isinstance(error, torch.OutOfMemoryError) or _CPU_ALLOCATOR in str(error):
            raise  # memory says nothing about the architecture
        return error


def _agrees(function: LogprobFn, model: Any, tokens: Tensor, logits: Tensor, limit: float) -> bool:
    """True if the function runs, and returns the log-probabilities and entropies that the logits [2, S, V] give."""
    positions = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)[:, :-1].flatten()
    targets, temperature = tokens[:, 1:].flatten(), torch.ones(len(positions), device=tokens.device)
    results = _results_or_error(function, model, {"input_ids": tokens}, positions, targets, temperature)
    log_p = logits.flatten(0, 1)[positions].log_softmax(-1)
    expected = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    if isinstance(results, Exception):
        logger.info("%s has no %s: %s", name_of(model), function.__name__, results)
        return False
    return all(_close(result, exact, limit) for result, exact in zip(results, expected, strict=True))


def _close(result: Tensor, expected: Tensor, limit: float) -> bool:
    return float((result - expected).abs().mean()) <= limit

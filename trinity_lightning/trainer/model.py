"""What is done to a Hugging Face model to be trained, and how its log-probabilities are computed."""

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.training import Dropout, Layout
from trinity_lightning.errors import ConfigError, ModelLoadError
from trinity_lightning.trainer.attention import NAME, attention_implementation
from trinity_lightning.trainer.layout import collate, cut
from trinity_lightning.trainer.logprobs import Head, token_logprobs


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
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # whatever wrong files provoke in transformers
        raise ModelLoadError(f"cannot load the model '{name}': {error or type(error).__name__}") from error
    if dropout is Dropout.off:
        switch_off_dropout(model)
    if model.dtype == torch.bfloat16 and not compiles:
        from trinity_lightning.trainer.lean_layers import lean_layers

        lean_layers(model)
    return model


# -- dropout: the first ratio of a PPO step must be 1 ------------------------------------------------------------------

# Shares and amplitudes, by their names in configurations and modules of transformers: attention_dropout, resid_pdrop,
# attn_drop, layerdrop, drop_path_rate, fusion_droppath, drop_mlp_rate, router_jitter_noise; not xdrope_section.
_RANDOM = re.compile(r"dropout|jitter|layer_?drop|(^|_)drop_?path|(^|_)p?drop(_(\w+_)?(rate|prob|p))?$")


def switch_off_dropout(model: nn.Module) -> None:
    """Set every share of dropout to 0, in the configuration (which some layers read in their forward pass) and modules.

    Training mode stays what it is otherwise. Noise that routers of experts add to their input goes, too.
    """
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


# -- log-probabilities -------------------------------------------------------------------------------------------------
# By the base model and a head of ours, on trained positions only and in chunks, which saves most of the memory; or by
# the model's own forward pass. Not every architecture's logits are what its configuration's common names say, so both
# are held against the model's own logits before one is used; and shared prefixes against rows that are whole.

logger = logging.getLogger(__name__)

# (model, inputs, positions [n], targets [n], temperature [n]) -> log-probabilities and entropies, float32 [n]. Inputs
# are arguments of the forward pass, among them `input_ids` [B, S]; a position is the place in the flattened tokens of
# the state that predicts the target. With candidates there are more targets a position, and as many log-probabilities:
# [n, 1 + k].
LogprobFn = Callable[[Any, dict[str, Any], Tensor, Tensor, Tensor], tuple[Tensor, ...]]

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
        from trinity_lightning.trainer.own_logits import by_own_forward_pass

        return by_own_forward_pass(model, lambda function: _agrees(function, model, tokens, logits, limit))
    except AttributeError as error:
        raise ModelLoadError(f"{name_of(model)} cannot be trained: {error}") from error
    finally:
        model.train(was_training)


def usable_layout(layout: Layout, model: Any, function: LogprobFn) -> Layout:
    """The layout, or `padded` if it is `auto` and the model's log-probabilities differ with shared prefixes.

    Raises:
        ConfigError: it is `shared_prefix`, and they do; the message says why.
    """
    obstacle = None if layout is Layout.padded else _obstacle(model, function)
    if obstacle is None:
        return layout
    if layout is Layout.shared_prefix:
        raise ConfigError(f"algorithm.layout=shared_prefix: {name_of(model)} {obstacle}. Set algorithm.layout=padded.")
    logger.info("%s %s: the padded layout is used.", name_of(model), obstacle)
    return Layout.padded


def _obstacle(model: Any, function: LogprobFn) -> str | None:
    """Why the model's rows cannot share prefixes; None if they can."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    plain = set(kinds) == {"full_attention"} and config._attn_implementation == NAME and not has_dropout(model)
    if plain and model.device.type in ("cpu", "cuda"):
        return _fault_of_sharing(model, function)
    from trinity_lightning.trainer.own_logits import why_unshared

    return why_unshared(model, set(kinds))


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
    """The parameter whose gradient is compared: the first vector, or else the first matrix; None: all are embeddings.

    A vector's gradient is small, and that of the first needs all layers. Not one of input and output embeddings, whose
    gradient is no result of the backward pass (`logprobs.lean_embeddings`).
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

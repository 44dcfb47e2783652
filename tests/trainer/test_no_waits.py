"""Within a micro-batch the CPU never waits for a GPU: it runs on the device "meta", whose values nobody can read.

There an `.item()`, a `.tolist()`, an `if` of a tensor or a mask as an index is an error, as tensors have shapes alone.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.policy import groups, make_policy
from support.streams import STREAMS, read
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.config.algorithm import KLConfig, Layout
from trinity_lightning.trainer import fused, layers
from trinity_lightning.trainer.layout import collate, cut
from trinity_lightning.trainer.passes import Passes
from trinity_lightning.trainer.placement import WHOLE

META = torch.device("meta")
LAYOUTS = (Layout.padded, Layout.shared_prefix)


# Operations whose result has a size that depends on values: a GPU tells the CPU, which waits for it.
OF_VALUES = ("nonzero", "masked_select", "masked_scatter_backward", "unique", "bincount", "repeat_interleave")


class Waits(TorchDispatchMode):
    """Keeps the operations that bring tensors from one device to the other, and those that the CPU waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if "copy" not in str(func):  # a single number goes to a GPU as a kernel's argument
            tensors = [tensor for tensor in tensors if tensor.ndim > 0]
        on_gpu = any(tensor.device == META for tensor in tensors)
        by_mask = "index" in str(func) and any(tensor.dtype == torch.bool for tensor in tensors[1:-1])
        waits = on_gpu and (by_mask or any(name in str(func) for name in OF_VALUES))
        if waits or len({tensor.device for tensor in tensors}) > 1:
            self.seen.append(str(func))
        return result


@pytest.fixture
def eager_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """In place of FlexAttention and the head's kernel, which only a GPU computes; the masks that it is given."""
    masks: list[Any] = []

    def attend(query: Any, key: Any, value: Any, *, block_mask: Any, scale: float, enable_gqa: bool) -> Any:
        masks.append(block_mask)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(layers, "_compiled", lambda: attend)
    monkeypatch.setattr(fused, "is_usable", lambda *arguments: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # there is none on "meta"
    return masks


@pytest.fixture
def waits_of_libraries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The only wait of a library, left out here: transformers asks for each model if rows hold several sequences."""
    waits: list[str] = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: waits.append("packed rows"))
    return waits


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "settings",
    [
        {"policy_loss": "ppo", "entropy_coef": 0.1, "kl": KLConfig("k3", 0.1)},
        {"policy_loss": "mix", "entropy_coef": 0.1},
        {"policy_loss": STREAMS["policy_loss"]},
        {"critic": {"lr": 1e-3}},
        {"critic": {"lr": 1e-3, "model": "tiny"}},
    ],
    ids=["ppo", "mix", "streams", "critic", "value model"],
)
def test_one_copy_brings_a_micro_batch_and_nothing_is_read_back(
    layout: Layout, settings: dict[str, Any], eager_kernels: list[Any], waits_of_libraries: list[str]
) -> None:
    policy = make_policy(**settings)
    policy.configure_model()
    passes: Passes = policy.passes()
    batch = OptimizerBatch.of(groups(), explore_step=1)
    read(batch.experiences)
    policy.objective.add_columns(batch)
    if "kl" in settings:
        batch.columns["ref_logprobs"] = [torch.zeros(e.response_length) for e in batch.experiences]
    if (critic := policy.critic) is not None:
        passes = critic.with_values(passes)
        for name in ("values", "returns", "advantages", "old_logprobs"):
            batch.columns[name] = [torch.zeros(e.response_length) for e in batch.experiences]
        critic.begin(batch, 0)
    policy.to("meta")
    [part] = cut(batch, range(len(batch.experiences)), 10_000, layout)
    waits_of_libraries.clear()
    with Waits() as waits:
        micro = collate(batch, part, META)
        logprobs, entropies, *values = passes.through(policy.policy, micro, WHOLE)
        loss, _ = policy.objective(logprobs, entropies, micro, batch, batch.num_tokens, batch.num_tokens)
        if critic is not None:
            loss, _ = critic.joined(loss, values, micro, batch)
        loss.backward()
    assert waits.seen == ["aten._to_copy.default"]
    assert all(parameter.grad is not None for parameter in policy.policy.parameters())
    models = 1 if critic is None or critic.model is None else 2
    assert waits_of_libraries == (["packed rows"] * models if layout is Layout.padded else [])
    assert bool(eager_kernels) == (layout is Layout.shared_prefix)
    assert all(mask.kv_indices.device == META for mask in eager_kernels)

"""The log-softmax of the head on a GPU: torch.compile makes one kernel of each pass, which keeps no float32 logits.

Written out in torch, the two passes read and write about 150 bytes a logit; compiled they read the logits twice and
write their gradient once, 8 bytes.
"""

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

T = TypeVar("T")


def one_kernel(function: Callable[..., T]) -> Callable[..., T]:
    """Compile a function of tensors at its first call: one kernel for any number of rows, the tensors' first dimension.

    It gets the tensors without their history. The second dimension of the first tensor is always the same.
    """

    @cache
    def compiled() -> Callable[..., T]:
        return torch.compile(function)

    @wraps(function)
    def call(*tensors: Tensor) -> T:
        detached = [tensor.detach() for tensor in tensors]
        for tensor in detached:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        torch._dynamo.mark_static(detached[0], 1)
        return compiled()(*detached)

    return call


@cache
def is_usable(device: torch.device, dtype: torch.dtype, vocabulary: int) -> bool:
    """True if compiled kernels run on the device, which they are tried on; it is False for a CPU.

    They are tried with the dtype and the width of the logits, since others would be compiled apart. On a CPU blocks of
    a few tokens stay in its caches, which is quicker than what torch.compile makes.
    """
    if device.type == "cpu":
        return False
    logits = torch.zeros(2, vocabulary, device=device, dtype=dtype)
    targets = torch.zeros(2, 1, dtype=torch.int64, device=device)
    temperature = torch.ones(2, device=device)
    try:
        logprobs, entropy, highest, log_sum = statistics(logits, targets, temperature)
        write_gradient(logits, targets, temperature, entropy, highest, log_sum, logprobs, entropy)
    except Exception as error:  # what a missing compiler or an unknown GPU provokes in torch, Triton and their tools
        logger.warning("the head's softmax is not compiled on this GPU, which takes longer: %s", error)
        return False
    return True


@one_kernel
def statistics(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics of softmax(logits / temperature), in float32.

    Args:
        logits: [n, vocabulary].
        targets: token ids, int64 [n, 1].
        temperature: float32 [n].

    Returns:
        Log-probabilities of the targets [n, 1], entropies, largest scaled logits, and logarithms of the sums of
        exponentials above those, each [n].
    """
    scaled = logits.float() * temperature.reciprocal()[:, None]
    highest = scaled.amax(-1)
    shifted = scaled - highest[:, None]
    exps = shifted.exp()
    sums = exps.sum(-1)
    log_sum = sums.log()
    chosen = logits.gather(-1, targets).float() * temperature.reciprocal()[:, None]
    return chosen - highest[:, None] - log_sum[:, None], log_sum - (exps * shifted).sum(-1) / sums, highest, log_sum


@one_kernel
def write_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    entropy: Tensor,
    highest: Tensor,
    log_sum: Tensor,
    target_grad: Tensor,
    entropy_grad: Tensor,
) -> None:
    """Write the gradient of the logits in their place.

    Args:
        logits, targets, temperature: as in `statistics`.
        entropy, highest, log_sum: what it returned.
        target_grad: gradient of the targets' log-probabilities, divided by the temperature, float32 [n, 1].
        entropy_grad: gradient of the entropies, divided by the temperature, float32 [n].
    """
    log_p = logits.float() * temperature.reciprocal()[:, None] - highest[:, None] - log_sum[:, None]
    p_grad = entropy_grad[:, None] * (log_p + entropy[:, None]) + target_grad
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets
    logits.copy_(torch.where(is_target, target_grad, 0.0) - log_p.exp() * p_grad)

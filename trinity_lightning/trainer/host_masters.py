"""Float32 masters and moments in the host's memory, where the optimizer takes its steps: `adamw_offload`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from trinity_lightning.trainer.optim import MasterWeights, are_rounded


class HostMasters(MasterWeights):
    """Masters on the host; a device has of each parameter its weight and, until the step, its float32 gradient.

    A step copies the gradients, which are clipped by then, to the host, waits for them once, and sends the new weights
    back in their own dtype. Both go through one buffer of 4 bytes a parameter, which is pinned if the device is a GPU.
    The state is that of the same optimizer on the device, and a checkpoint of either is one of the other: float32
    weights are their masters, which it has none of.
    """

    def __init__(self, params: list[dict[str, Any]], factory: Callable[[Any], Optimizer]) -> None:
        super().__init__(params, factory, torch.device("cpu"))
        self._rounded = are_rounded(self.param_groups)
        sizes = [each.numel() for each in self.masters]
        # One tensor: torch makes each that is pinned as large as the next power of two.
        buffer = torch.empty(sum(sizes), dtype=torch.float32, pin_memory=any(each.is_cuda for each in self.weights))
        self._slots = buffer.split(sizes)

    def state_dict(self) -> dict[str, Any]:
        """That of `MasterWeights`; of float32 weights that of the inner optimizer, with the settings of this one."""
        if self._rounded:
            return super().state_dict()
        self._hand_on_settings()
        return self.inner.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` has; the masters of float32 weights are those that are there."""
        if self._rounded:
            super().load_state_dict(state_dict)
            return
        self.inner.load_state_dict(state_dict)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.copy_(weight)

    def _hand_on_gradients(self) -> None:
        for weight, master, slot in zip(self.weights, self.masters, self._slots, strict=True):
            if weight.grad is not None:
                master.grad = slot.as_strided(master.shape, master.stride())
                master.grad.copy_(weight.grad, non_blocking=True)
        self._wait()

    def _round(self) -> None:
        """Send the masters, rounded: on the stream before what computes with the weights, and before new gradients."""
        for weight, master, slot in zip(self.weights, self.masters, self._slots, strict=True):
            rounded = slot.view(weight.dtype)[: weight.numel()].as_strided(weight.shape, weight.stride())
            weight.copy_(rounded.copy_(master), non_blocking=True)

    def _wait(self) -> None:
        """Until the gradients are there."""
        device = self.weights[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

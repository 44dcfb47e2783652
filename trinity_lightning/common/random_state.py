"""Seeds of rollouts, and the random states of Python, NumPy and torch in a form that a checkpoint may hold."""

import random
from typing import Any

import numpy as np
import torch
import xxhash

SEED_MODULUS = 2**31


def rollout_seed(run_seed: int, batch: int | str, task: int | str, turn: int, run: int) -> int:
    """Seed of the `turn`-th request of run `run` of a task: (hash(run_seed, batch, task, turn) + run) mod 2**31.

    It depends neither on chunking, retries and ranks, nor on the order in which tasks finish. It equals vLLM's own
    n-sampling, where the i-th sample of a request has the request's seed + i.
    """
    key = f"{run_seed}/{batch}/{task}/{turn}".encode()
    return (xxhash.xxh3_64_intdigest(key) + run) % SEED_MODULUS


def rest_seed(seed: int, drawn: int) -> int:
    """Seed of a request for the rest of a sample with this seed, of which so many tokens are drawn."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{drawn}".encode()) % SEED_MODULUS


def random_state() -> dict[str, Any]:
    """The present random states, including CUDA's if there is a GPU."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the random states that `random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():  # only for the GPUs that there are now
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"][: torch.cuda.device_count()]])

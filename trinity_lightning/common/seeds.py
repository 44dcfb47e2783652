"""Seeds of rollouts: a function of what is rolled out, never of when or where."""

import xxhash

SEED_MODULUS = 2**31


def rollout_seed(run_seed: int, batch: int | str, task: int | str, turn: int, run: int) -> int:
    """Seed of the `turn`-th request of run `run` of a task: (hash(run_seed, batch, task, turn) + run) mod 2**31.

    Independent of chunking, retries, ranks and the order in which tasks finish; equal to vLLM's own n-sampling, where
    the i-th sample of a request has its seed + i.
    """
    key = f"{run_seed}/{batch}/{task}/{turn}".encode()
    return (xxhash.xxh3_64_intdigest(key) + run) % SEED_MODULUS

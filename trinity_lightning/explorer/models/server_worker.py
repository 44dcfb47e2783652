"""Makes the workers of a vLLM server on a CPU sleep soon; they import it with `Extension`.

A worker waits for work by asking for it again and again, for a second after the last work that it had. On a machine of
few cores the training that follows the rollouts meanwhile computes beside it, many times more slowly.
"""

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

SECONDS = 0.005  # longer than the time between two steps of a busy server

SpinCondition.__init__.__defaults__ = (SECONDS,)


class Extension:
    """Adds nothing to vLLM's worker."""

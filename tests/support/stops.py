"""A training run of which one rank stops for good at some place: `python -m support.stops ARGUMENTS`.

The variable STOPS says which rank, where, and at which call: "0 finish 2". The file `stopped` is there from then on.
"""

import os
import time
from pathlib import Path
from typing import Any

from trinity_lightning import train
from trinity_lightning.common import checkpoints
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.trainer import fsdp

PLACES: dict[str, tuple[Any, str]] = {
    "finish": (checkpoints._Writer, "finish"),  # a checkpoint's shards, and what is where in them
    "share": (fsdp.Shards, "_share"),  # of a weight that is gathered
    "step": (TransformersEngine, "_step"),  # of an engine that rolls out
    "add": (VLLMEngine, "_add"),  # of a request to generate
    "reshard": (fsdp.Shards, "reshard"),  # what `perturb` begins with, when a rank serves it
}


def stop_at(owner: Any, name: str, call: int) -> None:
    """Stop when this function has been called so often."""
    function, calls = getattr(owner, name), 0

    def stop(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        found = function(*arguments, **settings)
        if calls == call:
            Path("stopped").touch()
            time.sleep(3600)
        return found

    setattr(owner, name, stop)


if __name__ == "__main__":
    rank, place, call = os.environ["STOPS"].split()
    if rank == os.environ.get("LOCAL_RANK", "0"):
        stop_at(*PLACES[place], int(call))
    train.main()

"""A training run of which one rank stops for good at some place: `python -m support.stops ARGUMENTS`.

The variable STOPS says which rank, where, and at which call: "0 finish 2"; "0 finish 2 fails": it raises an error
there. The file `stopped` is there from then on, and the time limits of waits for another rank that begin later are a
HURRY-th: they may be long before, for a busy machine, and the test does not wait long. The file `stopping` says so as
the call begins: what the ranks do together ends for all at once, and another may wait again before the file is there.
"""

import os
import time
from pathlib import Path
from typing import Any

from trinity_lightning import train
from trinity_lightning.common import checkpoints
from trinity_lightning.common.ranks import Ranks
from trinity_lightning.errors import TrinityError
from trinity_lightning.explorer.models.rank_engine import RankEngine
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.trainer import fsdp

PLACES: dict[str, tuple[Any, str]] = {
    "finish": (checkpoints._Writer, "finish"),  # a checkpoint's shards, and what is where in them
    "pass": (fsdp.Gather, "__call__"),  # of a layer's weights, within a pass
    "share": (fsdp.Shards, "_share"),  # of a weight that is gathered
    "step": (TransformersEngine, "_step"),  # of an engine that rolls out
    "add": (VLLMEngine, "_add"),  # of a request to generate
    "reshard": (fsdp.Shards, "reshard"),  # what `perturb` begins with, when a rank serves it
}
HURRY = 15
LIMITS: list[tuple[Any, str, str]] = [  # attributes that limit the waits of methods
    (Ranks, "exchange", "timeout"),
    (Ranks, "call", "timeout"),
    (Ranks, "collect", "timeout"),
    (Ranks, "end", "timeout"),
    (RankEngine, "_ask_in_time", "limit"),
]


def stop_at(owner: Any, name: str, call: int, fails: bool) -> None:
    """Stop, or fail, when this function has been called so often."""
    function, calls = getattr(owner, name), 0

    def stop(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            Path("stopping").touch()
        result = function(*arguments, **settings)
        if calls == call:
            Path("stopped").touch()
            if fails:
                raise TrinityError("broken on purpose")
            time.sleep(3600)
        return result

    setattr(owner, name, stop)


def hurry(owner: Any, name: str, attribute: str) -> None:
    """Divide the limit, once for each object, when the method is called after a rank was about to stop."""
    function, hurried = getattr(owner, name), f"hurried_{attribute}"

    def shortened(waiting: Any, *arguments: Any, **settings: Any) -> Any:
        if Path("stopping").exists() and not hasattr(waiting, hurried):
            setattr(waiting, hurried, True)
            setattr(waiting, attribute, getattr(waiting, attribute) / HURRY)
        return function(waiting, *arguments, **settings)

    setattr(owner, name, shortened)


if __name__ == "__main__":
    rank, place, call, *fails = os.environ["STOPS"].split()
    if rank == os.environ.get("LOCAL_RANK", "0"):
        stop_at(*PLACES[place], int(call), bool(fails))
    for limit in LIMITS:
        hurry(*limit)
    train.main()

"""Weights to a vLLM server without a file (`synchronizer=tcp`) against a folder (`synchronizer=checkpoint`).

    python benchmarks/weight_sync.py [--rounds 8]

One server of SmolLM2-135M-Instruct in bfloat16 on one core, a trainer on the other: 0.33 GB a sync, the tied head
included. Both ways take turns with weights that change each time; the median of the rounds counts, and the server's
log-probabilities have to be the same to the last bit. Prints one JSON line.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trinity_lightning.common.config import EngineDtype
from trinity_lightning.common.model_files import resolve_model
from trinity_lightning.common.ports import free_port
from trinity_lightning.explorer.host import Host
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine
from trinity_lightning.explorer.weight_group import WeightGroup
from trinity_lightning.trainer.weight_sync import weight_stream

HERE = "127.0.0.1"
TEXT = list(range(100, 164))


async def compare(engine: VLLMServerEngine, model: Any, rounds: int) -> dict[str, Any]:
    await engine.load()
    shapes, held = weight_stream(model).shapes, partial(weight_stream, model)
    group = await WeightGroup.form([engine], HERE, free_port(HERE), torch.device("cpu"), shapes, held)
    seconds: dict[str, list[float]] = {"tcp": [], "checkpoint": []}
    for version in range(rounds):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.999)
        found = []
        for way, send in (("tcp", group.send), ("checkpoint", engine.sync_weights)):
            start = time.perf_counter()
            await send(weight_stream(model), version)
            seconds[way].append(time.perf_counter() - start)
            found.append(await engine.logprobs(TEXT))
        if found[0] != found[1]:
            raise SystemExit("the two ways brought different weights")
    group.close()
    await engine.shutdown()
    medians = {f"{way}_s": round(statistics.median(each), 3) for way, each in seconds.items()}
    ratio = medians["checkpoint_s"] / medians["tcp_s"]
    return {"benchmark": "weight_sync", **medians, "ratio": round(ratio, 2), "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description="Weight sync to a server: connections against a folder.")
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        engine = VLLMServerEngine(
            "smollm2",
            transfer="tcp",
            cores=sorted(os.sched_getaffinity(0))[-1:],
            log=Path(folder) / "server.log",
            dtype=EngineDtype.bf16,
            max_model_len=256,
            kv_cache_gb=0.1,
        )
        host = Host()
        result = host.run(compare(engine, model, rounds))
        host.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()

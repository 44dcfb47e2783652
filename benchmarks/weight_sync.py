"""Weights to vLLM in the same process against copying the same bytes, and to a server without a file against a folder.

    python benchmarks/weight_sync.py [--rounds 8]

An engine in this process is given the weights and, in turns with that, buffers in memory are: `in_process_s`, `copy_s`.
Then one server of SmolLM2-135M-Instruct in bfloat16 on one core, a trainer on the other: 0.33 GB a sync, the tied head
included. Its two ways take turns with weights that change each time; the median of the rounds counts, and the server's
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

from trinity_lightning.config.engines import EngineDtype, free_port
from trinity_lightning.config.models import resolve_model
from trinity_lightning.explorer.host import Host
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine
from trinity_lightning.explorer.weight_group import WeightGroup
from trinity_lightning.trainer.weight_sync import weight_stream

HERE = "127.0.0.1"
TEXT = list(range(100, 164))


def copy_in_process(model: Any, rounds: int) -> dict[str, float]:
    """Seconds of a sync in process, of copying the same bytes, and their ratio."""
    settings: dict[str, Any] = {"dtype": EngineDtype.bf16, "max_model_len": 256, "kv_cache_gb": 0.1}
    engine = VLLMEngine("smollm2", **settings)
    host = Host([engine])
    host.run(engine.load())
    buffers = [tensor.clone() for _, tensor in weight_stream(model)]
    seconds: dict[str, list[float]] = {"in_process": [], "copy": []}
    for version in range(rounds):
        start = time.perf_counter()
        host.run(engine.sync_weights(weight_stream(model), version))
        between = time.perf_counter()
        for buffer, (_, tensor) in zip(buffers, weight_stream(model), strict=True):
            buffer.copy_(tensor)
        seconds["in_process"].append(between - start)
        seconds["copy"].append(time.perf_counter() - between)
    host.run(engine.shutdown())
    host.close()
    sync, copy = (statistics.median(each) for each in seconds.values())
    return {"in_process_s": round(sync, 3), "copy_s": round(copy, 3), "in_process_over_copy": round(sync / copy, 2)}


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
    parser = argparse.ArgumentParser(description="Weight sync in process, and to a server.")
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.bfloat16)
    here = copy_in_process(model, rounds)
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
    print(json.dumps(result | here))


if __name__ == "__main__":
    main()

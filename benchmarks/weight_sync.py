"""Weights to vLLM in the same process against copying the same bytes, and to a server through memory against a disk.

    python benchmarks/weight_sync.py [--rounds 8]

SmolLM2-135M-Instruct in bfloat16: 0.33 GB a sync, the tied head included. An engine in this process is given the
weights and, in turns with that, buffers in memory are (`in_process_s`, `copy_s`), with as many threads as a run has.
`of_it_packing_s` is what oneDNN takes to bring the weights into the layout of its matrix products, for vLLM.
Then a server on one core, a trainer on the other: it reads weights that change each time from a folder in memory and,
in turns, from one on the disk. The median of the rounds counts. Prints one JSON line.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trinity_lightning  # noqa: F401  first: torch and OpenMP read what it sets when they are loaded

# isort: split
import torch
from transformers import AutoModelForCausalLM

from trinity_lightning.common.hardware import reuse_large_buffers
from trinity_lightning.config.engines import EngineDtype
from trinity_lightning.config.models import resolve_model
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models import vllm_engine
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine
from trinity_lightning.sync.files import MEMORY, WeightFolder
from trinity_lightning.sync.stream import weight_stream

SETTINGS: dict[str, Any] = {"dtype": EngineDtype.bf16, "max_model_len": 256, "kv_cache_gb": 0.1}


def medians(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds of each way, which take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    return {f"{name}_s": round(statistics.median(times), 3) for name, times in seconds.items()}


def in_process(model: Any, rounds: int) -> dict[str, float]:
    """Seconds of a sync in process, of its packing, and of copying the same bytes; and the ratio of sync and copy."""
    reuse_large_buffers()  # as a run does
    engine = VLLMEngine("smollm2", **SETTINGS)
    driver = Driver([engine])
    driver.run(engine.load())
    buffers = [tensor.clone() for _, tensor in weight_stream(model)]
    pack, seconds = vllm_engine._pack, 0.0

    def timed(layer: Any) -> None:
        nonlocal seconds
        start = time.perf_counter()
        pack(layer)
        seconds += time.perf_counter() - start

    def copy() -> None:
        for buffer, (_, tensor) in zip(buffers, weight_stream(model), strict=True):
            buffer.copy_(tensor)

    def sync() -> None:
        driver.run(engine.sync_weights(weight_stream(model), 1))

    vllm_engine._pack = timed
    results = medians({"in_process": sync, "copy": copy}, rounds)
    vllm_engine._pack = pack
    driver.run(engine.shutdown())
    driver.close()
    ratio = results["in_process_s"] / results["copy_s"]
    return results | {"of_it_packing_s": round(seconds / rounds, 3), "in_process_over_copy": round(ratio, 2)}


def to_a_server(model: Any, rounds: int) -> dict[str, float]:
    """Seconds of a sync to a server through memory and through the disk."""
    with tempfile.TemporaryDirectory() as disk:
        cores, log = sorted(os.sched_getaffinity(0))[-1:], Path(disk) / "server.log"
        engine = VLLMServerEngine("smollm2", cores=cores, log=log, **SETTINGS)
        driver = Driver()
        driver.run(engine.load())

        def through(folder: WeightFolder) -> Callable[[], None]:
            def send() -> None:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.999)
                engine._weights = folder
                driver.run(engine.sync_weights(weight_stream(model), 1))

            return send

        folders = {"memory": WeightFolder(memory=MEMORY), "disk": WeightFolder(disk)}
        results = medians({name: through(folder) for name, folder in folders.items()}, rounds)
        driver.run(engine.shutdown())
        driver.close()
        for folder in folders.values():
            folder.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Weight sync in process, and to a server.")
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = to_a_server(model, rounds)
    torch.set_num_threads(threads)
    results |= in_process(model, rounds)
    print(json.dumps({"benchmark": "weight_sync", **results, "threads": threads, "rounds": rounds}))


if __name__ == "__main__":
    main()

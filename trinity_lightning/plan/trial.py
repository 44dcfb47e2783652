"""Trials of a product and of generations, each finding told to a file: in a process of its own, for `doctor`.

    python -m trinity_lightning.plan.trial FILE     vLLM alone, which may crash or hang

Each finding is a line of JSON in FILE as soon as it is known, so that a process that dies or hangs has told the others.
"""

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trinity_lightning.config.engines import EngineDtype, gpu_count
from trinity_lightning.config.model import Dropout
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.trainer.model import load_model

# A finding: GOOD, a NOTE that may cost somebody an hour, or BAD: a run cannot work.
GOOD, NOTE, BAD = "good", "note", "bad"
Tell = Callable[..., None]

PROMPT = "What is 2 + 3?"


def tell_to(file: Path) -> Tell:
    """A function that appends a finding to a file."""

    def tell(section: str, name: str, text: str, level: str = GOOD, fix: str = "") -> None:
        finding = {"section": section, "name": name, "text": text, "level": level, "fix": fix}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(finding) + "\n")

    return tell


def be_quiet() -> None:
    """Leave out what libraries log and warn of: the findings say what matters."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


# -- trials ------------------------------------------------------------------------------------------------------------


def tell_product(tell: Tell) -> None:
    """Tell the times of a matrix product in float32 and bfloat16 on the device that trains, which must be right."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times, size = [], 1024 if device.type == "cpu" else 4096
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        factors = torch.ones(2, size, size, device=device, dtype=dtype)
        (factors[0] @ factors[1]).sum(dtype=torch.float64).item()  # a warm-up
        start = time.perf_counter()
        total = (factors[0] @ factors[1]).sum(dtype=torch.float64).item()
        seconds = time.perf_counter() - start
        if total != size**3:
            tell("trials", "product", f"{name} on {device}: the sum is {total}, and {size**3} is right", BAD)
            return
        times.append(f"{name} {2 * size**3 / seconds / 1e9:,.0f} GFLOP/s")
    tell("trials", "product", f"{', '.join(times)} on {device} ({size} x {size})")


def tell_generation(tell: Tell, name: str, engine: Engine) -> None:
    """Tell the time in which an engine loads the tiny model and generates eight tokens, or why it does not."""
    start = time.perf_counter()
    driver = Driver([engine])
    try:
        driver.run(engine.load())
        loaded = time.perf_counter() - start
        [completion] = driver.run(engine.chat([{"role": "user", "content": PROMPT}], max_tokens=8))
        count, seconds = len(completion.token_ids), time.perf_counter() - start - loaded
        text = f"loaded in {loaded:.1f} s, {count} tokens {seconds:.1f} s later"
        tell("trials", name, text, GOOD if count else BAD)
        driver.run(engine.shutdown())
    except Exception as error:  # whatever a library raises
        tell("trials", name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", BAD)
    finally:
        driver.close()


def tell_transformers(tell: Tell) -> None:
    """Try the engine of transformers with the tiny model."""
    engine = TransformersEngine("tiny", max_model_len=64)
    engine.bind(load_model("tiny", torch.float32, Dropout.off, "sdpa").eval())
    tell_generation(tell, "transformers", engine)


def tell_vllm(tell: Tell) -> None:
    """Try vLLM with the tiny model, without graphs, and with little memory on a GPU."""
    args = {"enforce_eager": True, "gpu_memory_utilization": 0.1} if gpu_count() else {}
    settings = {"dtype": EngineDtype.fp32, "max_model_len": 64, "max_num_seqs": 2, "kv_cache_gb": 0.1, "args": args}
    tell_generation(tell, "vllm", VLLMEngine("tiny", **settings))


def main(arguments: Sequence[str]) -> None:
    """Try vLLM, and tell to the file that is named."""
    [file] = arguments
    be_quiet()
    tell_vllm(tell_to(Path(file)))


if __name__ == "__main__":
    main(sys.argv[1:])

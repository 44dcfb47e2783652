"""The share of the hardware's speed that a training step reaches, for each case of `vs_trl.py`.

    python benchmarks/utilization.py [--model smollm2] [--rounds 2] [--compile]

Steps by `PolicyModule` under Lightning's Trainer with its defaults, or with compiled layers (model.compile=true); the
first step, which compiles, is left out. The peak is that of the best matrix product in the same dtype, timed in the
same process (on a GPU that of its data sheet), or of the fastest step, if that was faster. Prints one JSON line, of
each case the median over the rounds: `mfu` is the metric `perf/mfu`; `tokens_6n` counts computed tokens, padding
included, times 6 times all weights that multiply, as if the head ran on every token, and nothing for attention.
"""

import argparse
import json
import os
import statistics
import warnings
from typing import Any

from _rollouts import CASES

import trinity_lightning  # noqa: F401  before torch, which reads what it sets

GROUPS, GROUP_SIZE = 8, 8


def measure(
    model: str, case: str, rounds: int, dtype: str, vocabulary: int, compile_layers: bool
) -> list[dict[str, float]]:
    """The seconds and the share of the peak of each step but the first."""
    import lightning as L
    from _training import batch_of, fit

    from trinity_lightning.trainer.flops import ModelSize

    batch = batch_of(CASES[case].rollouts(GROUPS, GROUP_SIZE, vocabulary))
    steps: list[dict[str, float]] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            size = ModelSize.of(pl_module.policy)
            if pl_module.peak is None:
                raise SystemExit("What this device can compute is not known: see trainer/flops.py.")
            computed = metrics["perf/computed_tokens"] / metrics["time/train"]
            steps.append(
                {
                    "seconds": metrics["time/train"],
                    "peak_tflops": pl_module.peak.flops / 1e12,
                    "mfu": metrics["perf/mfu"],
                    "tokens_6n": 6 * (size.body + size.head) * computed / pl_module.peak.flops,
                }
            )

    batches = iter([batch] * (1 + rounds))
    fit(model, batches, dtype, callbacks=[Look()], accelerator="auto", compile_layers=compile_layers)
    return steps[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["short", "ragged", "uniform"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), default="auto")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")

    from transformers import AutoConfig

    from trinity_lightning.common.hardware import faster_dtype
    from trinity_lightning.config.models import resolve_model

    dtype = faster_dtype().value if args.dtype == "auto" else args.dtype
    vocabulary = AutoConfig.from_pretrained(resolve_model(args.model)).vocab_size
    by_case = {}
    for case in args.cases:
        steps = measure(args.model, case, args.rounds, dtype, vocabulary, args.compile)
        by_case[case] = {name: round(statistics.median(step[name] for step in steps), 3) for name in steps[0]}
    result = {
        "benchmark": "utilization",
        **vars(args),
        "dtype": dtype,
        "cores": len(os.sched_getaffinity(0)),
        "cases": by_case,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""A whole step of the default recipe (rollouts, rewards, training, weight sync) against TRL's GRPOTrainer as it comes.

    python benchmarks/vs_trl_step.py [--model smollm2] [--steps 3]

Ours is `+recipe=grpo` with vLLM, without evaluations; TRL generates by transformers, since its vLLM mode stops at the
first weight sync on a CPU. Neither writes checkpoints. Both learn the same sums with 8 prompts x 8 completions of at
most 32 tokens, the same learning rate and objective, in the dtype whose products are faster here: in bf16 ours has
bfloat16 weights with float32 masters, TRL's is autocast over float32 weights. TRL's other settings are its defaults,
gradient checkpointing among them; `--trl` changes them, as JSON. Each side is a process of its own, and they take
turns. Each begins with the same model and learns, so that completions become shorter on both sides; the first step
warms up. Prints one JSON line: seconds a step (median, least, largest), peak memory of each process in these steps,
`ratio` is TRL's time divided by ours, `completion_tokens` the mean length of what each side generated, `trained_rows`
the share of completions that it computed gradients of: ours leaves out groups whose rewards are all equal, which have
none.
"""

import argparse
import importlib.metadata
import json
import os
import re
import statistics
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from _rollouts import varied
from _turns import EnoughError, Requests, Side, clock, peak_gb, reset_peak, spread, take_turns

ENVIRONMENT = dict(os.environ)  # before this package sets what libraries read, which is none of TRL's
# Of the default recipe.
PROMPTS, COMPLETIONS, MAX_TOKENS, LEARNING_RATE = 8, 8, 32, 2e-5
PARTS = {"rollout_s": "time/rollout", "train_s": "time/train", "sync_s": "time/sync_weight"}


# -- the processes that train -----------------------------------------------------------------------------------------


class Turns:
    """Waits for a request at the beginning of each step but the first, and answers at its end."""

    def __init__(self) -> None:
        self._requests = Requests()
        self._started: float | None = None

    def begin(self, step: int) -> None:
        """`step` counts from 0; an EnoughError where none is asked for."""
        if step == 0:
            return
        if step == 1:
            reset_peak()
            self._requests.answer("ready")
        if next(iter(self._requests), "") != "step":
            self._requests.answer(peak_gb())
            raise EnoughError
        self._started = clock()

    def end(self, completion_tokens: float, trained_rows: float, **parts: float) -> None:
        """Answer with the seconds of the step, the mean length of completions, and the share that was trained on.

        `parts` are seconds of parts of the step.
        """
        if self._started is not None:
            means = {"completion_tokens": completion_tokens, "trained_rows": trained_rows}
            self._requests.answer({"seconds": clock() - self._started} | means | parts)


def train_ours(spec: dict[str, Any], folder: str) -> None:
    import trinity_lightning  # noqa: F401  first: torch and OpenMP read what it sets when they are loaded

    # isort: split
    import lightning as L
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from trinity_lightning.build import build
    from trinity_lightning.config import hydra as compose
    from trinity_lightning.config.registry import config_dir

    turns = Turns()

    class InTurns(L.Callback):
        """The first of the callbacks: the explorer's rolls out in the same hook."""

        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch > 1:
                metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
                parts = {name: metrics[metric] for name, metric in PARTS.items() if metric in metrics}
                rows = spec["prompts"] * spec["completions"]
                turns.end(metrics["response_length/mean"], metrics["actor/trained_rows"] / rows, **parts)
            turns.begin(trainer.current_epoch)

    compose.register()
    overrides = ["+recipe=grpo", f"output_dir={folder}", "steps=1000000", "ckpt_path=null", *spec["overrides"]]
    overrides += ["explorer.eval_on_startup=false", "explorer.eval_interval=0", "logger=csv"]
    overrides += ["~callbacks.checkpoint"]
    with initialize_config_dir(str(config_dir("conf")), version_base="1.3"):
        run = build(hydra_compose("train", overrides))
    callbacks: list[L.Callback] = run.trainer.callbacks  # type: ignore[attr-defined]
    callbacks.insert(0, InTurns())
    run.trainer.fit(run.policy, run.data)


def train_trl(spec: dict[str, Any], folder: str) -> None:
    import torch
    from _trl import OnStep
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    turns = Turns()
    lengths: list[int] = []  # of the latest completions, in tokens

    def reward(
        completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float | None]:
        lengths[:] = map(len, completion_ids)
        if spec["reward"] == "varied":
            return [varied(completion[0]["content"]) for completion in completions]
        numbers = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
        return [float(answers[-1:] == [expected]) for answers, expected in zip(numbers, answer, strict=True)]

    arguments = GRPOConfig(
        output_dir=folder,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        num_generations=spec["completions"],
        per_device_train_batch_size=spec["rows_a_pass"],
        gradient_accumulation_steps=spec["prompts"] * spec["completions"] // spec["rows_a_pass"],
        max_completion_length=spec["max_tokens"],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=1_000_000,
        **spec["trl"],
    )
    trainer = GRPOTrainer(
        model=spec["folder"],
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(json.loads(Path(spec["tasks"]).read_text())),
        callbacks=[
            OnStep(
                before=lambda: turns.begin(trainer.state.global_step),
                after=lambda: turns.end(statistics.mean(lengths), trained_rows=1.0),
            )
        ],
    )
    trainer.train()


def work(spec: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, suppress(EnoughError):
        {"ours": train_ours, "trl": train_trl}[spec["side"]](spec, folder)


# -- the process that measures ----------------------------------------------------------------------------------------


def write_tasks(file: Path) -> None:
    """The sums of the default taskset, as conversations."""
    from trinity_lightning.explorer.tasks.sources import addition

    entries = addition("train", low=0, high=20, heldout=128)
    tasks = [{"prompt": [{"role": "user", "content": entry["prompt"]}], "answer": entry["answer"]} for entry in entries]
    file.write_text(json.dumps(tasks))


def start(spec: dict[str, Any], name: str, python: str | None = None) -> Side:
    """A side of this name; `python`: see `Side`."""
    return Side([__file__, "--work", json.dumps(spec | {"side": name})], ENVIRONMENT, python)


def compare(spec: dict[str, Any], steps: int) -> dict[str, Any]:
    sides = {name: start(spec, name) for name in ("ours", "trl")}
    try:
        for side in sides.values():
            side.answer()
        answers = take_turns(sides, seconds=0.0, rounds=steps)
        peaks = {name: side.ask("peak") for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.close()
    return summary(answers, peaks)


def alone(spec: dict[str, Any], name: str, steps: int, python: str | None = None) -> tuple[list[dict[str, Any]], float]:
    """The answers and the peak memory of a side that has the device to itself, in so many steps after the first."""
    side = start(spec, name, python)
    try:
        side.answer()
        return [side.ask("step") for _ in range(steps)], side.ask("peak")
    finally:
        side.close()


def summary(answers: Mapping[str, Sequence[dict[str, Any]]], peaks: Mapping[str, float]) -> dict[str, Any]:
    """The printed results of both sides' steps."""
    seconds = {name: [step["seconds"] for step in values] for name, values in answers.items()}
    means = {
        key: {name: round(statistics.mean(step[key] for step in values), 2) for name, values in answers.items()}
        for key in ("completion_tokens", "trained_rows")
    }
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "ratio": round(median["trl"] / median["ours"], 2),
        "peak_gb": {name: round(value, 2) for name, value in peaks.items()},
        **means,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trl", type=json.loads, default={}, help="settings of TRL's, as JSON")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(json.loads(args.work))
        return
    from trinity_lightning.common.hardware import faster_dtype
    from trinity_lightning.config.models import resolve_model

    dtype = faster_dtype().value
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder) / "tasks.json"
        write_tasks(tasks)
        overrides = [f"model={args.model}", f"model.dtype={dtype}"]
        spec = {"folder": str(resolve_model(args.model)), "tasks": str(tasks), "overrides": overrides, "reward": "sums"}
        spec |= {"prompts": PROMPTS, "completions": COMPLETIONS, "rows_a_pass": COMPLETIONS, "max_tokens": MAX_TOKENS}
        spec["trl"] = {"bf16": dtype == "bf16"} | args.trl
        comparison = compare(spec, args.steps)
    result = {
        "benchmark": "vs_trl_step",
        "trl": importlib.metadata.version("trl"),
        "model": args.model,
        "steps": args.steps,
        "dtype": dtype,
        "trl_settings": spec["trl"],
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result | comparison))


if __name__ == "__main__":
    main()

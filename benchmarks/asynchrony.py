"""Rollouts that do not wait (explorer.max_staleness) beside synchronous ones, where a few responses are very long.

    python benchmarks/asynchrony.py [--steps 10] [--places process server] [--quick]
    python benchmarks/asynchrony.py --learning tiny smollm2 [--seeds 1 2 3] [--curves FILE] [--plot FILE]

Times: the tiny model answers with a length that is drawn beforehand: lognormal around a median of 16 tokens, and 1 in
140 is longer than 20 times that. The weights have no influence on it, and rollout r of group g has the same length in
all runs. Three comparisons: an engine in this process and a short training, an engine in this process and a training
that takes as long as the rollouts (several passes over a step), and a server beside such a training. The runs of a
comparison are processes that take turns step by step: each is stopped while another has its turn, with its server. So
they are measured beside the same other programs. The first three steps of a run are left out. Prints the tables as
Markdown, and a JSON line.

In a table: seconds a step (mean, least and largest), trained tokens a second, their ratio to the synchronous run's, and
the seconds of a step that went into rollouts (with a server: into waiting for them), training and syncs (means).
"again" are the tokens that the engine computed again because a sync changed its weights, as a share of the trained
ones; "old" is the mean staleness. Compare tokens a second: a step may have a long response that another one waited for.

Learning: the rewards of runs with k = 0, 1, 2 (`_staleness_curves.py`), 24 steps each, as a JSON line, a CSV file and
a picture.
"""

import argparse
import asyncio
import csv
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _staleness_curves import MODELS, SETTINGS, plot, read, record
from _turns import Requests, Side, spread

import trinity_lightning  # noqa: F401  before torch, which reads what it sets

# isort: split
import lightning as L
import psutil

from trinity_lightning.build import build
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import Completion
from trinity_lightning.config import hydra as compose
from trinity_lightning.explorer.workflows.workflow import SimpleWorkflow

MEDIAN, SIGMA, LONGEST = 16, 1.22, 430  # tokens of a response; the tiny model has a context of 512
GROUPS, ROLLOUTS = 8, 4  # of a step
WARM_UP = 3  # steps
LONG_TRAINING = 4  # passes over the experiences of a step
ENDLESS = 100_000  # steps of a run, which is ended when enough were measured
END_SECONDS = 60.0

COMMON = (
    "+recipe=grpo",
    *("model=tiny", "model.dtype=fp32", "reward=contains_digits", "logger=csv", "save_model=false"),
    *("explorer.eval_on_startup=false", "explorer.eval_interval=0", f"steps={ENDLESS}", "engine.max_model_len=512"),
    *(f"explorer.batch_size={GROUPS}", f"explorer.repeat_times={ROLLOUTS}", f"sampling.max_tokens={LONGEST}"),
    "workflow=asynchrony.LongTail",
)
SYNCHRONOUS = "synchronous"
STALE = {f"k={k}, {in_flight}": (f"explorer.max_staleness={k}", f"explorer.in_flight={in_flight}")
         for k in (1, 2) for in_flight in ("continue", "wait")}  # fmt: skip
OLD_LOGPROBS = ("algorithm.old_logprobs=engine", "algorithm.rollout_correction.level=none")  # one_step_off_policy's
ON_A_SERVER = {
    SYNCHRONOUS: (),
    "sync_offset=1": ("explorer.sync_offset=1",),
    **{f"k={k}, continue": STALE[f"k={k}, continue"] for k in (1, 2)},
}
PASSES = f"algorithm.inner_epochs={LONG_TRAINING}"
# The runs of each comparison and their settings, by the place of the engine.
COMPARISONS: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "process": {
        "Engine in the trainer's process, short training": {SYNCHRONOUS: (), **STALE},
        "Engine in the trainer's process, long training": {
            SYNCHRONOUS: (PASSES,),
            **{f"k={k}, continue": (*STALE[f"k={k}, continue"], PASSES) for k in (1, 2)},
        },
    },
    "server": {
        "Server on cores of its own, long training": {
            name: (*arguments, *OLD_LOGPROBS, "engine=vllm_server", PASSES) for name, arguments in ON_A_SERVER.items()
        }
    },
}
QUICK = {"Engine in the trainer's process, short training": {SYNCHRONOUS: (), "k=1, continue": STALE["k=1, continue"]}}


# -- the processes that train ------------------------------------------------------------------------------------------


def length_of(batch: int | str, task: int | str, run: int) -> int:
    """Tokens of a response, whatever the weights are."""
    drawn = random.Random(f"{batch}/{task}/{run}").lognormvariate(math.log(MEDIAN), SIGMA)
    return min(max(round(drawn), 1), LONGEST)


class LongTail(SimpleWorkflow):
    """Asks for responses whose lengths are drawn beforehand."""

    async def run(self) -> list[Experience]:
        """One Experience a response."""
        runs = range(self.run_id_base, self.run_id_base + self.repeat_times)
        completions = await asyncio.gather(*map(self._response, runs))
        return list(await asyncio.gather(*map(self._experience, completions, runs)))

    async def _response(self, run: int) -> Completion:
        length = length_of(self.task.batch_id, self.task.task_id, run)
        [completion] = await self.model.chat(self.messages, n=1, max_tokens=length, ignore_eos=True)
        return completion


class Gate(L.Callback):
    """Lets a step begin when one is asked for, and answers with its seconds; the first answer is that it has begun."""

    def __init__(self, requests: Requests) -> None:
        self._requests, self._began = requests, 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._requests.answer(time.perf_counter() - self._began)
        trainer.should_stop = next(iter(self._requests), "end") != "step"
        self._began = time.perf_counter()


def work(folder: str, arguments: Sequence[str]) -> None:
    """Train in this process, a step a request."""
    requests = Requests()
    compose.register()
    config = compose.compose_run([*COMMON, *arguments], folder)
    run = build(config)
    run.trainer.callbacks.append(Gate(requests))  # type: ignore[attr-defined]
    run.fit()


# -- turns -------------------------------------------------------------------------------------------------------------


class Run:
    """A training in a process of its own, which is stopped, with its server, unless it has its turn.

    Args:
        folder: the run's folder.
        arguments: its settings beside COMMON.

    Attributes:
        seconds: of each step after the first.
    """

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.folder = folder
        here = str(Path(__file__).parent)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((here, *filter(None, [os.environ.get("PYTHONPATH")])))
        }
        self._side = Side([__file__, "--run", str(folder), *arguments], environment)
        self._side.answer()  # a first step
        self.seconds: list[float] = []
        self._signal("suspend")

    def step(self) -> None:
        """Take a step."""
        self._signal("resume")
        self.seconds.append(self._side.ask("step"))
        self._signal("suspend")

    def close(self) -> None:
        """End the process and its server."""
        processes = self._processes()
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, END_SECONDS)
        self._side.close()

    def _signal(self, name: str) -> None:
        for process in self._processes():
            getattr(process, name)()

    def _processes(self) -> list[psutil.Process]:
        trainer = psutil.Process(self._side.pid)
        return [trainer, *trainer.children(recursive=True)]


def rows_of(folder: Path) -> list[dict[str, float]]:
    """Metrics by step, those of warm-up steps left out; seconds are summed over the passes of a step."""
    steps: dict[float, dict[str, float]] = {}
    with (folder / "metrics.csv").open() as file:
        for cells in csv.DictReader(file):
            row = {name: float(value) for name, value in cells.items() if value}
            known = steps.setdefault(row["explore_step"], {})
            train = known.get("time/train", 0.0) + row.get("time/train", 0.0)
            known |= row | {"time/train": train}
    return list(steps.values())[WARM_UP:]


def compare(runs: Mapping[str, tuple[str, ...]], steps: int) -> dict[str, dict[str, Any]]:
    """The figures of each run."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started: dict[str, Run] = {}
        for number, (name, arguments) in enumerate(runs.items()):
            started[name] = Run(folder / str(number), arguments)
            stack.callback(started[name].close)
        for _ in range(WARM_UP - 1 + steps):
            for run in started.values():
                run.step()
        return {name: figures(run) for name, run in started.items()}


def figures(run: Run) -> dict[str, Any]:
    rows, seconds = rows_of(run.folder), run.seconds[WARM_UP - 1 :]

    def mean(name: str) -> float:
        return statistics.fmean(row.get(name, 0.0) for row in rows)

    tokens = sum(row["response_length/mean"] * row["rollout/experiences"] for row in rows)
    return {
        "seconds": {"mean": round(statistics.fmean(seconds), 2)} | spread(seconds, 2),
        "tokens_per_second": round(tokens / sum(seconds)),
        "rollout": round(mean("time/wait_for_rollout") or mean("time/rollout"), 2),
        "train": round(mean("time/train"), 2),
        "sync": round(mean("time/sync_weight"), 3),
        "again": round(sum(row.get("rollout/reprefilled_tokens", 0.0) for row in rows) / tokens, 2),
        "old": round(statistics.fmean(row.get("sample/staleness/mean", row["sample/lag/mean"]) for row in rows), 2),
    }


def table(title: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table of a comparison."""
    lines = [
        f"| {title} | s a step | tokens/s | ratio | rollout | train | sync | again | old |",
        "|---" * 9 + "|",
    ]
    base = results[SYNCHRONOUS]["tokens_per_second"]
    for name, result in results.items():
        seconds = "{mean} [{min}, {max}]".format(**result["seconds"])
        ratio = f"{result['tokens_per_second'] / base:.2f}"
        split = (str(result[part]) for part in ("rollout", "train", "sync", "again", "old"))
        lines.append(f"| {name} | {' | '.join((seconds, str(result['tokens_per_second']), ratio, *split))} |")
    return "\n".join(lines)


# -- the command -------------------------------------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--places", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--quick", action="store_true", help="two runs, two steps")
    parser.add_argument("--learning", nargs="+", choices=MODELS, metavar="MODEL", help="learning instead of times")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--curves", type=Path, default=Path("asynchrony_learning.csv"), help="CSV file to add to")
    parser.add_argument("--plot", type=Path, help="picture of all curves in that file")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)  # folder and settings of a process that trains
    return parser.parse_args()


def main() -> None:
    args = parsed()
    if args.run:
        work(args.run[0], args.run[1:])
        return
    if args.learning is not None:
        results = {model: record(model, args.seeds, args.settings, args.curves) for model in args.learning}
        if args.plot is not None:
            plot(read(args.curves), args.plot)
        print(json.dumps({"benchmark": "asynchrony", "learning": results}))
        return
    comparisons = QUICK if args.quick else {
        title: runs for place in args.places for title, runs in COMPARISONS[place].items()
    }  # fmt: skip
    results = {title: compare(runs, 2 if args.quick else args.steps) for title, runs in comparisons.items()}
    print("\n\n".join(table(title, result) for title, result in results.items()))
    print(json.dumps({"benchmark": "asynchrony", "cores": len(os.sched_getaffinity(0)), "results": results}))


if __name__ == "__main__":
    main()

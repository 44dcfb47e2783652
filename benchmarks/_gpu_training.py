"""The training phase alone: seconds, MFU, memory against the plan, compilations, kinds of work (stages c and g)."""

import trinity_lightning  # noqa: F401  first: torch and OpenMP read what it sets when they are loaded

# isort: split
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import step_profile
import torch
from _gpu import Job, median
from _rollouts import Case
from _training import batch_of, fit
from _turns import clock, peak_gb, reset_peak, spread
from torch._dynamo.utils import counters
from torch._logging._internal import set_logs

from trinity_lightning.common.hardware import free_memory
from trinity_lightning.common.model_memory import ModelShape, Training
from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.config.model import OFFLOADED
from trinity_lightning.errors import ConfigError
from trinity_lightning.plan.memory import RESERVE, MemoryPlan, plan
from trinity_lightning.sync.stream import skeleton

GROUP_SIZE = 8
ROUNDS = 2  # steps that are measured, after one that warms up
TOKENS = (16384, 4096, 512)
MIXED = Case((128, 384), (32, 896))  # all lengths, for what is compiled
RECOMPILES = "torch._dynamo.guards.__recompiles"  # the logger of TORCH_LOGS=recompiles


def uniform(length: int) -> Case:
    """Rollouts of as many tokens each, a sixteenth of them the prompt."""
    prompt = max(length // 16, 8)
    return Case((prompt, prompt), (length - prompt, length - prompt))


class Watch(L.Callback):
    """Times steps, and counts the graphs that torch compiles in each."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._start = self._gradient = 0.0
        self._graphs = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._graphs = counters["stats"]["unique_graphs"]
        self._start = clock()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._gradient = clock()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        end = clock()
        step = {name: float(value) for name, value in trainer.callback_metrics.items()}
        step |= {"seconds": end - self._start, "optimizer": end - self._gradient}
        self.steps.append(step | {"compiled": counters["stats"]["unique_graphs"] - self._graphs})


@contextmanager
def recompilations() -> Iterator[list[str]]:
    """The reasons for which torch compiles anything once more within the block."""
    reasons: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reasons.append(record.getMessage())

    handler, source = Keep(), logging.getLogger(RECOMPILES)
    set_logs(recompiles=True)
    source.addHandler(handler)
    try:
        yield reasons
    finally:
        source.removeHandler(handler)
        set_logs()


def planned(job: Job, folder: str, length: int, tokens: int, optimizer: str, width: int = 2) -> MemoryPlan:
    """The memory plan of a trainer that has the device to itself; a ConfigError if there is no room."""
    offloads = int(optimizer == OFFLOADED)
    training = Training(width, longest_row=length, tokens=tokens, on_cpu=job.small, on_host=offloads)
    free = free_memory() if job.small else torch.cuda.mem_get_info()[0]
    return plan(ModelShape.of(skeleton(folder)), training, None, free, free_memory())


def memory(job: Job, memory_plan: MemoryPlan) -> dict[str, Any]:
    """The peak of torch's tensors beside the plan without its reserve; on a CPU the process's, and the whole plan."""
    parts = dict(memory_plan.training)
    reserve = parts.pop(RESERVE)
    expected = sum(parts.values()) + (reserve if job.small else 0)
    peak = peak_gb()
    results = {"peak_gb": peak, "planned_gb": expected / 1e9, "peak_over_plan": peak * 1e9 / expected}
    if not job.small:
        results["peak_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return {name: round(value, 3) for name, value in results.items()}


def trained(
    job: Job, folder: str, cases: list[Any], tokens: int, optimizer: str = "adamw", **settings: Any
) -> dict[str, Any]:
    """Figures of a step over each of these batches, the first of which warms up."""
    longest = max(len(row.prompt) + len(row.response) for groups in cases for group in groups for row in group)
    memory_plan = planned(job, folder, longest, tokens, optimizer)
    watch, algorithm = Watch(), AlgorithmConfig(max_tokens_per_micro_batch=tokens)
    reset_peak()
    dtype = settings.pop("dtype", "bf16")
    with recompilations() as reasons:
        batches = iter([batch_of(groups) for groups in cases])
        fit(folder, batches, dtype, algorithm, [watch], job.accelerator, optimizer=optimizer, **settings)
    measured = watch.steps[1:]
    return {
        "seconds": spread([step["seconds"] for step in measured]),
        "optimizer_s": median(measured, "optimizer"),
        "mfu": median(measured, "perf/mfu"),
        "micro_batches": median(measured, "actor/micro_batches", 0),
        "padding": median(measured, "perf/padding_ratio"),
        **memory(job, memory_plan),
        "compiled_in_steps": [int(step["compiled"]) for step in watch.steps],
        "recompilations": len(reasons),
    }


def training(job: Job) -> None:
    """Stage c: uniform rows at several sizes of a micro-batch, all lengths, layers compiled or not, a profile."""
    folder, vocabulary = job.path()
    length, sizes = (64, (128, 32)) if job.small else (1024, TOKENS)
    case, mixed = (uniform(length), Case((8, 24), (4, 40)) if job.small else MIXED)

    def steps(case: Case, rows: int, count: int = 1 + ROUNDS) -> list[Any]:
        return [case.rollouts(rows // GROUP_SIZE, GROUP_SIZE, vocabulary, seed) for seed in range(count)]

    few, many = (8, 16) if job.small else (128, 512)
    for rows in (few, many):
        for tokens in sizes:
            with job.part("train", rows=rows, length=length, tokens=tokens) as values:
                values |= trained(job, folder, steps(case, rows), tokens)
            if rows == few and tokens == sizes[0]:
                profiled(job, folder, case.rollouts(rows // GROUP_SIZE, GROUP_SIZE, vocabulary), tokens)
    with job.part("train, all lengths", rows=few, length=mixed.longest, tokens=sizes[0]) as values:
        values |= trained(job, folder, steps(mixed, few, 6), sizes[0])
    # The others are compiled on a GPU, and not on a CPU.
    what = "train, compiled layers" if job.small else "train, plain layers"
    with job.part(what, rows=few, length=mixed.longest, tokens=sizes[0]) as values:
        values |= trained(job, folder, steps(mixed, few, 3 if job.small else 6), sizes[0], compile_layers=job.small)


def profiled(job: Job, folder: str, groups: Any, tokens: int) -> None:
    """Report the shares of a step's kinds of work."""
    with job.part("profile", rows=sum(map(len, groups)), tokens=tokens) as values:
        results = step_profile.measure(folder, groups, "bf16", tokens, False, job.accelerator)
        values |= {name: results[name] for name in ("seconds", "mfu", "ceiling", "share", "products")}


def offload(job: Job) -> None:
    """Stage g: adamw_offload of the largest model that this machine's memory holds."""
    rows, length, sizes = (8, 64, (32,)) if job.small else (16, 1024, (4096, 8192))
    for model in (job.model,) if job.small else ("7B", "1.5B", "0.5B"):
        folder, vocabulary = job.path(model)
        try:
            planned(job, folder, length, sizes[0], OFFLOADED)
        except ConfigError as error:
            job.report("train, adamw_offload", model=model, refused=str(error))
            continue
        cases = [uniform(length).rollouts(rows // GROUP_SIZE, GROUP_SIZE, vocabulary)] * (1 + ROUNDS)
        for tokens in sizes:
            threads = torch.get_num_threads()
            with job.part(
                "train, adamw_offload", model=model, rows=rows, length=length, tokens=tokens, threads=threads
            ) as values:
                values |= trained(job, folder, cases, tokens, OFFLOADED)
        return

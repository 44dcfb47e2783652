"""The losses when rollouts kill their Ray workers: one JSON line.

python benchmarks/ray_faults.py [tasks]

As many tasks (200) on 4 Ray runners, of which 5% kill their worker (SIGKILL): most of them the first time only, the
others every time. Every task must end in exactly one status, which says that it failed where it kills every time, and
every other task in exactly one experience; every runner must have a worker in the end, and memory, of this process and
of the workers, must not grow from batch to batch.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
from faults import NoModel, Trivial

from trinity_lightning.common.experience import Experience
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.explorer import Scheduler, Status
from trinity_lightning.explorer.tasks import Task

RUNNERS = 4
BATCHES = 5
Ended = list[tuple[Status, str | None]]  # status and fault of each task


class Deadly(Trivial):
    """Kills the process that it runs in, as its task says."""

    async def run(self) -> list[Experience]:
        fault, mark = self.task.raw_task["fault"], self.task.raw_task["mark"]
        if fault == "always" or (fault == "once" and first_time(mark)):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().run()


def first_time(mark: str) -> bool:
    """True if this is the first call for the file, which is made here."""
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def fault_of(index: int) -> str | None:
    """5% kill their worker, in a fixed pattern: of four of them three once, the fourth every time."""
    if index % 20 != 7:
        return None
    return "always" if index // 20 % 4 == 3 else "once"


def memory_mb() -> tuple[float, float]:
    """Resident memory of this process, and the mean of the workers that have run something."""
    here = psutil.Process()
    workers = [
        process.memory_info().rss for process in here.children(recursive=True) if process.name().startswith("ray::RayW")
    ]
    return here.memory_info().rss / 2**20, sum(workers) / len(workers) / 2**20


async def run(total: int, marks: Path) -> tuple[float, Ended, list[int], list[tuple[float, float]]]:
    """Seconds, (status, fault) of each task, indices of the experiences, and memory after each batch."""
    config = ExplorerConfig(runner="ray", runner_per_model=RUNNERS, max_retry_times=2, max_timeout=60)
    scheduler = Scheduler(config, [NoModel()])  # type: ignore[list-item]
    await scheduler.start()
    ended: Ended = []
    indices: list[int] = []
    memory = []
    start = time.perf_counter()
    size = max(total // BATCHES, 1)
    for batch, first in enumerate(range(0, total, size)):
        raw = [{"index": i, "fault": fault_of(i), "mark": str(marks / str(i))} for i in range(first, first + size)]
        scheduler.schedule([Task(Deadly, entry) for entry in raw], batch)
        statuses, experiences = await scheduler.get_results(batch, timeout=600)
        ended += zip(statuses, [entry["fault"] for entry in raw], strict=True)
        indices += [experience.info["index"] for experience in experiences]
        await asyncio.gather(*(runner.runner.ready() for runner in scheduler.runners))  # type: ignore[union-attr]
        memory.append(memory_mb())
    seconds = time.perf_counter() - start
    assert scheduler.idle == RUNNERS, "a runner was lost"
    await scheduler.stop()
    return seconds, ended, indices, memory


def main(total: int) -> None:
    """Print the line; an AssertionError where something was lost."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as marks:
        seconds, ended, indices, memory = asyncio.run(run(total, Path(marks)))
    total = len(ended)
    survivors = [index for index in range(total) if fault_of(index) != "always"]
    unexpected = [str(status.message) for status, fault in ended if status.ok == (fault == "always")]
    assert not unexpected, unexpected
    assert sorted(indices) == survivors, "an experience was lost or doubled"
    assert all("WorkerDiedError" in str(status.message) for status, _ in ended if not status.ok)
    grown = [last - early for early, last in zip(memory[1 % len(memory)], memory[-1], strict=True)]
    assert max(grown) < 50, "memory grew"
    faults = [fault for _, fault in ended if fault is not None]
    print(
        json.dumps(
            {
                "benchmark": "ray_faults",
                "tasks": total,
                "runners": RUNNERS,
                "killed_once": faults.count("once"),
                "killed_always": faults.count("always"),
                "workers_killed": faults.count("once") + 3 * faults.count("always"),
                "seconds": round(seconds, 1),
                "failed": sum(not status.ok for status, _ in ended),
                "succeeded": len(indices),
                "lost": len(set(survivors) - set(indices)),
                "memory_grown_mb": round(grown[0], 1),
                "worker_memory_grown_mb": round(grown[1], 1),
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)

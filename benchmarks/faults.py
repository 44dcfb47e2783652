"""The cost of the scheduler, and the tasks that it loses when rollouts fail: one JSON line.

python benchmarks/faults.py [tasks]

Overhead: trivial tasks through 64 runners, in milliseconds a task. Faults: of as many tasks 10% raise, 5% hang (the
time-out is 1 s) and 2% are cancelled; every task must end in exactly one status, every success in exactly one
experience, every runner must be free in the end, and memory must not grow from batch to batch.
"""

import asyncio
import json
import logging
import sys
import time
from collections import Counter

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import Completion
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.explorer import Scheduler, Status
from trinity_lightning.explorer.tasks import Task
from trinity_lightning.explorer.workflows import Workflow
from trinity_lightning.monitor.machine import resident_gb

RUNNERS = 64
BATCHES = 10
TIMEOUT = 1.0

Ended = list[tuple[Status, str | None]]  # status and fault of each task


class NoModel:
    """An engine that answers at once: the scheduler is what is measured."""

    model_version = 0
    max_model_len = 64

    async def generate(self, prompt: object, n: int = 1, **sampling: object) -> list[Completion]:
        return [Completion([1], [2, 3], [-0.5, -0.5], "", "stop")] * n


class Trivial(Workflow):
    """One call, one experience."""

    async def run(self) -> list[Experience]:
        (completion,) = await self.model.generate([1])
        index = self.task.raw_task["index"]
        tokens = [*completion.prompt_token_ids, *completion.token_ids]
        return [Experience(tokens=tokens, prompt_length=1, reward=1.0, info={"index": index})]


class Faulty(Trivial):
    """Fails as its task says."""

    async def run(self) -> list[Experience]:
        match self.task.raw_task["fault"]:
            case "raise":
                raise RuntimeError("the tool is not there")
            case "hang":
                await asyncio.sleep(3600)
            case "cancel":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)
        return await super().run()


def fault_of(index: int) -> str | None:
    """10% raise, 5% hang, 2% are cancelled, in a fixed pattern."""
    share = index % 100
    return "raise" if share < 10 else "hang" if share < 15 else "cancel" if share < 17 else None


async def run(workflow: type[Workflow], total: int) -> tuple[float, Ended, list[int], list[float]]:
    """Seconds, (status, fault) of each task, indices of the experiences, and memory after each batch."""
    config = ExplorerConfig(runner_per_model=RUNNERS, max_timeout=TIMEOUT, max_retry_times=0)
    scheduler = Scheduler(config, [NoModel()])  # type: ignore[list-item]
    await scheduler.start()
    ended: Ended = []
    indices: list[int] = []
    memory = []
    start = time.perf_counter()
    size = max(total // BATCHES, 1)
    for batch, first in enumerate(range(0, total, size)):
        faults = [fault_of(index) for index in range(first, min(first + size, total))]
        tasks = [Task(workflow, {"index": first + i, "fault": fault}) for i, fault in enumerate(faults)]
        scheduler.schedule(tasks, batch)
        statuses, experiences = await scheduler.get_results(batch, timeout=600)
        ended += zip(statuses, faults, strict=True)
        indices += [experience.info["index"] for experience in experiences]
        memory.append(resident_gb())
    seconds = time.perf_counter() - start
    assert scheduler.idle == RUNNERS, "a runner was lost"
    await scheduler.stop()
    return seconds, ended, indices, memory


def main(total: int) -> None:
    """Print the line; an AssertionError where something was lost."""
    logging.disable(logging.WARNING)  # every failed task is logged, 1,700 times here
    overhead, _, trivial, _ = asyncio.run(run(Trivial, total))
    seconds, ended, indices, memory = asyncio.run(run(Faulty, total))
    healthy = [index for index in range(total) if fault_of(index) is None]
    assert sorted(trivial) == list(range(total))
    assert sorted(indices) == healthy, "an experience was lost or doubled"
    assert len(ended) == total
    assert all(status.ok == (fault is None) for status, fault in ended)
    assert memory[-1] - memory[1] < 0.05, "memory grew"
    failed = Counter(fault for status, fault in ended if not status.ok)
    grown = memory[-1] - memory[len(memory) // 2]
    print(
        json.dumps(
            {
                "benchmark": "faults",
                "tasks": total,
                "runners": RUNNERS,
                "overhead_ms_a_task": round(1000 * overhead / total, 3),
                "faulty_run_s": round(seconds, 1),
                "failed": dict(failed),
                "succeeded": len(indices),
                "lost": len(set(healthy) - set(indices)),
                "memory_grown_mb_in_second_half": round(1000 * grown, 1),
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)

"""GRPO's add strategy against a plain loop over the groups: 65,536 experiences in groups of 8.

    python benchmarks/add_strategy.py [--experiences 65536] [--group 8] [--response 16] [--repeats 5]

The plain loop does what an add strategy has to do, a group at a time: rewards to a tensor, mean, standard deviation,
scores, advantages of each experience, one write a group, metrics over the groups. Both sides run in turns in one
process on one thread; the fastest of the repeats counts. Prints one JSON line: seconds of both
by the clock and of the processor (which other processes on the machine disturb less), and the ratio of the latter.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from trinity_lightning.algorithm.add_strategy import create_add_strategy
from trinity_lightning.algorithm.add_strategy.add_strategy import BufferWriter
from trinity_lightning.common.experience import EID, Experience

EPSILON = 1e-6


class CountingWriter(BufferWriter):
    """Counts what is written."""

    def __init__(self) -> None:
        self.written = 0

    def write(self, experiences: list[Experience]) -> None:
        self.written += len(experiences)


def make_experiences(count: int, group: int, response: int) -> list[Experience]:
    """Single turns with random rewards, groups one after the other."""
    rewards = torch.rand(count, generator=torch.Generator().manual_seed(0)).tolist()
    tokens = torch.arange(1, response + 3)
    return [
        Experience(
            eid=EID(batch=1, task=index // group, run=index % group), tokens=tokens, prompt_length=2, reward=reward
        )
        for index, reward in enumerate(rewards)
    ]


async def plain_add(experiences: list[Experience], writer: BufferWriter) -> dict[str, float]:
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(f"{experience.eid.batch}/{experience.eid.task}", []).append(experience)
    columns: dict[str, list[float]] = {"reward_mean": [], "reward_std": []}
    for group in groups.values():
        rewards = torch.tensor([experience.reward for experience in group], dtype=torch.float32)
        mean, std = (rewards.mean(), rewards.std()) if len(group) > 1 else (torch.tensor(0.0), torch.tensor(1.0))
        for experience in group:
            assert experience.reward is not None
            assert experience.action_mask is not None
            score = (experience.reward - mean) / (std + EPSILON)
            experience.advantages = score * experience.action_mask
            experience.returns = experience.advantages.clone()
        columns["reward_mean"].append(mean.item())
        columns["reward_std"].append(std.item())
        await writer.write_async(group)
    stats: dict[str, Callable[[list[float]], float]] = {"mean": lambda v: sum(v) / len(v), "max": max, "min": min}
    return {f"group_advantages/{name}/{how}": f(values) for name, values in columns.items() for how, f in stats.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiences", type=int, default=65_536)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--response", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    experiences = make_experiences(args.experiences, args.group, args.response)
    sides: dict[str, Callable[[BufferWriter], Any]] = {
        "plain": lambda writer: plain_add(experiences, writer),
        "ours": lambda writer: create_add_strategy([("grpo", {"epsilon": EPSILON})], writer).add(experiences, 1),
    }
    clock, cpu = dict.fromkeys(sides, float("inf")), dict.fromkeys(sides, float("inf"))
    advantages = {}
    for _ in range(args.repeats):
        for name, side in sides.items():
            writer = CountingWriter()
            start, cpu_start = time.perf_counter(), time.process_time()
            asyncio.run(side(writer))
            clock[name] = min(clock[name], time.perf_counter() - start)
            cpu[name] = min(cpu[name], time.process_time() - cpu_start)
            if writer.written != len(experiences):
                raise RuntimeError(f"{name} wrote {writer.written} of {len(experiences)} experiences")
            advantages[name] = torch.stack([e.advantages for e in experiences if e.advantages is not None])
    difference = float((advantages["plain"] - advantages["ours"]).abs().max())
    result = {
        "benchmark": "add_strategy",
        **vars(args),
        "plain_seconds": round(clock["plain"], 3),
        "seconds": round(clock["ours"], 3),
        "plain_cpu_seconds": round(cpu["plain"], 3),
        "cpu_seconds": round(cpu["ours"], 3),
        "ratio": round(cpu["plain"] / cpu["ours"], 1),
        "max_difference": difference,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

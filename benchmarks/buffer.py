"""What it costs to hold experiences outside the process: groups a second written (each on the disk) and read back.

    python benchmarks/buffer.py [--groups 200] [--size 8] [--tokens 512] [--folder FOLDER] [--url postgresql://...]

Writes one group a write, as the group strategies do, to a file, to SQLite and, with a URL, to another database, and
reads all of it back in batches of 64. Prints one JSON line: by storage, milliseconds a write, milliseconds a group
read, and MB on the disk. `fsync_ms` is what the disk alone takes to append a block and sync it, the floor of a write.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trinity_lightning.buffer.reader import create_reader, create_storage
from trinity_lightning.common.experience import EID, Experience


def make_groups(number: int, size: int, tokens: int) -> list[list[Experience]]:
    """Groups of rollouts with log-probabilities; a quarter of the tokens is the prompt."""
    generator = torch.Generator().manual_seed(0)
    prompt = max(tokens // 4, 1)
    return [
        [
            Experience(
                eid=EID(batch=1, task=task, run=run),
                tokens=torch.randint(0, 50_000, (tokens,), dtype=torch.int32, generator=generator),
                prompt_length=prompt,
                logprobs=torch.randn(tokens - prompt, generator=generator),
                reward=float(run % 2),
                response_text="It is 4. " * 20,
            )
            for run in range(size)
        ]
        for task in range(number)
    ]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def fsync_time(folder: Path, repeats: int = 50) -> float:
    """Seconds to append a block of 64 kB and sync it, the median."""
    times = []
    with (folder / "fsync").open("wb", buffering=0) as file:
        for _ in range(repeats):
            file.write(bytes(1 << 16))
            times.append(seconds(lambda: os.fsync(file.fileno())))
    return sorted(times)[repeats // 2]


def measure(name: str, place: dict[str, Any], groups: list[list[Experience]]) -> dict[str, float]:
    """Milliseconds a group to write and to read."""
    storage = create_storage(name, **place)

    def write() -> None:
        for group in groups:
            storage.write(group)

    def read() -> None:
        with create_reader(name, **place) as reader:
            count = 0
            while got := reader.read(64):
                count += len(got)
        if count != sum(map(len, groups)):
            raise RuntimeError(
                f"{name}: {count} experiences came back of {sum(map(len, groups))}: use a fresh database"
            )

    return {"write_ms": 1e3 * seconds(write) / len(groups), "read_ms": 1e3 * seconds(read) / len(groups)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("groups", 200), ("size", 8), ("tokens", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--url", help="of an empty database to measure too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    groups = make_groups(arguments.groups, arguments.size, arguments.tokens)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        result: dict[str, object] = {name: getattr(arguments, name) for name in ("groups", "size", "tokens")}
        result["fsync_ms"] = round(1e3 * fsync_time(Path(folder)), 3)
        for name in ("file", "sql"):
            path = Path(folder) / name
            times = measure(name, {"path": str(path)}, groups)
            times["mb"] = sum(p.stat().st_size for p in Path(folder).glob(f"{name}*")) / 1e6
            result["sqlite" if name == "sql" else name] = {key: round(value, 3) for key, value in times.items()}
    if arguments.url:
        times = measure("sql", {"url": arguments.url}, groups)
        result["database"] = {key: round(value, 3) for key, value in times.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()

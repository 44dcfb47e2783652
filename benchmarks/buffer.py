"""The cost of experiences outside the process: groups a second written (each on the disk) and read back.

    python benchmarks/buffer.py [--groups 200] [--size 8] [--tokens 512] [--folder FOLDER] [--url postgresql://...]

Writes one group a write to step files (a group a step), to SQLite and, with a URL, to another database, and reads all
of it back in batches of 64. Prints one JSON line: by storage, milliseconds a write, milliseconds a group
read, and MB on the disk. `fsync_ms` is what the disk alone takes to append a block and sync it, the floor of a write.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from trinity_lightning.buffer.reader import create_reader
from trinity_lightning.buffer.sql import SqlStorage
from trinity_lightning.buffer.step_files import keep_step
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.config.buffer import BufferConfig

Groups = list[list[Experience]]
Write = Callable[[int, list[Experience]], object]


def make_groups(number: int, size: int, tokens: int) -> Groups:
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


def measure(
    section: BufferConfig, write: Callable[[int, list[Experience]], object], groups: Groups
) -> dict[str, float]:
    """Milliseconds a group to write and to read."""

    def write_all() -> None:
        for step, group in enumerate(groups, 1):
            write(step, group)

    def read_all() -> None:
        with create_reader(section) as reader:
            count = 0
            while got := reader.read(64):
                count += len(got)
        if count != sum(map(len, groups)):
            raise RuntimeError(f"{count} experiences came back of {sum(map(len, groups))}: use a fresh database")

    return {"write_ms": 1e3 * seconds(write_all) / len(groups), "read_ms": 1e3 * seconds(read_all) / len(groups)}


def measure_database(groups: Groups, path: str | None = None, url: str | None = None) -> dict[str, float]:
    """The same of a SQLite file or of a database at a URL."""
    with SqlStorage(path or url or "") as storage:
        section = BufferConfig(storage="sql", path=path, url=url, repeat=False)
        return measure(section, lambda _, group: storage.write(group), groups)


def rounded(times: dict[str, float], files: Iterable[Path] = ()) -> dict[str, float]:
    """With the size of the files, if there are some."""
    size = sum(file.stat().st_size for file in files) / 1e6
    return {key: round(value, 3) for key, value in (times | ({"mb": size} if size else {})).items()}


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
        steps, database = Path(folder) / "steps", Path(folder) / "buffer.db"
        steps.mkdir()
        section = BufferConfig(storage="file", path=str(steps), repeat=False)
        result["file"] = rounded(measure(section, partial(keep_step, steps), groups), steps.iterdir())
        times = measure_database(groups, path=str(database))
        result["sqlite"] = rounded(times, Path(folder).glob("buffer.db*"))
    if arguments.url:
        result["database"] = rounded(measure_database(groups, url=arguments.url))
    print(json.dumps(result))


if __name__ == "__main__":
    main()

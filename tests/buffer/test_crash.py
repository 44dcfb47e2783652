"""Writers and readers killed at any moment: each acknowledged experience is read exactly once, and nothing torn.

TRINITY_CRASH_KILLS=100 kills as often as that, instead of 10 times.
"""

import json
import os
import random
import time
from pathlib import Path

import pytest
from support import crashes
from support.crashes import processes  # noqa: F401  # a fixture
from support.postgres import postgres_url  # noqa: F401  # a fixture

KILLS = int(os.environ.get("TRINITY_CRASH_KILLS", "10"))
# Writers at work at the same time.
WRITERS = {"file": 1, "sqlite": 2, "postgresql": 2}


class Crashes:
    """A buffer at a place, its writers and its reader, and what they left behind in a folder."""

    def __init__(self, context, kind, place, folder):
        self.context, self.kind, self.place, self.folder = context, kind, place, folder
        self.memory = str(folder / "memory.json")
        self.lives = 0
        crashes.STORAGES[kind](self.place).close()
        self.writers = [self.start_writer() for _ in range(WRITERS[kind])]
        self.reader = self.start_reader()

    def start(self, target, *arguments):
        process = self.context.Process(target=target, args=(self.kind, self.place, *arguments), daemon=True)
        process.start()
        return process

    def start_writer(self):
        self.lives += 1
        return self.start(crashes.write_forever, self.lives, str(self.acknowledgements(self.lives)))

    def acknowledgements(self, life):
        return self.folder / f"acknowledged-{life}"

    def start_reader(self):
        return self.start(crashes.read_forever, self.memory)

    def wait_for_work(self):
        """Until the newest writer has acknowledged something."""
        deadline, file = time.monotonic() + 30, self.acknowledgements(self.lives)
        while not (file.exists() and file.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.001)

    def kill(self, process):
        """Kill a process, which must not have ended by itself."""
        assert process.exitcode is None, f"ended with {process.exitcode}: see its traceback"
        process.kill()
        process.join()

    def kill_one(self, choice):
        if choice < 0.35:
            self.kill(self.reader)
            self.reader = self.start_reader()
        else:
            self.kill(self.writers.pop(0))
            self.writers.append(self.start_writer())

    def finish(self):
        """Kill all, and read what is left."""
        for process in [*self.writers, self.reader]:
            self.kill(process)
        crashes.read_forever(self.kind, self.place, self.memory, until_end=True)

    def acknowledged(self):
        """The writes that each life of the writer acknowledged, in order, without a line that the kill cut short."""
        files = {life: self.acknowledgements(life) for life in range(1, self.lives + 1)}
        texts = {life: file.read_text() if file.exists() else "" for life, file in files.items()}
        return {life: text[: text.rfind("\n") + 1].split() for life, text in texts.items()}


@pytest.mark.parametrize("kind", ["file", "sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def test_acknowledged_writes_survive_kills_and_are_read_once(processes, kind, tmp_path, request):  # noqa: F811
    place = request.getfixturevalue("postgres_url")() if kind == "postgresql" else str(tmp_path / "buffer")
    run = Crashes(processes, kind, place, tmp_path)
    generator = random.Random()
    for _ in range(KILLS):
        if generator.random() < 0.8:  # else perhaps while it opens the buffer
            run.wait_for_work()
        time.sleep(generator.uniform(0, 0.1))
        run.kill_one(generator.random())
    run.finish()

    memory = json.loads(Path(run.memory).read_text())
    acknowledged = run.acknowledged()
    seen = memory["seen"]
    print(f"{kind}: {KILLS} kills, {sum(map(len, acknowledged.values()))} acknowledged, {len(seen)} read")
    assert memory["torn"] == []
    assert len(set(seen)) == len(seen)
    assert sum(map(len, acknowledged.values())) > KILLS
    for life, names in acknowledged.items():
        of_life = [name for name in seen if name.startswith(f"{life}/")]
        assert of_life[: len(names)] == names
        # A write whose acknowledgement the kill cut off may be there too, whole.
        extra = {name.rpartition("/")[0] for name in of_life[len(names) :]}
        assert len(extra) <= 1

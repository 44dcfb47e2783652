"""Work of other processes in tests: write and acknowledge, or read and store the read experiences with the cursor."""

import json
import multiprocessing
import os
import random
from pathlib import Path

import pytest

from support.buffer import make_group
from trinity_lightning.buffer.sql import SqlReader, SqlStorage
from trinity_lightning.buffer.step_files import StepReader, keep_step, step_files
from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.files import write_atomically


@pytest.fixture(scope="session")
def processes():
    """A multiprocessing context for the functions below.

    Its processes are forked off one that has imported everything: at work after milliseconds instead of seconds.
    """
    tests = Path(__file__).resolve().parents[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tests), str(tests.parent)]))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["support.crashes"])
        warm_up = context.Process(target=print)
        warm_up.start()
        warm_up.join()
        return context


class StepFiles:
    """A folder of step files as a storage: each write is the next step."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
        self.next = max(step_files(self.folder), default=0) + 1

    def write(self, experiences):
        keep_step(self.folder, self.next, experiences)
        self.next += 1

    def close(self):
        """Nothing is open."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


STORAGES = {"file": StepFiles, "sqlite": SqlStorage, "postgresql": SqlStorage}
READERS = {"file": StepReader, "sqlite": SqlReader, "postgresql": SqlReader}


def name(experience):
    """The writer's life, its write, and the experience within that, as text."""
    return f"{experience.eid.batch}/{experience.eid.task}/{experience.eid.run}"


def make(life, number, run, generator):
    """An experience that says what it must hold."""
    tokens = [generator.randrange(1000) for _ in range(generator.choice([4, 400, 20_000]))]
    return Experience(
        eid=EID(batch=life, task=number, run=run, suffix=""), tokens=tokens, info={"sum": sum(tokens)}, prompt_length=2
    )


def intact(experience):
    """True if the tokens of an experience have the sum that it names."""
    return int(experience.tokens.sum()) == experience.info["sum"]


def write_forever(kind, place, life, acknowledged):
    """Write, and print what each acknowledged write held, until killed."""
    generator = random.Random(life)
    with STORAGES[kind](place) as storage, Path(acknowledged).open("a") as file:
        number = 0
        while True:
            group = [make(life, number, run, generator) for run in range(generator.randint(1, 4))]
            storage.write(group)
            print(*map(name, group), file=file, flush=True)
            number += 1


def read_forever(kind, place, memory, until_end=False):
    """Read from where `memory` says, and keep cursor and findings in it, until killed (or at the end)."""
    memory = Path(memory)
    remembered = json.loads(memory.read_text()) if memory.exists() else {"state": None, "seen": [], "torn": []}
    generator = random.Random(len(remembered["seen"]))
    with READERS[kind](place) as reader:
        if remembered["state"] is not None:
            reader.load_state_dict(remembered["state"])
        while True:
            got = reader.read(generator.choice([1, 3, 50]), wait=0.0 if until_end else 0.02)
            if until_end and not got:
                return
            remembered["state"] = reader.state_dict()
            remembered["seen"] += map(name, got)
            remembered["torn"] += [name(experience) for experience in got if not intact(experience)]
            write_atomically(memory, json.dumps(remembered).encode())


def count_up(place, writer, number):
    """Write a group of three for each task up to a number."""
    with SqlStorage(place) as storage:
        for task in range(number):
            storage.write(make_group(task, 3, batch=writer))

"""Observations that come from one thread while another shows them."""

import sys
from threading import Thread
from types import FrameType
from typing import Any

from trinity_lightning.explorer.watchers import Watchers


def test_an_observation_is_shown_once_wherever_another_thread_shows_what_there_is() -> None:
    """The other thread runs `flush` before every single instruction of `observe`."""
    shown: list[int] = []
    flushes: list[Thread] = []
    watchers = Watchers(lambda experiences, step, taskset: shown.append(step), None, waiting=lambda: True)

    def flush_before_instructions(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not Watchers.observe.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            flushes.append(Thread(target=watchers.flush))
            flushes[-1].start()
            flushes[-1].join()
        return flush_before_instructions

    def observe() -> None:
        sys.settrace(flush_before_instructions)  # of this thread
        for step in range(3):
            watchers.observe([], step, None)

    observing = Thread(target=observe)
    observing.start()
    observing.join()
    assert len(flushes) > 3
    watchers.flush()
    assert shown == [0, 1, 2]


def test_what_comes_while_others_are_shown_is_shown_after_them() -> None:
    shown: list[int] = []

    def show(experiences: list[Any], step: int, taskset: str | None) -> None:
        shown.append(step)
        if step < 3:
            other = Thread(target=watchers.observe, args=([], step + 1, None))
            other.start()
            other.join()

    watchers = Watchers(show, None, waiting=lambda: True)
    watchers.observe([], 0, None)
    watchers.flush()
    assert shown == [0, 1, 2, 3]

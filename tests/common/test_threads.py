"""Blocking code next to an event loop."""

import asyncio
import threading

import pytest

from trinity_lightning.common.threads import run_in_thread


def test_a_thread_that_nobody_waits_for_any_more_ends_by_itself() -> None:
    release, ended = threading.Event(), threading.Event()

    def work() -> None:
        release.wait(20)
        ended.set()

    async def main() -> None:
        waiting = asyncio.create_task(run_in_thread(work))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    assert not ended.is_set()
    release.set()  # its result finds the loop closed
    assert ended.wait(20)

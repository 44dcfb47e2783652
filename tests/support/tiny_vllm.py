"""A real vLLM of the tiny model, small, and in float32: its tokens depend on seeds alone."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trinity_lightning.config.engines import EngineDtype
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine


def tiny_engine(model: str = "tiny", **overrides: Any) -> VLLMEngine:
    """An engine that is not loaded yet."""
    settings: dict[str, Any] = {"dtype": EngineDtype.fp32, "max_num_seqs": 16, "kv_cache_gb": 0.1}
    return VLLMEngine(model, **(settings | overrides))


def standing_still(engine: VLLMEngine) -> threading.Event:
    """The engine does nothing before the event is set: not before all requests have been posted, say."""
    event = threading.Event()

    def wait() -> None:
        event.wait(60)

    engine._post(wait)
    return event


def take_posted(engine: VLLMEngine, commands: int = 1) -> None:
    """Run commands once the loop has posted so many, however slow it is; the engine makes no step meanwhile."""
    for _ in range(60_000):
        if engine._commands.qsize() >= commands:
            engine.run_commands()
            return
        time.sleep(0.001)
    raise AssertionError(f"{commands} commands were not posted")


def until_written(engine: VLLMEngine, driver: Driver, tokens: int) -> None:
    """Pump the engine until the longest of the unfinished responses has so many tokens."""
    for _ in range(1000):
        driver.pump(1.0)
        states = engine._engine.output_processor.request_states.values()
        if any(state.detokenizer.num_output_tokens() >= tokens for state in states):
            return
    raise AssertionError(f"no response has {tokens} tokens")


@contextmanager
def driven_engine(max_model_len: int) -> Iterator[tuple[VLLMEngine, Driver]]:
    """A loaded engine and its driver; both are gone afterwards."""
    engine = tiny_engine(max_model_len=max_model_len)
    driver = Driver([engine])
    try:
        driver.run(engine.load())
        yield engine, driver
        driver.run(engine.shutdown())
    finally:
        driver.close()

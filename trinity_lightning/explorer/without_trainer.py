"""What an explorer does by itself: all of its steps, or evaluations of several checkpoints."""

from collections.abc import Iterable

from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.sync.stream import WeightStream


async def explore(explorer: Explorer) -> None:
    """See `Explorer.explore`."""
    if explorer.step == 0 and explorer.config.eval_on_startup and explorer.evaluates:
        await explorer.eval()
    while await explorer.explore_step():
        if explorer.need_sync():
            await explorer.sync_weight()
        if explorer.need_eval():
            await explorer.eval()


async def benchmark(
    explorer: Explorer, checkpoints: Iterable[tuple[int, WeightStream]] | None
) -> dict[int, dict[str, float]]:
    """See `Explorer.benchmark`."""
    if checkpoints is None:
        return {explorer.step: await explorer.eval()}
    results = {}
    for step, weights in checkpoints:
        await explorer.engines.send(weights, step)
        results[step] = await explorer.eval(step)
    return results

"""Writes the tokens of a few trained responses of each step, with advantages and both log-probabilities.

Nothing is computed for it: the trainer's log-probabilities are those of the step's own forward pass. Its weights are
those from before the step's first update.
"""

import json
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.files import write_atomically
from trinity_lightning.common.optimizer_batch import OptimizerBatch, trained_mask
from trinity_lightning.monitor.folders import STEP_FILE, TOKENS

TASKS = 3  # of a step, the first ones that were trained on
MOST_TOKENS = 400  # of a response, the first ones
MOST_STEPS = 200  # with a file
_DIGITS = 5  # behind the point; log-probabilities have an error of this size

logger = logging.getLogger(__name__)
# An experience, its advantages [resp] or None, and the trainer's log-probabilities [resp].
Trained = tuple[Experience, Tensor | None, Tensor]


class TokenKeeper(L.Callback):
    """Keeps the tokens of the first optimizer step of each explore step, in `completions/tokens/step_<step>.jsonl`.

    Of the first tasks that this process trains on (with several processes: rank 0) there are the response with the
    highest and the one with the lowest advantage. A long run loses the files of some older steps, see `steps_to_keep`.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder) / "completions" / TOKENS
        self._seen: list[tuple[tuple[int, ...], Tensor]] = []
        self._failed = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: OptimizerBatch, batch_idx: int
    ) -> None:
        """Ask for the log-probabilities of the step's first item; those of later items are of newer weights."""
        if batch_idx == 0 and batch.unit == 1:
            pl_module.on_logprobs = self._take  # type: ignore[assignment]

    def _take(self, rows: tuple[int, ...], logprobs: Tensor) -> None:
        # It neither waits for a GPU nor copies, unless those of a teacher's likeliest tokens follow: a view would hold
        # their memory until the step ends.
        sampled = logprobs if logprobs.dim() == 2 else logprobs[..., 0].clone()
        self._seen.append((rows, sampled))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: OptimizerBatch, batch_idx: int
    ) -> None:
        """Write the tokens. A file that cannot be written ends no run, and is warned of once."""
        pl_module.on_logprobs = None  # type: ignore[assignment]
        seen, self._seen = self._seen, []
        shown = _chosen(batch, seen)
        if not shown or self._failed:
            return
        records = [record(batch.explore_step, *trained, pl_module.tokenizer) for trained in shown]
        lines = (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in records)
        try:
            write_atomically(self._folder / f"step_{batch.explore_step}.jsonl", "".join(lines).encode(errors="replace"))
            _remove_old(self._folder, batch.explore_step)
        except OSError as error:
            self._failed = True
            logger.warning("tokens are not kept any more, which report.html would show: %s", error)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Forget the log-probabilities of a step that failed."""
        pl_module.on_logprobs, self._seen = None, []  # type: ignore[assignment]


def _remove_old(folder: Path, newest: int) -> None:
    files = {int(step[1]): path for path in folder.iterdir() if (step := STEP_FILE.fullmatch(path.name))}
    for step in files.keys() - steps_to_keep(files, newest):
        files[step].unlink(missing_ok=True)


def steps_to_keep(steps: Iterable[int], newest: int) -> set[int]:
    """The steps whose files stay once that of step `newest` is written: at most MOST_STEPS, the first one among them.

    The newest half of MOST_STEPS stay. Of older steps there is one in each interval of equal length: a power of two,
    so that what a longer interval keeps was kept by the shorter ones. Later steps than `newest` are those of a run that
    was resumed from a checkpoint before them.
    """
    half = MOST_STEPS // 2
    taken = sorted(step for step in steps if step <= newest)
    older, new = taken[:-half], taken[-half:]
    length = 1
    while older and (older[-1] - older[0]) // length >= half:
        length *= 2
    first_of_interval: dict[int, int] = {}
    for step in older:
        first_of_interval.setdefault((step - older[0]) // length, step)
    return {*first_of_interval.values(), *new}


def _chosen(batch: OptimizerBatch, seen: Sequence[tuple[tuple[int, ...], Tensor]]) -> list[Trained]:
    """The rows to show among those that were computed, with their advantages and log-probabilities on the CPU."""
    places = {row: (part, place) for part, (rows, _) in enumerate(seen) for place, row in enumerate(rows)}
    advantages = batch.columns.get("advantages") or [experience.advantages for experience in batch.experiences]
    rows_by_task: dict[str, list[int]] = {}
    for row in sorted(places):
        experience = batch.experiences[row]
        if trained_mask(experience).any() and (experience.logprobs is not None or advantages[row] is not None):
            rows_by_task.setdefault(experience.eid.tid, []).append(row)
    chosen: list[Trained] = []
    for rows in list(rows_by_task.values())[:TASKS]:
        means = {row: _mean(advantages[row], batch.experiences[row]) for row in rows}
        best, worst = max(rows, key=means.__getitem__), min(rows, key=means.__getitem__)
        for row in dict.fromkeys((best, worst)):
            part, place = places[row]
            experience = batch.experiences[row]
            logprobs = seen[part][1][place, : experience.response_length].cpu()
            chosen.append((experience, advantages[row], logprobs))
    return chosen


def _mean(advantages: Tensor | None, experience: Experience) -> float:
    return 0.0 if advantages is None else float(advantages[trained_mask(experience)].mean())


# -- what is written ---------------------------------------------------------------------------------------------------


def record(
    step: int, experience: Experience, advantages: Tensor | None, logprobs: Tensor, tokenizer: Any
) -> dict[str, Any]:
    """One line of the file.

    It has step, task, run, prompt, reward, length (response tokens in all), and for the first tokens lists of their
    text (`tokens`), `trained`, `advantages`, and log-probabilities of the `engine` that sampled and of the `trainer`.
    What is not known, or not finite, is null.
    """
    mask = trained_mask(experience)[:MOST_TOKENS]
    engine = experience.logprobs
    return {
        "step": step,
        "task": experience.eid.task,
        "run": experience.eid.run,
        "prompt": experience.prompt_text,
        "reward": _number(experience.reward),
        "length": experience.response_length,
        "tokens": pieces(tokenizer, experience.tokens[experience.prompt_length :][:MOST_TOKENS].tolist()),
        "trained": mask.int().tolist(),
        "advantages": _numbers(advantages, mask),
        "engine": _numbers(engine, mask),
        "trainer": _numbers(logprobs, mask),
    }


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token. One that only begins a character has an empty text, and the last one has it whole."""
    whole, texts = tokenizer.decode(ids), [tokenizer.decode([token]) for token in ids]
    if "".join(texts) == whole:
        return texts
    texts, begin, end = [], 0, 0  # tokens from `begin` are decoded together: a blank may belong to either neighbour
    for place in range(1, len(ids) + 1):
        before, after = tokenizer.decode(ids[begin:end]), tokenizer.decode(ids[begin:place])
        if after.endswith("�") and place < len(ids):
            texts.append("")
        else:
            texts.append(after[len(before) :])
            begin, end = end, place
    return texts


def _numbers(values: Tensor | None, mask: Tensor) -> list[float | None] | None:
    if values is None:
        return None
    rows = zip(values[: len(mask)].tolist(), mask.tolist(), strict=True)
    return [_number(value) if trained else None for value, trained in rows]


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), _DIGITS)

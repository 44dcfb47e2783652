"""Runs with groups under way across steps that an error or a signal ends: resumed, nothing is lost or there twice."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.errors import refuses
from support.runs import rows
from support.trainer import quiet_trainer

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.buffer.step_files import keep_step, read_experiences, step_files
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import Completion, joined_spans
from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.config.engines import Capabilities, SynchronizerConfig
from trinity_lightning.config.explorer import ExplorerConfig, SamplingConfig
from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.config.models import load_tokenizer, resolve_model
from trinity_lightning.explorer.callback import ExplorerCallback
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.models.engine import InProcessEngine
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.taskset import Taskset
from trinity_lightning.monitor.csv_logger import MetricsCSVLogger
from trinity_lightning.sync.stream import WeightStream, parameter_shapes
from trinity_lightning.trainer.policy import PolicyModule

pytestmark = [
    pytest.mark.slow,  # whole runs, in this process
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own use of torch
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),  # of the run that is resumed
]

STEPS, ITEMS, TASKS, REPEATS = 5, 2, 2, 4
LONG, MOST = range(80, 99), 150  # tokens that long responses have, and no prompt ends with; and their number
COMMAND = "trinity-lightning +recipe=grpo ckpt_path=last"


def even(response: str, task: Any) -> float:
    return float(sum(map(ord, response)) % 2 == 0)


class TornError(OSError):
    """Ends a run in these tests."""


class OneByOne(InProcessEngine):
    """Draws a token of each sample a step, by the sample's seed, its tokens so far and the weights."""

    capabilities = Capabilities(goes_on_after_sync=True)

    def __init__(self) -> None:
        super().__init__(max_model_len=320)
        self.holds: Callable[[int], bool] = lambda requests: False  # tells long samples to wait
        self.check_weights: Callable[[], None] = lambda: None
        self._samples: dict[str, list[tuple[int, int, Completion]]] = {}  # with seed and most tokens
        self._scored: dict[str, list[int]] = {}
        self._model: Any = None

    def _load(self) -> None:
        from transformers import AutoModelForCausalLM

        path = str(resolve_model("tiny"))
        self._tokenizer, self._weight_shapes = load_tokenizer("tiny"), parameter_shapes(path)
        self._dtype, self._model = torch.float32, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._weights = self._sum()

    def _add(self, request_id: str, token_ids: list[int], n: int, sampling: dict[str, Any]) -> None:
        sample, most = Completion(token_ids, [], [], "", None), sampling["max_tokens"]
        self._samples[request_id] = [(sampling["seed"] + i, most, sample) for i in range(n)]

    def _add_scoring(self, request_id: str, token_ids: list[int]) -> None:
        self._scored[request_id] = token_ids

    def _abort(self, request_id: str) -> None:
        self._samples.pop(request_id, None)

    def _abort_all(self) -> None:
        self._samples.clear()

    def _has_work(self) -> bool:
        return bool(self._samples or self._scored)

    def _step(self) -> Iterator[tuple[str, Any]]:
        time.sleep(0.001)  # as a real engine takes its time
        for request_id in list(self._scored):
            yield request_id, self._scores(self._scored.pop(request_id))
        if self._samples:
            self.check_weights()
        for request_id, samples in list(self._samples.items()):
            held = len(samples) > 1 and self.holds(len(self._samples))
            for index, (seed, most, sample) in enumerate(samples):
                if not (held and sample.token_ids and is_long(sample)):
                    samples[index] = seed, most, self._longer(seed, most, sample)
            if all(sample.finish_reason for *_, sample in samples):
                del self._samples[request_id]
                yield request_id, [sample for *_, sample in samples]

    def _longer(self, seed: int, most: int, sample: Completion) -> Completion:
        """The sample with one more token. One sample in eight is long: its tokens are of LONG."""
        if sample.finish_reason:
            return sample
        written = len(sample.token_ids)
        drawn = random.Random(f"b {seed} {written} {self._weights}")
        long = is_long(sample) or (not written and drawn.random() < 1 / 8)
        ends = not long and drawn.random() < 1 / 3
        present = ((0, self.model_version),)
        return replace(
            sample,
            token_ids=[*sample.token_ids, drawn.choice(LONG) if long else drawn.randrange(20, 80)],
            logprobs=[*sample.logprobs, -4.0],
            finish_reason="stop" if ends else "length" if written + 1 == most else None,
            versions=joined_spans([(0, sample.versions), (written, present)]) if written else present,
        )

    def _scores(self, token_ids: list[int]) -> list[float]:
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([token_ids])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()

    def _written(self, request_id: str) -> list[Completion]:
        return [sample for *_, sample in self._samples.get(request_id, ())]

    def _sum(self) -> float:
        return float(self._model.model.embed_tokens.weight.detach().double().sum())

    def _take_weights(self, stream: WeightStream) -> None:
        with torch.no_grad():
            parameters = dict(self._model.named_parameters(remove_duplicate=False))
            for name, tensor in stream:
                parameters[name].copy_(tensor)
        self._weights = self._sum()

    def _free(self) -> None:
        self._model = None


def is_long(sample: Completion) -> bool:
    return [*sample.prompt_token_ids, *sample.token_ids][-1] in LONG


class Run:
    """A run of five steps with two optimizer steps each, whose groups may be two steps old."""

    def __init__(self, folder: Path, steps: int = STEPS, **explorer: Any) -> None:
        lightning.seed_everything(1, verbose=False)
        self.folder, self.steps = folder, steps
        sampling = SamplingConfig(max_tokens=MOST)
        source = TaskSource(Taskset.addition(), "simple", even, sampling)
        heldout = TaskSource(Taskset([{"prompt": "1 + 1 ="}], name="heldout"), "simple", even, sampling)
        settings: dict[str, Any] = {"batch_size": TASKS, "repeat_times": REPEATS, "max_staleness": 2}
        settings |= {"eval_on_startup": False, "eval_interval": 2, "max_retry_times": 0}
        self.engine = OneByOne()
        self.explorer = Explorer(ExplorerConfig(**(settings | explorer)), [self.engine], source, [heldout])
        if self.explorer.config.max_staleness and self.explorer.config.in_flight == "continue":
            self.engine.holds, self.engine.check_weights = self.holds, self.check_weights
        self.callback = ExplorerCallback(
            self.explorer,
            SynchronizerConfig(check_interval=1000, drill=False),
            folder=folder / "checkpoints",
            command=lambda: COMMAND,
        )
        self.data = ExperienceDataModule("grpo", optimizer_steps=ITEMS, keep=partial(keep_step, folder / "experiences"))
        algorithm = AlgorithmConfig(optimizer_steps=ITEMS)
        self.policy = PolicyModule("tiny", algorithm, OptimizerConfig(lr=1e-2), dtype="fp32")
        self.interrupted, self.done = (folder / "checkpoints" / f"{name}.ckpt" for name in ("interrupted", "done"))

    def holds(self, requests: int) -> bool:
        """True if long samples are to wait: for the loop, which has not seen all groups that ended, or for training."""
        assert self.explorer.groups is not None
        controller = self.explorer.groups.controller
        return requests < controller.running or controller.ready()

    def check_weights(self) -> None:
        """Refuse to draw tokens with weights that the trainer has changed since."""
        assert self.callback._running is not None
        assert self.callback._running.sync._synced_at == self.policy.trainer.global_step

    def fit(self, checkpoint: Path | None = None) -> "Run":
        settings = {"logger": MetricsCSVLogger(self.folder), "log_every_n_steps": 1, "enable_checkpointing": True}
        saving = ModelCheckpoint(self.folder / "checkpoints", "done")
        trainer = quiet_trainer(self.folder, self.callback, saving, max_epochs=self.steps, **settings)
        trainer.fit(self.policy, datamodule=self.data, ckpt_path=checkpoint, weights_only=True)
        return self

    def responses(self) -> dict[tuple[str, int, int], list[int]]:
        """The tokens of every response that was trained on: of batch, task and run."""
        trained = [experience for step in self.experiences() for experience in step]
        keys = [(str(experience.eid.batch), int(experience.eid.task), experience.eid.run) for experience in trained]
        assert len(set(keys)) == len(keys)
        tokens = [experience.tokens[experience.prompt_length :].tolist() for experience in trained]
        return dict(zip(keys, tokens, strict=True))

    def experiences(self) -> list[list[Experience]]:
        files = step_files(self.folder / "experiences")
        return [read_experiences(files[step]) for step in sorted(files)]


def sigterm_while_rolling_out(run: Run) -> None:
    """SIGTERM comes within rollouts after the second step."""
    draw, begun = run.engine._longer, 0

    def drawing(*args: Any) -> Completion:
        nonlocal begun
        begun += run.callback._ended >= 2
        if begun == 20:
            run.policy.trainer._signal_connector.received_sigterm = True
        return draw(*args)

    run.engine._longer = drawing  # type: ignore[method-assign]


def torn_after_an_evaluation(run: Run) -> None:
    """The end of the first evaluation, meanwhile rollouts go on, fails."""
    evaluate = run.explorer.eval

    async def evaluated(step: int) -> dict[str, float]:
        await evaluate(step)
        raise TornError("torn")

    run.explorer.eval = evaluated  # type: ignore[method-assign]


def torn_within_a_step(run: Run) -> None:
    """The second item of a step fails while rollouts are suspended."""
    accumulate, items = run.policy.accumulate, itertools.count(1)

    def accumulated(*args: Any) -> Any:
        assert run.explorer.groups is not None
        if next(items) % ITEMS == 0 and run.explorer.groups.controller.running:
            raise TornError("torn")
        return accumulate(*args)

    run.policy.accumulate = accumulated  # type: ignore[method-assign]


WAYS: dict[str, Callable[[Run], None]] = {
    "rollouts": sigterm_while_rolling_out,
    "second item of a step": torn_within_a_step,
    "evaluation": torn_after_an_evaluation,
}


def kept_in(checkpoint: Path) -> dict[tuple[str, int, int], list[int]]:
    """The tokens of responses under way in a checkpoint: of batch, task and run."""
    states = torch.load(checkpoint, weights_only=True)["callbacks"]
    calls = states["ExplorerCallback"]["explorer"]["groups"]["calls"]
    tokens, lengths = calls["tokens"].tolist(), iter(sample[0] for sample in calls["samples"])
    kept = {}
    for batch, task, run, _, _, count in calls["calls"]:
        for index in range(count):
            length = next(lengths)
            kept[batch, int(task), run + index], tokens = tokens[:length], tokens[length:]
    return {key: written for key, written in kept.items() if written}


def check_whole(run: Run, steps: int = STEPS) -> None:
    """Refuse steps that are not full, groups that are missing or too old, and rows that are missing."""
    for number, step in enumerate(run.experiences(), 1):
        assert {e.info.get("trained_step", number) for e in step} == {number}
        assert len(step) == TASKS * REPEATS
        assert len({(e.eid.batch, e.eid.task) for e in step}) == TASKS
    assert {(int(batch) - 1) * TASKS + task for batch, task, _ in run.responses()} == set(range(steps * TASKS))
    of_steps = [row for row in rows(run.folder) if row["reward/mean"]]
    assert [int(row["explore_step"]) for row in of_steps] == list(range(1, steps + 1))
    assert max(float(row.get("sample/staleness/max") or 0) for row in of_steps) <= 2


def torn(folder: Path, way: str, **explorer: Any) -> Run:
    """A run that ended early."""
    run = Run(folder, **explorer)
    WAYS[way](run)
    with pytest.raises((TornError, SIGTERMException)):
        run.fit()
    return run


@pytest.mark.parametrize("way", ["rollouts", "second item of a step"])
def test_rollouts_go_on_where_they_were(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = kept_in(torn(tmp_path, way).interrupted)
    assert kept
    assert f"Resume with: {COMMAND}" in caplog.text
    resumed = Run(tmp_path)
    check_whole(resumed.fit(resumed.interrupted))
    responses = resumed.responses()
    assert all(responses[key][: len(tokens)] == tokens for key, tokens in kept.items())
    assert sum(float(row["rollout/replay_diverged"] or 0) for row in rows(tmp_path)) == 0


def test_a_run_whose_syncs_wait_has_the_same_bits_once_resumed(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", in_flight="wait").fit()
    for way in ("rollouts", "evaluation"):
        torn(tmp_path / way, way, in_flight="wait")
        resumed = Run(tmp_path / way, in_flight="wait")
        resumed.fit(resumed.interrupted)
        assert resumed.responses() == whole.responses()
        weights = resumed.policy.policy.state_dict()
        assert all(torch.equal(weights[name], weight) for name, weight in whole.policy.policy.state_dict().items())


def test_a_run_goes_on_with_and_without_staleness(tmp_path: Path) -> None:
    for steps, staleness in ((1, 0), (3, 2), (4, 0), (5, 1)):
        run = Run(tmp_path, steps, max_staleness=staleness)
        run.fit(run.done if steps > 1 else None)
        check_whole(run, steps)
    torn(tmp_path / "torn", "rollouts")
    run = Run(tmp_path / "torn", max_staleness=0)
    with refuses("explorer.max_staleness"):
        run.fit(run.interrupted)

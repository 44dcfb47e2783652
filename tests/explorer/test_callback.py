"""The explorer inside Lightning's Trainer, with the tiny model and a real vLLM."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from support.errors import refuses
from support.runs import rows
from support.trainer import quiet_trainer
from torch import Tensor

from trinity_lightning.buffer.datamodule import ExperienceDataModule
from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.config.engines import EngineDtype, SynchronizerConfig
from trinity_lightning.config.explorer import ExplorerConfig, SamplingConfig
from trinity_lightning.config.model import OptimizerConfig
from trinity_lightning.config.models import resolve_model
from trinity_lightning.errors import ModelLoadError, WeightSyncError
from trinity_lightning.explorer.callback import ExplorerCallback
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.models.engine import InProcessEngine
from trinity_lightning.explorer.models.transformers_engine import TransformersEngine
from trinity_lightning.explorer.models.vllm_engine import VLLMEngine
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.taskset import Taskset
from trinity_lightning.monitor.csv_logger import MetricsCSVLogger
from trinity_lightning.sync.stream import WeightStream
from trinity_lightning.trainer import policy as policy_module
from trinity_lightning.trainer.policy import PolicyModule

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own use of torch
    # Lightning takes vLLM's process group of one for several devices.
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log:UserWarning"),
]

STEPS, ROLLOUTS = 3, 16
SYNCS_BEFORE_TRAINING = 2  # the drill's, and the true weights


class Recorder(lightning.Callback):
    """Keeps the explorer's metrics, epoch by epoch."""

    def __init__(self, explorer_callback: ExplorerCallback) -> None:
        self.explorer_callback = explorer_callback
        self.metrics: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.metrics.append(dict(self.explorer_callback.metrics))


def fit(
    engine: InProcessEngine,
    folder: Path,
    reward: Any = "contains_digits",
    algorithm: AlgorithmConfig | None = None,
    offload: bool = False,
    freeze: Sequence[str] = (),
) -> tuple[lightning.Trainer, list[dict[str, float]]]:
    """A short run: 4 prompts x 4 rollouts, rewarded for digits, `STEPS` steps, every sync probed."""
    lightning.seed_everything(1, verbose=False)
    source = TaskSource(Taskset.addition(), "simple", reward, SamplingConfig(max_tokens=8))
    config = ExplorerConfig(batch_size=4, repeat_times=4, eval_on_startup=False)
    callback = ExplorerCallback(
        Explorer(config, [engine], source), SynchronizerConfig(check_interval=1), offload=offload
    )
    recorder = Recorder(callback)
    logger = MetricsCSVLogger(folder)
    trainer = quiet_trainer(folder, callback, recorder, max_epochs=STEPS, logger=logger, log_every_n_steps=1)
    policy = PolicyModule("tiny", algorithm, optimizer=OptimizerConfig(lr=1e-2), dtype="fp32", freeze=freeze)
    try:
        trainer.fit(policy, datamodule=ExperienceDataModule("grpo"))
    finally:
        callback.teardown(trainer, policy, "fit")  # Lightning leaves this hook out when fit fails
    return trainer, recorder.metrics


class TamperedEngine(VLLMEngine):
    """Gets its weights through `tamper`, which is also told how many syncs there were before."""

    def __init__(self, tamper: Callable[[int, str, Tensor], Tensor]) -> None:
        super().__init__("tiny", dtype=EngineDtype.fp32, max_model_len=320, max_num_seqs=16, kv_cache_gb=0.05)
        self.tamper = tamper
        self.syncs = 0
        self.lacking: list[set[str]] = []  # names of the weights that each sync does not send

    def _take_weights(self, stream: WeightStream) -> None:
        def tampered() -> Iterator[tuple[str, Tensor]]:
            return ((name, self.tamper(self.syncs, name, tensor)) for name, tensor in stream)

        super()._take_weights(WeightStream(stream.shapes, tampered))
        self.syncs += 1
        self.lacking.append(self.weight_shapes.keys() - stream.shapes.keys())


@pytest.mark.usefixtures("needs_vllm")
def test_a_run_syncs_before_every_step_and_the_engine_follows_the_trainer(tmp_path: Path) -> None:
    """Frozen layers are sent until the first sync has ended, by the drill and once more."""
    engine = TamperedEngine(lambda syncs, name, tensor: tensor)
    trainer, metrics = fit(engine, tmp_path, freeze=["layers.0"])
    assert trainer.global_step == trainer.current_epoch == STEPS
    assert engine.syncs == SYNCS_BEFORE_TRAINING + STEPS - 1
    assert engine.model_version == STEPS - 1
    frozen = {name for name in engine.weight_shapes if ".layers.0." in name}
    assert engine.lacking == [set()] * SYNCS_BEFORE_TRAINING + [frozen] * (STEPS - 1)
    assert [m["sample/model_version/mean"] for m in metrics] == [0.0, 1.0, 2.0]
    assert [m["sample/lag/mean"] for m in metrics] == [0.0, 0.0, 0.0]
    assert all(m["sync/probe_diff/max"] < 1e-4 for m in metrics)
    logged = rows(tmp_path)  # one row a step, with its sync
    assert [(row["step"], row["explore_step"]) for row in logged] == [("0", "1"), ("1", "2"), ("2", "3")]
    assert all(row["time/sync_weight"] and row["time/train"] for row in logged)


class SleepingEngine(TransformersEngine):
    """Records whose turn it is at whatever it is asked for."""

    def __init__(self) -> None:
        super().__init__("tiny", max_model_len=320, max_num_seqs=16)
        self.asleep = False
        self.turns: list[str] = []

    async def sleep(self) -> None:
        self.asleep = True
        self.turns.append("sleep")

    async def wake_up(self) -> None:
        self.asleep = False

    def _step(self) -> Any:
        assert not self.asleep
        self.turns.append("generate")
        return super()._step()


@pytest.mark.slow
def test_engine_and_optimizer_take_turns_and_train_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SleepingEngine()
    train, moments = PolicyModule.training_step, []

    def watched(policy: PolicyModule, *args: Any) -> Any:
        assert engine.asleep
        engine.turns.append("train")
        states: Any = policy.trainer.optimizers[0].state.values()
        moments.append([state["exp_avg"].data_ptr() for state in states])
        return train(policy, *args)

    _, plain = fit(TransformersEngine("tiny", max_model_len=320, max_num_seqs=16), tmp_path / "plain")
    monkeypatch.setattr(PolicyModule, "training_step", watched)
    _, metrics = fit(engine, tmp_path / "turns", offload=True)
    order = [turn for before, turn in zip([None, *engine.turns], engine.turns, strict=False) if turn != before]
    assert order == ["generate", "sleep", "train"] * STEPS
    assert moments[0] == []
    assert moments[1] != moments[2]  # they were away
    for name in ("reward/mean", "response_length/mean", "rollout/tokens"):
        assert [step.get(name) for step in metrics] == [step.get(name) for step in plain]


class DigitsButInStep2:
    """Rewards digits, but all answers of the second step alike: it trains nothing."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, response: str, task: Any) -> float:
        self.asked += 1
        return 1.0 if ROLLOUTS < self.asked <= 2 * ROLLOUTS else float(any(c.isdigit() for c in response))


@pytest.mark.slow
def test_a_step_that_trains_nothing_leaves_the_version_of_the_weights(tmp_path: Path) -> None:
    engine = TransformersEngine("tiny", max_model_len=320, max_num_seqs=16)
    trainer, metrics = fit(engine, tmp_path, DigitsButInStep2())
    assert trainer.global_step == STEPS - 1
    assert [m["sample/model_version/mean"] for m in metrics] == [0.0, 1.0, 1.0]
    assert [m["sample/lag/mean"] for m in metrics] == [0.0, 0.0, 0.0]


@pytest.mark.slow
def test_a_loss_that_needs_no_advantage_trains_on_equal_rewards(tmp_path: Path) -> None:
    engine = TransformersEngine("tiny", max_model_len=320, max_num_seqs=16)
    trainer, metrics = fit(engine, tmp_path, lambda response, task: 1.0, AlgorithmConfig(entropy_coef=0.1))
    assert trainer.global_step == STEPS
    assert [m["experience_pipeline/trained"] for m in metrics] == [ROLLOUTS] * STEPS


@pytest.mark.slow
def test_the_time_of_the_first_step_has_its_rollouts(tmp_path: Path) -> None:
    _, metrics = fit(TransformersEngine("tiny", max_model_len=320, max_num_seqs=16), tmp_path)
    assert all(m["time/step"] > m["time/rollout"] + m["time/sync_weight"] > 0 for m in metrics)


@pytest.mark.usefixtures("needs_vllm")
def test_a_corrupted_sync_stops_the_run_with_the_probes_error(tmp_path: Path) -> None:
    """One tensor is negated on its way, in the sync after the first training step."""

    def tamper(syncs: int, name: str, tensor: Tensor) -> Tensor:
        is_victim = syncs >= SYNCS_BEFORE_TRAINING and name == "model.layers.0.mlp.down_proj.weight"
        return -tensor if is_victim else tensor

    with pytest.raises(WeightSyncError, match=r"probe of weight sync 2"):
        fit(TamperedEngine(tamper), tmp_path)


class DeafEngine(TamperedEngine):
    """Takes no weights at all, and says that it did."""

    def _take_weights(self, stream: WeightStream) -> None:
        self.syncs += 1


@pytest.mark.usefixtures("needs_vllm")
def test_an_engine_that_ignores_syncs_stops_the_run_at_its_start(tmp_path: Path) -> None:
    engine = DeafEngine(lambda syncs, name, tensor: tensor)
    with pytest.raises(WeightSyncError, match=r"drill with perturbed weights"):
        fit(engine, tmp_path)
    assert engine.syncs == 1


class Noting(SingleDeviceStrategy):
    """Notes where the policy goes: Lightning takes it to the CPU before `on_fit_end`."""

    def __init__(self, places: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self.places = places

    def model_to_device(self) -> None:
        self.places.append("device")
        super().model_to_device()

    def teardown(self) -> None:
        self.places.append("CPU")
        super().teardown()


def test_what_is_left_to_evaluate_of_a_finished_run_is_evaluated_on_the_policys_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[str] = []
    monkeypatch.setattr(ExplorerCallback, "_evaluate", lambda *_arguments, **_keywords: places.append("evaluation"))
    source = TaskSource(Taskset.addition(), "simple", "contains_digits", SamplingConfig(max_tokens=8))
    config = ExplorerConfig(batch_size=4, repeat_times=4, eval_on_startup=False, eval_interval=1)
    engine = TransformersEngine("tiny", max_model_len=320)
    callback = ExplorerCallback(Explorer(config, [engine], source, [source]))
    trainer = quiet_trainer(tmp_path, callback, strategy=Noting(places))
    progress: Any = trainer.fit_loop.epoch_progress.current
    progress.ready = progress.started = progress.processed = progress.completed = 1  # as a checkpoint restores it
    trainer.fit(PolicyModule("tiny", dtype="fp32"), datamodule=ExperienceDataModule("grpo"))
    assert places == ["device", "CPU", "device", "evaluation", "CPU"]


class Expensive(TransformersEngine):
    """Takes minutes to load."""

    def _load(self) -> None:
        raise AssertionError("loaded before the policy was looked at")


def test_a_policy_that_cannot_be_trained_is_refused_before_an_engine_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(model: Any) -> Any:
        raise ModelLoadError("of no use")

    monkeypatch.setattr(policy_module, "logprob_function", refused)
    with pytest.raises(ModelLoadError, match="of no use"):
        fit(Expensive("tiny", max_model_len=320), tmp_path)


@pytest.mark.slow
def test_the_transformers_engine_needs_no_sync(tmp_path: Path) -> None:
    trainer, metrics = fit(TransformersEngine("tiny", max_model_len=320, max_num_seqs=16), tmp_path)
    assert trainer.global_step == STEPS
    assert all(m["sync/probe_diff/max"] < 1e-4 for m in metrics)


def test_an_engine_with_the_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Its weights are those that it is sent, and no probe could tell it from the policy's own."""
    other = tmp_path / "other"
    shutil.copytree(resolve_model("tiny"), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with refuses("engine") as refused:
        fit(TransformersEngine(str(other), max_model_len=320), tmp_path)
    assert "tokenizer is not that of 'tiny'" in str(refused.value)


def test_a_fit_without_anything_that_rolls_out_is_refused(tmp_path: Path) -> None:
    with refuses(None) as refused:
        quiet_trainer(tmp_path).fit(PolicyModule("tiny", dtype="fp32"), datamodule=ExperienceDataModule("grpo"))
    assert "ExplorerCallback" in str(refused.value)

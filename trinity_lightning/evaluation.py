"""Builds and runs an evaluation from a validated configuration; no trainer is needed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig

from trinity_lightning.build import eval_sources, finish, instances_of, quiet_libraries, record_config
from trinity_lightning.common.checkpoints import contents, whole
from trinity_lightning.config.engines import TRAINER_GPU
from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.run import typed_config
from trinity_lightning.engines import (
    auxiliary_models_of,
    check_pictures,
    check_room,
    engines_of,
    settle_dtypes,
    tell_settings,
)
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.monitor.csv_logger import log_row
from trinity_lightning.monitor.presentation import summary_table
from trinity_lightning.monitor.run_monitor import RunMonitor
from trinity_lightning.resume import check_model
from trinity_lightning.sync.files import checkpoint_weights
from trinity_lightning.sync.stream import WeightStream, as_checkpoint, skeleton
from trinity_lightning.trainer.adapter import put_base_in
from trinity_lightning.trainer.policy import PolicyModule


@dataclass
class Evaluation:
    """The parts of an evaluation.

    Attributes:
        model: name or folder of the model. It is evaluated itself if there are no checkpoints.
    """

    model: str
    explorer: Explorer
    engines: list[Engine]
    checkpoints: list[Path]
    folder: Path
    monitor: RunMonitor
    loggers: list[Logger]

    def run(self) -> dict[int, dict[str, float]]:
        """Evaluate the model or each checkpoint, log and print the metrics, and free the engines."""
        driver = Driver(self.engines)
        try:
            driver.run(self.explorer.prepare(watcher=self.monitor))
            driver.limit_blocking(self.explorer.config.max_timeout)
            results: dict[int, dict[str, float]] = {}
            for weights in [self._weights(path) for path in self.checkpoints] or [None]:
                measured = driver.run(self.explorer.benchmark(weights and [weights]))
                results |= measured
                self._show(measured)
        finally:
            driver.end(self.explorer.shutdown())
            driver.close()
        finish(self.loggers)
        print(f"everything is in {self.folder}", flush=True)
        return results

    def _weights(self, path: Path) -> tuple[int, WeightStream]:
        """The step and the weights of a checkpoint, by the names of a model's folder if an engine has its own model."""
        step, weights = checkpoint_weights(path)
        if any(".lora_" in name for name in weights.shapes):  # the checkpoint holds adapters alone
            weights = merged_weights(path, self.model)
        model = skeleton(str(resolve_model(self.model)))
        buffers = {name for name, _ in model.named_buffers()}  # not sent, because training does not change them
        parameters = {name: tensor for name, tensor in weights if name not in buffers}
        if all(engine.capabilities.shares_weights for engine in self.engines):
            return step, WeightStream.of(parameters.items())
        return step, as_checkpoint(parameters, model)

    def _show(self, results: dict[int, dict[str, float]]) -> None:
        for step, metrics in results.items():
            log_row(self.loggers, metrics, step, row=step)
            criteria = [(f"{taskset}: solved", criterion) for taskset, criterion in self.explorer.solved.items()]
            print(summary_table([("explore step", str(step)), *evaluation_rows(metrics), *criteria]), flush=True)


def merged_weights(path: Path, model: str) -> WeightStream:
    """The model's weights merged with a checkpoint's adapters; a ConfigError if those belong to another model."""
    saved = contents(path)
    policy = PolicyModule(**(saved["hyper_parameters"] | {"model": model}))
    policy.configure_model()
    checkpoint = whole(path, {part: saved[part] for part in ("state_dict", "adapter")})
    put_base_in(checkpoint, policy)
    policy.load_state_dict(checkpoint["state_dict"])
    return WeightStream.of(policy.policy.adapter.merged().items())


def build_evaluation(config: DictConfig, checkpoints: list[Path]) -> Evaluation:
    """The evaluation with its parts connected. Errors as `build.build`."""
    for checkpoint in checkpoints:
        saved_name = contents(checkpoint).get("hyper_parameters", {}).get("model", config.model.name)
        check_model(config.model.name, saved_name, may_have_moved=True)
    settle_dtypes(config, checkpoints[0] if checkpoints else None)
    typed = typed_config(config)
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    record_config(config, folder / "config.yaml")
    L.seed_everything(typed.seed, verbose=False)
    check_room(typed, sends=bool(checkpoints))
    engines = engines_of(typed, folder)
    sources = eval_sources(typed)
    check_pictures(typed, sources)
    tell_settings(engines, typed, sources)
    if any(engine.capabilities.shares_weights for engine in engines):
        policy = PolicyModule(typed.model.name, dtype=typed.model.dtype)
        policy.configure_model()
        if (config.trainer or {}).get("accelerator", "auto") != "cpu" and torch.cuda.is_available():
            policy.to(torch.device("cuda", TRAINER_GPU))  # otherwise Lightning's Trainer does so
        for engine in engines:
            engine.bind(policy.policy)
    loggers: list[Logger] = instances_of(config.logger)
    monitor = RunMonitor(folder, total_steps=0)
    auxiliary_models = [[model] for model in auxiliary_models_of(typed, folder).values()]
    explorer = Explorer(typed.explorer, engines, None, sources, auxiliary_models)
    return Evaluation(typed.model.name, explorer, engines, checkpoints, folder, monitor, loggers)


def evaluation_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The rows of an evaluation's table. A row has all statistics of the reward, or of another metric.

    Example:
        held            mean@4 0.25  std@4 0.43  best@2 0.5  best@4 1
        held/accuracy   mean@4 0.25  std@4 0.43  best@2 0.5  best@4 1
        held/seconds    3
    """
    rows: dict[str, list[str]] = {}
    for name, value in metrics.items():
        whole = name.removeprefix("eval/")
        measured, _, statistic = whole.rpartition("/")
        if "@" in statistic:
            rows.setdefault(measured, []).append(f"{statistic} {value:.4g}")
        else:
            rows[whole] = [f"{value:.4g}"]
    return [(name, "  ".join(values)) for name, values in rows.items()]

"""Checkpoints: named by explore steps, written straight to disk and moved into place; and how a run resumes."""

import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from trinity_lightning.common.checkpoints import contents, whole
from trinity_lightning.common.files import new_file
from trinity_lightning.common.random_state import restore_random_state
from trinity_lightning.config.model import OFFLOADED, LoRAConfig, OptimizerConfig
from trinity_lightning.config.sections import section_of
from trinity_lightning.config.values import check_version
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.optim import learning_rate_schedule, peak_learning_rates, schedule_settings

if TYPE_CHECKING:
    from trinity_lightning.trainer.policy import PolicyModule

logger = logging.getLogger(__name__)

COUNTERS = ("skipped_items", "bad_steps", "bad_steps_in_a_row")  # attributes of PolicyModule, saved in checkpoints
BUDGET = "max_tokens"  # another one
LOSS_SCALE = "loss_scale"  # state of the attribute of that name, of a float16 policy
SCHEDULED = ("lr", "betas", "momentum")  # settings that torch's schedules change

# -- files -------------------------------------------------------------------------------------------------------------


def check_local(path: str | Path) -> None:
    """Refuse an address, which would be taken for a local folder's name; a ConfigError."""
    if re.match(r"\w[\w+.-]*:/", str(path)):
        raise ConfigError(
            f"checkpoints go to local folders, and '{path}' is an address",
            key="callbacks.checkpoint.dirpath",
            fix="give a local dirpath",
        )


class StepCheckpoint(ModelCheckpoint):
    """Lightning's callback, whose `filename` may contain the explore step's number, from 1: `{explore_step:05d}`.

    Its state in a checkpoint is the same as that callback's, so that runs resume with either.
    """

    @property
    def state_key(self) -> str:
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def format_checkpoint_name(self, metrics: dict[str, Any], *args: Any, **settings: Any) -> str:
        """Name a checkpoint as ModelCheckpoint does; an explore step is an epoch, counted from 0."""
        step = {"explore_step": metrics["epoch"] + 1} if "epoch" in metrics else {}
        return super().format_checkpoint_name(metrics | step, *args, **settings)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file beside the target, then renames it.

    Lightning builds the whole checkpoint in memory first, twice: gigabytes that a small machine lacks.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any] | Mapping[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint to a local path; a kill meanwhile leaves the checkpoint that was there.

        Raises:
            ConfigError: the path is an address, such as s3://bucket/it.ckpt.
            DiskFullError: the disk is full.
            TypeError: there are storage options, which a local file does not have.
        """
        if storage_options is not None:
            raise TypeError("`Trainer.save_checkpoint(..., storage_options=...)`: a local file has no storage options.")
        check_local(path)
        with new_file(Path(path)) as file:
            torch.save(checkpoint, file)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The contents of a checkpoint in one file, or in shards (`trainer.fsdp`).

        Raises:
            ConfigError: its shards are damaged.
        """
        if Path(path).is_dir():
            return whole(path, contents(path))
        return super().load_checkpoint(path, map_location, weights_only)


# -- resuming ----------------------------------------------------------------------------------------------------------


class Resumption:
    """Restores a policy from a checkpoint: its counters at once, everything else before it trains.

    Args:
        policy: the policy, not trained yet.
        checkpoint: Lightning's checkpoint; entries that must not be loaded are removed from it.
        own_optimizer: an `optimizer_factory` made the policy's optimizer: its checkpoint is not checked.

    Attributes:
        max_tokens: most computed tokens of a micro-batch in the run before.

    Raises:
        ConfigError: the checkpoint is of an earlier version (it lacks a counter, or its parameters are one group, which
            decays), of another optimizer, or of a run that froze other parameters.
    """

    def __init__(self, policy: "PolicyModule", checkpoint: dict[str, Any], own_optimizer: bool) -> None:
        state = checkpoint["policy"]
        check_version(state, (*COUNTERS, BUDGET), "the policy")
        if not own_optimizer:
            check_resumed(checkpoint, policy.optimizer_config)
        check_freeze(checkpoint, policy.hparams["freeze"])
        before = section_of("optimizer", OptimizerConfig, checkpoint["hyper_parameters"]["optimizer"])
        # Includes arguments that are no longer given: the checkpoint's groups still have their values.
        self._configured = {*SCHEDULED, "eps", "weight_decay", *before.args, *policy.optimizer_config.args}
        self._schedule_changed = schedule_changed(before, policy.optimizer_config)
        if self._schedule_changed:
            checkpoint["lr_schedulers"] = []  # the new schedule does not load the state of the old one
        for name in COUNTERS:
            setattr(policy, name, state[name])
        if policy.loss_scale is not None and LOSS_SCALE in state:
            policy.loss_scale.load_state_dict(state[LOSS_SCALE])
        self._policy = policy
        self._random_state: dict[str, Any] = state["rng"]
        self.max_tokens: int = state[BUDGET]
        self._threads: int | None = state.get("threads")  # earlier versions did not save it

    def begin(self, device: torch.device) -> None:
        """Restore the random states; warn if sums on a CPU are rounded in another order than before."""
        restore_random_state(self._random_state)
        threads = torch.get_num_threads()
        if device.type == "cpu" and self._threads not in (None, threads):
            logger.warning(
                "the checkpoint was computed with %d threads of torch, and this process has %d: sums are rounded "
                "otherwise, so that the run is not to the bit what it would have been. OMP_NUM_THREADS=%d keeps it so.",
                *(self._threads, threads, self._threads),
            )

    def configure(self, initial: list[dict[str, Any]], peak_rates: list[Any]) -> None:
        """Give the optimizer its configured settings, and a new schedule if that changed; its state stays.

        Other entries of a group may be state of the optimizer, and stay too.

        Args:
            initial: the optimizer's settings when it was made, by `masters.settings_of`.
            peak_rates: its `optim.peak_learning_rates` at that time.
        """
        policy = self._policy
        optimizer: Any = policy.optimizers(use_pl_optimizer=False)
        reschedules = self._schedule_changed or peak_learning_rates(optimizer) != peak_rates
        replaced = self._configured if reschedules else self._configured - {*SCHEDULED}
        for group, settings in zip(optimizer.param_groups, initial, strict=True):
            if reschedules:
                group.pop("initial_lr", None)
            group.update({key: value for key, value in settings.items() if key in replaced})
        if reschedules:
            schedule = learning_rate_schedule(optimizer, policy.optimizer_config)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Detected call of", category=UserWarning)
                for _ in range(policy.global_step):  # on to the learning rates and momenta of the present step
                    schedule.step()
            policy.trainer.strategy.lr_scheduler_configs[0].scheduler = schedule


def misfit(error: RuntimeError, model: str) -> ConfigError:
    """A ConfigError of one sentence in place of torch's about weights that do not fit `model`, or its critic."""
    first = " ".join(str(error).splitlines()[1].split())
    is_critic = re.search(r'(: "| for )critic\.', first)
    part, fix = ("algorithm.critic", "algorithm.critic") if is_critic else (f"model '{model}'", "model")
    return ConfigError(
        f"the checkpoint's weights do not fit {part}: {first} Give the {fix} that the checkpoint is of.",
        key="algorithm.critic" if is_critic else "model",
    )


def check_resumed(checkpoint: Mapping[str, Any], config: OptimizerConfig) -> None:
    """Refuse a checkpoint of no run, of an earlier version that cannot go on, or of another optimizer."""
    if "policy" in checkpoint:
        check_version(checkpoint, ("hyper_parameters",), "the policy")
    if "optimizer" not in checkpoint.get("hyper_parameters", {}):
        raise ConfigError(
            "the checkpoint has no settings of an optimizer",
            key="ckpt_path",
            fix="give one that a run of train has written",
        )
    optimizers = checkpoint.get("optimizer_states", [])  # none where only weights were saved
    if any(len(state["param_groups"]) == 1 for state in optimizers):
        raise ConfigError(
            "the checkpoint is of a version in which norms, biases and embeddings decayed too, as one parameter "
            "group: its optimizer cannot go on here",
            key="ckpt_path",
            fix="finish that run with its version, or begin a new one",
        )
    before = checkpoint["hyper_parameters"]["optimizer"].get("name", "adamw")  # the only optimizer of earlier versions
    if optimizers and before != config.name and {before, config.name} != {"adamw", OFFLOADED}:  # their states are alike
        raise ConfigError(
            f"optimizer.name is {config.name}, and the checkpoint's optimizer is {before}",
            key="optimizer.name",
            fix=f"set optimizer.name={before}",
        )


def check_lora(checkpoint: Mapping[str, Any], lora: LoRAConfig) -> None:
    """Refuse a checkpoint of other adapters than are configured, or of none; a ConfigError."""
    saved = checkpoint.get("adapter")
    if saved is None and lora.r is not None:
        raise ConfigError(
            "the checkpoint has the weights of a whole model, and no adapters",
            key="model.lora",
            fix="leave model.lora out",
        )
    for key, trained in (saved or {"lora": {}})["lora"].items():
        if (configured := getattr(lora, key)) != trained:
            now, before = ("null" if value is None else value for value in (configured, trained))
            raise ConfigError(
                f"model.lora.{key} is {now}, but the checkpoint was trained with {before}",
                key=f"model.lora.{key}",
                fix=f"set model.lora.{key}={before}",
            )


def check_freeze(checkpoint: Mapping[str, Any], patterns: Sequence[str]) -> None:
    """Refuse a checkpoint in whose run other parameters were frozen: its optimizer has other moments; a ConfigError."""
    saved = checkpoint["hyper_parameters"].get("freeze") or []  # earlier versions froze nothing
    if {*saved} != {*patterns}:
        now, before = (f"[{','.join(names)}]" for names in (patterns, saved))
        raise ConfigError(
            f"model.freeze is {now}, and that of the checkpoint's run is {before}",
            key="model.freeze",
            fix=f"set model.freeze={before}, or begin a new run with the trained model (model.name=FOLDER/model)",
        )


def schedule_changed(before: OptimizerConfig, config: OptimizerConfig) -> bool:
    """True if the schedule is now another one, has other arguments or steps, or begins from other settings."""
    if before.lr_scheduler.name != config.lr_scheduler.name:  # the checkpoint's own may no longer be importable
        return True
    if (before.betas, before.args) != (config.betas, config.args):  # momenta, which a schedule may change
        return True
    return schedule_settings(before) != schedule_settings(config)

"""The LightningModule: one optimizer batch in, one optimizer step out.

It knows neither explorer nor buffer. Optimization is manual: an optimizer batch is cut into micro-batches by a token
budget, so their number varies. There is exactly one optimizer step per `training_step`, so `global_step`, loggers,
checkpoints and schedulers behave as in any Lightning module.
"""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from trinity_lightning.algorithm.policy_loss.policy_loss import combine_metrics
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.hardware import TORCH_DTYPES, HeapBound, await_kernels, reuse_large_buffers
from trinity_lightning.common.model_memory import useful_tokens
from trinity_lightning.common.optimizer_batch import OptimizerBatch
from trinity_lightning.common.pictures.kept import KeptStates, keep_states
from trinity_lightning.common.pictures.positions import position_rule
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.common.random_state import random_state
from trinity_lightning.config.algorithm import AlgorithmConfig
from trinity_lightning.config.checkpoints import check_file
from trinity_lightning.config.model import Dropout, LoRAConfig, OptimizerConfig, WeightDtype
from trinity_lightning.config.models import load_tokenizer, resolve_model
from trinity_lightning.config.sections import plain, section_of
from trinity_lightning.config.trainer import check_half, check_trainer_settings
from trinity_lightning.config.values import AUTO
from trinity_lightning.errors import ConfigError, ModelLoadError
from trinity_lightning.sync.files import saved_weights
from trinity_lightning.trainer import optim
from trinity_lightning.trainer.adapter import Adapter, put_base_in
from trinity_lightning.trainer.checkpoint import (
    BUDGET,
    COUNTERS,
    LOSS_SCALE,
    AtomicCheckpointIO,
    Resumption,
    check_local,
    misfit,
)
from trinity_lightning.trainer.compiled import check_compilable, compile_layers
from trinity_lightning.trainer.critic import Critic
from trinity_lightning.trainer.flops import ModelSize, Peak, products_dtype, step_costs
from trinity_lightning.trainer.frozen import freeze
from trinity_lightning.trainer.garbage import Thaw
from trinity_lightning.trainer.head import lean_embeddings
from trinity_lightning.trainer.layout import Part, collate, trained_tokens
from trinity_lightning.trainer.loss_scale import LossScale
from trinity_lightning.trainer.masters import settings_of
from trinity_lightning.trainer.model import load_model, logprob_function, usable_layout
from trinity_lightning.trainer.objective import Objective, count_bad_step
from trinity_lightning.trainer.out_of_memory import Expected, out_of_memory
from trinity_lightning.trainer.passes import Compiled, LogprobFn, Passes, idle
from trinity_lightning.trainer.placement import WHOLE, Whole
from trinity_lightning.trainer.saving import ModelFiles, allow_reading

logger = logging.getLogger(__name__)


class PolicyModule(L.LightningModule):
    """Trains a causal language model by policy gradients.

    Args:
        model: `smollm2`, `tiny`, a folder with a Hugging Face checkpoint, or a hub name.
        algorithm: the objective and how batches are cut; also as a mapping, as a checkpoint has it.
        optimizer: the optimizer and the learning-rate schedule; also as a mapping.
        optimizer_factory: makes an optimizer of your own from the groups of `optim.parameter_groups`.
        dtype: `bf16` or `fp16` computes in 16 bits with float32 masters in the optimizer; `fp32` is float32 throughout.
        dropout: `off` sets the model's dropout to 0; `keep` trains with the dropout of its configuration.
        compile_layers: compile the model's layers with torch.compile when training starts; auto: as `model.compile`.
        gradient_checkpointing: recompute activations in the backward pass.
        attn_implementation: attention of transformers.
        lora: adapters to train in place of the weights.
        freeze: patterns of the names of parameters that are not trained; see `model.freeze`.
        planned_tokens: a memory plan's value for algorithm.max_tokens_per_micro_batch=auto; None: chosen here.

    Attributes:
        skipped_items: optimizer batches so far with nothing to train; they took no optimizer and no schedule step.
        bad_steps: optimizer batches so far that took no step because the gradient was not finite.
        bad_steps_in_a_row: how many of those came since the last good step.
        loss_scale: factor of the loss in the backward pass of a float16 policy; None: another dtype.
        model: the Hugging Face model; None until it is loaded.
        adapter: adapters of the model, whose weights are then frozen; None: all weights are trained.
        critic: the critic, once loaded; None: the algorithm has none.
        expected: memory that training is planned to take, for the message of a GPU that runs out of it.
        peak: operations a second of the devices that train; None before training, or unknown.
        on_logprobs: called in training with rows of the batch that this process computes, and their log-probabilities.

    Raises:
        ConfigError: a number of the algorithm or the optimizer is out of its range; or dtype=auto, which every resume
            would time again (`common.hardware.faster_dtype()` tells which dtype is faster here).
        ValueError, TypeError: an unknown policy loss, or an argument that it does not have.
    """

    def __init__(
        self,
        model: str,
        algorithm: AlgorithmConfig | Mapping[str, Any] | None = None,
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
        *,
        optimizer_factory: Callable[[Any], Optimizer] | None = None,
        dtype: WeightDtype | str = WeightDtype.bf16,
        dropout: Dropout | str = Dropout.off,
        compile_layers: bool | str = AUTO,
        gradient_checkpointing: bool = False,
        attn_implementation: str = "sdpa",
        lora: LoRAConfig | Mapping[str, Any] | None = None,
        freeze: Sequence[str] = (),
        planned_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.model_name, self.automatic_optimization = model, False
        self.algorithm = section_of("algorithm", AlgorithmConfig, algorithm)
        self.optimizer_config = section_of("optimizer", OptimizerConfig, optimizer)
        self.lora = section_of("model.lora", LoRAConfig, lora)
        self.objective = Objective(self.algorithm)
        optim.check_optimizer(self.optimizer_config, alone=self.algorithm.critic is None)
        for caveat in self.objective.caveats:
            logger.warning(caveat)
        self.skipped_items = self.bad_steps = self.bad_steps_in_a_row = 0
        self.model: nn.Module | None = None
        self.adapter: Adapter | None = None
        self.critic: Critic | None = None
        self.expected = Expected()
        if self.algorithm.critic is not None:
            self.algorithm.critic.check_alone(self.lora)
        # A list, so that it is no submodule: not saved, not synchronized between devices, never in training mode.
        self._reference: list[Any] = []
        self._optimizer_factory = optimizer_factory
        if WeightDtype(dtype) is WeightDtype.auto:
            raise ConfigError("dtype is auto, which the commands settle", fix="give bf16, fp16, fp32 or faster_dtype()")
        self._dtype = TORCH_DTYPES[WeightDtype(dtype)]
        self.loss_scale = LossScale() if self._dtype == torch.float16 else None
        self._resumption: Resumption | None = None  # until a resumed run trains
        self.peak: Peak | None = None
        self.on_logprobs: Callable[[tuple[int, ...], Tensor], object] | None = None
        self._heap, self._kept = HeapBound(), KeptStates()
        self._optimizer_settings: list[dict[str, Any]] = []  # `settings_of` the optimizer when it was made
        self._peak_rates: list[Any] = []  # configured learning rates of the optimizer's groups
        budget = self.algorithm.max_tokens_per_micro_batch
        self._threads: int | None = None  # threads of torch when training began
        self._budget = planned_tokens if isinstance(budget, str) else budget  # None: chosen for the device
        self._passes: Passes | None = None
        self._function: LogprobFn | None = None
        self._compiled: Compiled | None = None
        arguments = {
            "model": model,
            "algorithm": plain(self.algorithm),
            "optimizer": plain(self.optimizer_config),
            "dtype": WeightDtype(dtype).value,
            "dropout": Dropout(dropout).value,
            "compile_layers": compile_layers,
            "gradient_checkpointing": gradient_checkpointing,
            "attn_implementation": attn_implementation,
            "lora": plain(self.lora),
            "freeze": list(freeze),
            "planned_tokens": planned_tokens,
        }
        self.save_hyperparameters(arguments, logger=False)  # for checkpoints; a run's record has them already

    # -- set-up -------------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[L.Callback]:
        """A callback that undoes what `on_train_start` does to the whole process.

        This is Lightning's earliest hook, before anything is loaded: wrong settings of the Trainer end here.

        Raises:
            ConfigError: several devices without ReplicaStrategy, a setting of the Trainer in whose place the policy has
                its own, or an address as the folder of checkpoints.
        """
        names = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches", "num_nodes", "precision")
        settings = {name: getattr(self.trainer, name) for name in names}
        kind, alone = type(self.trainer.strategy), isinstance(self.trainer.strategy, SingleDeviceStrategy)
        settings["strategy"] = AUTO if alone else {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
        check_trainer_settings(settings | {"devices": self.trainer.num_devices})
        check_half(WeightDtype(self.hparams["dtype"]), self.trainer.precision)
        if isinstance(self.trainer.strategy.checkpoint_io, AtomicCheckpointIO):
            for callback in self.trainer.checkpoint_callbacks:
                check_local(getattr(callback, "dirpath", None) or "")
        # One is enough: in a second fit Lightning would announce that the first one's is replaced.
        present = any(isinstance(callback, Thaw) for callback in vars(self.trainer)["callbacks"])
        return [] if present else [Thaw()]

    def setup(self, stage: str) -> None:
        """Prepare for experiences of older weights, if the data module has any.

        Raises:
            ConfigError: nothing in the objective corrects for older weights.
        """
        self._resumption = None  # a fit that ended before it trained may have left one
        if getattr(getattr(self.trainer, "datamodule", None), "older_weights", False):
            self.objective.expect_older_weights()
        dtype = self.placement.ranks.exchange(self._dtype)[0]  # each rank has timed model.dtype=auto
        if dtype != self._dtype:
            self._dtype, self.loss_scale = dtype, LossScale() if dtype == torch.float16 else None

    def configure_model(self) -> None:
        """Load the policy (and the reference, where the objective needs one) on the CPU, once, in training mode."""
        if self.model is None:
            # Lightning's default here is the GPU: what is to be sharded may not fit, and accelerate would be needed.
            with torch.device("cpu"):
                self._load_models()

    def _load_models(self) -> None:
        self.model = self._load_model(self.model_name)
        if self.lora.r is not None:
            self.adapter = Adapter(self.model, self.lora, str(resolve_model(self.model_name)))
        if self.hparams["freeze"]:
            freeze(self.policy, self.hparams["freeze"])
        lean_embeddings(self.policy.train())
        if self.algorithm.critic is not None:
            self.critic = Critic(self.algorithm.critic, self.policy, self.tokenizer, self._load_model)
        if self.objective.needs_reference and self.adapter is None:
            reference = self._load_model(self.model_name).eval()
            self._reference = [reference.requires_grad_(False)]

    def configure_optimizers(self) -> Any:
        """One optimizer, over float32 masters where the weights are bfloat16, and its schedule."""
        groups = optim.parameter_groups(self.policy) + ([] if self.critic is None else self.critic.groups())
        factory = self._optimizer_factory or optim.optimizer_factory(self.optimizer_config)
        optimizer = optim.make_optimizer(groups, factory, self.optimizer_config.name)
        self._optimizer_settings = settings_of(optimizer)
        schedule = optim.learning_rate_schedule(optimizer, self.optimizer_config)
        self._peak_rates = optim.peak_learning_rates(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _load_model(self, name: str) -> Any:
        dropout, attention = Dropout(self.hparams["dropout"]), self.hparams["attn_implementation"]
        model = load_model(name, self._dtype, dropout, attention)
        if self.hparams["gradient_checkpointing"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def on_fit_start(self) -> None:
        """Settle how rows are computed, and set the random states of a resumed run.

        Engines are loaded by now, and callbacks have not explored yet.
        """
        self._threads = torch.get_num_threads()
        if self.device.type == "cpu":
            reuse_large_buffers()
        self.check_trainable()
        self._kept, self._size = keep_states(self.policy, self.reference), ModelSize.of(self.policy)
        # All ranks must cut alike: each works out the micro-batches of all. Patient, since rank 0 has loaded engines.
        settled = self.placement.ranks.exchange((self.passes().max_tokens, self.passes().layout), patient=True)
        self._passes = replace(self.passes(), max_tokens=min(tokens for tokens, _ in settled), layout=settled[0][1])
        dtype = products_dtype(self.policy, self.device, self.trainer.precision_plugin)
        self.peak = Peak.of(self.policy, self.device, dtype, self._passes.max_tokens, self.placement.ranks.size)
        if self._compiled is None:  # only now: the trials above would be compiled too
            others = (self.reference, getattr(self.critic, "model", None))
            self._compiled = compile_layers(self.hparams["compile_layers"], self._passes, self.policy, *others)
        self._passes = replace(self._passes, compiled=self._compiled)
        if self._resumption is not None:
            self._resumption.begin(self.device)

    def on_train_start(self) -> None:
        """Give a resumed run's optimizer its configured settings, once it has loaded the checkpoint's state."""
        gc.freeze()  # a step makes so many objects that Python would look through all existing ones, several times
        if self._resumption is not None:
            self._resumption.configure(self._optimizer_settings, self._peak_rates)
            self._resumption = None

    def on_train_epoch_end(self) -> None:
        """Forget states of pictures: the explore step ends."""
        self._kept.drop()

    # -- the models, and how rows go through them ---------------------------------------------------------------------

    @property
    def placement(self) -> Whole:
        """Placement of the weights in the processes that train them."""
        return WHOLE if self._trainer is None else getattr(self.trainer.strategy, "placement", WHOLE)

    @property
    def policy(self) -> Any:
        """The Hugging Face model; an error before `configure_model`."""
        if self.model is None:
            raise ModelLoadError("the policy is not loaded yet: call configure_model() first.")
        return self.model

    @property
    def reference(self) -> Any:
        """The frozen initial policy, never in a checkpoint; None: not needed, or the policy without adapters serves."""
        return self._reference[0] if self._reference else None

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return load_tokenizer(self.model_name)

    @property
    def max_tokens(self) -> int:
        """Upper bound on the computed tokens of a micro-batch; with `auto`, chosen for the training device.

        A resumed run keeps it: where a batch is cut changes float32 sums in their last bits.
        """
        return self.passes().max_tokens

    def check_trainable(self, device: torch.device | None = None) -> None:
        """Refuse a model that cannot be trained as configured, on `device` or the device that it is on.

        Raises:
            ModelLoadError: its log-probabilities cannot be computed.
            ConfigError: `algorithm.layout` is not for this architecture, or the model cannot be compiled as asked.
        """
        if self.hparams["compile_layers"] is True:
            check_compilable(self.policy)
        device = device or self.device
        if self._passes is not None and self._passes.device != device:  # settled for a script's log-probabilities
            self._passes = None
        self.passes(device)

    def passes(self, device: torch.device | None = None) -> Passes:
        """Settings by which rows go through the policy, found at the first use; raises as `check_trainable` does."""
        if self._passes is None:
            function = self._function = self._function or logprob_function(self.policy)
            layout = usable_layout(self.algorithm.layout, self.policy, function)
            if self.critic is not None:
                layout = self.critic.usable_layout(layout)
            device, tokens = device or self.device, self._budget
            if tokens is None:
                trainers = getattr(self._trainer, "num_devices", 1)
                tokens = useful_tokens(self.policy, device, trainers, getattr(self.critic, "model", None))
                logger.info("micro-batches of at most %d tokens (algorithm.max_tokens_per_micro_batch)", tokens)
            settings = self.objective.needs_all_rows, self._compiled, position_rule(self.policy)
            passes = Passes(device, layout, tokens, function, *settings)
            if self.critic is not None:
                self.critic.check(passes, self.policy)
            self._passes = passes
        return self._passes

    # -- columns that are computed before a step, and probes ----------------------------------------------------------

    def prepare_step(self, experiences: Sequence[Experience]) -> dict[str, list[Tensor]]:
        """Per-token columns that must be computed before the step's first update; none for a plain on-policy step.

        `old_logprobs` and `ref_logprobs` are computed where the objective needs them. A critic always needs
        `old_logprobs`, and adds `values`, `advantages` and `returns`; an adaptive weight of its KL moves. Each column
        is a list of float32 CPU tensors [response], one an experience; 0 in rows that are not trained.
        """
        batch, columns = OptimizerBatch.of(experiences, explore_step=0), dict[str, list[Tensor]]()
        with torch.no_grad(), self._like_training():
            if self.critic is not None:
                columns |= self.critic.columns(self.passes(), self.policy, batch, self.placement)
            elif self.objective.needs_old_logprobs:
                columns["old_logprobs"] = self._logprobs(self.policy, batch)
        columns |= self.reference_column(batch)
        if self.critic is not None:
            columns |= self.critic.weigh(batch, columns)
            self.critic.adapt(batch, columns)
        return columns

    @contextmanager
    def _like_training(self) -> Iterator[None]:
        """Compute as in training, so that the first ratio is 1; a lack of memory is told as in training, too."""
        try:
            with self.trainer.precision_plugin.forward_context():
                yield
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error) from error

    @torch.no_grad()
    def reference_column(self, batch: OptimizerBatch) -> dict[str, list[Tensor]]:
        """The column ref_logprobs, within a fit; empty where the objective has no reference."""
        if not self.objective.needs_reference:
            return {}
        with self._like_training():
            if self.adapter is None:
                return {"ref_logprobs": self._logprobs(self.reference.to(self.device), batch)}
            with self.adapter.off():
                return {"ref_logprobs": self._logprobs(self.policy, batch)}

    def _logprobs(self, model: Any, batch: OptimizerBatch) -> list[Tensor]:
        return self.passes().columns(model, batch, self.placement)[0]

    @torch.no_grad()
    def sequence_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token given those before it, at temperature 1: [len - 1]. Probes compare these.

        The tokens may be a `PicturePrompt`.
        """
        # Rank 0 computes alone if each rank has all weights.
        self.placement.on_all_ranks("sequence_logprobs", token_ids)
        experience = Experience(tokens=list(token_ids), prompt_length=1)
        if isinstance(token_ids, PicturePrompt):
            experience.multi_modal_inputs = token_ids.inputs  # unchecked: the tokens of pictures are scored too
        batch = OptimizerBatch.of([experience], explore_step=0)
        with self._kept.off():  # the weights may be a drill's
            return self.passes().columns(self.policy, batch, self.placement, shared=False)[0][0].tolist()

    # -- training -----------------------------------------------------------------------------------------------------

    def training_step(self, batch: OptimizerBatch, batch_idx: int) -> dict[str, Tensor] | None:
        """Take one optimizer step over a whole optimizer batch; one with nothing to train is counted, without a step.

        Raises:
            ConfigError: the batch lacks advantages, or columns of `prepare_step`.
            ExperienceError: an experience has no log-probabilities of the engine, and the ratio or the correction for
                older weights needs them.
            TrinityError: the gradient is not finite, as in the `max_bad_steps` - 1 steps before. A step without a
                finite gradient changes neither weights nor optimizer nor schedule, and is counted.
            LossScaleError: a float16 gradient overflows at the least loss scale.
        """
        start = time.perf_counter()
        self._kept.count()  # forgets pictures that columns, held-out examples or a step cut short have computed
        self.objective.check(batch)
        if self.critic is not None:
            self.critic.begin(batch, self.global_step)
        rows = self.passes().rows(batch)
        if not rows:
            self.skipped_items += 1
            self._log(self._counts([]), batch)
            return None
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        shares = self.shares(batch, rows)
        parts = [part for share in shares for part in share]
        if self.hparams["dropout"] == Dropout.keep.value or self.lora.dropout:
            self.placement.seed_noise()
        try:
            losses, metrics = self.accumulate(batch, shares)
            clip, limit = self.placement.clip, self.algorithm.max_grad_norm
            trained = {"actor": self.policy, "critic": self.critic}
            norms = {name: clip(model.parameters(), limit) for name, model in trained.items() if model is not None}
            if not math.isfinite(norm := math.hypot(*norms.values())):
                count_bad_step(self, batch, norm, parts, losses)
                self._log(self._counts([]), batch)
                return None
            metrics |= {f"{name}/grad_norm": norm for name, norm in norms.items()}
            metrics["actor/lr"] = optimizer.param_groups[0]["lr"]
            if self.critic is not None:
                metrics |= self.critic.metrics(batch) | {"critic/lr": optimizer.param_groups[-1]["lr"]}
            optimizer.step()
            self.placement.end_step()
            schedule.step()
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error, shares[self.placement.ranks.rank], batch.unit) from error
        finally:
            optimizer.zero_grad()  # not at the next step: rollouts need the memory
            if self.device.type == "cpu":
                self._heap.check()
        self.bad_steps_in_a_row = 0
        if self.loss_scale is not None:
            self.loss_scale.stepped()
        await_kernels(self.device)  # before the time is taken
        seconds, ranks = time.perf_counter() - start, self.placement.ranks
        costs = step_costs(batch, parts, seconds, self._size, self.peak, self._kept, ranks)
        self._log(metrics | self._counts(parts) | costs, batch)
        return {"loss": losses.sum()}

    def shares(self, batch: OptimizerBatch, rows: Sequence[int]) -> list[list[Part]]:
        """The micro-batches of each rank; the batch is given the columns that the loss still needs."""
        if self.objective.needs_reference and "ref_logprobs" not in batch.columns:
            batch.columns |= self.reference_column(batch)  # the reference stays the same: now is soon enough
        self.objective.add_columns(batch)
        return self.passes().shares(batch, rows, self.placement.ranks.size)

    def accumulate(self, batch: OptimizerBatch, shares: list[list[Part]]) -> tuple[Tensor, dict[str, float]]:
        """Losses of all micro-batches [parts], and metrics of the whole batch; gradients, if enabled, are added up."""
        parts = [part for share in shares for part in share]
        tokens = trained_tokens(batch, parts), trained_tokens(batch, parts, sampled=True)
        passes, placement, critic = self.passes(), self.placement, self.critic
        backward: Any = self._backward if torch.is_grad_enabled() else lambda loss: None
        passes = passes if critic is None else critic.with_values(passes)
        measured: list[dict[str, Tensor]] = []
        losses: list[Tensor] = []
        collating = 0.0
        for part in placement.passes(shares):
            if part is None:
                backward(0 * idle(passes, self.policy, placement))
                continue
            start = time.perf_counter()
            micro = collate(batch, part, self.device, passes.position_rule)
            collating += time.perf_counter() - start
            logprobs, entropies, *values = passes.through(self.policy, micro, placement)
            if self.on_logprobs is not None:
                self.on_logprobs(part.rows, logprobs.detach())
            part_loss, part_metrics = self.objective(logprobs, entropies, micro, batch, *tokens)
            measured.append({f"actor/{name}": value for name, value in part_metrics.items()})
            if critic is not None:
                part_loss, critic_metrics = critic.joined(part_loss, values, micro, batch)
                measured[-1] |= critic_metrics
            backward(part_loss)
            losses.append(part_loss.detach())
        if torch.is_grad_enabled():
            placement.add_up_gradients(trained := self.policy if critic is None else self)
            if self.loss_scale is not None:
                self.loss_scale.divide(placement.gradients(trained).values())
        losses, measured = placement.from_all_ranks(losses, measured)
        metrics = {name: float(value) for name, value in combine_metrics(measured).items()}
        return torch.stack(losses), metrics | {"time/collate": collating}

    def _out_of_memory(self, error: torch.OutOfMemoryError, parts: Sequence[Part] = (), unit: int = 1) -> Exception:
        settings = {"rows_of_a_unit": unit, "checkpointing": self.hparams["gradient_checkpointing"]}
        return out_of_memory(error, self.device, parts, self.passes().max_tokens, self.expected, **settings)

    def _backward(self, loss: Tensor) -> None:
        """Add up the gradients of a micro-batch's loss, times the loss scale of a float16 policy."""
        self.manual_backward(loss if self.loss_scale is None else loss * self.loss_scale.scale)

    def _counts(self, parts: list[Part]) -> dict[str, float]:
        """Metrics of how much was trained on; 0 for a batch with nothing to train, or without a finite gradient."""
        return {
            "actor/trained_rows": sum(len(part.rows) for part in parts),
            "actor/micro_batches": len(parts),
            "actor/skipped_items": self.skipped_items,
            "actor/bad_steps": self.bad_steps,
        } | ({} if self.loss_scale is None else self.loss_scale.metrics())

    def _log(self, metrics: dict[str, float], batch: OptimizerBatch) -> None:
        values = {name: float(value) for name, value in (metrics | {"explore_step": batch.explore_step}).items()}
        self.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    # -- saving the trained model -------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model and tokenizer as a folder that transformers, vLLM and TRL load.

        Adapters are merged into it, and written by themselves to `adapter` in it, which peft loads. The model's own
        generation_config.json is copied unchanged; a model without one gets none.
        """
        folder = Path(folder)
        weights = self.placement.state_dict(self.policy) if self.adapter is None else self.adapter.merged()
        self._files.write(folder, self.policy, weights)
        if self.adapter is not None:
            self.adapter.save(folder / "adapter")
        allow_reading(folder)

    def try_saving(self, folder: str | Path) -> None:
        """Write what `save_pretrained` would, without any weights, to a folder in this one, and remove it.

        Raises:
            ConfigError: model or tokenizer could not be saved once trained.
            DiskFullError: the disk is full now.
        """
        parameters = self.policy.state_dict() if self.adapter is None else self.adapter.parameters()
        self._files.try_out(Path(folder), self.policy, parameters)

    @cached_property
    def _files(self) -> ModelFiles:
        """The model's other files, first read by `try_saving`: their folder may be gone once the model is trained."""
        return ModelFiles.of(self.model_name, self.tokenizer, self.policy.config)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add counters, random states, threads that trained (a run that ends gives them back), and the loss scale."""
        process = {"rng": random_state(), "threads": self._threads or torch.get_num_threads()}
        checkpoint["policy"] = {name: getattr(self, name) for name in (*COUNTERS, BUDGET)} | process
        if self.loss_scale is not None:
            checkpoint["policy"][LOSS_SCALE] = self.loss_scale.state_dict()
        if self.adapter is not None:
            self.adapter.leave_base_out(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the frozen weights that a checkpoint of adapters lacks; in a fit that it resumes, restore the counters.

        Random states are set later, once everything else that draws from them is set up.

        Raises:
            ConfigError: the checkpoint cannot be resumed (see `Resumption`), or has other adapters than this policy.
        """
        if "adapter" in checkpoint or self.lora.r is not None:
            put_base_in(checkpoint, self)
        if self._trainer is not None:
            self._resumption = Resumption(self, checkpoint, own_optimizer=self._optimizer_factory is not None)
            if self.algorithm.max_tokens_per_micro_batch == AUTO:
                self._budget, self._passes = self._resumption.max_tokens, None

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights as `nn.Module.load_state_dict` does; raises a ConfigError if they belong to another model."""
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            raise misfit(error, self.model_name) from error

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a policy as Lightning does; raises a ConfigError for a file that is damaged, in shards, or of no run."""
        if isinstance(checkpoint_path, str | Path):
            check_file(Path(checkpoint_path))
            saved_weights(checkpoint_path)
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

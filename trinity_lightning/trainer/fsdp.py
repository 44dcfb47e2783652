"""Trains on several devices, each with a share of the policy: `trainer=fsdp2`."""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    AllgatherOptions,  # pyright: ignore[reportPrivateImportUsage]
    AllreduceOptions,
    ReduceScatterOptions,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from trinity_lightning.common.checkpoints import contents, filled, new_folder, places_of, read, without_shards, write
from trinity_lightning.common.ranks import CPU, Ranks
from trinity_lightning.config.checkpoints import HASH, REST, hash_of
from trinity_lightning.config.models import is_picture_model
from trinity_lightning.config.trainer import check_distributed_checkpoint, check_shards_of
from trinity_lightning.config.values import AUTO
from trinity_lightning.errors import ConfigError, RankError, TrinityError, WeightSyncError
from trinity_lightning.sync.proof import DRILL_SEED, noise
from trinity_lightning.trainer.ddp import Replicas, ReplicaStrategy
from trinity_lightning.trainer.head import gradient_of
from trinity_lightning.trainer.layout import Part
from trinity_lightning.trainer.masters import master_of, parameters_of
from trinity_lightning.trainer.model import layers_of

ONE_FILE_BYTES = 16 << 30  # most that rank 0 writes alone: about 1.2 billion parameters in bfloat16


def is_large(parameters: int, dtype: torch.dtype) -> bool:
    """True if weights, masters and two moments of that number of parameters take more than ONE_FILE_BYTES."""
    return parameters * (dtype.itemsize + (0 if dtype == torch.float32 else 4) + 8) > ONE_FILE_BYTES


class Shards(Replicas):
    """A PolicyModule's policy and reference, in shards of about the same size: rows of each tensor's first dimension.

    Some calls come to rank 0 alone and yet need the shares of all ranks: weights for engines and checkpoints, and
    log-probabilities of a probe. Rank 0 then has the others make the same call, in the round in which they wait for it.
    """

    def __init__(self, module: Any, ranks: Ranks, device: torch.device, in_shards: bool | str = AUTO) -> None:
        super().__init__(ranks)
        self.module = module
        self.dtype: torch.dtype = module.policy.dtype
        parameters = sum(p.numel() for p in module.policy.parameters() if p.requires_grad)
        self.in_shards = is_large(parameters, self.dtype) if in_shards == AUTO else bool(in_shards)
        self._optimizer: Any = None
        self._order: list[str] = []  # names of the optimizer's parameters
        self._mesh, self._host = Mesh(ranks, device), Mesh(ranks, torch.device("cpu"))
        self._saved: list[Tensor] = []  # copies of the shards during the drill
        # Reentrant: a rank that writes a checkpoint may have to serve rank 0, which failed and writes another one.
        self._asking, self._thread = threading.RLock(), threading.get_ident()
        self._used: set[Any] = set()  # models that have begun a pass
        self._trained: set[str] = set()  # names of parameters that had a gradient in this optimizer batch
        self._watched: set[int] = set()  # ids of whole parameters whose gradients are noted
        self._passes_left = 0  # passes still to come that have rows of this rank
        references = [] if module.reference is None else [module.reference]
        for model in (module.policy, *references):
            self._shard(model, trained=model is module.policy)
        self.refresh()

    def _shard(self, model: Any, trained: bool) -> None:
        """Shard each layer of the model, then the rest of it; trained weights become float32 shards."""
        names = {module: f"{name}." for name, module in model.named_modules()}
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        # The tower for pictures is part of the rest, which every pass gathers: a rank's rows may have no pictures.
        language = model.get_decoder() if is_picture_model(model.config) else model
        for part in (*reversed(layers_of(language)), model):
            if trained:
                for parameter in part.parameters():
                    if parameter.requires_grad and not isinstance(parameter, DTensor):
                        parameter.data = master_of(parameter.data)
            sharded: Any = fully_shard(part, mesh=self._mesh, mp_policy=policy)
            sharded.set_custom_all_gather(Gather(self.ranks))
            sharded.set_custom_reduce_scatter(Scatter(self.ranks))
            sharded.set_gradient_divide_factor(1.0)  # gradients are sums
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_reduce_scatter_unused_params(True)  # such as an expert that no row of this rank was sent to
            if trained and part is not model:
                part.register_forward_pre_hook(partial(self._watch, names[part]))  # when the layer is whole
        kind = type(model)
        model.__class__ = type(kind.__name__, (kind,), {"dtype": property(lambda model: model.shards.dtype)})
        model.shards = self
        model.token_logprobs = MethodType(_token_logprobs, model)
        register_fsdp_forward_method(model, "token_logprobs")

    def refresh(self) -> None:
        """Look up the shards again: they may be other objects once the policy has been moved."""
        self.reshard()
        self._parameters: dict[str, Any] = dict(self.module.policy.named_parameters(remove_duplicate=False))
        self._names = {id(p): name for name, p in reversed(self._parameters.items())}  # the first name of tied ones

    def hold(self, optimizer: Optimizer) -> None:
        """Take the optimizer of the shards, to save and load its state."""
        self._optimizer = optimizer
        self._order = [self._names[id(parameter)] for parameter in parameters_of(optimizer)]

    def parameters(self) -> dict[str, Any]:
        """The policy's shards by name, a tied one by each of its names; the same even within a forward pass."""
        return self._parameters

    def reshard(self) -> None:
        """Make the next pass gather the weights again: shards may have changed while some layers were left whole.

        A pass without gradients leaves them whole, and so does a failed one, which `FSDPModule.reshard` does not undo.
        """
        for model in self._used:
            model.reset_iter_state()

    # -- passes and gradients -----------------------------------------------------------------------------------------

    def passes(self, shares: Sequence[Sequence[Part]]) -> list[Part | None]:
        share = shares[self.ranks.rank]
        self._trained, self._passes_left = set(), len(share)
        return [*share, *[None] * (max(map(len, shares)) - len(share))]

    def logprobs(self, function: Any, model: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """The results of a `LogprobFn`, within a forward pass of the sharded model: the head is part of it."""
        self._used.add(model)
        if model is self.module.policy and torch.is_grad_enabled():
            self._passes_left -= 1
        self.ranks.enter_pass()
        try:
            return model.token_logprobs(function, *arguments)
        except BaseException:
            self.ranks.end_passes()  # a caller may go on, while the other ranks wait in the pass
            raise

    def _watch(self, prefix: str, part: Any, *arguments: Any) -> None:
        """Note from now on which parameters of a part, now whole, have a gradient; their names begin with `prefix`."""
        for name, parameter in part.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor) and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(lambda _, name=prefix + name: self._note(name))

    def _note(self, name: str) -> None:
        if self._passes_left >= 0:  # an empty pass has gradients of zeros
            self._trained.add(name)

    def begin_pass(self, model: Any) -> None:
        """Let gradients of parameters outside the layers, which are whole now, add up in float32 as on one device.

        Within a pass they add up over tokens and blocks of the head.
        """
        lean = [module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings())]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.grad_dtype = torch.float32
                gradient_of(parameter)  # for every parameter: torch sends gradients of one dtype
                if any(parameter is weight for weight in lean):  # no hook is called for these (see `trainer.head`)
                    self._note(name)
        self._watch("", model)

    def add_up_gradients(self, model: Any) -> None:
        """Remove gradients of parameters that no rank trained; each backward pass has added up all others.

        The sums have zeros where there was no gradient. As on one device, the optimizer must skip such a parameter,
        which would otherwise decay, and move by its momentum.
        """
        named = dict(model.named_parameters())
        trained = self.ranks.exchange([name in self._trained for name in named])
        for parameter, *by_rank in zip(named.values(), *trained, strict=True):
            if not any(by_rank):
                parameter.grad = None

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: grad.to_local() for name, grad in super().gradients(model).items() if isinstance(grad, DTensor)}

    def clip(self, parameters: Iterable[nn.Parameter], limit: float | None) -> float:
        """Clip the gradient that all ranks hold together, as `Whole.clip` does."""
        gradients = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
        norm = torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient.numel()])
        self.ranks.add_up([squares := norm.double().square().reshape(1).cpu()])
        total = float(squares.sqrt())
        if limit is not None and math.isfinite(total) and (factor := limit / (total + 1e-6)) < 1:
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
        return total

    def faulty_gradients(self, model: nn.Module) -> list[str]:
        """Names of the parameters whose gradients are not finite in the share of any rank."""
        shares = self.ranks.exchange(super().faulty_gradients(model))
        return [name for name in self._parameters if any(name in share for share in shares)]

    def end_step(self) -> None:
        """Wait until all ranks have taken the step: shards of different steps are no policy."""
        self.ranks.exchange(None, at="an optimizer step")

    # -- calls that rank 0 makes on all ranks -------------------------------------------------------------------------

    def on_all_ranks(self, name: str, *arguments: Any) -> None:
        """Let the other ranks call the method of that name too, of this class or of the PolicyModule."""
        saving = self.module.trainer.interrupted
        try:
            self.ranks.call(name, *arguments, saving=saving)
        except RankError as error:
            if not saving:
                raise
            raise RankError(f"nothing can be saved without the shares of all processes: {error}") from error

    def serve(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Call the method that rank 0 asks for."""
        owner = self if hasattr(type(self), name) else self.module
        getattr(owner, name)(*arguments)

    def gather(
        self, name: str, moment: str | None = None, dtype: torch.dtype | None = None, on_host: bool = False
    ) -> Tensor:
        """The whole parameter of that name, or the optimizer's `moment` of it, rounded to `dtype` first.

        It is sent from the hosts if `on_host`, or once a pass has failed on rank 0: what GPUs send by was ended.
        Once the run has failed, a thread that still sends weights to an engine is refused: it would take part in the
        checkpoint's rounds.
        """
        with self._asking:
            if self.module.trainer.interrupted and threading.get_ident() != self._thread:
                raise WeightSyncError("the run has failed: its weights are not sent any further.")
            if self.module.trainer.interrupted:
                self.ranks.leave_pass()
            on_host = on_host or self.ranks.pass_group is None
            self.on_all_ranks("gather", name, moment, dtype, on_host)
            at = f"{moment} of {name}" if moment else name
            try:
                return self.gathered(self._share(name, moment), dtype, at, on_host)
            except TrinityError:
                raise
            except Exception as error:  # out of memory, say: an error of the run, which the other ranks are told
                raise TrinityError(f"{type(error).__name__} when {at} was gathered: {error}") from error

    def _share(self, name: str, moment: str | None = None) -> DTensor:
        """This rank's share of a parameter, or of the optimizer's `moment` of it."""
        if moment is None:
            return self._parameters[name]
        return self._optimizer.state[parameters_of(self._optimizer)[self._order.index(name)]][moment]

    def gathered(
        self, tensor: DTensor, dtype: torch.dtype | None = None, at: str = "a tensor", on_host: bool = False
    ) -> Tensor:
        """The whole tensor on the policy's device, or else the host, rounded to `dtype` first; all ranks call this.

        Nothing is sent before every rank has room. Moments may be on the host (`HostMemory`) on rank 0 alone, while the
        others send theirs from the GPU: so all are sent from the policy's device. `at` names the tensor in errors.
        """
        rows, *shape = tensor.shape
        device = next(iter(self._parameters.values())).to_local().device
        local, place = tensor.to_local().detach(), CPU if on_host else device
        padded = torch.zeros(self._most_rows(rows), *shape, dtype=dtype or tensor.dtype, device=place)
        padded[: len(local)] = local
        whole = padded.new_empty(len(padded) * self.ranks.size, *shape)
        self.ranks.send(self.ranks.group._allgather_base, whole, padded, AllgatherOptions(), at)
        return whole[:rows]

    def _most_rows(self, rows: int) -> int:
        """Most rows that one rank has of a tensor with `rows` rows."""
        return -(-rows // self.ranks.size)

    def _rows_here(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole tensor."""
        most = self._most_rows(len(whole))
        return whole[self.ranks.rank * most : (self.ranks.rank + 1) * most]

    # -- weights for engines ------------------------------------------------------------------------------------------

    def whole(self, name: str) -> Tensor:
        """The parameter of that name in the dtype that the policy computes in."""
        return self.gather(name, dtype=self.dtype)

    @contextmanager
    def perturbed(self) -> Iterator[Callable[[float], None]]:
        """Perturb the policy as `sync.proof.perturbed` does, with the same noise."""
        try:
            yield self.perturb
        finally:
            self.restore()

    @torch.no_grad()
    def perturb(self, scale: float) -> None:
        """Give every parameter its own value plus noise, on all ranks."""
        with self._asking:
            self.on_all_ranks("perturb", scale)
            self.reshard()
            parameters = list(dict.fromkeys(self._parameters.values()))
            local = [parameter.to_local() for parameter in parameters]
            if not self._saved:
                self._saved = [share.to("cpu", copy=True) for share in local]
            squares = torch.stack([share.double().square().sum().cpu() for share in self._saved])
            self.ranks.add_up([squares])
            generator = torch.Generator(local[0].device).manual_seed(DRILL_SEED)
            for parameter, share, original, square in zip(parameters, local, self._saved, squares, strict=True):
                size = (square / parameter.numel()).sqrt().float().to(share.device)
                drawn = self._rows_here(noise(parameter.shape, generator, scale, size))
                share.copy_(original).add_(drawn.to(share.dtype))

    def restore(self) -> None:
        """End the drill, on all ranks."""
        with self._asking:
            try:
                self.on_all_ranks("restore")
            finally:
                self.remove_noise()

    @torch.no_grad()
    def remove_noise(self) -> None:
        """Undo `perturb` in this rank's shares, also if another rank has failed: the shares may be saved."""
        if not self._saved:  # nothing was perturbed
            return
        self.reshard()
        for parameter, original in zip(dict.fromkeys(self._parameters.values()), self._saved, strict=True):
            parameter.to_local().copy_(original)
        self._saved = []

    # -- checkpoints, in the form that one device writes --------------------------------------------------------------

    def state_dict(self, model: Any) -> dict[str, Any]:
        """The policy's weights on the host."""
        return self._state(model, lambda name: self.whole(name).cpu())

    def _state(self, model: Any, take: Callable[[str], Tensor]) -> dict[str, Any]:
        """The model's state with `take(name)` for each parameter, tied ones once; with adapters, for these alone."""
        alone = self.module.adapter is not None
        chosen = {name: p for name, p in self._parameters.items() if p.requires_grad or not alone}
        taken = {name: take(name) for name, p in chosen.items() if self._names[id(p)] == name}
        weights = {name: taken[self._names[id(p)]] for name, p in chosen.items()}
        state = {name: weights.get(name, value) for name, value in model.state_dict().items()}
        return {name: value for name, value in state.items() if name in weights or not isinstance(value, DTensor)}

    def module_state(self) -> dict[str, Any]:
        """The weights by the names of the PolicyModule, for a checkpoint."""
        state = self._state(self.module.policy, lambda name: self._to_save(name, dtype=self.dtype))
        return {f"model.{name}": value for name, value in state.items()}

    def _to_save(self, name: str, moment: str | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A parameter (or its `moment`) for a checkpoint: whole, on the host; or this rank's share of it."""
        if not self.in_shards:
            return self.gather(name, moment, dtype).cpu()
        share = self._share(name, moment)
        if dtype in (None, share.dtype):
            return share
        return self._as_share(share.to_local().detach().to("cpu", dtype), share)  # the device may be full

    def write(self, folder: Path, optimizer: bool) -> None:
        """Write the shares of weights, and of the optimizer's state, to a folder, on all ranks."""
        with self._asking:
            self.on_all_ranks("write", folder, optimizer)
            saved: dict[str, Any] = {"state_dict": self.module_state()}
            if optimizer:
                saved["optimizer_states"] = [self.optimizer_state()]
            write(folder, places_of(saved), self.ranks)

    def optimizer_state(self) -> dict[str, Any]:
        """The state that one device's optimizer would have; with masters if the policy computes in bfloat16."""
        plain = self._optimizer.state_dict()  # its inner dicts are the optimizer's own, and keep the shards
        plain["state"] = {
            position: {
                moment: self._to_save(self._order[position], moment) if isinstance(value, DTensor) else value
                for moment, value in values.items()
            }
            for position, values in plain["state"].items()
        }
        if self.dtype == torch.float32:
            return plain
        return {
            "state": {"inner": plain, "masters": [self._to_save(name) for name in self._order]},
            "param_groups": [{k: v for k, v in group.items() if k != "params"} for group in plain["param_groups"]],
        }

    @torch.no_grad()
    def load_optimizer_state(self, states: Sequence[Mapping[str, Any]], folder: Path) -> None:
        """Load this rank's share of one device's optimizer state; masters become the weights.

        Args:
            states: the state of that one optimizer.
            folder: the checkpoint, if it is in shards: shares are read from it.
        """
        (state,) = states
        plain = state
        shares: dict[int, DTensor] = {}  # by the id of the whole tensor

        def take(whole: Tensor, share: DTensor) -> DTensor:
            shares[id(whole)] = share
            if not whole.is_meta:
                share.to_local().copy_(self._rows_here(whole))
            return share

        if self.dtype != torch.float32:
            plain = state["state"]["inner"]
            for name, master in zip(self._order, state["state"]["masters"], strict=True):
                take(master, self._parameters[name])
        groups = [
            {**inner, **{k: v for k, v in outer.items() if k != "params"}}
            for inner, outer in zip(plain["param_groups"], state["param_groups"], strict=True)
        ]

        def moment(value: Tensor, like: DTensor) -> Tensor:
            if value.ndim == 0:  # a count of steps
                return value.clone()
            return take(value, self._as_share(torch.empty_like(like.to_local(), dtype=value.dtype), like))

        moments = {
            position: {name: moment(value, self._parameters[self._order[position]]) for name, value in values.items()}
            for position, values in plain["state"].items()
        }
        if places := places_of({"optimizer_states": states}):
            read(folder, {place: shares[id(whole)] for place, whole in places.items()})
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})

    def _as_share(self, rows: Tensor, like: DTensor) -> DTensor:
        """This rank's rows as a share of a tensor with the shape of `like`."""
        mesh = self._mesh if rows.device.type == self._mesh.device_type else self._host
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride())


# -- the strategy that Lightning is given ------------------------------------------------------------------------------


class ShardStrategy(ReplicaStrategy):
    """A ReplicaStrategy with the policy, its gradients, its optimizer's state and the reference in shards.

    A bfloat16 policy computes in bfloat16, and its shards are float32: there are no other masters. One process alone
    shards nothing. (Lightning's ModelParallelStrategy does not hand over steps, metrics and faults as ReplicaStrategy
    does, and writes checkpoints without a CheckpointIO: a file could be cut off.)

    Args:
        save_distributed_checkpoint: save a folder to which each rank writes its shares. Otherwise rank 0 puts together
            one device's checkpoint in its host's memory. `auto`: a folder for more than ONE_FILE_BYTES.
        settings: further settings of ReplicaStrategy.
    """

    passes_together = True
    shards: Shards | None = None

    def __init__(self, save_distributed_checkpoint: bool | str = AUTO, **settings: Any) -> None:
        check_distributed_checkpoint(save_distributed_checkpoint)
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                f"trainer=fsdp2 needs a newer torch than {torch.__version__}, 2.13 for example",
                key="trainer",
                fix="choose trainer=ddp, or upgrade torch",
            )
        super().__init__(**settings)
        self._in_shards = save_distributed_checkpoint
        self._folder = Path()  # the checkpoint that was read, if it is in shards

    def model_to_device(self) -> None:
        """Move the policy to the device once it is in shards: as a whole it may not fit."""
        if self.shards is not None or self.ranks.size == 1:
            super().model_to_device()

    def configure_ddp(self) -> None:
        """Give all ranks the weights of rank 0, and keep this rank's share.

        Raises:
            ConfigError: the module is no PolicyModule, was trained in shards by another Trainer, or has a setting that
                shards do not support.
        """
        super().configure_ddp()
        module: Any = self.lightning_module
        if not isinstance(self.ranks, Ranks):
            return
        if not hasattr(module, "check_trainable") or hasattr(module.policy, "shards"):
            raise ConfigError(
                "trainer=fsdp2 trains a PolicyModule that no other Trainer has trained in shards.", key="trainer"
            )
        settings = module.trainer.precision, module.hparams["compile_layers"] is True
        has_critic = module.algorithm.critic is not None
        check_shards_of(*settings, module.optimizer_config.name, has_critic=has_critic)
        module.check_trainable(self.root_device)  # tried while it is whole
        self.placement = self.shards = Shards(module, self.ranks, self.root_device, self._in_shards)
        self.ranks.serve = self.shards.serve
        super().model_to_device()

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizer, over the shards."""
        super().setup_optimizers(trainer)
        if self.shards is not None:
            self.shards.hold(*self.optimizers)

    def on_exception(self, exception: BaseException) -> None:
        """Remove the noise of a drill, so that rank 0 saves none; then end the other ranks."""
        if self.shards is not None:
            self.shards.remove_noise()
        super().on_exception(exception)

    def teardown(self) -> None:
        """Move the policy to the host; all of it stays in shards."""
        if self.shards is not None:
            self.shards.reshard()
        super().teardown()
        if self.shards is not None:
            self.shards.refresh()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of one device on rank 0, which asks the others for their shares; empty on the others."""
        if self.shards is None:
            return super().lightning_module_state_dict()
        return without_shards(self.shards.module_state()) if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer state of one device on rank 0; empty on the others."""
        if self.shards is None:
            return super().optimizer_state(optimizer)
        return without_shards(self.shards.optimizer_state()) if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one file; or a folder to which each rank writes its shares, and rank 0 everything else."""
        if self.shards is None or not self.shards.in_shards:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            with new_folder(Path(filepath).absolute()) as folder:
                self.shards.write(folder, "optimizer_states" in checkpoint)
                super().save_checkpoint(checkpoint | {HASH: hash_of(folder)}, folder / REST, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """A local checkpoint whose tensors stay on disk: each process reads its own rows of moments and masters."""
        if self.ranks.size == 1:
            return super().load_checkpoint(checkpoint_path, weights_only)
        self._folder = Path(checkpoint_path)
        return contents(checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read weights in shards straight into the policy's: there may be no room for a copy."""
        saved = {"state_dict": checkpoint["state_dict"]}
        module = self.lightning_module
        if self.ranks.size > 1 and module is not None and places_of(saved):
            targets = {f"state_dict.{name}": value for name, value in module.state_dict().items()}
            saved = filled(self._folder, saved, targets)
        super().load_model_state_dict(saved, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's share of one device's optimizer state."""
        if self.shards is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self.shards.load_optimizer_state(checkpoint["optimizer_states"], self._folder)


# -- passes and collectives that torch's `fully_shard` is given --------------------------------------------------------


def _token_logprobs(model: Any, function: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The results of a `LogprobFn`, called as a forward pass of the model: parameters outside layers are whole."""
    if torch.is_grad_enabled():
        model.shards.begin_pass(model)
    return function(model, *arguments)


class Mesh(DeviceMesh):
    """A mesh of the ranks, by their own process group, which torch's list does not have (see `ddp.join`)."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        super().__init__(device.type, torch.arange(ranks.size), _init_backend=False, _rank=ranks.rank)
        self._ranks_group = ranks.group

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        return self._ranks_group


class Gather:
    """Gathers weights for `fully_shard`, whenever torch asks for them: there is no round within a pass."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        tensors, device = (output_tensor, input_tensor), input_tensor.device
        self._ranks.collect("_allgather_base", tensors, AllgatherOptions(), "a layer's weights", device)


class Scatter(Gather):
    """Adds up gradients for `fully_shard`."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fill the output with this rank's share of the sum of all ranks' inputs, which are not read again."""
        tensors, device, at = (output_tensor, input_tensor), input_tensor.device, "a layer's gradient"
        if device.type == "cpu":  # gloo would also send the whole sum, without progress
            self._ranks.collect("allreduce", ([input_tensor],), AllreduceOptions(), at, device)
            output_tensor.copy_(input_tensor.chunk(self._ranks.size)[self._ranks.rank])
        else:
            self._ranks.collect("_reduce_scatter_base", tensors, ReduceScatterOptions(), at, device)

"""Several devices, each with a share of the policy: `trainer=fsdp2`, what Lightning asks of it."""

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
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from trinity_lightning.common.checkpoints import contents, filled, new_folder, places_of, read, without_shards, write
from trinity_lightning.common.ranks import Ranks
from trinity_lightning.config.checkpoints import HASH, REST, hash_of
from trinity_lightning.config.trainer import check_distributed_checkpoint, check_shards_of
from trinity_lightning.config.values import AUTO
from trinity_lightning.errors import ConfigError, RankError, TrinityError, WeightSyncError
from trinity_lightning.sync.proof import DRILL_SEED, noise
from trinity_lightning.trainer.ddp import Replicas, ReplicaStrategy
from trinity_lightning.trainer.layout import Part
from trinity_lightning.trainer.model import gradient_of
from trinity_lightning.trainer.optim import parameters_of
from trinity_lightning.trainer.other_models import layers_of


class Shards(Replicas):
    """A PolicyModule's policy and reference, in shards of about the same size: rows of each tensor's first dimension.

    What only rank 0 asks for (weights for engines and checkpoints, log-probabilities of a probe) needs all of them: it
    calls, and the others do the same in the round in which they wait for it.
    """

    def __init__(self, module: Any, ranks: Ranks, device: torch.device, in_shards: bool | str = AUTO) -> None:
        super().__init__(ranks)
        self.module = module
        self.dtype: torch.dtype = module.policy.dtype
        parameters = sum(each.numel() for each in module.policy.parameters() if each.requires_grad)
        self.in_shards = is_large(parameters, self.dtype) if in_shards == AUTO else bool(in_shards)
        self._optimizer: Any = None
        self._order: list[str] = []  # names of the optimizer's parameters
        self._mesh, self._host = Mesh(ranks, device), Mesh(ranks, torch.device("cpu"))
        self._saved: list[Tensor] = []  # copies of the shards during the drill
        # Reentrant: a rank that writes serves rank 0, which could not and writes another checkpoint.
        self._asking, self._thread = threading.RLock(), threading.get_ident()
        self._used: set[Any] = set()  # models that have begun a pass
        self._trained: set[str] = set()  # names of parameters that had a gradient in this optimizer batch
        self._watched: set[int] = set()  # ids of whole parameters whose gradients are noted
        self._passes_left = 0  # passes with rows of this rank that are still to come
        references = [] if module.reference is None else [module.reference]
        for model in (module.policy, *references):
            self._shard(model, trained=model is module.policy)
        self.refresh()

    def _shard(self, model: Any, trained: bool) -> None:
        names = {module: f"{name}." for name, module in model.named_modules()}
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for part in (*reversed(layers_of(model)), model):
            if trained:
                for parameter in part.parameters():
                    if parameter.requires_grad and not isinstance(parameter, DTensor):
                        parameter.data = parameter.data.float()
            sharded: Any = fully_shard(part, mesh=self._mesh, mp_policy=policy)
            sharded.set_custom_all_gather(Gather(self.ranks))
            sharded.set_custom_reduce_scatter(Scatter(self.ranks))
            sharded.set_gradient_divide_factor(1.0)  # gradients are sums
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_reduce_scatter_unused_params(True)  # an expert that no row of this rank came to
            if trained and part is not model:
                part.register_forward_pre_hook(partial(self._watch, names[part]))  # when the layer is whole
        kind = type(model)
        model.__class__ = type(kind.__name__, (kind,), {"dtype": property(lambda model: model.shards.dtype)})
        model.shards = self
        model.token_logprobs = MethodType(_token_logprobs, model)
        register_fsdp_forward_method(model, "token_logprobs")

    def refresh(self) -> None:
        """Find the shards: those of a policy that has been moved may be other objects."""
        self.reshard()
        self._parameters: dict[str, Any] = dict(self.module.policy.named_parameters(remove_duplicate=False))
        self._names = {id(each): name for name, each in reversed(self._parameters.items())}  # of tied ones the first

    def hold(self, optimizer: Optimizer) -> None:
        """Save and load this optimizer, over the shards."""
        self._optimizer = optimizer
        self._order = [self._names[id(parameter)] for parameter in parameters_of(optimizer)]

    def parameters(self) -> dict[str, Any]:
        """The policy's shards by their names, a tied one by each of its own; also within a forward pass."""
        return self._parameters

    def reshard(self) -> None:
        """Make the next pass gather the weights again: shards may have changed since some of them were left whole.

        (By a pass without gradients; or by one that failed, which `FSDPModule.reshard` would not put right.)
        """
        for model in self._used:
            model.reset_iter_state()

    # -- passes and gradients -----------------------------------------------------------------------------------------

    def passes(self, shares: Sequence[Sequence[Part]]) -> list[Part | None]:
        own = shares[self.ranks.rank]
        self._trained, self._passes_left = set(), len(own)
        return [*own, *[None] * (max(map(len, shares)) - len(own))]

    def logprobs(self, function: Any, model: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """As a forward pass of the sharded model, which the head is part of."""
        self._used.add(model)
        if model is self.module.policy and torch.is_grad_enabled():
            self._passes_left -= 1
        return model.token_logprobs(function, *arguments)

    def _watch(self, prefix: str, part: Any, *arguments: Any) -> None:
        """Note of which parameters a part that is whole, of the names that begin so, will have a gradient."""
        for name, parameter in part.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor) and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(lambda _, name=prefix + name: self._note(name))

    def _note(self, name: str) -> None:
        if self._passes_left >= 0:  # a pass of nothing has gradients of zeros
            self._trained.add(name)

    def begin_pass(self, model: Any) -> None:
        """Have gradients of what is in no layer, which is whole now, added up in float32 within a pass, as one device.

        They are added up over tokens and blocks of the head.
        """
        lean = [each.weight for each in (model.get_input_embeddings(), model.get_output_embeddings())]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.grad_dtype = torch.float32
                gradient_of(parameter)  # of all of them: torch sends gradients of one dtype
                if any(parameter is each for each in lean):  # no hook is called for those (`logprobs`)
                    self._note(name)
        self._watch("", model)

    def add_up_gradients(self, model: Any) -> None:
        """Each backward pass has done so, with zeros where there was no gradient: if no rank had one, there is none.

        As on one device, the optimizer passes over such a parameter, which would decay, and go on by its momentum.
        """
        named = dict(model.named_parameters())
        found = self.ranks.exchange([name in self._trained for name in named])
        for parameter, *trained in zip(named.values(), *found, strict=True):
            if not any(trained):
                parameter.grad = None

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: each.to_local() for name, each in super().gradients(model).items() if isinstance(each, DTensor)}

    def clip(self, parameters: Iterable[nn.Parameter], limit: float | None) -> float:
        """As `Whole.clip`, of the gradient that all ranks hold together."""
        gradients = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
        norm = torch.nn.utils.get_total_norm([each for each in gradients if each.numel()])
        self.ranks.add_up([squares := norm.double().square().reshape(1).cpu()])
        total = float(squares.sqrt())
        if limit is not None and math.isfinite(total) and (factor := limit / (total + 1e-6)) < 1:
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
        return total

    def faulty_gradients(self, model: nn.Module) -> list[str]:
        """Names of the parameters whose gradients are not finite, in the share of any rank."""
        shares = self.ranks.exchange(super().faulty_gradients(model))
        return [name for name in self._parameters if any(name in share for share in shares)]

    def end_step(self) -> None:
        """Make sure that all ranks have taken it before any continues: shards of different steps are no policy."""
        self.ranks.exchange(None, at="an optimizer step")

    # -- what rank 0 asks for -----------------------------------------------------------------------------------------

    def on_all_ranks(self, name: str, *arguments: Any) -> None:
        """Let the others do it too; the same name, of this class or of the PolicyModule."""
        saving = self.module.trainer.interrupted
        try:
            self.ranks.call(name, *arguments, saving=saving)
        except RankError as error:
            if not saving:
                raise
            raise RankError(f"nothing can be saved without the shares of all processes: {error}") from error

    def serve(self, name: str, arguments: tuple[Any, ...]) -> None:
        owner = self if hasattr(type(self), name) else self.module
        getattr(owner, name)(*arguments)

    def gather(self, name: str, moment: str | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The whole parameter of that name, or the optimizer's `moment` of it, rounded to a dtype first.

        A thread that still sends weights to an engine when the run has failed is refused: it would take part in the
        same rounds as the checkpoint.
        """
        with self._asking:
            if self.module.trainer.interrupted and threading.get_ident() != self._thread:
                raise WeightSyncError("the run has failed: its weights are not sent any further.")
            self.on_all_ranks("gather", name, moment, dtype)
            at = f"{moment} of {name}" if moment else name
            try:
                return self.gathered(self._share(name, moment), dtype, at)
            except TrinityError:
                raise
            except Exception as error:  # which other ranks are told: out of memory, say
                raise TrinityError(f"{type(error).__name__} when {at} was gathered: {error}") from error

    def _share(self, name: str, moment: str | None = None) -> DTensor:
        if moment is None:
            return self._parameters[name]
        return self._optimizer.state[parameters_of(self._optimizer)[self._order.index(name)]][moment]

    def gathered(self, tensor: DTensor, dtype: torch.dtype | None = None, at: str = "a tensor") -> Tensor:
        """The whole of it, rounded to a dtype first, where the policy is; all ranks ask. `at`: what an error calls it.

        Nothing is sent before every rank has room for it. Moments of rank 0 alone may be on the host (`HostMemory`),
        and the others send theirs by the GPU.
        """
        rows, *shape = tensor.shape
        local, place = tensor.to_local().detach(), next(iter(self._parameters.values())).to_local().device
        own = torch.zeros(self._most_rows(rows), *shape, dtype=dtype or tensor.dtype, device=place)
        own[: len(local)] = local
        whole = own.new_empty(len(own) * self.ranks.size, *shape)
        self.ranks.send(self.ranks.group._allgather_base, whole, own, AllgatherOptions(), at)
        return whole[:rows]

    def _most_rows(self, rows: int) -> int:
        return -(-rows // self.ranks.size)

    def _own(self, whole: Tensor) -> Tensor:
        most = self._most_rows(len(whole))
        return whole[self.ranks.rank * most : (self.ranks.rank + 1) * most]

    # -- weights for engines ------------------------------------------------------------------------------------------

    def whole(self, name: str) -> Tensor:
        """The parameter of that name in the dtype that the policy computes in."""
        return self.gather(name, dtype=self.dtype)

    @contextmanager
    def perturbed(self) -> Iterator[Callable[[float], None]]:
        """As `sync.proof.perturbed`, with the same noise."""
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
            local = [each.to_local() for each in parameters]
            if not self._saved:
                self._saved = [each.to("cpu", copy=True) for each in local]
            squares = torch.stack([each.double().square().sum().cpu() for each in self._saved])
            self.ranks.add_up([squares])
            generator = torch.Generator(local[0].device).manual_seed(DRILL_SEED)
            for parameter, own, original, square in zip(parameters, local, self._saved, squares, strict=True):
                size = (square / parameter.numel()).sqrt().float().to(own.device)
                own.copy_(original).add_(self._own(noise(parameter.shape, generator, scale, size)).to(own.dtype))

    def restore(self) -> None:
        """End the drill, on all ranks."""
        with self._asking:
            try:
                self.on_all_ranks("restore")
            finally:
                self.remove_noise()

    @torch.no_grad()
    def remove_noise(self) -> None:
        """Take back what `perturb` did to this rank's shares, also if another rank has failed: they may be saved."""
        if not self._saved:  # nothing was perturbed
            return
        self.reshard()
        for parameter, original in zip(dict.fromkeys(self._parameters.values()), self._saved, strict=True):
            parameter.to_local().copy_(original)
        self._saved = []

    # -- checkpoints, in the form of one device -----------------------------------------------------------------------

    def state_dict(self, model: Any) -> dict[str, Any]:
        """The policy's weights on the host."""
        return self._state(model, lambda name: self.whole(name).cpu())

    def _state(self, model: Any, take: Callable[[str], Tensor]) -> dict[str, Any]:
        trained = {name: each for name, each in self._parameters.items() if each.requires_grad}
        taken = {name: take(name) for name, each in trained.items() if self._names[id(each)] == name}
        own = {name: taken[self._names[id(each)]] for name, each in trained.items()}
        state = {name: own.get(name, each) for name, each in model.state_dict().items()}
        return {name: each for name, each in state.items() if name in own or not isinstance(each, DTensor)}

    def module_state(self) -> dict[str, Any]:
        """The weights by the names of the PolicyModule, for a checkpoint."""
        state = self._state(self.module.policy, lambda name: self._kept(name, dtype=self.dtype))
        return {f"model.{name}": each for name, each in state.items()}

    def _kept(self, name: str, moment: str | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """What a checkpoint has of a parameter: its whole, on the host, or this rank's share."""
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
            kept: dict[str, Any] = {"state_dict": self.module_state()}
            if optimizer:
                kept["optimizer_states"] = [self.optimizer_state()]
            write(folder, places_of(kept), self.ranks)

    def optimizer_state(self) -> dict[str, Any]:
        """What one device's optimizer would have, which is over masters if the policy computes in bfloat16."""
        plain = self._optimizer.state_dict()  # the optimizer's own dicts, which keep the shards
        plain["state"] = {
            position: {
                moment: self._kept(self._order[position], moment) if isinstance(value, DTensor) else value
                for moment, value in values.items()
            }
            for position, values in plain["state"].items()
        }
        if self.dtype == torch.float32:
            return plain
        return {
            "state": {"inner": plain, "masters": [self._kept(name) for name in self._order]},
            "param_groups": [{k: v for k, v in group.items() if k != "params"} for group in plain["param_groups"]],
        }

    @torch.no_grad()
    def load_optimizer_state(self, states: Sequence[Mapping[str, Any]], folder: Path) -> None:
        """Take this rank's share of what one device's optimizer had, and the masters for weights.

        `folder`: where shares are read that are in shards.
        """
        (state,) = states
        plain = state
        shares: dict[int, DTensor] = {}  # by what they are shares of

        def take(whole: Tensor, share: DTensor) -> DTensor:
            shares[id(whole)] = share
            if not whole.is_meta:
                share.to_local().copy_(self._own(whole))
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

    def _as_share(self, own: Tensor, like: DTensor) -> DTensor:
        mesh = self._mesh if own.device.type == self._mesh.device_type else self._host
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride())


class ShardStrategy(ReplicaStrategy):
    """The policy, its gradients, its optimizer's state and the reference in shards; else as ReplicaStrategy.

    Weights of bfloat16 are computed with in bfloat16, and their shards are float32: there are no other masters. One
    process alone shards nothing. (Lightning's ModelParallelStrategy does not hand over steps, metrics and faults as
    that of replicas does, and writes checkpoints without a CheckpointIO: one could be half of a file.)

    A checkpoint is that of one device, which rank 0 puts together in its host's memory, or, with
    `save_distributed_checkpoint`, a folder to which each rank writes its shares; `auto`: if it has ONE_FILE_BYTES.
    """

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
        """Begin with the weights of rank 0, and keep this rank's share of them.

        Raises:
            ConfigError: the module is no PolicyModule, has been trained in shards by another Trainer, or has a setting
                that is not for shards.
        """
        super().configure_ddp()
        module: Any = self.lightning_module
        if not isinstance(self.ranks, Ranks):
            return
        if not hasattr(module, "check_trainable") or hasattr(module.policy, "shards"):
            raise ConfigError(
                "trainer=fsdp2 trains a PolicyModule that no other Trainer has trained in shards.", key="trainer"
            )
        name = module.optimizer_config.name
        has_critic = module.algorithm.critic is not None
        check_shards_of(module.trainer.precision, module.hparams["compile_layers"], name, has_critic=has_critic)
        module.check_trainable(self.root_device)  # tried while it is whole
        self.placement = self.shards = Shards(module, self.ranks, self.root_device, self._in_shards)
        self.ranks.serve = self.shards.serve
        super().model_to_device()

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizer of the shards, which checkpoints are then put together from."""
        super().setup_optimizers(trainer)
        if self.shards is not None:
            self.shards.hold(*self.optimizers)

    def on_exception(self, exception: BaseException) -> None:
        """As ReplicaStrategy; what rank 0 saves then has no noise of a drill."""
        if self.shards is not None:
            self.shards.remove_noise()
        super().on_exception(exception)

    def teardown(self) -> None:
        """The policy moves to the host, all of it in shards."""
        if self.shards is not None:
            self.shards.reshard()
        super().teardown()
        if self.shards is not None:
            self.shards.refresh()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights as one device has them, on rank 0, which asks the others for their shares; nothing on those."""
        if self.shards is None:
            return super().lightning_module_state_dict()
        return without_shards(self.shards.module_state()) if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, likewise."""
        if self.shards is None:
            return super().optimizer_state(optimizer)
        return without_shards(self.shards.optimizer_state()) if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """In a file, or rank 0's of what is in no shards in a folder where each writes its shares."""
        if self.shards is None or not self.shards.in_shards:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            with new_folder(Path(filepath).absolute()) as folder:
                self.shards.write(folder, "optimizer_states" in checkpoint)
                super().save_checkpoint(checkpoint | {HASH: hash_of(folder)}, folder / REST, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """A local checkpoint that stays on disk: each process reads of moments and masters its own rows."""
        if self.ranks.size == 1:
            return super().load_checkpoint(checkpoint_path, weights_only)
        self._folder = Path(checkpoint_path)
        return contents(checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read weights that are in shards into the policy's own, of which there may be no room for a copy."""
        saved = {"state_dict": checkpoint["state_dict"]}
        module = self.lightning_module
        if self.ranks.size > 1 and module is not None and places_of(saved):
            own = {f"state_dict.{name}": each for name, each in module.state_dict().items()}
            saved = filled(self._folder, saved, own)
        super().load_model_state_dict(saved, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """This rank's share of what one device's optimizer had."""
        if self.shards is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self.shards.load_optimizer_state(checkpoint["optimizer_states"], self._folder)


ONE_FILE_BYTES = 16 << 30  # what rank 0 puts together and writes, of about 1.2 billion parameters in bfloat16


def is_large(parameters: int, dtype: torch.dtype) -> bool:
    """Whether a checkpoint has more than ONE_FILE_BYTES: of each parameter its weight, its master and two moments."""
    return parameters * (dtype.itemsize + (0 if dtype == torch.float32 else 4) + 8) > ONE_FILE_BYTES


def _token_logprobs(model: Any, function: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    """What the `LogprobFn` yields, within a forward pass of the model: what is in no layer is whole."""
    if torch.is_grad_enabled():
        model.shards.begin_pass(model)
    return function(model, *arguments)


class Mesh(DeviceMesh):
    """The ranks, by a process group that torch's own list of them does not have (see `ddp.join`)."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        super().__init__(device.type, torch.arange(ranks.size), _init_backend=False, _rank=ranks.rank)
        self._ranks_group = ranks.group

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        return self._ranks_group


class Gather:
    """How `fully_shard` gathers weights: each time in a round, so that a rank that failed is not waited for."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self._ranks.send(group._allgather_base, output_tensor, input_tensor, AllgatherOptions(), "a layer's weights")


class Scatter(Gather):
    """How `fully_shard` adds up gradients."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fill the output with this rank's share of the sum of the inputs, which are not read again."""
        if input_tensor.device.type == "cpu":  # gloo would send the whole sum as well, and not say how far it is
            self._ranks.add_up([input_tensor], "a layer's gradient")
            output_tensor.copy_(input_tensor.chunk(self._ranks.size)[self._ranks.rank])
        else:
            scatter, sums = group._reduce_scatter_base, ReduceScatterOptions()
            self._ranks.send(scatter, output_tensor, input_tensor, sums, "a layer's gradient")

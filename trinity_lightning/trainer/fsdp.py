"""Several devices, each with a share of the policy: `trainer=fsdp2`, what Lightning asks of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from trinity_lightning.common.checkpoints import contents, filled, new_folder, places_of, without_shards
from trinity_lightning.common.ranks import Ranks
from trinity_lightning.config.checkpoints import HASH, REST, hash_of
from trinity_lightning.config.trainer import check_distributed_checkpoint, check_shards_of
from trinity_lightning.config.values import AUTO
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.ddp import ReplicaStrategy
from trinity_lightning.trainer.shards import Shards


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
                f"trainer=fsdp2 needs a newer torch than {torch.__version__}, 2.13 for example: choose trainer=ddp, or "
                "upgrade torch."
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
            raise ConfigError("trainer=fsdp2 trains a PolicyModule that no other Trainer has trained in shards.")
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

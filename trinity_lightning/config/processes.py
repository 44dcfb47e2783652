"""Whether this machine can start the processes that train together (trainer=ddp, trainer=fsdp2)."""

import os
from collections.abc import Mapping
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig

from trinity_lightning.config.engines import gpu_count
from trinity_lightning.errors import ConfigError

# One of these is set in a process that torchrun, srun, or a cluster's own way of starting has begun.
LAUNCHED = ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "MASTER_ADDR")
ALWAYS = 2  # processes that any machine may have, if only to try it


def check_processes_here(trainer: Mapping[str, Any]) -> None:
    """Refuse more processes than a CPU has cores, and several machines that nothing connects.

    Raises:
        ConfigError: says how many there may be, or by which command the run is started.
    """
    devices, nodes = str(trainer.get("devices")), trainer.get("num_nodes", 1)
    if nodes > 1 and not any(name in os.environ for name in LAUNCHED):
        raise ConfigError(
            f"trainer.num_nodes is {nodes}, and no launcher started this process, which would wait for the others: on "
            f"every machine, run torchrun --nnodes {nodes} --node-rank NUMBER --nproc-per-node {devices} --master-addr "
            "HOST --master-port 29500 -m trinity_lightning.train with the same arguments, or use srun."
        )
    if trainer.get("accelerator") != "cpu" and gpu_count():
        return
    if devices == "-1":
        raise ConfigError("trainer.devices is -1, all GPUs, and this process sees none: give how many processes train.")
    cores = len(os.sched_getaffinity(0))
    if devices.isdigit() and int(devices) > max(cores, ALWAYS):
        raise ConfigError(
            f"trainer.devices is {devices}, each a process of its own, and this process may use {cores} CPU cores: "
            f"give at most {max(cores, ALWAYS)}."
        )


def check_start(config: DictConfig, hydra: Any) -> None:
    """Refuse a sweep of processes that train together, and those that torchrun starts without one folder.

    Args:
        config: the run's.
        hydra: Hydra's own.

    Raises:
        ConfigError: says how to start it.
    """
    if hydra.mode == RunMode.MULTIRUN:
        raise ConfigError(
            "trainer=ddp and trainer=fsdp2 start this command once more for every device, and each would begin the "
            "sweep again: start its jobs one by one, without --multirun."
        )
    named = any(each.startswith("hydra.run.dir=") for each in hydra.overrides.hydra)
    if "RANK" in os.environ and not named and config.ckpt_path != "last":
        raise ConfigError(
            "processes that torchrun starts need one folder for the run: give it, such as "
            f"hydra.run.dir={config.output_root}/{config.name}/first."
        )

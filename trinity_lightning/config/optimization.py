"""Rules of what is trained, and by what: adapters (model.lora), optimizers, schedules, several steps, the KL penalty.

Imported by runs that have others than a full policy, plain AdamW and a schedule that fits the run.
"""

import importlib.util

from trinity_lightning.config.engines import SENT
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.config.training import ADAM, ALL_LINEAR, BETAS, EPS, KLConfig, LoRAConfig, OptimizerConfig
from trinity_lightning.errors import ConfigError

# -- adapters, and those that vLLM computes with itself (synchronizer.lora=adapter) ------------------------------------


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room
LORA_ARGUMENTS = ("enable_lora", "max_lora_rank", "lora_target_modules")  # of vLLM's arguments
MERGE = "leave synchronizer.lora merged"


def check_lora(lora: LoRAConfig) -> None:
    """Refuse targets that are no names of layers, and adapters without peft; a ConfigError."""
    named = isinstance(lora.targets, list) and lora.targets and all(isinstance(each, str) for each in lora.targets)
    if lora.targets != ALL_LINEAR and not named:
        raise ConfigError(f"model.lora.targets is {lora.targets!r}; give {ALL_LINEAR}, or [q_proj,v_proj], say.")
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("model.lora needs peft: pip install 'trinity-lightning[lora]'.")


def settled_alpha(lora: LoRAConfig) -> int:
    """Alpha, or what null stands for."""
    return 2 * (lora.r or 0) if lora.alpha is None else lora.alpha


def room_for(rank: int) -> int:
    """The rank that vLLM makes room for to hold adapters of this one."""
    return next(each for each in LORA_RANKS if each >= rank)


def check_adapters(run: TrainConfig) -> None:
    """Refuse synchronizer.lora=adapter without adapters, or with an engine that does not take them; a ConfigError."""
    engine, rank = run.engine, run.model.lora.r
    if rank is None:
        raise ConfigError(f"synchronizer.lora=adapter, and there is none: set model.lora.r=16, say, or {MERGE}.")
    if engine.name not in ("vllm", "vllm_server"):
        raise ConfigError(
            f"synchronizer.lora=adapter is for engine=vllm and vllm_server, not for engine={engine.name}: {MERGE}."
        )
    if engine.urls:
        raise ConfigError(
            f"synchronizer.lora=adapter is for servers that are started here, and engine.urls names others: {MERGE}."
        )
    if run.synchronizer.method in SENT:
        raise ConfigError(
            f"synchronizer.lora=adapter gives servers a folder, and synchronizer={run.synchronizer.method} sends none: "
            f"take synchronizer=checkpoint, or {MERGE}."
        )
    if engine.quantizes:
        raise ConfigError(
            "synchronizer.lora=adapter, and engine.args quantises the weights that the adapters are trained for: "
            f"{MERGE}, or leave the quantization out."
        )
    if rank > LORA_RANKS[-1]:
        raise ConfigError(f"model.lora.r is {rank}, and vLLM takes adapters up to rank {LORA_RANKS[-1]}: {MERGE}.")
    for name in LORA_ARGUMENTS:
        if name in engine.args:
            raise ConfigError(f"synchronizer.lora=adapter sets {name} of vLLM itself: leave it out of engine.args.")


# -- optimizers, schedules, several steps, and the KL penalty ----------------------------------------------------------


ENDING = ("cosine", "linear")  # polynomial stays at its lr_end from there on


def check_optimization(run: TrainConfig) -> None:
    """Refuse more optimizer steps than an explore step has prompts, a KL estimate whose coef is 0, which older
    checkpoints may hold, and a schedule that ends before the run or never reaches its peak; a ConfigError.
    """
    algorithm, optimizer, prompts = run.algorithm, run.optimizer, run.explorer.batch_size
    if run.buffer.has_rollouts and algorithm.optimizer_steps > prompts:
        raise ConfigError(
            f"algorithm.optimizer_steps ({algorithm.optimizer_steps}) is more than explorer.batch_size "
            f"({prompts}), and the rollouts of a prompt stay together: give fewer."
        )
    if algorithm.kl.name not in ("none", KLConfig.name) and algorithm.kl.coef == 0:
        raise ConfigError(
            f"algorithm.kl.name={algorithm.kl.name} has no effect without algorithm.kl.coef: set that, or leave it out."
        )
    schedule, steps = optimizer.lr_scheduler.name, run.steps * run.items
    horizon = optimizer.total_steps or steps
    if schedule in ENDING and horizon < steps:
        raise ConfigError(
            f"optimizer.total_steps is {horizon}, and optimizer.lr_scheduler={schedule} ends there; the run takes "
            f"{steps} optimizer steps: give at least as many, or leave it out."
        )
    if optimizer.warmup_steps >= horizon:
        raise ConfigError(
            f"optimizer.warmup_steps is {optimizer.warmup_steps}, and there are {horizon} optimizer steps: the "
            "learning rate would not reach optimizer.lr. Give fewer, or optimizer.total_steps of a longer run."
        )


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Refuse an optimizer whose package is missing, and settings of another; a ConfigError."""
    name, args = optimizer.name, optimizer.args
    if name in ADAM and args:
        raise ConfigError(f"optimizer.args are for an optimizer of your own: {name} has betas, eps and weight_decay.")
    if name not in ADAM and (list(optimizer.betas), optimizer.eps) != (BETAS, EPS):
        raise ConfigError(f"optimizer.betas and eps belong to {', '.join(ADAM)}: {name} has optimizer.args.")
    if taken := sorted({"lr", "weight_decay"} & args.keys()):
        raise ConfigError(f"optimizer.args has {taken[0]}: set optimizer.{taken[0]}.")
    if name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise ConfigError("optimizer.name=adamw_8bit needs torchao: pip install 'trinity-lightning[optim]'.")

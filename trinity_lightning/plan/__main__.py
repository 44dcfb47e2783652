"""`python -m trinity_lightning.plan +recipe=grpo plan.device=H100-80GB`: what a run needs, before anything is loaded.

Memory of each device by part, tokens and seconds of a step, from the configuration and the model's config alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict

from trinity_lightning.config import hydra as compose
from trinity_lightning.config.registry import config_dir
from trinity_lightning.config.sections import Section, checked, schema_of
from trinity_lightning.config.values import number, whole_number
from trinity_lightning.errors import ConfigError
from trinity_lightning.train import check

if TYPE_CHECKING:
    from trinity_lightning.plan.run import RunPlan


@dataclass
class PlanConfig(Section, key="plan"):
    """What to plan for.

    Attributes:
        device: the GPU that the run is to have, such as H100-80GB (an unknown name lists all); null: what this machine
            has, a GPU or its CPU.
        memory_gb: GiB of a device that may be used; null: of a GPU what CUDA reports, of this machine what is free.
        host_gb: GiB of the host's memory that may be used; null: what is free, if the plan is for this machine;
            another machine is taken to have enough.
        tflops: 10^12 operations a second of a device's best matrix product; null: of a GPU by its data sheet, of this
            machine's CPU measured.
        bandwidth_gb: 10^9 bytes a second that a device's memory is read with; null: likewise.
        training_share: of the speed of products, what training is assumed to reach (`perf/mfu`; 0.41 to 0.52 on a CPU).
        rollout_share: of the speed of products and of memory, whichever takes longer, what the engine is assumed to
            reach while it generates.
        sync_gb: 10^9 bytes a second that weights are assumed to be sent with; null: 2 within one process on a CPU, 10
            within or between GPUs, 1 through a folder.
        prompt_tokens: tokens of a prompt; null: all that the context leaves to it.
        response_tokens: tokens of a response; null: the most, sampling.max_tokens.
        json: print one line of JSON instead of the tables.
    """

    device: str | None = None
    memory_gb: float | None = checked(None, number, above=0, optional=True)
    host_gb: float | None = checked(None, number, above=0, optional=True)
    tflops: float | None = checked(None, number, above=0, optional=True)
    bandwidth_gb: float | None = checked(None, number, above=0, optional=True)
    training_share: float = checked(0.4, number, above=0, most=1)
    rollout_share: float = checked(0.25, number, above=0, most=1)
    sync_gb: float | None = checked(None, number, above=0, optional=True)
    prompt_tokens: int | None = checked(None, whole_number, least=1, optional=True)
    response_tokens: int | None = checked(None, whole_number, least=1, optional=True)
    json: bool = False


def plan(config: DictConfig) -> "RunPlan":
    """What the run that is configured needs.

    A ConfigError: a value that cannot work, or what does not fit, with numbers and the knobs that help.
    """
    if not isinstance(config.plan, DictConfig):
        raise ConfigError(f"plan is {config.plan!r}, and has keys", fix=f"give plan.device={config.plan}")
    with open_dict(config):
        asked: PlanConfig = OmegaConf.to_object(config.pop("plan"))  # type: ignore[assignment]
    check(config, here=False)
    from trinity_lightning.plan.run import plan_run

    return plan_run(config, asked)


def as_text(found: "RunPlan") -> str:
    """The plan as a person reads it."""
    devices = sum(each.devices for each in found.shares)
    phases: list[tuple[str, Mapping[str, int]]] = []
    for each in found.shares:
        if each.memory.shared:
            phases.append((f"{each.name}, training", each.memory.training))
            phases.append((f"{each.name}, generating", each.memory.generating))
        else:  # the trainer alone while it trains, and vLLM alone all the time
            phases.append((each.name, each.memory.training))
    names = dict.fromkeys(name for _, parts in phases for name in parts)
    rows = [[name, *(_gib(parts.get(name, 0)) for _, parts in phases)] for name in names]
    rows.append(["all of it", *(_gib(sum(parts.values())) for _, parts in phases)])
    return "\n".join(
        [
            found.model,
            f"on {devices} x {found.hardware.name}",
            "",
            *table(["GiB of a device", *(name for name, _ in phases)], rows),
            "",
            *(f"{each.name}: {each.memory.rows()[0][1]}" for each in found.shares),
            *(f"{name}: {said}" for name, said in found.shares[0].memory.rows() if name == "on the host"),
            "",
            *table(["tokens of a step", ""], [[name, f"{tokens:,}"] for name, tokens in found.tokens.items()]),
            "",
            *table(["seconds of a step", ""], [[name, f"{each:.3g}"] for name, each in found.seconds.items()]),
            "",
            "if",
            *(f"  {said} ({key})" for key, said in found.assumed.items()),
        ]
    )


def as_json(found: "RunPlan") -> str:
    """The plan as one line, sizes in bytes."""
    memory = [
        {
            "name": each.name,
            "devices": each.devices,
            "free": each.memory.device,
            "left": each.memory.left,
            "training": each.memory.training,
            "generating": each.memory.generating,
            "on_host": each.memory.on_host,
        }
        for each in found.shares
    ]
    return json.dumps(
        {
            "model": found.model,
            "parameters": found.parameters,
            "device": found.hardware.name,
            "memory": memory,
            "tokens": found.tokens,
            "seconds": found.seconds,
            "assumed": found.assumed,
        }
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns as wide as their longest entry; all but the first to the right."""
    first, *others = [len(max(column, key=len)) for column in zip(header, *rows, strict=True)]
    lines = []
    for name, *cells in (header, *rows):
        right = (cell.rjust(width) for cell, width in zip(cells, others, strict=True))
        lines.append("  ".join([name.ljust(first), *right]).rstrip())
    return lines


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}" if size else "-"


@hydra.main(version_base="1.3", config_path=str(config_dir("conf")), config_name="plan")
def _main(config: DictConfig) -> None:
    with compose.errors_as_sentences(config.output_dir):
        compose.check_overrides(config)
        compose.check_read(config)
        show = as_json if OmegaConf.select(config, "plan.json") else as_text
        found = plan(config)
    print(show(found))


def register() -> None:
    """Make the keys `plan.*` known to Hydra."""
    ConfigStore.instance().store(name="planning", node={"plan": schema_of(PlanConfig)})


def main() -> None:
    """Console entry point: configuration errors are one message and exit code 2."""
    register()
    compose.run_command(_main, within=None)


if __name__ == "__main__":
    main()

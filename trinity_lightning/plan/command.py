"""`python -m trinity_lightning.plan +recipe=grpo plan.device=H100-80GB`: the memory and time that a run needs.

Prints the memory of each device by part, and the tokens and seconds of a step. The configuration and the model's
config are enough: no weights are loaded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
    """The devices, speeds and lengths for which the plan is made.

    Attributes:
        device: the GPU to plan for, such as H100-80GB (an unknown name lists all). Null: this machine's GPU, or its
            CPU.
        memory_gb: GiB of a device that may be used. Null: for a GPU, the memory that CUDA reports; for a CPU, the free
            memory.
        host_gb: GiB of host memory that may be used. Null: the free memory if the plan is for this machine; no limit
            if it is for another one.
        tflops: 10^12 operations a second of a device's best matrix product. Null: for a GPU, its data sheet; for this
            machine's CPU, a measurement.
        bandwidth_gb: 10^9 bytes a second at which a device's memory is read. Null: as for tflops.
        training_share: share of tflops that training is assumed to reach (`perf/mfu`; 0.41 to 0.52 on a CPU).
        rollout_share: share that generation is assumed to reach, of tflops or of bandwidth_gb, whichever takes longer.
        sync_gb: 10^9 bytes a second at which weights are assumed to be sent. Null: 2 within one process on a CPU, 10
            within or between GPUs, 1 through a folder.
        prompt_tokens: tokens of a prompt; null: all that the response leaves of the context.
        response_tokens: tokens of a response; null: sampling.max_tokens.
        pictures: pictures of a prompt; null: 1 if the model reads pictures.
        picture_edge: width and height of a picture in pixels, on which the number of its tokens may depend.
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
    pictures: int | None = checked(None, whole_number, least=0, optional=True)
    picture_edge: int = checked(512, whole_number, least=2)
    json: bool = False


def plan(config: DictConfig) -> "RunPlan":
    """The plan of the configured run.

    Raises:
        ConfigError: a value cannot work; or a part does not fit, with its bytes and the keys that help.
    """
    if not isinstance(config.plan, DictConfig):
        raise ConfigError(f"plan is {config.plan!r}, and has keys", key="plan", fix=f"give plan.device={config.plan}")
    with open_dict(config):
        plan_config: PlanConfig = OmegaConf.to_object(config.pop("plan"))  # type: ignore[assignment]
    check(config, here=False)
    from trinity_lightning.plan.run import plan_run

    return plan_run(config, plan_config)


def as_text(run: "RunPlan") -> str:
    """The plan as tables for people."""
    devices = sum(share.devices for share in run.shares)
    phases: list[tuple[str, Mapping[str, int]]] = []
    for share in run.shares:
        if share.memory.shared:
            phases.append((f"{share.name}, training", share.memory.training))
            phases.append((f"{share.name}, generating", share.memory.generating))
        else:  # a trainer alone, which takes most while it trains; or vLLM alone, whose memory is constant
            phases.append((share.name, share.memory.training))
    names = dict.fromkeys(name for _, parts in phases for name in parts)
    rows = [[name, *(_gib(parts.get(name, 0)) for _, parts in phases)] for name in names]
    rows.append(["all of it", *(_gib(sum(parts.values())) for _, parts in phases)])
    return "\n".join(
        [
            run.model,
            f"on {devices} x {run.hardware.name}",
            "",
            *table(["GiB of a device", *(name for name, _ in phases)], rows),
            "",
            *(f"{share.name}: {share.memory.rows()[0][1]}" for share in run.shares),
            *(f"{name}: {parts}" for name, parts in run.shares[0].memory.rows() if name == "on the host"),
            "",
            *table(["tokens of a step", ""], [[name, f"{tokens:,}"] for name, tokens in run.tokens.items()]),
            "",
            *_pictures(run),
            *table(["seconds of a step", ""], [[name, f"{seconds:.3g}"] for name, seconds in run.seconds.items()]),
            "",
            "if",
            *(f"  {assumption} ({key})" for key, assumption in run.assumed.items()),
        ]
    )


def _pictures(run: "RunPlan") -> list[str]:
    """The lines about a step's pictures; none without pictures."""
    if run.pictures is None:
        return []
    rows = [
        ["pictures", f"{run.pictures.count:,}"],
        ["tokens of each", f"{run.pictures.tokens:,}"],
        ["MB of their pixels, on the host", f"{run.pictures.tensors / 1e6:,.1f}"],
    ]
    return [*table(["pictures of a step", ""], rows), ""]


def as_json(run: "RunPlan") -> str:
    """The plan as one line of JSON, sizes in bytes."""
    memory = [
        {
            "name": share.name,
            "devices": share.devices,
            "free": share.memory.device,
            "left": share.memory.left,
            "training": share.memory.training,
            "generating": share.memory.generating,
            "on_host": share.memory.on_host,
        }
        for share in run.shares
    ]
    pictures = {} if run.pictures is None else {"pictures": asdict(run.pictures)}
    return json.dumps(
        {
            "model": run.model,
            "parameters": run.parameters,
            "device": run.hardware.name,
            "memory": memory,
            "tokens": run.tokens,
            **pictures,
            "seconds": run.seconds,
            "assumed": run.assumed,
        }
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table. A column is as wide as its longest cell. All columns but the first are aligned right."""
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
        show = as_json if OmegaConf.select(config, "plan.json") else as_text
        text = show(plan(config))
    print(text)


def register() -> None:
    """Register the keys `plan.*` with Hydra."""
    ConfigStore.instance().store(name="planning", node={"plan": schema_of(PlanConfig)})


def main() -> None:
    """Console entry point. A configuration error is one message and exit code 2."""
    register()
    compose.run_command(_main, within=None)

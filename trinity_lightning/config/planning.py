"""What `python -m trinity_lightning.plan` is asked, besides the configuration of the run."""

from dataclasses import dataclass

from trinity_lightning.config.sections import Section, checked
from trinity_lightning.config.values import number, whole_number


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
        sync_gb: 10^9 bytes a second that weights are assumed to be sent with; null: 2 within a CPU's process, 10
            between GPUs or within a GPU's, 1 as a folder.
        prompt_tokens: tokens of a prompt; null: all that the context leaves to it.
        response_tokens: tokens of a response; null: the most, sampling.max_tokens.
        json: print one line of JSON instead of the tables.

    Raises:
        ConfigError: a number out of its range.
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

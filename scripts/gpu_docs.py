"""Write what the plan says into `docs/gpu.md`: the outputs of its commands, and the table of what fits.

python scripts/gpu_docs.py
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from functools import cache
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from trinity_lightning.common.hardware import GIB
from trinity_lightning.config import hydra as compose
from trinity_lightning.config.registry import config_dir
from trinity_lightning.errors import ConfigError
from trinity_lightning.plan.command import as_text, plan, register
from trinity_lightning.plan.run import RunPlan

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gpu.md"
SECTION = "## What the plan prints"
COMMANDS = re.compile(r"^    python -m trinity_lightning\.plan ((?:.*\\\n)*.*)", re.MULTILINE)
OUTPUTS = re.compile(r"(?<=```text\n).*?(?=\n```)", re.DOTALL)
TABLE = re.compile(r"^\| model \|.*?(?=\n\n)", re.DOTALL | re.MULTILINE)

MODELS = {name: f"Qwen2.5-{name}" for name in ("0.5B", "1.5B", "7B")}
STEP = (
    "explorer.batch_size=64",
    "explorer.repeat_times=8",
    "sampling.max_tokens=1024",
    "engine.max_model_len=1280",
    "plan.prompt_tokens=64",
)
DEVICES = {
    "16 GB": ("plan.device=T4",),
    "24 GB": ("plan.device=L4",),
    "80 GB": ("plan.device=H100-80GB",),
}
TRAINED = {
    "`adamw`": (),
    "`adamw_offload`": ("optimizer.name=adamw_offload",),
    "adapters (`model.lora.r=16`)": ("model.lora.r=16",),
}
WAYS = {(False, False): "together", (True, False): "in turns", (True, True): "in turns, optimizer too"}


def page() -> str:
    """The text of the page, with the plan's parts written anew."""
    before, _, rest = PAGE.read_text().partition(SECTION)
    section, end, after = rest.partition("\n## ")
    with models():
        commands = [command.replace("\\\n", " ").split() for command in COMMANDS.findall(section)]
        outputs = iter([as_text(planned(*command)) for command in commands])
        section = TABLE.sub(lambda _: table(), OUTPUTS.sub(lambda _: next(outputs), section))
    return before + SECTION + section + end + after


def table() -> str:
    """The table of what fits on which GPU."""
    rows = [["model", "trained by", *DEVICES], ["---"] * (2 + len(DEVICES))]
    rows += [
        [model, trained, *(cell(folder, *device, *settings) for device in DEVICES.values())]
        for model, folder in MODELS.items()
        for trained, settings in TRAINED.items()
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def cell(folder: str, *overrides: str) -> str:
    """How the GPU is shared, tokens of a micro-batch, what is left, seconds of a step; or the memory that is needed."""
    try:
        run = planned("+recipe=grpo", f"model.name={folder}", *STEP, *overrides)
    except ConfigError as error:
        [needed] = re.findall(r"a device of ([\d.]+ GiB) has room", str(error))
        return f"no: {needed}"
    memory, seconds = run.shares[0].memory, sum(run.seconds.values())
    way = WAYS[memory.sleep, memory.offload]
    return f"{way}, {memory.micro_batch_tokens:,} tokens, {memory.left / GIB:.1f} GiB left, {seconds:.0f} s"


@contextmanager
def models() -> Iterator[None]:
    """A working folder with the models' folders, in which there is nothing but config.json."""
    sys.path.append(str(ROOT / "benchmarks"))
    from _models import SHAPES  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for name, model in MODELS.items():
            config = SHAPES[name] | {"model_type": "qwen2", "max_position_embeddings": 32768}
            Path(model).mkdir()
            Path(model, "config.json").write_text(json.dumps(config))
        yield


def planned(*overrides: str) -> RunPlan:
    """The plan of a run with these overrides."""
    register_once()
    with initialize_config_dir(str(config_dir("conf")), version_base="1.3"):
        return plan(hydra_compose("plan", ["output_dir=x", *overrides]))


@cache
def register_once() -> None:
    """Register with Hydra what the command registers."""
    compose.register()
    register()


if __name__ == "__main__":
    PAGE.write_text(page())

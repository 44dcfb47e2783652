"""The command that goes on with a run, said when it stops."""

import re
import shlex
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from trinity_lightning.config.schema import PACKAGE_DIR


def resume_command(folder: str | Path) -> str | None:
    """The command that goes on with the run that was composed here, to be pasted; None if Hydra did not start it."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    words = _program()
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            words += ["--config-dir", source.path]
    words += [each for each in hydra.overrides.task if not each.startswith("ckpt_path=")]
    words += [each for each in hydra.overrides.hydra if not each.startswith(("hydra.mode=", "hydra.run.dir="))]
    words.append(f"hydra.run.dir={_quoted(str(Path(folder).absolute()))}")  # another run may be newer
    return shlex.join([*words, "ckpt_path=last"])


def _program() -> list[str]:
    """The words that started this process: a module of this package, a script, or a console command."""
    program = Path(sys.argv[0])
    if program.suffix != ".py":
        return [program.name]
    if program.resolve().is_relative_to(PACKAGE_DIR):
        return ["python", "-m", "trinity_lightning.train"]
    return ["python", sys.argv[0]]


def _quoted(value: str) -> str:
    """A value as Hydra reads it: in quotes if it has characters that mean something to Hydra."""
    return value if re.fullmatch(r"[\w/.+@-]+", value) else '"' + value.replace('"', '\\"') + '"'

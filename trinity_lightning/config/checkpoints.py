"""Which files and folders are checkpoints, which one is meant, and whether it is whole; before torch is imported."""

import logging
import re
import shlex
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from trinity_lightning.config.registry import PACKAGE_DIR
from trinity_lightning.config.values import AUTO
from trinity_lightning.errors import ConfigError, TakenFolderError

logger = logging.getLogger(__name__)

# In a checkpoint that is a folder: where the tensors in shards are, and all else, which is written last, by Lightning's
# name, and has the former's hash.
METADATA, REST, HASH = ".metadata", "meta.pt", "metadata_sha256"


def is_checkpoint(path: Path) -> bool:
    """Whether it is a file, or a folder that was written to its end."""
    return path.is_file() or (path / REST).is_file()


def checkpoints_in(folder: Path, pattern: str = "*.ckpt") -> list[Path]:
    """Those of that pattern in a folder, the one that was written last at the end.

    If a kill interrupted the replacement of NAME (`put_in_place`), the checkpoint before is still there as `.NAME.old`,
    and is listed in its place. It is only read: the run may be under way.
    """
    old = (each for each in folder.glob(f"{pattern}.old") if not is_checkpoint(each.with_name(each.name[1:-4])))
    return sorted(filter(is_checkpoint, [*folder.glob(pattern), *old]), key=lambda path: path.stat().st_mtime)


def check_checkpoint(config: DictConfig) -> None:
    """Refuse a checkpoint to resume from that does not exist or is damaged; a ConfigError."""
    check_whole(_newest(Path(config.output_dir)) if config.ckpt_path == "last" else Path(config.ckpt_path))


def hash_of(folder: Path) -> str:
    """That of a folder's METADATA, which REST has."""
    return sha256((folder / METADATA).read_bytes()).hexdigest()


def check_metadata(folder: Path) -> None:
    """A ValueError if METADATA is not as it was written, by its hash: it has no checksum, and torch would read less."""
    with ZipFile(folder / REST) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/data.pkl"))
        if hash_of(folder).encode() not in archive.read(name):  # a text in a pickle, whatever else it holds
            raise ValueError(f"{METADATA} is not as it was written")


def check_whole(path: Path) -> None:
    """Refuse what is no file that torch.save wrote, or is no longer as it was written.

    Such a file is a zip archive with a checksum of each entry: all of it is read once, 3 GB a second. Shards in a
    folder are checked as they are read (`common.checkpoints`). A ConfigError names the file, what is wrong, and the
    last checkpoint before it that is whole, if there is one.
    """
    if not is_checkpoint(path):
        what = "is a folder, and no whole checkpoint" if path.is_dir() else "is no file"
        raise ConfigError(
            f"ckpt_path: '{path}' {what}", key="ckpt_path", fix="give FOLDER/checkpoints/NAME.ckpt, or last"
        )
    if (problem := _problem(path)) is None:
        return
    there = reversed(checkpoints_in(path.parent))
    before = (each for each in there if each != path and each.stat().st_mtime <= path.stat().st_mtime)
    whole = next((each for each in before if _problem(each) is None), None)
    fix = f"the one before it, ckpt_path='{whole}'" if whole else "another, or leave ckpt_path out to begin again"
    raise ConfigError(f"'{path}' is no checkpoint of a training run, or a damaged one ({problem})", fix=f"give {fix}")


def _problem(path: Path) -> str | None:
    """In what way a checkpoint is not as it was written; None: it is."""
    try:
        with ZipFile(path / REST if path.is_dir() else path) as archive:
            broken = archive.testzip()
        if path.is_dir():
            check_metadata(path)
    except Exception as error:  # zipfile raises a dozen types, by which bytes are wrong
        return f"{error or type(error).__name__}".rstrip(".")
    return f"its part '{broken}' is not as it was written" if broken else None


def check_file(path: Path) -> None:
    """As `check_whole`, and refuse a checkpoint in shards, and other folders."""
    if path.is_dir() and not is_checkpoint(path):
        found = checkpoints_in(path) or checkpoints_in(path / "checkpoints")
        fix = f"give the file, '{found[-1]}'" if found else "it has none: give FOLDER/checkpoints/NAME.ckpt of a run"
        if (path / "config.json").is_file():
            fix = f"it holds a model, which is loaded by its name, PolicyModule('{path}')"
        raise ConfigError(f"'{path}' is a folder, and no checkpoint: {fix}.")
    check_whole(path)
    if path.is_dir():
        raise ConfigError(
            f"'{path}' is in shards, and a file is needed",
            fix="give it to Trainer.fit as ckpt_path, or take the folder `model` of its run (save_model=true)",
        )


def folder_to_resume(runs: Path) -> Path:
    """The folder of the run, of those in a folder, whose checkpoint is the newest; a ConfigError if none has one."""
    found = checkpoints_in(runs, "*/checkpoints/*.ckpt")
    if not found:
        raise ConfigError(f"ckpt_path=last: there is no checkpoint under {runs} to resume from.", key="ckpt_path")
    return found[-1].parents[1]


RECORD = Path(".hydra", "config.yaml")  # what was composed, as Hydra records it
# What may differ between two parts of one run: where it writes, and what it is shown by.
NOT_OF_THE_TRAINING = ("ckpt_path", "output_dir", "output_root", "logger", "hydra")


def folder_of_same_run(runs: Path, config: DictConfig) -> Path | None:
    """The folder of the run of this configuration, of those in a folder, whose checkpoint is the newest; None: none.

    Configurations are compared as they were composed, in Hydra's own records, without NOT_OF_THE_TRAINING.
    """
    this = _compared(config)
    folders = dict.fromkeys(path.parents[1] for path in reversed(checkpoints_in(runs, "*/checkpoints/*.ckpt")))
    recorded = (folder for folder in folders if (folder / RECORD).is_file())
    return next((folder for folder in recorded if _compared(OmegaConf.load(folder / RECORD)) == this), None)


def _compared(config: Any) -> dict[str, Any]:
    settings: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    return {key: value for key, value in settings.items() if key not in NOT_OF_THE_TRAINING}


def settle_auto(config: DictConfig, leads: bool) -> None:
    """Replace `ckpt_path=auto` by what it means in the run's folder: `last`, or null if there is no checkpoint.

    What a run left that ended before its first checkpoint is begun again, and a run that came to its end is not, though
    its checkpoints were removed. Other ranks, which do not lead, remove nothing.
    """
    if config.ckpt_path != AUTO:
        return
    folder = Path(config.output_dir)
    config.ckpt_path = "last" if checkpoints_in(folder / "checkpoints") else None
    if config.ckpt_path is None and leads and not any(folder.glob("model/*.safetensors")):
        for name in ("metrics.csv", "config.yaml"):  # the record last: without it nobody would know
            (folder / name).unlink(missing_ok=True)


def last_checkpoint(folder: str | Path) -> Path:
    """The newest checkpoint of a run's folder, which the log says; a ConfigError if there is none."""
    folder = Path(folder)
    last = _newest(folder)
    later = sorted(run.name for run in folder.parent.glob("*-*-*_*") if run.name > folder.name)
    without = [name for name in later if not checkpoints_in(folder.parent / name / "checkpoints")]
    passed_over = f"; begun later, and without a checkpoint: {', '.join(without)}" if without else ""
    logger.info("ckpt_path=last is %s%s", last, passed_over)
    return last


def _newest(folder: Path) -> Path:
    found = checkpoints_in(folder / "checkpoints")
    if not found:
        raise ConfigError(
            f"ckpt_path=last: there is no checkpoint in {folder / 'checkpoints'} (a job of a sweep has a new folder of "
            "its own)",
            key="ckpt_path",
            fix="give ckpt_path=FILE, or output_dir=FOLDER of the run to go on with",
        )
    return found[-1]


def recorded_run(record: Path) -> DictConfig:
    """The `config.yaml` of a run; a ConfigError if the file is damaged."""
    try:
        run = OmegaConf.load(record)
        if isinstance(OmegaConf.select(run, "model.name"), str):
            return run  # type: ignore[return-value]
        reason = "it names no model"
    except Exception as error:  # of YAML, OmegaConf, the decoder or the disk
        reason = str(error).splitlines()[0]
    raise ConfigError(
        f"'{record}', which says what the run to resume is, is damaged ({reason}): restore it, or delete it, and give "
        "the same configuration."
    )


def holds_a_run(folder: Path) -> TakenFolderError:
    """The error to raise when another run is begun in a folder that holds one already."""
    resume = "go on with it (ckpt_path=last)" if checkpoints_in(folder / "checkpoints") else "delete this one"
    return TakenFolderError(f"'{folder}' holds a run already: give another folder, or {resume}.")


def resume_command(folder: str | Path) -> str | None:
    """The command that goes on with the run that was composed here, to be pasted; None if Hydra did not start it."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    words = _program()
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            words += ["--config-dir", source.path]
    words += [each for each in hydra.overrides.task if not each.lstrip("+").startswith(("ckpt_path=", "output_dir="))]
    words += [each for each in hydra.overrides.hydra if not each.startswith(("hydra.mode=", "hydra.run.dir="))]
    # Another run may be newer. A `hydra.run.dir` that is not ours, such as a recipe's own, does not follow output_dir.
    key = "output_dir" if "trinity.run_dir" in str(OmegaConf.to_container(hydra.run)) else "hydra.run.dir"
    words.append(f"{key}={_quoted(str(Path(folder).absolute()))}")
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

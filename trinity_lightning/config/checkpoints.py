"""Finds and checks checkpoints on disk, without torch; and makes the command that resumes a run."""

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

# Files of a checkpoint that is a folder. METADATA is the index of its sharded tensors. REST, a name of Lightning's, is
# written last; it has everything else, and the index's hash under the key HASH.
METADATA, REST, HASH = ".metadata", "meta.pt", "metadata_sha256"


# -- whole and damaged checkpoints -------------------------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    """True for a file, and for a folder that was written to its end."""
    return path.is_file() or (path / REST).is_file()


def checkpoints_in(folder: Path, pattern: str = "*.ckpt") -> list[Path]:
    """Checkpoints in a folder whose names match the pattern, the newest last.

    If a kill interrupted the replacement of NAME (`put_in_place`), the earlier checkpoint still exists as `.NAME.old`,
    and is listed instead. It is not renamed, because the run may still be going.
    """
    old = (path for path in folder.glob(f"{pattern}.old") if not is_checkpoint(path.with_name(path.name[1:-4])))
    return sorted(filter(is_checkpoint, [*folder.glob(pattern), *old]), key=lambda path: path.stat().st_mtime)


def check_checkpoint(config: DictConfig) -> None:
    """Refuse a checkpoint to resume from that does not exist or is damaged; a ConfigError."""
    check_whole(_newest(Path(config.output_dir)) if config.ckpt_path == "last" else Path(config.ckpt_path))


def hash_of(folder: Path) -> str:
    """The hash of a folder's METADATA, which REST holds too."""
    return sha256((folder / METADATA).read_bytes()).hexdigest()


def check_metadata(folder: Path) -> None:
    """Refuse METADATA that has changed since it was written; a ValueError.

    The file has no checksum of its own, and torch would silently load fewer tensors.
    """
    with ZipFile(folder / REST) as archive:
        (name,) = (entry for entry in archive.namelist() if entry.endswith("/data.pkl"))
        if hash_of(folder).encode() not in archive.read(name):  # a pickle holds the text of a hash unchanged
            raise ValueError(f"{METADATA} is not as it was written")


def check_whole(path: Path) -> None:
    """Refuse a file that torch.save did not write, or that has changed since it was written.

    A checkpoint is a zip archive with a checksum for each entry. It is read once from end to end, at 3 GB a second.
    Shards in a folder are checked when they are read (`common.checkpoints`).

    Raises:
        ConfigError: names the file, the problem, and the last whole checkpoint before it, if there is one.
    """
    if not is_checkpoint(path):
        problem = "is a folder, and no whole checkpoint" if path.is_dir() else "is no file"
        raise ConfigError(
            f"ckpt_path: '{path}' {problem}", key="ckpt_path", fix="give FOLDER/checkpoints/NAME.ckpt, or last"
        )
    if (problem := _problem(path)) is None:
        return
    newest_first = reversed(checkpoints_in(path.parent))
    before = (other for other in newest_first if other != path and other.stat().st_mtime <= path.stat().st_mtime)
    whole = next((other for other in before if _problem(other) is None), None)
    fix = f"the one before it, ckpt_path='{whole}'" if whole else "another, or leave ckpt_path out to begin again"
    raise ConfigError(
        f"'{path}' is no checkpoint of a training run, or a damaged one ({problem})",
        key="ckpt_path",
        fix=f"give {fix}",
    )


def _problem(path: Path) -> str | None:
    """The damage of a checkpoint, in words; None if it is whole."""
    try:
        with ZipFile(path / REST if path.is_dir() else path) as archive:
            broken = archive.testzip()
        if path.is_dir():
            check_metadata(path)
    except Exception as error:  # zipfile raises a dozen types of errors
        return f"{error or type(error).__name__}".rstrip(".")
    return f"its part '{broken}' is not as it was written" if broken else None


def check_file(path: Path) -> None:
    """Refuse a folder, even if it is a checkpoint in shards; otherwise as `check_whole`."""
    if path.is_dir() and not is_checkpoint(path):
        inside = checkpoints_in(path) or checkpoints_in(path / "checkpoints")
        fix = f"give the file, '{inside[-1]}'" if inside else "it has none: give FOLDER/checkpoints/NAME.ckpt of a run"
        if (path / "config.json").is_file():
            fix = f"it holds a model, which is loaded by its name, PolicyModule('{path}')"
        raise ConfigError(f"'{path}' is a folder, and no checkpoint", key="ckpt_path", fix=fix)
    check_whole(path)
    if path.is_dir():
        raise ConfigError(
            f"'{path}' is in shards, and a file is needed",
            key="ckpt_path",
            fix="give it to Trainer.fit as ckpt_path, or take the folder `model` of its run (save_model=true)",
        )


# -- the run to resume -------------------------------------------------------------------------------------------------


def folder_to_resume(runs: Path) -> Path:
    """The folder below `runs` with the newest checkpoint; a ConfigError if there is no checkpoint."""
    checkpoints = checkpoints_in(runs, "*/checkpoints/*.ckpt")
    if not checkpoints:
        raise ConfigError(f"ckpt_path=last: there is no checkpoint under {runs} to resume from.", key="ckpt_path")
    return checkpoints[-1].parents[1]


RECORD = Path(".hydra", "config.yaml")  # Hydra's record of the composed configuration
# Keys that may differ between two parts of one run: they say where it reads and writes, and do not change the training.
NOT_OF_THE_TRAINING = ("ckpt_path", "output_dir", "output_root", "logger", "hydra")


def folder_of_same_run(runs: Path, config: DictConfig) -> Path | None:
    """The folder below `runs` of a run with this configuration; None if no such run has a checkpoint.

    Of several runs, the one with the newest checkpoint is returned. Configurations are compared by Hydra's records of
    them, without callbacks and the keys of NOT_OF_THE_TRAINING.
    """
    settings = _training_settings(config)
    folders = dict.fromkeys(path.parents[1] for path in reversed(checkpoints_in(runs, "*/checkpoints/*.ckpt")))
    recorded = (folder for folder in folders if (folder / RECORD).is_file())
    same = (folder for folder in recorded if _training_settings(OmegaConf.load(folder / RECORD)) == settings)
    return next(same, None)


def _training_settings(config: Any) -> dict[str, Any]:
    settings: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    return {key: value for key, value in settings.items() if key not in (*NOT_OF_THE_TRAINING, "callbacks")}


def settle_auto(config: DictConfig, leads: bool) -> None:
    """Replace `ckpt_path=auto` by `last`, or by null if the run's folder has no checkpoint.

    A run that ended before its first checkpoint begins again, and the leading rank (`leads`) removes its record. A run
    that has finished does not begin again, even if its checkpoints were removed.
    """
    if config.ckpt_path != AUTO:
        return
    folder = Path(config.output_dir)
    config.ckpt_path = "last" if checkpoints_in(folder / "checkpoints") else None
    if config.ckpt_path is None and leads and not any(folder.glob("model/*.safetensors")):
        for name in ("metrics.csv", "config.yaml"):  # config.yaml last, because it marks the folder as a run's
            (folder / name).unlink(missing_ok=True)


def last_checkpoint(folder: str | Path) -> Path:
    """The newest checkpoint of a run's folder, whose path is logged; a ConfigError if there is none."""
    folder = Path(folder)
    last = _newest(folder)
    later = sorted(run.name for run in folder.parent.glob("*-*-*_*") if run.name > folder.name)
    skipped = [name for name in later if not checkpoints_in(folder.parent / name / "checkpoints")]
    hint = f"; begun later, and without a checkpoint: {', '.join(skipped)}" if skipped else ""
    logger.info("ckpt_path=last is %s%s", last, hint)
    return last


def _newest(folder: Path) -> Path:
    checkpoints = checkpoints_in(folder / "checkpoints")
    if not checkpoints:
        raise ConfigError(
            f"ckpt_path=last: there is no checkpoint in {folder / 'checkpoints'} (a job of a sweep has a new folder of "
            "its own)",
            key="ckpt_path",
            fix="give ckpt_path=FILE, or output_dir=FOLDER of the run to go on with",
        )
    return checkpoints[-1]


def recorded_run(record: Path) -> DictConfig:
    """The `config.yaml` of a run; a ConfigError if the file is damaged."""
    try:
        run = OmegaConf.load(record)
        if isinstance(OmegaConf.select(run, "model.name"), str):
            return run  # type: ignore[return-value]
        reason = "it names no model"
    except Exception as error:  # an error of YAML, of OmegaConf, of decoding or of the disk
        reason = str(error).splitlines()[0]
    raise ConfigError(
        f"'{record}', the record of the run to resume, is damaged ({reason})",
        fix="restore it, or delete it, and give the same configuration",
    )


def holds_a_run(folder: Path) -> TakenFolderError:
    """The error to raise when another run is begun in a folder that holds one already."""
    resume = "go on with it (ckpt_path=last)" if checkpoints_in(folder / "checkpoints") else "delete this one"
    return TakenFolderError(f"'{folder}' holds a run already: give another folder, or {resume}.")


# -- the command that resumes a run ------------------------------------------------------------------------------------


def resume_command(folder: str | Path) -> str | None:
    """The shell command that resumes this run; None if Hydra did not start the run."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    words = _program()
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            words += ["--config-dir", source.path]
    words += [item for item in hydra.overrides.task if not item.lstrip("+").startswith(("ckpt_path=", "output_dir="))]
    words += [item for item in hydra.overrides.hydra if not item.startswith(("hydra.mode=", "hydra.run.dir="))]
    # The command names the folder, because another run may be newer. If a recipe sets `hydra.run.dir`, the folder does
    # not follow output_dir.
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
    """A value for Hydra's command line, in quotes if it has special characters."""
    return value if re.fullmatch(r"[\w/.+@-]+", value) else '"' + value.replace('"', '\\"') + '"'

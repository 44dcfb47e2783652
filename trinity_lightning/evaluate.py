"""`python -m trinity_lightning.evaluate +recipe=grpo ckpt_path=last`: evaluate a model or its checkpoints."""

import re
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from trinity_lightning.config import hydra as compose
from trinity_lightning.config.checkpoints import check_whole, checkpoints_in, is_checkpoint, last_checkpoint
from trinity_lightning.config.engines import SENT
from trinity_lightning.config.explorer import SYNCHRONOUS
from trinity_lightning.config.lightning_objects import check_loggers, check_modules, check_targets
from trinity_lightning.config.own_parts import check_own_parts
from trinity_lightning.config.registry import config_dir
from trinity_lightning.config.run import validate
from trinity_lightning.errors import ConfigError
from trinity_lightning.train import check_models, refusals_of_parts


def evaluate(config: DictConfig) -> dict[int, dict[str, float]]:
    """Evaluate as configured, and return the metrics by explore step; step 0 is the model itself.

    Raises:
        ConfigError: there is no taskset, there is no such checkpoint, or a value cannot work.
    """
    run = validate(config, trains=False)
    if not config.eval_tasksets:
        raise ConfigError(
            "there is nothing to evaluate on",
            key="eval_tasksets",
            fix="give eval_tasksets, or a recipe that has some (+recipe=NAME)",
        )
    check_own_parts(run, trains=False)
    check_modules(config)
    check_loggers(config)
    checkpoints = find_checkpoints(config)
    for checkpoint in checkpoints:
        check_whole(checkpoint)
    from trinity_lightning.explorer.tasks.taskset import check_tasksets

    check_tasksets({f"eval_tasksets.{name}": taskset for name, taskset in run.eval_tasksets.items()})
    check_models(run)
    check_targets(config)
    from trinity_lightning.build import logging_to
    from trinity_lightning.evaluation import build_evaluation

    with refusals_of_parts():
        evaluation = build_evaluation(config, checkpoints)
    with logging_to(evaluation.loggers, config):
        return evaluation.run()


def find_checkpoints(config: DictConfig) -> list[Path]:
    """The checkpoints that `ckpt_path` names, oldest first: none, one file, all of a folder, or the recipe's newest.

    Raises:
        ConfigError: `ckpt_path` is given, and there is no checkpoint.
    """
    if config.ckpt_path is None:
        return []
    if config.ckpt_path == "last":
        return [last_checkpoint(compose.run_dir(config.output_root, config.name, "last"))]
    path = Path(config.ckpt_path)
    if is_checkpoint(path):
        return [path]
    checkpoints = sorted([*checkpoints_in(path), *checkpoints_in(path / "checkpoints")], key=_by_step)
    if not checkpoints:
        raise ConfigError(f"ckpt_path: '{path}' is neither a checkpoint nor a folder that holds one.", key="ckpt_path")
    return checkpoints


def _by_step(path: Path) -> tuple[bool, Sequence[int], str]:
    """A sort key: files named by a step come first, by number; files written at the end or on Ctrl-C follow."""
    numbers = [int(number) for number in re.findall(r"\d+", path.name)]
    return not numbers, numbers, path.name


def _without_training(config: DictConfig) -> None:
    """Reset the settings that only training needs: an evaluation is one process, and gives servers weights as a folder.

    Raises:
        ConfigError: servers run already, and `synchronizer.folder`, which they must see, is not configured.
    """
    if OmegaConf.select(config, "synchronizer.method") in SENT:
        if config.engine.urls and config.synchronizer.folder is None:
            raise ConfigError(
                "an evaluation gives the servers of engine.urls their weights as a folder",
                key="synchronizer.folder",
                fix="set synchronizer=checkpoint and synchronizer.folder to one that they see",
            )
        config.synchronizer.method = "auto"
    neutral = {f"explorer.{key}": value for key, value in SYNCHRONOUS.items()} | {"engine.per_rank": False}
    for key, default in neutral.items():
        if OmegaConf.select(config, key) is not None:  # the section may be left out
            OmegaConf.update(config, key, default)
    if isinstance(config.trainer, DictConfig):
        with open_dict(config.trainer):
            for key in ("strategy", "devices", "num_nodes"):
                config.trainer.pop(key, None)


@hydra.main(version_base="1.3", config_path=str(config_dir("conf")), config_name="evaluate")
def _main(config: DictConfig) -> None:
    with compose.errors_as_sentences(config.output_dir):
        compose.check_overrides(config)
        compose.check_folder(config)
        _without_training(config)
        with compose.sole_writer(Path(config.output_dir)):
            evaluate(config)


def main() -> None:
    """Console entry point. A configuration error is one message and exit code 2."""
    compose.run_command(_main, within="evaluate")


if __name__ == "__main__":
    main()

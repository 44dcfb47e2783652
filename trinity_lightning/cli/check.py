"""`trinity-lightning check +recipe=NAME`: score completions of the untrained model, before anything is trained."""

import os
import shlex
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from trinity_lightning.config import hydra as compose
from trinity_lightning.config.explain import line_in_recipe
from trinity_lightning.config.registry import config_dir
from trinity_lightning.config.sections import Section, checked, schema_of
from trinity_lightning.config.values import AUTO, whole_number
from trinity_lightning.errors import ConfigError
from trinity_lightning.train import check as check_run
from trinity_lightning.train import refusals_of_parts

if TYPE_CHECKING:
    from trinity_lightning.cli.trial import Trial


WIDTH = 100  # characters in a line of advice


@dataclass
class CheckConfig(Section, key="check"):
    """Settings of the check.

    Attributes:
        tasks: number of the run's first tasks that are tried, explorer.repeat_times times each.
    """

    tasks: int = checked(5, whole_number, least=1)


def check(config: DictConfig) -> "Trial":
    """Try the run's first tasks, and return what came of them. The configuration is checked as the run's is.

    Raises:
        ConfigError: the run would be refused; or it has no rollouts, or is to go on from a checkpoint.
        RewardError: a reward function failed for every completion; the message names its file and line.
        RolloutError: no completion came of the tasks, for other reasons.
    """
    if not isinstance(config.check, DictConfig):
        raise ConfigError(
            f"check is {config.check!r}, and has keys", key="check", fix=f"give check.tasks={config.check}"
        )
    with open_dict(config):
        settings: CheckConfig = OmegaConf.to_object(config.pop("check"))  # type: ignore[assignment]
    if config.ckpt_path not in (None, AUTO):
        raise ConfigError(
            "a check looks at the model before it is trained",
            key="ckpt_path",
            fix="leave ckpt_path out; trinity-lightning evaluate looks at checkpoints",
        )
    config.ckpt_path = None
    if OmegaConf.select(config, "buffer.storage") != "memory":
        raise ConfigError(
            "this run trains on stored data, and has no completions of its own to check",
            key="buffer.storage",
            fix="check a recipe that generates, such as grpo",
        )
    with refusals_with_their_line():
        check_run(config)
    from trinity_lightning.cli.trial import build_trial

    with refusals_of_parts():
        return build_trial(config, settings.tasks)


@contextmanager
def refusals_with_their_line() -> Iterator[None]:
    """Begin the message of a ConfigError with the recipe's line that sets its key, if the recipe does."""
    try:
        yield
    except ConfigError as error:
        if error.key is None or (line := line_in_recipe(error.key)) is None:
            raise
        raise ConfigError(f"{line}: {error}", key=error.key) from error


def show(trial: "Trial") -> bool:
    """Print completions, rewards, signal and advice; True if the run can learn."""
    from trinity_lightning.cli.trial import hints, lines_of, problems

    print(*lines_of(trial), sep="\n")
    wrong = problems(trial)
    for sentence in (*wrong, *hints(trial)):
        print(textwrap.fill(sentence, WIDTH, initial_indent="- ", subsequent_indent="  "))
    print(f"All completions are in {trial.folder}{os.sep}completions.")
    if not wrong:
        why = "There is a teacher" if trial.objective.teacher else "The rewards differ"
        print(f"{why}, so there is something to learn. Train: {_command()}")
    return not wrong


def _command() -> str:
    """The command of the run that was checked."""
    hydra_config = HydraConfig.get()
    folders = [source.path for source in hydra_config.runtime.config_sources if source.provider == "command-line"]
    words = [word for folder in folders for word in ("--config-dir", os.path.relpath(folder))]
    words += [
        word for word in hydra_config.overrides.task if not word.lstrip("+").startswith(("check.", "output_dir="))
    ]
    return shlex.join(["trinity-lightning", *words])


@hydra.main(version_base="1.3", config_path=str(config_dir("conf")), config_name="check")
def _main(config: DictConfig) -> None:
    with compose.errors_as_sentences(config.output_dir, keeps_log=False):
        compose.check_overrides(config)
        compose.check_folder(config)
        with compose.sole_writer(Path(config.output_dir)):
            can_learn = show(check(config))
    if not can_learn:
        sys.exit(1)


def register() -> None:
    """Register the keys `check.*` with Hydra."""
    ConfigStore.instance().store(name="checking", node={"check": schema_of(CheckConfig)})


def main() -> None:
    """Console entry point. Exit code 1: nothing would be learned, or completions failed; 2: a wrong configuration."""
    register()
    compose.run_command(_main, within="check")


if __name__ == "__main__":
    main()

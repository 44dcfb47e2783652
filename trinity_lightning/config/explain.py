"""Explains errors of Hydra, OmegaConf and YAML in one sentence each, and ends a command that failed."""

import argparse
import logging
import re
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trinity_lightning.config.own_code import described, place_of
from trinity_lightning.config.registry import config_dir, groups, options
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.sections import choice_of, keys_like, sentence_of
from trinity_lightning.config.trainer import NOT_OF_A_RUN, SET_INSTEAD
from trinity_lightning.config.values import nearest, unknown_name
from trinity_lightning.errors import ConfigError, RankTerminatedError, TakenFolderError, TrinityError

# Commands other than training, and their modules.
PROGRAMS = {
    **{name: f"trinity_lightning.{name}" for name in ("plan", "evaluate", "report")},
    **{name: f"trinity_lightning.cli.{name}" for name in ("check", "dashboard", "doctor", "new", "watch")},
}
CONFIG_ERRORS = (ConfigError, HydraException, OmegaConfBaseException, YAMLError)
begun: set[Path] = set()  # folders of runs and evaluations that this process made, or Hydra made for it
LOCK = ".lock"

_COMPOSING = ("hydra", "omegaconf", "antlr4", "yaml")  # packages that compose a configuration

# -- one sentence about an error ---------------------------------------------------------------------------------------

# Messages of Hydra and OmegaConf.
_NEW_ENTRY = re.compile(r"Error merging override \+{1,2}(\w+)\.(\w+)\.([\w.]+)=(.*)")
_IN_A_FILE = re.compile(r"In '(\w+)/(.*)': ")
_SET_ALREADY = re.compile(r"Could not append to config\. An item is already at '([^']+)'")
_NOT_TO_DELETE = re.compile(r"Could not delete from config\. '(\w+)\.[^']+' does not exist")
_TWICE = re.compile(r"Multiple values for ([\w/]+)\.")
_SEVERAL = re.compile(r"Ambiguous value for argument '([^=]+)=(.*)'\n")
_NOT_CHOSEN = re.compile(r"Could not override '.*'\. No match in the defaults list\.\n.* use (\+(\S+)=\S+)")
_NEW_MAPPING = re.compile(r"Error merging override \+{1,2}(\w+)\.(\w+)=(\{.*\})$")
_NAME_FOR_KEYS = re.compile(r"Merge error: str is not a subclass of (\w+)|Cannot assign str to Dict")


def explain(error: BaseException) -> str:
    """One sentence about an error of `CONFIG_ERRORS`; the message of any other error."""
    if isinstance(error, yaml.MarkedYAMLError):
        return _explain_yaml(error)
    if isinstance(error, OverrideParseException):
        return _explain_grammar(str(error.override))
    file = _IN_A_FILE.match(str(error))
    if isinstance(error, MissingConfigException):
        place = f"{file[1]}/{file[2]}.yaml: " if file else ""
        return place + _explain_missing(str(error.missing_cfg_file), error.options)
    root = _root(error)
    if (entry := _NEW_ENTRY.match(str(error))) and "is not a subclass of" in str(root):
        group, name, key, value = entry.groups()
        whole = f"{{{name}: {{name: {name}, {key}: {value}}}}}"
        return f"'{group}.{name}' is not there yet: add it as a whole, with all of its keys, '+{group}={whole}'."
    if (entry := _NEW_MAPPING.match(str(error))) and "is not a subclass of" in str(root):
        group, name, values = entry.groups()
        return f"'{group}.{name}' is not there yet: add it as a whole, '+{group}={{{name}: {values}}}'."
    if several := _SEVERAL.match(str(error)):
        key, values = several.groups()
        return f"{key} has several values: put --multirun first for a run of each, or give a list, {key}=[{values}]."
    if not_chosen := _NOT_CHOSEN.match(str(error)):
        return f"{not_chosen[2]} is not chosen yet: add it with a plus sign, {not_chosen[1]}."
    if already := _SET_ALREADY.match(str(root)):
        return f"'{already[1]}' is set already: leave out the plus sign, {already[1]}=VALUE."
    if missing := _NOT_TO_DELETE.match(str(root)):
        sweep = f" A sweep needs it before it has chosen a recipe: leave out all of them, '~{missing[1]}'."
        return f"{str(root).partition('. ')[2]}{sweep if {'--multirun', '-m'} & {*sys.argv} else ''}"
    if twice := _TWICE.match(str(root)):
        return f"{twice[1]} is chosen twice: give {'+' if twice[1] == 'recipe' else ''}{twice[1]}=NAME once."
    if isinstance(root, ConfigError) or not isinstance(root, OmegaConfBaseException):
        return " ".join(str(root).split()) if isinstance(root, yaml.YAMLError) else str(root).strip()
    place = f"{_place(file[1], file[2], str(root.full_key))}: " if file else ""
    if file and root.full_key == file[1]:
        return f"{place}write '# @package _global_' as its first line, for its keys to be those of the whole run."
    group, _, name = str(root.full_key).rpartition(".")
    if group in groups() and name in options(group):
        return f"'{group}.{name}' is not there: choose it first, {group}={name}."
    return place + (_explain_choice(root) or _explain_key_of_others(root) or sentence_of(root))


def _explain_key_of_others(error: OmegaConfBaseException) -> str | None:
    """The sentence for a missing key of the planner or of Lightning's Trainer; None for any other error."""
    key = str(error.full_key or error.key or "")
    if "not in" not in str(error):
        return None
    if key == "plan":
        return "plan.* is asked of another command: python -m trinity_lightning.plan, with the run's own arguments."
    if key == "trainer.strategy":
        return "trainer.strategy comes with a group: choose trainer=ddp or trainer=fsdp2."
    prefix, _, name = key.rpartition(".")
    if prefix == "trainer" and name in NOT_OF_A_RUN:
        return f"{key} {NOT_OF_A_RUN[name]}."
    if prefix == "trainer" and name in SET_INSTEAD:
        return f"{key}: {SET_INSTEAD[name][1]}."
    return None


def explain_composition(error: Exception) -> str | None:
    """One sentence about a Python error that Hydra raised while composing or making a folder; None for other errors."""
    if str(error).startswith("No trials are completed yet"):  # Optuna's error about the best trial
        return "no job of the sweep succeeded: see the train.log in each job's folder."
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [frame.f_globals["__name__"].partition(".")[0] for frame in frames]
    libraries = [name for name in packages if name not in sys.stdlib_module_names]
    # A recursion reaches its limit in any library that it calls: the one with most frames is the one that recurs.
    raised_in = Counter(libraries).most_common(1)[0][0] if isinstance(error, RecursionError) else libraries[-1]
    if raised_in not in _COMPOSING:
        return None
    if str(error).startswith("Config group override must be a string or a list"):  # engine=3, and =3
        return _explain_group(frames[-1].f_locals["override"])
    if isinstance(error, TypeError):  # engine=[3]
        override = _no_choice(frames)
        return None if override is None else _explain_group(override)
    if isinstance(error, AssertionError | AttributeError):
        return _explain_null(frames)
    files = [f"{frame.f_locals['config_path']}.yaml" for frame in frames if "config_path" in frame.f_locals]
    if files and (sentence := _explain_defaults(files[-1], str(error))) is not None:
        return sentence
    if isinstance(error, RecursionError):
        return "the `defaults` of a recipe lead back to the recipe itself: leave out the entry that does."
    if isinstance(error, UnicodeDecodeError):
        paths = [frame.f_locals["full_path"] for frame in frames if "full_path" in frame.f_locals]
        return f"{paths[-1] if paths else 'a configuration file'} is no text: give a YAML file in UTF-8."
    cause = error if isinstance(error, OSError) else error.__cause__  # the module logging wraps the error
    if isinstance(cause, OSError) and cause.strerror:
        file = f", '{cause.filename}'" if cause.filename else ""  # the error of a full disk names no file
        return f"output_dir or hydra.run.dir: cannot write the run's folder{file}: {cause.strerror}: give another one."
    return None


def _explain_yaml(error: yaml.MarkedYAMLError) -> str:
    mark, problem = error.problem_mark, str(error.problem)
    if r"'\t'" in problem:
        problem = "there is a tab, and YAML takes spaces only"
    elif problem.startswith("found duplicate key"):
        problem = f"the key '{problem.rpartition(' ')[2]}' is there twice: leave one of them out"
    return f"{mark.name}, line {mark.line + 1}: {problem}." if mark else f"{problem}."


def _explain_grammar(override: str) -> str:
    key, equals, value = override.partition("=")
    if override in keys_like(override, TrainConfig):  # KEY = VALUE, or KEY VALUE
        return f"cannot read the override '{override}': give {override}=VALUE, without spaces."
    if not (key and equals):
        names = {program: program for program in PROGRAMS}
        names |= {recipe: f"+recipe={recipe}" for recipe in options("recipe")}
        hint = f" Did you mean {names[match]}?" if (match := nearest(override, names)) else ""
        return f"cannot read the override '{override}': give KEY=VALUE.{hint}"
    quoted = value.strip('"')
    hint = f"quote a value with other characters that mean something to Hydra: '{key}=\"{quoted}\"'"
    return f"cannot read the override '{override}': close every bracket and quote, and {hint}."


def _no_choice(frames: Sequence[FrameType]) -> Override | None:
    """The override that sets a group to anything but a choice's name or a list of names; None if there is none."""
    parsed = (frame.f_locals["parsed_overrides"] for frame in frames if "parsed_overrides" in frame.f_locals)
    for override in next(parsed, []):
        value = override.value()
        is_list = isinstance(value, list) and override.key_or_group in {*groups(), "recipe"}
        if is_list and not all(isinstance(name, str) for name in value):
            return override
    return None


def _explain_null(frames: Sequence[FrameType]) -> str | None:
    """The sentence about an override that sets something in a mapping that is null; None if there is none."""
    composing = next((frame for frame in frames if frame.f_code.co_name == "_apply_overrides_to_config"), None)
    if composing is None:
        return None
    override, config = composing.f_locals["override"], composing.f_locals["cfg"]
    names = override.key_or_group.split(".")
    keys = [".".join(names[: count + 1]) for count in range(len(names))]
    null = next((key for key in keys if OmegaConf.select(config, key) is None), None)
    return null and f"{null} is null, and '{override.input_line}' would set something in it: leave out {null}=null."


def _explain_defaults(file: str, problem: str) -> str | None:
    """The sentence about a file, or its `defaults`, that Hydra cannot read; None for another problem."""
    if problem.startswith("Invalid loaded object type"):
        return f"{file} holds no keys: give KEY: VALUE, one a line."
    if "defaults" in problem or "default item" in problem:
        return (
            f"{file}: `defaults` is a list of recipes to build on (- grpo), of choices in groups "
            "(- override /engine: transformers), and of _self_, the file's own keys; every choice is a name, or a list "
            "of names."
        )
    return None


def _explain_group(override: Override) -> str:
    if not (group := override.key_or_group):
        return _explain_grammar(str(override.input_line))
    none = f", or '~{group}' for none" if override.value() is None and group in ("callbacks", "logger") else ""
    plus = "+" if group == "recipe" else ""
    choice = f"give the group the name of a choice, {plus}{group}=NAME{none}"
    return f"{override.input_line}: {choice}. Known: {', '.join(options(group))}."


# Choices of Hydra's groups that come with the extra `sweep`.
_PLUGINS = ("sweeper/optuna", *(f"launcher/{name}" for name in ("joblib", "ray", "submitit_local", "submitit_slurm")))


def _explain_missing(path: str, known: Sequence[str] | None) -> str:
    """The sentence about a missing file or choice; `known` are the choices of its group, None if Hydra lists none."""
    group, slash, name = path.partition("/")
    if group == "hydra" and name in _PLUGINS:
        return (
            f"hydra/{name.replace('/', '=')} is a plugin that is not installed: pip install 'trinity-lightning[sweep]'."
        )
    if not slash:
        return "there is no such file: leave out --config-name and --config-path, and choose a recipe by +recipe=NAME."
    hint = " Your own is FOLDER/recipe/NAME.yaml, with --config-dir FOLDER." if group == "recipe" else ""
    if group in ("engine", "workflow") and "." in name:
        hint = f" Your own goes by {group}.name={name}."
    if group == "model":
        hint = " Your own goes by model=custom model.name=FOLDER, or a name of the hub."
    return unknown_name(group, name, options(group) if known is None else known) + hint


def _place(group: str, name: str, key: str) -> str:
    """A configuration file, and the key's line if the file is in this package or in the folder of `--config-dir`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path, default=Path())
    shipped = config_dir("recipes") if group == "recipe" else config_dir("conf") / group
    places = [folder / f"{name}.yaml" for folder in (parser.parse_known_args()[0].config_dir / group, shipped)]
    path = next((path for path in places if path.is_file()), None)
    line = _line(yaml.compose(path.read_text()), key.split(".")) if path else None
    return f"{group}/{name}.yaml" + ("" if line is None else f", line {line}")


def line_in_recipe(key: str) -> str | None:
    """The chosen recipe and its line that sets a key, as "recipe/mine.yaml, line 7"; None if it does not set it."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    names = (override.lstrip("+").partition("=")[0] for override in hydra.overrides.task)
    recipe = hydra.runtime.choices.get("recipe")
    if not isinstance(recipe, str) or any(key == name or key.startswith(f"{name}.") for name in names):
        return None
    place = _place("recipe", recipe, key)
    return place if ", line " in place else None


def _line(node: yaml.Node | None, keys: Sequence[str]) -> int | None:
    """The line number of nested keys in a YAML tree; None if they are not there."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value == keys[0]:
            return key.start_mark.line + 1 if len(keys) == 1 else _line(value, keys[1:])
    return None


def _explain_choice(error: OmegaConfBaseException) -> str | None:
    """The sentence about a recipe that sets a group to the name of a choice; None for another error."""
    if not (match := _NAME_FOR_KEYS.search(str(error))):
        return None
    sections = {getattr(section.type, "__name__", ""): section.name for section in fields(TrainConfig)}
    group = sections.get(match[1], str(error.full_key))
    return choice_of(group) if group in groups() else None


def _root(error: BaseException) -> BaseException:
    """The innermost configuration error. Hydra's errors wrap OmegaConf's, and those wrap the errors of resolvers."""
    cause = error.__cause__
    if cause is None and isinstance(error, ConfigCompositionException):
        cause = error.__context__
    wrapped = isinstance(error, ConfigCompositionException | OmegaConfBaseException)
    return _root(cause) if wrapped and isinstance(cause, CONFIG_ERRORS) else error


# -- the end of a command ----------------------------------------------------------------------------------------------


def end_run(error: BaseException, folder: str | Path | None, keeps_log: bool = True) -> NoReturn:
    """Print and log the error that ended a run, and exit; see `hydra.errors_as_sentences`.

    `folder` is the run's folder, or None if the folder existed before this command.
    """
    if isinstance(error, SystemExit):
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise error
        error = error.__context__  # Lightning turns Ctrl-C within `fit` into a SystemExit
    sentence = log_end(error)
    print(f"trinity-lightning: {sentence}", file=sys.stderr)
    began = not isinstance(error, (*CONFIG_ERRORS, KeyboardInterrupt))
    if folder is not None and not (began and keeps_log):
        _discard_unused(Path(folder))
    if began:
        sys.exit(143 if isinstance(error, RankTerminatedError) else 1)
    sys.exit(130 if isinstance(error, KeyboardInterrupt) else 2)


def log_end(error: BaseException) -> str:
    """Write the error that ended a run to the run's log, with the traceback, and return the error's sentence.

    Nothing is written if the folder belongs to another run.
    """
    known = isinstance(error, (TrinityError, OmegaConfBaseException, KeyboardInterrupt))
    sentence = str(error) if known else described(error)
    if isinstance(error, OmegaConfBaseException):
        sentence = explain(error)
    level, trace = (logging.WARNING, None) if isinstance(error, KeyboardInterrupt) else (logging.ERROR, sys.exc_info())
    if not isinstance(error, TakenFolderError):
        _log_to_file(level, sentence or "interrupted.", trace)
    return sentence or "interrupted."


def _log_to_file(level: int, sentence: str, trace: Any) -> list[str]:
    """Write an error, with its traceback (`sys.exc_info()`), to the run's log files, and return their names."""
    record = logging.LogRecord("trinity_lightning", level, "", 0, sentence, None, trace)
    files = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]
    for handler in files:
        handler.handle(record)
    return [handler.baseFilename for handler in files]


def end_by_own_code(error: Exception) -> None:
    """Log an error that is not of this package. If the user's code raised it, print its file and line, and exit."""
    logs = _log_to_file(logging.ERROR, described(error), sys.exc_info())
    if place_of(error) is not None:
        more = f" The traceback is in {logs[0]}." if logs else ""
        print(f"trinity-lightning: {described(error)}.{more}", file=sys.stderr)
        sys.exit(1)


def _discard_unused(folder: Path) -> None:
    """Remove a run's folder if it holds nothing but logs and records; also remove parents that were made for it."""
    inside = [path for path in folder.rglob("*") if path.is_file()]
    if all(path.parent.name == ".hydra" or path.suffix == ".log" or path.name == LOCK for path in inside):
        shutil.rmtree(folder, ignore_errors=True)
        for parent in (path for path in folder.resolve().parents if path in begun):
            with suppress(OSError):  # the parent is not empty
                parent.rmdir()


def end_command(error: Exception) -> None:
    """Print a configuration error that ended a command before its run began, and exit. Return for any other error."""
    sentence = explain(error) if isinstance(error, CONFIG_ERRORS) else explain_composition(error)
    if sentence is not None:
        print(f"trinity-lightning: {sentence}", file=sys.stderr)
        sys.exit(2)


def exit_code(stop: KeyboardInterrupt | SystemExit) -> int | str | None:
    """The exit code of a stopped command: 143 for SIGTERM, so that a pre-empted run does not look finished."""
    if isinstance(stop, KeyboardInterrupt):
        print("trinity-lightning: interrupted.", file=sys.stderr)
        return 130
    if type(stop).__name__ == "SIGTERMException":  # Lightning's exception has no code
        return 143
    return 130 if isinstance(stop.__context__, KeyboardInterrupt) else stop.code  # Lightning exits with 1

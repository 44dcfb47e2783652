"""Parts by name: a table from each name in the configuration (`grpo`) to a dotted path, imported when it is used.

A new built-in part needs a file and a line here. A user's own part needs no line: its dotted path is its name.
"""

import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from trinity_lightning.config.losses import LOSSES
from trinity_lightning.config.own_code import of_a_library
from trinity_lightning.config.signatures import check_methods, is_of_the_library
from trinity_lightning.config.values import nearest, unknown_name
from trinity_lightning.errors import ConfigError, UnfinishedClassError

T = TypeVar("T")
S = TypeVar("S")


def _within(package: str, paths: Mapping[str, str]) -> dict[str, str]:
    return {name: f"trinity_lightning.{package}.{path}" for name, path in paths.items()}


PARTS: Mapping[str, Mapping[str, str]] = {
    "policy loss": _within("algorithm.policy_loss", {name: loss.path for name, loss in LOSSES.items()}),
    "KL estimate": _within(
        "algorithm.kl",
        {"abs": "absolute"} | {name: name for name in ("corrected_k3", "k1", "k2", "k3", "low_var_kl", "none")},
    ),
    "add strategy": _within(
        "algorithm.add_strategy",
        {
            "asymre": "baseline_add_strategies.ASYMREAddStrategy",
            "correct_bias": "correct_bias_add_strategy.CorrectBiasAddStrategy",
            "critic": "baseline_add_strategies.CriticAddStrategy",
            "dapo": "add_strategy.DAPOAddStrategy",
            "dr_grpo": "baseline_add_strategies.DrGRPOAddStrategy",
            "duplicate_informative": "duplicate_add_strategy.DuplicateInformativeAddStrategy",
            "gigpo": "step_wise_add_strategy.GiGPOAddStrategy",
            "grpo": "add_strategy.GRPOAddStrategy",
            "on_policy_distill": "baseline_add_strategies.OnPolicyDistillAddStrategy",
            "opmd": "add_strategy.OPMDAddStrategy",
            "reinforce": "baseline_add_strategies.REINFORCEAddStrategy",
            "reinforce_plus_plus": "baseline_add_strategies.REINFORCEPlusPlusAddStrategy",
            "reward_variance": "add_strategy.RewardVarianceAddStrategy",
            "rloo": "baseline_add_strategies.RLOOAddStrategy",
            "step_wise_grpo": "step_wise_add_strategy.StepWiseGRPOStrategy",
        },
    ),
    "built-in model": _within(
        "config",
        {
            "smollm2": "built_in_models.convert_smollm2",
            "tiny": "built_in_models.build_tiny",
            "tiny_vision": "built_in_vision.build_tiny_vision",
        },
    ),
    "experience operator": _within(
        "buffer.operators",
        {
            "dapo_dynamic_sampling": "filters.DAPODynamicSampling",
            "invalid_reward_filter": "filters.InvalidRewardFilter",
            "judge": "auxiliary.JudgeOperator",
            "mask_response_truncated": "mappers.MaskResponseTruncated",
            "overlong_penalty": "mappers.OverlongPenalty",
            "pass_rate_calculator": "mappers.PassRateCalculator",
            "reward_filter": "filters.RewardFilter",
            "reward_shaping_mapper": "mappers.RewardShapingMapper",
            "reward_std_filter": "filters.RewardSTDFilter",
            "teacher_top_k": "auxiliary.TeacherTopK",
        },
    ),
    "workflow": _within(
        "explorer.workflows",
        {
            "evaluation": "graded.EvaluationWorkflow",
            "judge": "graded.JudgeWorkflow",
            "math": "workflow.MathWorkflow",
            "multi_turn": "multi_turn.MultiTurnWorkflow",
            "on_policy_distill": "graded.OnPolicyDistillWorkflow",
            "simple": "workflow.SimpleWorkflow",
            "tool_use": "tool_use.ToolUseWorkflow",
        },
    ),
    "task source": _within(
        "explorer.tasks",
        {
            "addition": "sources.addition",
            "dataset": "dataset.dataset_entries",
            "drawings": "drawings.drawings",
            "reasoning_gym": "sources.reasoning_gym",
        },
    ),
    # by buffer.storage, called with (BufferConfig, seed): reads the experiences that a run kept
    "experience reader": _within("buffer", {"file": "step_files.reader_of", "sql": "sql.reader_of"}),
    # by buffer.keep, called with (BufferConfig, folder of the run): writes the experiences of explore steps
    "experience keeper": _within("buffer", {"file": "step_files.keeper_of", "sql": "sql.keeper_of"}),
    "environment": _within(
        "explorer.workflows", {"guess_number": "multi_turn.GuessNumber", "retry": "multi_turn.Retry"}
    ),
    "reward function": _within(
        "explorer.rewards",
        {
            "accuracy": "text.accuracy",
            "contains_digits": "text.contains_digits",
            "countdown": "puzzles.countdown",
            "exact_match": "text.exact_match",
            "format": "text.think_answer_format",
            "last_number": "text.last_number",
            "math": "answers.math_boxed_or_last",
            "reasoning_gym": "puzzles.reasoning_gym",
        },
    ),
    "engine": _within(
        "explorer.models",
        {
            "transformers": "transformers_engine.TransformersEngine",
            "vllm": "vllm_engine.VLLMEngine",
            "vllm_server": "vllm_server.VLLMServerEngine",
        },
    ),
    # by synchronizer.method: sends weights to servers; methods that are not listed here need no part
    "weight sender": _within("sync", {"ipc": "ipc.SharedMemory", "nccl": "nccl.WeightGroup"}),
    "runner": _within("explorer", {"local": "workflow_runner.Runners", "ray": "ray.RayRunners"}),
    # called with (parameters or groups, lr, betas, eps, weight_decay)
    "optimizer": {
        "adamw": "trinity_lightning.trainer.optim.adamw",
        "adamw_8bit": "trinity_lightning.trainer.optim.adamw_8bit",
        "adamw_offload": "trinity_lightning.trainer.optim.adamw",
    },
    # called with those of (optimizer, num_warmup_steps, num_training_steps) that the schedule has as parameters
    "schedule": {
        "constant": "transformers.get_constant_schedule",
        "constant_with_warmup": "transformers.get_constant_schedule_with_warmup",
        "cosine": "transformers.get_cosine_schedule_with_warmup",
        "inverse_sqrt": "transformers.get_inverse_sqrt_schedule",
        "linear": "transformers.get_linear_schedule_with_warmup",
        "polynomial": "transformers.get_polynomial_decay_schedule_with_warmup",
    },
}

# Facts about built-in parts that rules need before the part is imported.
FILTERING_STRATEGIES = ("dapo", "duplicate_informative", "reward_variance")  # they set no advantages
SINGLE_RESPONSE_WORKFLOWS = ("judge", "math", "on_policy_distill", "simple")  # one response of the policy each
ASKING_WORKFLOWS = {"judge": "judge", "on_policy_distill": "teacher"}  # and the argument that names the model asked


def import_object(path: str) -> object:
    """Import the object at a dotted path such as `my_package.rewards.exact`.

    Raises:
        ConfigError: the module or the attribute does not exist, or the user's code has a syntax error or a wrong
            import; the message then names the file and the line.
    """
    module_name, _, attribute = str(path).rpartition(".")
    if not (isinstance(path, str) and module_name.partition(".")[0]):  # a `_target_` may have any value
        raise ConfigError(f"{path!r} is not a dotted path", fix="write 'module.attribute'")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        if (refusal := _import_refusal(path, error)) is None:
            raise
        raise refusal from error
    if not hasattr(module, attribute):
        raise ConfigError(_unknown_attribute(module, attribute))
    return getattr(module, attribute)


class Registry(Generic[T]):
    """Classes or functions of one kind by name: those of `PARTS`, and registered ones.

    Args:
        kind: a key of `PARTS`, or another kind of part; it is also shown in messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._paths = PARTS.get(kind, {})
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[S], S]:
        """Return a decorator that registers a part under `name`; a ValueError if the name is taken."""

        def decorator(item: S) -> S:  # S, not T: a decorated class keeps its own signature
            if name in self:
                raise ValueError(f"{self.kind} '{name}' is registered already.")
            self._items[name] = cast(T, item)
            return item

        return decorator

    def get(self, name: str) -> T:
        """The part with this name, imported on first use; a ConfigError lists the names if there is no such part."""
        if name not in self:
            raise ConfigError(unknown_name(self.kind, name, self))
        if name not in self._items:
            self._items[name] = cast(T, import_object(self._paths[name]))
        return self._items[name]

    def resolve(self, part: object) -> object:
        """The part with this name or at this dotted path. Anything but text is the part itself, and is returned.

        Raises:
            ConfigError: as `get` and `import_object`; or a method of a user's class does not take the arguments of the
                method that it overrides.
            UnfinishedClassError: the part is an abstract class.
        """
        if isinstance(part, str):
            part = import_object(part) if "." in part and part not in self else self.get(part)
        if getattr(part, "__abstractmethods__", None):
            raise unfinished_class(self.kind, part)
        if isinstance(part, type) and not is_of_the_library(part):
            check_methods(self.kind, part)
        return part

    def __contains__(self, name: object) -> bool:
        return name in self._paths or name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter({**self._paths, **self._items})


def _import_refusal(path: str, error: ImportError | SyntaxError) -> ConfigError | None:
    """The error to raise if the path's module does not exist, or if an import in the user's code fails.

    None if an import in an installed package fails: the traceback then says more.
    """
    module, missing = path.rpartition(".")[0], str(getattr(error, "name", None) or "")
    if isinstance(error, ModuleNotFoundError) and missing and (module == missing or module.startswith(f"{missing}.")):
        match = nearest(missing, _modules_beside(missing))
        hint = f" Did you mean '{match}'?" if match else ""
        return ConfigError(
            f"cannot import '{path}': there is no module '{missing}'.{hint} "
            "A module of your own must lie in the current folder or on PYTHONPATH."
        )
    if isinstance(error, SyntaxError):
        file, line, message = error.filename, error.lineno, error.msg
    else:
        stack = traceback.extract_tb(error.__traceback__)
        frame = [frame for frame in stack if not frame.filename.startswith("<frozen")][-1]
        file, line, message = frame.filename, frame.lineno, str(error)
    if not file or of_a_library(file):
        return None
    return ConfigError(f"cannot import '{path}': {file}, line {line}: {type(error).__name__}: {message}.")


def _modules_beside(name: str) -> list[str]:
    """The modules where this one would lie: in its package, or else in the current folder and on PYTHONPATH."""
    package = name.rpartition(".")[0]
    own_folders = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    folders = list(getattr(sys.modules.get(package), "__path__", [])) if package else own_folders
    return [f"{package}.{module.name}".removeprefix(".") for module in pkgutil.iter_modules(folders)]


def _unknown_attribute(module: ModuleType, attribute: str) -> str:
    """The message about a name that a module lacks, with the nearest name that its package defines in it."""
    name = module.__name__
    package = name.partition(".")[0]
    known = [
        defined
        for defined, value in vars(module).items()
        if not defined.startswith("_")
        and not isinstance(value, ModuleType)
        and str(getattr(value, "__module__", package)).partition(".")[0] == package
    ]
    return f"cannot import '{name}.{attribute}': {unknown_name(f'name in module {name}', attribute, known)}"


def unfinished_class(kind: str, part: Any) -> UnfinishedClassError:
    """The error about a class that does not define all methods and properties that its base class requires."""
    lacking = ", ".join(sorted(part.__abstractmethods__))
    return UnfinishedClassError(f"{kind} '{part.__name__}' does not define {lacking}: see its base class.")


# -- the folders of the configuration files ----------------------------------------------------------------------------


PACKAGE_DIR = Path(__file__).resolve().parents[1]


def config_dir(name: str) -> Path:
    """The folder `conf` or `recipes`. It lies inside the package in a wheel, and next to it in a checkout."""
    for parent in (PACKAGE_DIR, PACKAGE_DIR.parent):
        if (parent / name).is_dir():
            return parent / name
    raise FileNotFoundError(
        f"the folder '{name}' is neither inside {PACKAGE_DIR} nor next to it: reinstall the package."
    )


def options(group: str) -> list[str]:
    """Names of a config group's choices, or of the recipes."""
    folder = config_dir("recipes") if group == "recipe" else config_dir("conf") / group
    return sorted(path.stem for path in folder.glob("*.yaml"))


def groups() -> set[str]:
    """Names of the config groups."""
    return {path.name for path in config_dir("conf").iterdir() if path.is_dir()}

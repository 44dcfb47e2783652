"""Parts by name: one table from what a configuration calls `grpo` to a dotted path, which is imported when it is used.

A new part is a file and a line here. A part of one's own needs no line: its dotted path is its name.
"""

import importlib
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NoReturn, TypeVar, cast

from trinity_lightning.config.losses import LOSSES
from trinity_lightning.config.signatures import check_methods
from trinity_lightning.config.values import unknown_name
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
    "built-in model": _within("config.built_in_models", {"smollm2": "convert_smollm2", "tiny": "build_tiny"}),
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
    # (parameters or groups, lr, betas, eps, weight_decay)
    "optimizer": {
        "adamw": "trinity_lightning.trainer.optim.adamw",
        "adamw_8bit": "trinity_lightning.trainer.optim.adamw_8bit",
        "adamw_offload": "trinity_lightning.trainer.optim.adamw",
    },
    # (optimizer, num_warmup_steps, num_training_steps), of which a schedule takes what it needs
    "schedule": {
        "constant": "transformers.get_constant_schedule",
        "constant_with_warmup": "transformers.get_constant_schedule_with_warmup",
        "cosine": "transformers.get_cosine_schedule_with_warmup",
        "inverse_sqrt": "transformers.get_inverse_sqrt_schedule",
        "linear": "transformers.get_linear_schedule_with_warmup",
        "polynomial": "transformers.get_polynomial_decay_schedule_with_warmup",
    },
}

# What the checks before any import need to know of parts by name; parts of one's own have none of it.
FILTERING_STRATEGIES = ("dapo", "duplicate_informative", "reward_variance")  # they set no advantages
SINGLE_RESPONSE_WORKFLOWS = ("judge", "math", "on_policy_distill", "simple")  # one response of the policy each
ASKING_WORKFLOWS = {"judge": "judge", "on_policy_distill": "teacher"}  # the argument that says which model is asked


def import_object(path: str) -> object:
    """The object at a dotted path such as `my_package.rewards.exact`.

    Raises:
        ConfigError: the module or the attribute does not exist, or a file of one's own has an error of syntax or a
            wrong import; the message says which, and where.
    """
    module_name, _, attribute = str(path).rpartition(".")
    if not (isinstance(path, str) and module_name.partition(".")[0]):  # a `_target_` may be anything
        raise ConfigError(f"{path!r} is not a dotted path", fix="write 'module.attribute'")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        check_module(path, error)
        raise
    if not hasattr(module, attribute):
        refuse_attribute(module, attribute)
    return getattr(module, attribute)


class Registry(Generic[T]):
    """The classes or functions of one kind by name: those of `PARTS`, and what is registered by a decorator.

    Args:
        kind: a kind of `PARTS`, or another in words, for messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._paths = PARTS.get(kind, {})
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[S], S]:
        """A decorator that files what it decorates under `name`; a name taken already is a ValueError."""

        def decorator(item: S) -> S:  # its own type comes back, so that a class keeps its own signature
            if name in self:
                raise ValueError(f"{self.kind} '{name}' is registered already.")
            self._items[name] = cast(T, item)
            return item

        return decorator

    def get(self, name: str) -> T:
        """What is registered under `name`, imported if need be; a ConfigError lists the names if there is no such."""
        if name not in self:
            raise ConfigError(unknown_name(self.kind, name, self))
        if name not in self._items:
            self._items[name] = cast(T, import_object(self._paths[name]))
        return self._items[name]

    def resolve(self, part: object) -> object:
        """What is registered under a name, or is at a dotted path; what is no text is the part itself.

        Errors as `get`, or as `import_object`; an UnfinishedClassError: it is an abstract class; a ConfigError: a
        method of a class of the user's own is not called as the one that it overrides.
        """
        if isinstance(part, str):
            part = import_object(part) if "." in part and part not in self else self.get(part)
        if getattr(part, "__abstractmethods__", None):
            refuse_unfinished(self.kind, part)
        if isinstance(part, type) and not part.__module__.startswith("trinity_lightning."):
            check_methods(self.kind, part)
        return part

    def __contains__(self, name: object) -> bool:
        return name in self._paths or name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter({**self._paths, **self._items})


def check_module(path: str, error: ImportError | SyntaxError) -> None:
    """ConfigError if the module of this path was not found, or cannot be imported for a line of the user's own.

    If the line is of something installed, its traceback is the answer.
    """
    module, missing = path.rpartition(".")[0], getattr(error, "name", None)
    not_found = isinstance(error, ModuleNotFoundError) and missing is not None
    if not_found and (module == missing or module.startswith(f"{missing}.")):
        raise ConfigError(
            f"cannot import '{path}': there is no module '{missing}'. "
            "A module of your own must lie in the current folder or on PYTHONPATH."
        ) from error
    if isinstance(error, SyntaxError):
        file, line, what = error.filename, error.lineno, error.msg
    else:
        stack = traceback.extract_tb(error.__traceback__)
        place = [frame for frame in stack if not frame.filename.startswith("<frozen")][-1]
        file, line, what = place.filename, place.lineno, str(error)
    installed = (Path(__file__).parents[1], *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    if file and not any(Path(file).is_relative_to(folder) for folder in installed):
        raise ConfigError(f"cannot import '{path}': {file}, line {line}: {type(error).__name__}: {what}.") from error


def refuse_attribute(module: ModuleType, attribute: str) -> NoReturn:
    """ConfigError: the module has no such name; the message has the nearest of those defined in it, or its package."""
    name = module.__name__
    package = name.partition(".")[0]
    known = [
        each
        for each, value in vars(module).items()
        if not each.startswith("_")
        and not isinstance(value, ModuleType)
        and str(getattr(value, "__module__", package)).partition(".")[0] == package
    ]
    raise ConfigError(f"cannot import '{name}.{attribute}': {unknown_name(f'name in module {name}', attribute, known)}")


def refuse_unfinished(kind: str, part: Any) -> NoReturn:
    """UnfinishedClassError: a class of that kind lacks these methods or properties, which its base leaves to it."""
    lacking = ", ".join(sorted(part.__abstractmethods__))
    raise UnfinishedClassError(f"{kind} '{part.__name__}' does not define {lacking}: see its base class.")


PACKAGE_DIR = Path(__file__).resolve().parents[1]


def config_dir(name: str) -> Path:
    """The folder `conf` or `recipes`: inside the package in a wheel, next to it in a checkout."""
    for parent in (PACKAGE_DIR, PACKAGE_DIR.parent):
        if (parent / name).is_dir():
            return parent / name
    raise FileNotFoundError(
        f"the folder '{name}' is neither inside {PACKAGE_DIR} nor next to it: reinstall the package."
    )


def options(group: str) -> list[str]:
    """Names of the choices of a config group, or of the recipes."""
    folder = config_dir("recipes") if group == "recipe" else config_dir("conf") / group
    return sorted(path.stem for path in folder.glob("*.yaml"))

"""The user's own parts, imported as soon as they are named: a misspelt path is refused before torch is imported."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trinity_lightning.config.registry import PARTS, import_object
from trinity_lightning.config.values import one_of
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.run import TrainConfig

ENVIRONMENT = "workflow.args.environment"  # the key of the environment that the workflow multi_turn plays with


def check_own_parts(run: "TrainConfig", trains: bool = True) -> None:
    """Import the parts of a run that go by a dotted path.

    Rewards, task sources and engines are left to their own checks, which do without torch too.

    Args:
        run: the configuration.
        trains: False for an evaluation, which uses no parts of the training.

    Raises:
        ConfigError: there is no such module or attribute, or the workflow's environment has no such name.
    """
    parts = dict(_parts_of_training(run)) if trains else {}
    if run.buffer.has_rollouts or not trains:
        parts["eval_workflow"] = run.eval_workflow
        if trains or run.eval_workflow is None:  # an evaluation has one workflow
            parts |= _parts_of_workflow(run)
    for key, path in parts.items():
        if isinstance(path, str) and "." in path:
            try:
                import_object(path)
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}", key=key) from error


def _parts_of_training(run: "TrainConfig") -> Iterator[tuple[str, Any]]:
    yield "algorithm.policy_loss", run.algorithm.policy_loss.name
    yield "optimizer.name", run.optimizer.name
    yield "optimizer.lr_scheduler", run.optimizer.lr_scheduler.name
    if run.buffer.has_rollouts:
        for group, parts in {"operators": run.operators, "add_strategy": run.add_strategy}.items():
            for label, part in parts.items():
                yield f"{group}.{label}", part.name


def _parts_of_workflow(run: "TrainConfig") -> Iterator[tuple[str, Any]]:
    yield "workflow.name", run.workflow.name
    if run.workflow.name == "multi_turn" and (environment := _environment(run.workflow.args)) is not None:
        yield ENVIRONMENT, one_of(ENVIRONMENT, environment, PARTS["environment"], with_paths=True)


def _environment(args: Mapping[str, Any]) -> Any:
    """The environment's name or dotted path; None if it is no text, which `MultiTurnArguments` refuses."""
    environment = args.get("environment")
    name = environment.get("name") if isinstance(environment, Mapping) else environment
    return name if isinstance(name, str) else None

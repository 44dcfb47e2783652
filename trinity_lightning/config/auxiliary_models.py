"""Auxiliary models: judges and teachers that workflows and operators ask, in servers started here or elsewhere.

Imported by the runs that have any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from trinity_lightning.config.engines import EngineConfig
from trinity_lightning.config.models import load_tokenizer, resolve_model
from trinity_lightning.config.own_models import check_same_vocabulary, config_of
from trinity_lightning.config.parts import OperatorConfig
from trinity_lightning.config.registry import ASKING_WORKFLOWS
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.config.sections import Section, section_of
from trinity_lightning.config.values import unknown_name, url, whole_number
from trinity_lightning.errors import ConfigError

TEACHER_OPERATOR, TEACHER_WORKFLOW = "teacher_top_k", "on_policy_distill"  # they ask a teacher
ASKING_OPERATORS = ("judge", TEACHER_OPERATOR)


@dataclass
class AuxiliaryConfig(Section):
    """Another model than the policy, for workflows and operators that ask one: a judge, a teacher.

    Attributes:
        model: `smollm2`, `tiny`, a folder, or a hub name: a vLLM server of it is started here; with `url`, the name
            that requests carry.
        url: of an OpenAI-compatible endpoint to ask instead, such as https://api.openai.com/v1.
        api_key_env: environment variable that holds the endpoint's key, such as OPENAI_API_KEY; null: none is sent.
        engine: knobs of a server started here, without `name`, `urls`, `servers` and `sleep`; max_model_len of a
            teacher (workflow on_policy_distill, operator teacher_top_k) is the policy's and one more.
    """

    model: str = MISSING
    url: str | None = None
    api_key_env: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.url is not None:
            url("url", self.url, "http://node7:8000/v1")
            if self.engine != EngineConfig():
                raise ConfigError(
                    f"engine describes a server that is started here, and {self.url} runs already: leave one out."
                )
        if self.engine.urls:
            raise ConfigError("engine.urls is not read: give the endpoint as url.")
        for name in self.engine.changed("name", "servers", "sleep"):
            value = getattr(self.engine, name)
            raise ConfigError(
                f"engine.{name} is {getattr(value, 'value', value)}, and an auxiliary model has one server of vLLM "
                "that never sleeps: leave the key out, and give the knobs of its engine one by one."
            )
        if self.url is None and self.api_key_env is not None:
            raise ConfigError("api_key_env belongs to an endpoint, and there is no url: give it, or leave the key out.")


def auxiliary_config(key: str, given: Any) -> AuxiliaryConfig:
    """The auxiliary model that stands under a key: a section already, or a mapping; errors as of every section."""
    named = {"model": "", **given} if isinstance(given, Mapping) else given
    section = section_of(key, AuxiliaryConfig, named) if isinstance(named, Mapping | AuxiliaryConfig) else None
    if section is None or not section.model:
        raise ConfigError(f"{key} needs a model: {key}.model=FOLDER, or the name that an endpoint (url) knows.")
    return section


def auxiliary_configs(run: TrainConfig) -> dict[str, Any]:
    """The auxiliary models of a run, sections or mappings there, by name; errors as of every section.

    A teacher that reads whole rollouts has room for those and the token it samples.
    """
    given = run.auxiliary_models
    configs = {str(name): auxiliary_config(f"auxiliary_models.{name}", each) for name, each in given.items()}
    teachers = teachers_of(run)
    for name, each in given.items():
        starts = isinstance(each, Mapping) and not each.get("url")
        if name in teachers and starts and "max_model_len" not in (each.get("engine") or {}):
            configs[str(name)].engine.max_model_len = run.engine.max_model_len + 1
    return configs


def asked_model(section: str, workflow: str, args: Mapping[str, Any], models: Sequence[str]) -> int:
    """The number, among these models, of the one that a workflow of `ASKING_WORKFLOWS` asks by its arguments.

    A ConfigError, which names the workflow's section: there is no such model.
    """
    key = ASKING_WORKFLOWS[workflow]
    asked, fix = args.get(key, 0), f"Give one, such as +auxiliary_models.{key}.model=FOLDER."
    if isinstance(asked, str):
        if asked not in models:
            message = unknown_name("auxiliary model", asked, models)
            raise ConfigError(f"{section}.args.{key}: {message} {fix}")
        asked = list(models).index(asked)
    whole_number(f"{section}.args.{key}", asked, least=0)
    if asked >= len(models):
        raise ConfigError(f"{section}={workflow} asks auxiliary model {asked}, and there are {len(models)}. {fix}")
    return asked


def _asked_by(operator: OperatorConfig) -> str:
    """Name of the model that an operator of `ASKING_OPERATORS` asks, there or not."""
    return str(operator.args.get("model", "teacher" if operator.name == TEACHER_OPERATOR else None))


# -- teachers: auxiliary models that read the policy's own tokens ------------------------------------------------------


def teachers_of(run: TrainConfig) -> list[str]:
    """Names of the auxiliary models that teach, as operators give them, there or not, and as the workflow asks one."""
    names = [_asked_by(each) for each in run.operators.values() if each.name == TEACHER_OPERATOR]
    if run.workflow.name == TEACHER_WORKFLOW:
        models = list(map(str, run.auxiliary_models))
        names.append(models[asked_model("workflow", TEACHER_WORKFLOW, run.workflow.args, models)])
    return names


def auxiliary_servers(run: TrainConfig) -> list[tuple[str, str, EngineConfig, bool]]:
    """Of each auxiliary model that is started here the key of its engine, its name, its engine, and whether that has
    its context from the policy's, as teachers do.
    """
    teachers, own = teachers_of(run), run.engine.max_model_len + 1
    return [
        (f"auxiliary_models.{name}.engine", it.model, it.engine, name in teachers and it.engine.max_model_len == own)
        for name, it in run.auxiliary_models.items()
        if it.url is None
    ]


def check_teachers(run: TrainConfig) -> None:
    """Refuse an operator whose model does not exist, and a teacher that cannot do what it is asked for; a ConfigError.

    Its context may be too short, its vocabulary smaller than the number of tokens asked for, its endpoint made for
    chats only, or no strategy uses its answers.
    """
    models = list(run.auxiliary_models)
    for operator in (each for each in run.operators.values() if each.name in ASKING_OPERATORS):
        if (model := _asked_by(operator)) not in models:
            fix = f"Give it, such as +auxiliary_models.{model}.model=FOLDER."
            raise ConfigError(f"operator {operator.name}: {unknown_name('auxiliary model', model, models)} {fix}")
        k, vocabulary = operator.args.get("k", 0), _vocabulary(run.model.name)
        if vocabulary is not None and isinstance(k, int) and k > vocabulary:
            raise ConfigError(
                f"operator {operator.name}: k is {k}, and the model's vocabulary has {vocabulary} tokens."
            )
    _check_weighed(run)
    longest, teachers = run.engine.max_model_len, teachers_of(run)
    for name in teachers:
        teacher = run.auxiliary_models[name]
        if run.workflow.name == TEACHER_WORKFLOW and run.sampling.temperature != 1:
            raise ConfigError(
                f"workflow={TEACHER_WORKFLOW} compares log-probabilities at temperature 1, not "
                f"{run.sampling.temperature}: set sampling.temperature=1."
            )
        if teacher.url is not None and run.workflow.name == TEACHER_WORKFLOW and name == teachers[-1]:
            raise ConfigError(
                f"workflow={TEACHER_WORKFLOW} asks for log-probabilities, and an endpoint (auxiliary_models.{name}.url)"
                " only chats: leave out the url for a model that the run starts, or choose operators=teacher_top_k."
            )
        if teacher.url is None and teacher.engine.max_model_len <= longest:
            raise ConfigError(
                f"auxiliary_models.{name}.engine.max_model_len is {teacher.engine.max_model_len}, and this teacher "
                f"reads sequences of up to {longest} tokens (engine.max_model_len) and samples one more: give "
                f"{longest + 1}."
            )


def _check_weighed(run: TrainConfig) -> None:
    """Refuse a workflow that asks a teacher, if nothing trains on the answers, as parts of the user's own may."""
    strategies = [each.name for each in run.add_strategy.values()]
    parts = [*strategies, run.algorithm.policy_loss.name, *(each.name for each in run.operators.values())]
    weighed = TEACHER_WORKFLOW in strategies or any("." in name for name in parts)
    if run.workflow.name == TEACHER_WORKFLOW and not weighed:
        raise ConfigError(
            f"workflow={TEACHER_WORKFLOW} asks a teacher, and add_strategy={strategies[-1]} does not weigh by its "
            f"answers: choose add_strategy={TEACHER_WORKFLOW}, or another workflow."
        )


def check_asked(run: TrainConfig) -> None:
    """Refuse a model that nothing asks, unless a part of the user's own may ask it; a ConfigError."""
    models, operators = list(run.auxiliary_models), list(run.operators.values())
    workflows = {run.workflow.name: run.workflow.args}
    if run.eval_workflow is not None:
        workflows.setdefault(run.eval_workflow, {})
    if any("." in name for name in (*workflows, *(each.name for each in operators))):
        return
    asked = {_asked_by(each) for each in operators if each.name in ASKING_OPERATORS}
    for name in workflows.keys() & ASKING_WORKFLOWS.keys():
        asked.add(models[asked_model("workflow", name, workflows[name], models)])
    for name in models:
        if name not in asked:
            raise ConfigError(
                f"auxiliary_models.{name}: no workflow or operator of this run asks it: leave it out, or choose one "
                f"that does, such as operators=judge with operators.judge.args.model={name}."
            )


def check_vocabularies(run: TrainConfig) -> None:
    """Refuse a teacher, served here, with another vocabulary than the policy's; a ConfigError."""
    for name in teachers_of(run):
        teacher = run.auxiliary_models[name]
        if teacher.url is None:
            check_same_vocabulary(f"auxiliary_models.{name}.model", teacher.model, load_tokenizer(run.model.name))


def _vocabulary(model: str) -> int | None:
    """How many tokens the model knows, by its configuration; None: it is not on this machine yet, or does not say."""
    folder = Path(resolve_model(model))
    config = config_of(folder) if (folder / "config.json").is_file() else {}
    return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")

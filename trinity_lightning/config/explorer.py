"""How rollouts are made: the explore step, tasks, workflows, sampling, and the models that workflows ask."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import MISSING

from trinity_lightning.config.buffer import OperatorConfig
from trinity_lightning.config.engine import EngineConfig
from trinity_lightning.config.model_files import check_same_vocabulary, config_of, load_tokenizer, resolve_model
from trinity_lightning.config.registry import ASKING_WORKFLOWS, PARTS
from trinity_lightning.config.sections import Section, checked, section_of
from trinity_lightning.config.values import number, one_of, unknown_name, url, whole_number
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.run import TrainConfig


DEFAULT_TEMPERATURE = 1.0  # of every engine

MOST_OF_A_STEP = 100_000  # prompts, and rollouts of each: all of a step is held at once

# Settings that change the sampled distribution, with the value at which each does not.
NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}

# Each of these makes the sampled distribution another than the policy's, whose gradient is taken. Those of the second
# line only a workflow's calls can have.
EVALUATION_ONLY = (
    *NEUTRAL_SAMPLING,
    *("min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "thinking_token_budget"),
)


@dataclass
class SamplingConfig(Section, key="sampling"):
    """How tokens are sampled; names as in vLLM's SamplingParams. Null leaves the engine's default.

    Training rollouts are drawn from the whole distribution at a temperature above 0, for log-probabilities to be those
    of the policy: `top_p`, `top_k`, `min_p`, penalties and temperature 0 are for evaluation only. So is what a call of
    a workflow's own may ask for besides: `min_tokens`, `logit_bias`, `allowed_token_ids`, `bad_words`,
    `structured_outputs` and `thinking_token_budget`.

    Attributes:
        temperature: logits are divided by it; 0 is greedy.
        max_tokens: longest response in tokens.
        stop: strings that end a response.
        skip_special_tokens: leave special tokens, such as markers of tool calls, out of the text that rewards,
            environments and tool parsers read; thoughts whose markers they are can then not be told from the answer.
            Null: no, all that the policy wrote is judged but end tokens.
        include_stop_str_in_output: leave the string of `stop` that ended a response in that text. Null: yes, the policy
            wrote it, and is trained on it.
        top_p: sample from the most likely tokens that make up this probability.
        top_k: sample from this many tokens.
        min_p: sample from tokens at least this likely, relative to the likeliest.
        presence_penalty: subtracted from the logits of tokens that have appeared.
        frequency_penalty: the same for each appearance.
        repetition_penalty: logits of tokens that have appeared are divided by it.
    """

    temperature: float = checked(1.0, number, least=0)
    max_tokens: int = checked(64, whole_number, least=1)
    stop: list[str] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    top_p: float | None = checked(None, number, above=0, most=1, optional=True)
    top_k: int | None = None
    min_p: float | None = checked(None, number, least=0, most=1, optional=True)
    presence_penalty: float | None = checked(None, number, least=-2, most=2, optional=True)
    frequency_penalty: float | None = checked(None, number, least=-2, most=2, optional=True)
    repetition_penalty: float | None = checked(None, number, above=0, optional=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k != -1:  # vLLM's word for all of them
            whole_number("sampling.top_k", self.top_k, least=1, optional=True)


def check_trained_sampling(settings: Mapping[str, Any]) -> None:
    """Refuse settings, by vLLM's names, that would draw rollouts from another distribution than the policy's.

    None is an unset value; a ConfigError names the setting.
    """
    for name in EVALUATION_ONLY:
        if settings.get(name) is not None:
            raise ConfigError(
                f"sampling.{name} is for evaluation only: training needs the whole distribution. Leave it out, or "
                "use eval_sampling.",
                key=f"sampling.{name}",
            )
    temperature = settings.get("temperature")
    if temperature is not None and not temperature > 0:
        raise ConfigError(
            f"sampling.temperature is {temperature}; training needs one above 0, such as 1.0.",
            key="sampling.temperature",
        )


@dataclass
class OverRolloutConfig(Section, key="explorer.over_rollout"):
    """Finish a step when most of its tasks are in.

    Attributes:
        ratio: share of a step's tasks that may be left out; 0: none.
        wait_after_min: seconds to wait for the rest once `1 - ratio` of them are in.
    """

    ratio: float = checked(0.0, number, least=0, most=0.99)
    wait_after_min: float = checked(30.0, number, least=0, only_with="ratio")


@dataclass
class DynamicTimeoutConfig(Section, key="explorer.dynamic_timeout"):
    """Time-out of train tasks from how long they usually take.

    Attributes:
        enable: whether the time-out is min(max_timeout, ratio * average).
        ratio: how many times the average a task may take.
        warmup_min_steps: steps before it applies.
    """

    enable: bool = False
    ratio: float = checked(3.0, number, least=1, only_with="enable")
    warmup_min_steps: int = checked(1, whole_number, least=0, only_with="enable")


@dataclass
class ExplorerConfig(Section, key="explorer"):
    """How an explore step is run.

    Attributes:
        batch_size: tasks (prompts) an explore step.
        repeat_times: rollouts a task, the group size.
        runner_per_model: runners a model, each running one task at a time; null, which the commands set: one for every
            task of a step and at least 64, with Ray 8.
        max_timeout: seconds one attempt at a task may take.
        max_retry_times: further attempts after a failed one.
        max_repeat_times_per_runner: a task with more rollouts is cut into chunks of this many; null: never.
        runner: `local`, asyncio tasks in this process; or `ray`, each a process of its own (a Ray actor), which needs
            an engine that is a server. A worker that dies is replaced, and its task tried again.
        ray_address: of a Ray cluster to join, HOST:PORT of its head, or `auto` for the one on this machine; null: one
            is started here, for this run.
        reward_workers: processes that call reward functions, local runners only; 0: threads of this process do, and
            what is slow pure Python there takes its time from rollouts and training ([reward](reward.md)).
        reward_timeout: seconds that one call of a reward function may take in such a process, which is ended then.
        max_refills: how often a step that add_strategy=dapo leaves short may ask for further tasks.
        sync_interval: explore steps between weight syncs; above 1, the steps between are sampled from older weights,
            which engine=transformers does not have.
        sync_offset: steps the trainer lags behind the explorer: 0 is on-policy; with 1 the next step's rollouts go on
            while the trainer trains, which needs engine=vllm_server. None are started beyond the last step: a run that
            is resumed with more steps samples its next one with the newest weights.
        eval_interval: explore steps between evaluations; 0 means never, before the first step neither; null, which the
            commands set: a tenth of the run's steps, rounded up. The last step is evaluated too.
        eval_on_startup: evaluate before the first step too.
        seed: seed of all rollouts.
    """

    batch_size: int = checked(8, whole_number, least=1, most=MOST_OF_A_STEP)
    repeat_times: int = checked(8, whole_number, least=1, most=MOST_OF_A_STEP)
    runner_per_model: int | None = checked(8, whole_number, least=1, optional=True)
    max_timeout: float = checked(1800.0, number, above=0)
    max_retry_times: int = checked(2, whole_number, least=0)
    max_repeat_times_per_runner: int | None = checked(None, whole_number, least=1, optional=True)
    runner: str = checked("local", one_of, names=("local", "ray"))
    ray_address: str | None = None
    reward_workers: int = checked(0, whole_number, least=0)
    reward_timeout: float = checked(60.0, number, above=0, only_with="reward_workers")
    over_rollout: OverRolloutConfig = field(default_factory=OverRolloutConfig)
    dynamic_timeout: DynamicTimeoutConfig = field(default_factory=DynamicTimeoutConfig)
    max_refills: int = checked(3, whole_number, least=0)
    sync_interval: int = checked(1, whole_number, least=1)
    sync_offset: int = checked(0, whole_number, least=0)
    eval_interval: int | None = checked(0, whole_number, least=0, optional=True)
    eval_on_startup: bool = True
    seed: int = checked(0, whole_number, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.runner == "ray" or self.ray_address is not None:
            check_runner(self)

    @property
    def runners(self) -> int:
        """`runner_per_model`, or what its null stands for: coroutines cost nothing, processes of Ray do."""
        return self.runner_per_model or (8 if self.runner == "ray" else max(self.batch_size, 64))

    @property
    def samples_older_weights(self) -> bool:
        """True if a step may be trained on rollouts of weights before the present ones."""
        return self.sync_interval > 1 or self.sync_offset > 0


@dataclass
class WorkflowConfig(Section, key="workflow"):
    """How a task is tried.

    Attributes:
        name: a registered name, or the dotted path of your own class.
        args: its arguments.
    """

    name: str = MISSING
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "evaluation":
            raise ConfigError(
                "workflow.name=evaluation trains nothing", key="workflow.name", fix="give it as eval_workflow"
            )
        if self.name != MISSING:
            one_of("workflow.name", self.name, PARTS["workflow"], with_paths=True)


A = TypeVar("A")


def arguments_of(workflow: str, kind: type[A], given: Mapping[str, Any]) -> A:
    """The settings of a workflow, by its name, as a dataclass of that kind.

    A ConfigError: a name that the workflow does not know, one that is missing, or a wrong value.
    """
    parameters = inspect.signature(kind).parameters
    for name in given:
        if name not in parameters:
            raise ConfigError(unknown_name(f"argument of workflow '{workflow}'", name, parameters))
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and given.get(name) is None:
            raise ConfigError(f"workflow '{workflow}' needs workflow.args.{name}.", key="workflow")
    return kind(**given)


def check_runner(explorer: ExplorerConfig) -> None:
    """Refuse what the runners of explorer.runner do not use; a ConfigError."""
    if explorer.runner == "local":
        raise ConfigError(
            f"explorer.ray_address is {explorer.ray_address}, and needs explorer.runner=ray",
            key="explorer.ray_address",
            fix="set that",
        )
    if explorer.ray_address is not None and "://" in explorer.ray_address:
        raise ConfigError(
            f"explorer.ray_address is {explorer.ray_address!r}",
            key="explorer.ray_address",
            fix="give HOST:PORT, or auto",
        )
    if explorer.reward_workers:
        raise ConfigError(
            "explorer.reward_workers: the runners of explorer.runner=ray are processes already, leave it out.",
            key="explorer.reward_workers",
        )


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
                    f"engine describes a server that is started here, and {self.url} runs already",
                    key="engine",
                    fix="leave one out",
                )
        if self.engine.urls:
            raise ConfigError("engine.urls is not read", key="engine.urls", fix="give the endpoint as url")
        for name in self.engine.changed("name", "servers", "sleep"):
            value = getattr(self.engine, name)
            raise ConfigError(
                f"engine.{name} is {getattr(value, 'value', value)}, and an auxiliary model has one server of vLLM "
                "that never sleeps",
                key=f"engine.{name}",
                fix="leave the key out, and give the knobs of its engine one by one",
            )
        if self.url is None and self.api_key_env is not None:
            raise ConfigError(
                "api_key_env belongs to an endpoint, and there is no url", fix="give it, or leave the key out"
            )


def auxiliary_config(key: str, given: Any) -> AuxiliaryConfig:
    """The auxiliary model that stands under a key: a section already, or a mapping; errors as of every section."""
    named = {"model": "", **given} if isinstance(given, Mapping) else given
    section = section_of(key, AuxiliaryConfig, named) if isinstance(named, Mapping | AuxiliaryConfig) else None
    if section is None or not section.model:
        raise ConfigError(
            f"{key} needs a model: {key}.model=FOLDER, or the name that an endpoint (url) knows.", key=key
        )
    return section


def auxiliary_configs(run: "TrainConfig") -> dict[str, Any]:
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


def teachers_of(run: "TrainConfig") -> list[str]:
    """Names of the auxiliary models that teach, as operators give them, there or not, and as the workflow asks one."""
    names = [_asked_by(each) for each in run.operators.values() if each.name == TEACHER_OPERATOR]
    if run.workflow.name == TEACHER_WORKFLOW:
        models = list(map(str, run.auxiliary_models))
        names.append(models[asked_model("workflow", TEACHER_WORKFLOW, run.workflow.args, models)])
    return names


def auxiliary_servers(run: "TrainConfig") -> list[tuple[str, str, EngineConfig, bool]]:
    """Of each auxiliary model that is started here the key of its engine, its name, its engine, and whether that has
    its context from the policy's, as teachers do.
    """
    teachers, own = teachers_of(run), run.engine.max_model_len + 1
    return [
        (f"auxiliary_models.{name}.engine", it.model, it.engine, name in teachers and it.engine.max_model_len == own)
        for name, it in run.auxiliary_models.items()
        if it.url is None
    ]


def check_teachers(run: "TrainConfig") -> None:
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
                f"{run.sampling.temperature}",
                key="workflow",
                fix="set sampling.temperature=1",
            )
        if teacher.url is not None and run.workflow.name == TEACHER_WORKFLOW and name == teachers[-1]:
            raise ConfigError(
                f"workflow={TEACHER_WORKFLOW} asks for log-probabilities, and an endpoint (auxiliary_models.{name}.url)"
                " only chats",
                key="workflow",
                fix="leave out the url for a model that the run starts, or choose operators=teacher_top_k",
            )
        if teacher.url is None and teacher.engine.max_model_len <= longest:
            raise ConfigError(
                f"auxiliary_models.{name}.engine.max_model_len is {teacher.engine.max_model_len}, and this teacher "
                f"reads sequences of up to {longest} tokens (engine.max_model_len) and samples one more",
                key=f"auxiliary_models.{name}.engine.max_model_len",
                fix=f"give {longest + 1}",
            )


def _check_weighed(run: "TrainConfig") -> None:
    """Refuse a workflow that asks a teacher, if nothing trains on the answers, as parts of the user's own may."""
    strategies = [each.name for each in run.add_strategy.values()]
    parts = [*strategies, run.algorithm.policy_loss.name, *(each.name for each in run.operators.values())]
    weighed = TEACHER_WORKFLOW in strategies or any("." in name for name in parts)
    if run.workflow.name == TEACHER_WORKFLOW and not weighed:
        raise ConfigError(
            f"workflow={TEACHER_WORKFLOW} asks a teacher, and add_strategy={strategies[-1]} does not weigh by its "
            "answers",
            key="workflow",
            fix=f"choose add_strategy={TEACHER_WORKFLOW}, or another workflow",
        )


def check_asked(run: "TrainConfig") -> None:
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
                f"auxiliary_models.{name}: no workflow or operator of this run asks it",
                key=f"auxiliary_models.{name}",
                fix=(
                    "leave it out, or choose one "
                    f"that does, such as operators=judge with operators.judge.args.model={name}"
                ),
            )


def check_vocabularies(run: "TrainConfig") -> None:
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

"""Rollouts: sampling, the explore step, workflows, and the auxiliary models that workflows and operators ask."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from trinity_lightning.config.buffer import OperatorConfig
from trinity_lightning.config.engines import EngineConfig
from trinity_lightning.config.models import (
    check_same_vocabulary,
    config_of,
    load_tokenizer,
    reads_pictures,
    resolve_model,
)
from trinity_lightning.config.registry import ASKING_WORKFLOWS, PARTS
from trinity_lightning.config.sections import Section, checked, section_of
from trinity_lightning.config.values import number, one_of, unknown_name, url, whole_number
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.run import TrainConfig

DEFAULT_TEMPERATURE = 1.0  # of every engine
IN_FLIGHT = ("continue", "wait")  # what a weight sync does to rollouts under way
# The settings of ExplorerConfig with which every rollout is of the present weights.
SYNCHRONOUS: dict[str, Any] = {
    **{"sync_interval": 1, "sync_offset": 0},
    **{"max_staleness": 0, "run_ahead": None, "in_flight": "continue", "max_concurrent": None},
}
MOST_AHEAD = 1000  # most steps whose groups are under way: they have a runner each
MOST_OF_A_STEP = 100_000  # most prompts of a step, and most rollouts of a prompt; a whole step is held in memory
# Settings that change the sampled distribution, each with the value that leaves the distribution as it is.
NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}

# Settings with which the sampled distribution is not the policy's, so that its gradient would be wrong. Only the calls
# of a workflow can have the settings of the second line.
EVALUATION_ONLY = (
    *NEUTRAL_SAMPLING,
    *("min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "thinking_token_budget"),
)


@dataclass
class SamplingConfig(Section, key="sampling"):
    """Sampling of tokens; names as in vLLM's SamplingParams. Null leaves the engine's default.

    Training rollouts are drawn from the whole distribution at a temperature above 0; otherwise their log-probabilities
    would not be the policy's. `top_p`, `top_k`, `min_p`, penalties and temperature 0 are for evaluation only, and so
    are these settings of a workflow's own calls: `min_tokens`, `logit_bias`, `allowed_token_ids`, `bad_words`,
    `structured_outputs` and `thinking_token_budget`.

    Attributes:
        temperature: divisor of the logits; 0 is greedy.
        max_tokens: most tokens of a response.
        stop: strings that end a response.
        skip_special_tokens: leave special tokens, such as markers of tool calls, out of the text that rewards,
            environments and tool parsers read. Thoughts between special tokens then look like the answer. Null: no;
            this text is all that the policy wrote, except end tokens.
        include_stop_str_in_output: keep the string of `stop` that ended a response in this text. Null: yes; the policy
            wrote the string, and is trained on it.
        top_p: sample from the most likely tokens that make up this probability.
        top_k: sample from this many tokens.
        min_p: sample from tokens with at least this share of the likeliest token's probability.
        presence_penalty: number subtracted from the logits of tokens that have appeared.
        frequency_penalty: number subtracted from the logits of tokens for each appearance.
        repetition_penalty: divisor of the logits of tokens that have appeared.
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
        if self.top_k != -1:  # -1 is vLLM's value for all tokens
            whole_number("sampling.top_k", self.top_k, least=1, optional=True)


def check_trained_sampling(settings: Mapping[str, Any]) -> None:
    """Refuse settings with which rollouts are not drawn from the policy's distribution.

    `settings` has vLLM's names; None is unset.

    Raises:
        ConfigError: names the setting.
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
            f"sampling.temperature is {temperature}: training needs one above 0, such as 1.0.",
            key="sampling.temperature",
        )


@dataclass
class OverRolloutConfig(Section, key="explorer.over_rollout"):
    """Finishes a step when most of its tasks are done.

    Attributes:
        ratio: share of a step's tasks that may be left out; 0: none.
        wait_after_min: seconds to wait for the other tasks once `1 - ratio` of the tasks are done.
    """

    ratio: float = checked(0.0, number, least=0, most=0.99)
    wait_after_min: float = checked(30.0, number, least=0, only_with="ratio")


@dataclass
class DynamicTimeoutConfig(Section, key="explorer.dynamic_timeout"):
    """A time-out of training tasks by their average duration.

    Attributes:
        enable: set the time-out to min(max_timeout, ratio * average).
        ratio: multiple of the average that a task may take.
        warmup_min_steps: steps before this time-out applies.
    """

    enable: bool = False
    ratio: float = checked(3.0, number, least=1, only_with="enable")
    warmup_min_steps: int = checked(1, whole_number, least=0, only_with="enable")


@dataclass
class ExplorerConfig(Section, key="explorer"):
    """Settings of an explore step.

    Attributes:
        batch_size: tasks (prompts) an explore step.
        repeat_times: rollouts of each task, the group size.
        runner_per_model: runners of each model; a runner runs one task at a time. Null (as the commands set it): one
            for every task of a step, and at least 64; with Ray 8.
        max_timeout: seconds that one attempt at a task may take.
        max_retry_times: further attempts after a failed one.
        max_repeat_times_per_runner: rollouts in a chunk; a task with more rollouts is cut into chunks. Null: never.
        runner: `local`: asyncio tasks in this process. `ray`: processes (Ray actors), which need an engine that is a
            server; a worker that dies is replaced, and its task is tried again.
        ray_address: Ray cluster to join: HOST:PORT of its head, or `auto` for the cluster on this machine. Null: the
            run starts one.
        reward_workers: (local runners) processes that call reward functions. 0: threads of this process call them, and
            a reward function in slow pure Python slows rollouts and training ([reward](reward.md)).
        reward_timeout: seconds that a call of a reward function may take in such a process. Then the process is ended.
        max_refills: times that a step may ask for further tasks if add_strategy=dapo leaves it short.
        sync_interval: explore steps between weight syncs. Above 1, the steps between are sampled from older weights,
            which engine=transformers does not have.
        sync_offset: steps by which the trainer lags behind the explorer. 0 is on-policy. With 1, the next step's
            rollouts run while the trainer trains, which needs engine=vllm_server. No rollouts are started beyond the
            last step: a run resumed with more steps samples its next step with the newest weights.
        max_staleness: most steps from the beginning of a group (a task with its rollouts) to its training
            ([asynchrony](../asynchrony.md)). 0: a step waits for all of its rollouts. Above 0, groups of several steps
            are under way, a step takes those that are complete, and long rollouts go on after the weight sync.
        run_ahead: (max_staleness above 0) steps beyond the next one whose groups may be under way, or complete and
            waiting; at most max_staleness. Null: 1.
        in_flight: (max_staleness above 0) what a weight sync does to rollouts under way. `continue`: their next tokens
            are drawn with the new weights. `wait`: it waits for their end.
        max_concurrent: (max_staleness above 0) most rollouts under way; whole groups begin, and a larger group runs
            alone. Null: as many as the engines decode at once (engine.max_num_seqs for each).
        eval_interval: explore steps between evaluations; the last step is evaluated too. 0: no evaluation at all. Null
            (as the commands set it): a tenth of the run's steps, rounded up.
        eval_on_startup: evaluate before the first step too.
        seed: seed of all rollouts.
    """

    batch_size: int = checked(8, whole_number, least=1, most=MOST_OF_A_STEP)
    repeat_times: int = checked(8, whole_number, least=1, most=MOST_OF_A_STEP)
    runner_per_model: int | None = checked(8, whole_number, least=1, optional=True)
    max_timeout: float = checked(1800.0, number, above=0)
    max_retry_times: int = checked(2, whole_number, least=0)
    max_repeat_times_per_runner: int | None = checked(None, whole_number, least=1, optional=True)
    runner: str = checked("local", one_of, names=tuple(PARTS["runner"]))
    ray_address: str | None = None
    reward_workers: int = checked(0, whole_number, least=0)
    reward_timeout: float = checked(60.0, number, above=0, only_with="reward_workers")
    over_rollout: OverRolloutConfig = field(default_factory=OverRolloutConfig)
    dynamic_timeout: DynamicTimeoutConfig = field(default_factory=DynamicTimeoutConfig)
    max_refills: int = checked(3, whole_number, least=0)
    sync_interval: int = checked(1, whole_number, least=1)
    sync_offset: int = checked(0, whole_number, least=0)
    max_staleness: int = checked(0, whole_number, least=0)
    run_ahead: int | None = checked(
        None, whole_number, least=0, most=MOST_AHEAD, optional=True, only_with="max_staleness"
    )
    in_flight: str = checked("continue", one_of, names=IN_FLIGHT, only_with="max_staleness")
    max_concurrent: int | None = checked(None, whole_number, least=1, optional=True, only_with="max_staleness")
    eval_interval: int | None = checked(0, whole_number, least=0, optional=True)
    eval_on_startup: bool = True
    seed: int = checked(0, whole_number, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.runner == "local" and self.ray_address is not None:
            raise ConfigError(
                f"explorer.ray_address is {self.ray_address}, and needs explorer.runner=ray",
                key="explorer.ray_address",
                fix="set that",
            )
        if self.ray_address is not None and "://" in self.ray_address:
            raise ConfigError(
                f"explorer.ray_address is {self.ray_address!r}",
                key="explorer.ray_address",
                fix="give HOST:PORT, or auto",
            )
        if self.runner == "ray" and self.reward_workers:
            raise ConfigError(
                "explorer.reward_workers: the runners of explorer.runner=ray are processes already, leave it out.",
                key="explorer.reward_workers",
            )

    @property
    def runners(self) -> int:
        """Runners of each model. Null stands for 8 processes of Ray, or for at least 64 coroutines, which are cheap."""
        return self.runner_per_model or (8 if self.runner == "ray" else max(self.batch_size, 64))

    @property
    def runners_under_way(self) -> int:
        """Further runners, of all models together, for groups under way from one step to the next.

        They are coroutines, one for each chunk of such a group: evaluations need not wait for those.
        """
        if self.max_staleness == 0 or self.runner_per_model is not None or self.runner == "ray":
            return 0
        chunks = math.ceil(self.repeat_times / (self.max_repeat_times_per_runner or self.repeat_times))
        return self.batch_size * (self.steps_ahead + 1) * chunks

    @property
    def steps_ahead(self) -> int:
        """Steps beyond the next one whose groups may be outstanding."""
        return min(1, self.max_staleness) if self.run_ahead is None else self.run_ahead

    @property
    def samples_older_weights(self) -> bool:
        """True if a step may be trained on rollouts of weights older than the present ones."""
        return self.needs_older_weights or self.max_staleness > 0

    @property
    def needs_older_weights(self) -> bool:
        """True if engines may need weights that the trainer no longer has, when the run is resumed."""
        return self.sync_interval > 1 or self.sync_offset > 0


@dataclass
class WorkflowConfig(Section, key="workflow"):
    """The workflow, by which a task is tried.

    Attributes:
        name: a registered name, or the dotted path of your own class.
        args: arguments of the workflow.
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


# -- auxiliary models: judges and teachers -----------------------------------------------------------------------------


TEACHER_OPERATOR, TEACHER_WORKFLOW = "teacher_top_k", "on_policy_distill"  # they ask a teacher
ASKING_OPERATORS = ("judge", TEACHER_OPERATOR)


@dataclass
class AuxiliaryConfig(Section):
    """A model beside the policy, such as a judge or a teacher, that workflows and operators ask.

    Attributes:
        model: `smollm2`, `tiny`, a folder or a hub name; the run starts a vLLM server of this model. With `url`: the
            name of the model in requests.
        url: an OpenAI-compatible endpoint to ask instead, such as https://api.openai.com/v1.
        api_key_env: environment variable with the endpoint's key, such as OPENAI_API_KEY; null: no key is sent.
        engine: settings of the server that the run starts, without `name`, `urls`, `servers` and `sleep`. The default
            max_model_len of a teacher (workflow on_policy_distill, operator teacher_top_k) is the policy's plus one.
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
                    fix="leave engine out, or the url",
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
                "api_key_env belongs to an endpoint, and there is no url",
                key="api_key_env",
                fix="leave it out, or give the url",
            )


def auxiliary_config(key: str, value: Any) -> AuxiliaryConfig:
    """The auxiliary model under a key, made from a mapping or copied from a section. Errors as `Section`."""
    values = {"model": "", **value} if isinstance(value, Mapping) else value
    section = section_of(key, AuxiliaryConfig, values) if isinstance(values, Mapping | AuxiliaryConfig) else None
    if section is None or not section.model:
        raise ConfigError(
            f"{key} needs a model: {key}.model=FOLDER, or the name that an endpoint (url) knows.", key=key
        )
    return section


def auxiliary_configs(run: "TrainConfig") -> dict[str, Any]:
    """The auxiliary models of a run by name. Errors as `Section`.

    A teacher that the run starts gets a context of one token more than the policy's. It reads whole rollouts, and
    samples a token.
    """
    models = run.auxiliary_models
    configs = {str(name): auxiliary_config(f"auxiliary_models.{name}", model) for name, model in models.items()}
    for name in teachers_of(run) if models else ():
        model = models.get(name)
        if isinstance(model, Mapping) and not model.get("url") and "max_model_len" not in (model.get("engine") or {}):
            configs[str(name)].engine.max_model_len = run.engine.max_model_len + 1
    return configs


def asked_model(section: str, workflow: str, args: Mapping[str, Any], models: Sequence[str]) -> int:
    """The number of the auxiliary model that a workflow of `ASKING_WORKFLOWS` asks.

    Args:
        section: key of the workflow, for messages.
        workflow: name of the workflow.
        args: arguments of the workflow; one of them is the model's name or number, 0 by default.
        models: names of the auxiliary models.

    Raises:
        ConfigError: there is no such model.
    """
    argument = ASKING_WORKFLOWS[workflow]
    key, fix = f"{section}.args.{argument}", f"Give one, such as +auxiliary_models.{argument}.model=FOLDER."
    model = args.get(argument, 0)
    if isinstance(model, str):
        if model not in models:
            raise ConfigError(f"{key}: {unknown_name('auxiliary model', model, models)} {fix}", key=key)
        model = list(models).index(model)
    whole_number(key, model, least=0)
    if model >= len(models):
        raise ConfigError(
            f"{section}={workflow} asks auxiliary model {model}, and there are {len(models)}. {fix}", key=key
        )
    return model


def _asked_by(operator: OperatorConfig) -> str:
    """Name of the model that an operator of `ASKING_OPERATORS` asks. The model may not exist."""
    return str(operator.args.get("model", "teacher" if operator.name == TEACHER_OPERATOR else None))


def teachers_of(run: "TrainConfig") -> list[str]:
    """Names of the auxiliary models that operators and the workflow use as teachers. Some may not exist."""
    names = [_asked_by(operator) for operator in run.operators.values() if operator.name == TEACHER_OPERATOR]
    if run.workflow.name == TEACHER_WORKFLOW:
        models = list(map(str, run.auxiliary_models))
        names.append(models[asked_model("workflow", TEACHER_WORKFLOW, run.workflow.args, models)])
    return names


def auxiliary_servers(run: "TrainConfig") -> list[tuple[str, str, EngineConfig, bool]]:
    """The auxiliary models that the run starts, each as key of the engine, model, engine, and a flag.

    The flag is True for a teacher whose context follows from the policy's and is one token longer.
    """
    teachers, context = teachers_of(run), run.engine.max_model_len + 1
    return [
        (
            f"auxiliary_models.{name}.engine",
            auxiliary.model,
            auxiliary.engine,
            name in teachers and auxiliary.engine.max_model_len == context,
        )
        for name, auxiliary in run.auxiliary_models.items()
        if auxiliary.url is None
    ]


def check_teachers(run: "TrainConfig") -> None:
    """Refuse an operator whose model does not exist, and a teacher that cannot answer; a ConfigError.

    A teacher cannot answer if its context is too short, if its vocabulary is smaller than the number of tokens asked
    for, or if its endpoint only chats. A teacher whose answers are not used is refused too.
    """
    models = list(run.auxiliary_models)
    for operator in (operator for operator in run.operators.values() if operator.name in ASKING_OPERATORS):
        if (model := _asked_by(operator)) not in models:
            fix = f"Give it, such as +auxiliary_models.{model}.model=FOLDER."
            message = unknown_name("auxiliary model", model, models)
            raise ConfigError(f"operator {operator.name}: {message} {fix}", key="auxiliary_models")
        k, vocabulary = operator.args.get("k", 0), _vocabulary(run.model.name)
        if vocabulary is not None and isinstance(k, int) and k > vocabulary:
            raise ConfigError(
                f"operator {operator.name}: k is {k}, and the model's vocabulary has {vocabulary} tokens.",
                key="operators",
            )
    _check_weighed(run)
    longest, teachers = run.engine.max_model_len, teachers_of(run)
    for name in teachers:
        teacher = run.auxiliary_models[name]
        if run.workflow.name == TEACHER_WORKFLOW and run.sampling.temperature != 1:
            raise ConfigError(
                f"workflow={TEACHER_WORKFLOW} compares log-probabilities at temperature 1, not "
                f"{run.sampling.temperature}",
                key="sampling.temperature",
                fix="set sampling.temperature=1",
            )
        if teacher.url is not None and run.workflow.name == TEACHER_WORKFLOW and name == teachers[-1]:
            raise ConfigError(
                f"workflow={TEACHER_WORKFLOW} asks for log-probabilities, and an endpoint (auxiliary_models.{name}.url)"
                " only chats",
                key=f"auxiliary_models.{name}.url",
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
    """Refuse a workflow that asks a teacher if no part uses the answers. A user's part is assumed to use them."""
    strategies = [strategy.name for strategy in run.add_strategy.values()]
    parts = [*strategies, run.algorithm.policy_loss.name, *(operator.name for operator in run.operators.values())]
    weighed = TEACHER_WORKFLOW in strategies or any("." in name for name in parts)
    if run.workflow.name == TEACHER_WORKFLOW and not weighed:
        raise ConfigError(
            f"workflow={TEACHER_WORKFLOW} asks a teacher, and add_strategy={strategies[-1]} does not weigh by its "
            "answers",
            key="workflow",
            fix=f"choose add_strategy={TEACHER_WORKFLOW}, or another workflow",
        )


def check_asked(run: "TrainConfig") -> None:
    """Refuse an auxiliary model that no part asks; a ConfigError. A user's part may ask any model."""
    models, operators = list(run.auxiliary_models), list(run.operators.values())
    workflows = {run.workflow.name: run.workflow.args}
    if run.eval_workflow is not None:
        workflows.setdefault(run.eval_workflow, {})
    if any("." in name for name in (*workflows, *(operator.name for operator in operators))):
        return
    asked_models = {_asked_by(operator) for operator in operators if operator.name in ASKING_OPERATORS}
    for name in workflows.keys() & ASKING_WORKFLOWS.keys():
        asked_models.add(models[asked_model("workflow", name, workflows[name], models)])
    for name in models:
        if name not in asked_models:
            raise ConfigError(
                f"auxiliary_models.{name}: no workflow or operator of this run asks it",
                key=f"auxiliary_models.{name}",
                fix=(
                    "leave it out, or choose one "
                    f"that does, such as operators=judge with operators.judge.args.model={name}"
                ),
            )


def check_vocabularies(run: "TrainConfig") -> None:
    """Refuse a teacher that the run starts if its vocabulary is not the policy's; a ConfigError."""
    for name in teachers_of(run):
        teacher = run.auxiliary_models[name]
        if teacher.url is None:
            check_same_vocabulary(f"auxiliary_models.{name}.model", teacher.model, load_tokenizer(run.model.name))


def check_sight_of_judge(run: "TrainConfig") -> None:
    """Refuse a judge of text that is to be shown pictures (`judge_pictures` of the workflow `judge`); a ConfigError."""
    if run.workflow.name != "judge" or run.workflow.args.get("judge_pictures") is not True:
        return
    names = list(run.auxiliary_models)
    name = names[asked_model("workflow", "judge", run.workflow.args, names)]
    judge, key = run.auxiliary_models[name], "workflow.args.judge_pictures"
    if judge.url is None and reads_pictures(judge.model) is False:
        fix = "leave it out, or choose a judge that reads pictures"
        raise ConfigError(f"the judge, auxiliary model '{name}', reads text alone", key=key, fix=fix)


def _vocabulary(model: str) -> int | None:
    """The vocabulary size in a model's config; None if the model is not on this machine, or its config has no size."""
    folder = Path(resolve_model(model))
    config = config_of(folder) if (folder / "config.json").is_file() else {}
    return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")

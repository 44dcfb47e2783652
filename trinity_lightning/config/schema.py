"""The typed sections of a run's configuration, one dataclass each, and where the configuration files are found.

Lightning's own objects (trainer, loggers, callbacks) are free `_target_` nodes and have no schema here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf, open_dict

from trinity_lightning import config as late
from trinity_lightning.config.engines import EngineConfig, SynchronizerConfig
from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.sections import Section, checked, strategies
from trinity_lightning.config.training import AlgorithmConfig, DatasetConfig, ModelConfig, OptimizerConfig
from trinity_lightning.config.values import number, one_of, text, whole_number
from trinity_lightning.errors import ConfigError

PACKAGE_DIR = Path(__file__).resolve().parents[1]

FREE = ("trainer", "logger", "callbacks")  # sections of Lightning's own objects, whose keys we do not know
TASK_SOURCES = ("addition", "reasoning_gym", "dataset")
TASK_ORDERS = ("sequential", "shuffled", "easy_to_hard", "by_difficulty")
BUFFER_STORAGES = ("memory", "file", "sql", "dataset")
REPLAYS = ("priority", "random")


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
                "use eval_sampling."
            )
    temperature = settings.get("temperature")
    if temperature is not None and not temperature > 0:
        raise ConfigError(f"sampling.temperature is {temperature}; training needs one above 0, such as 1.0.")


@dataclass
class TasksetConfig(Section, key="taskset"):
    """What to try: one of the three sources, and which fields of an entry mean what.

    Attributes:
        name: how the taskset is called in metrics (`eval/<name>/...`) and in the log; in `tasksets` and `eval_tasksets`
            its key there, if left out.
        source: `addition` (the built-in sums), `reasoning_gym`, or `dataset` (a file, a folder, or a hub name).
        path: name of the reasoning-gym dataset; or JSONL, parquet or CSV file, folder or hub name of the dataset.
        split: split of a dataset, or `train` and `heldout` of the sums.
        size: number of reasoning-gym entries.
        seed: seed of generated entries and of the order. Entries of some reasoning-gym datasets (such as `ransom_note`
            and `word_ladder`; a warning names them) depend on Python's hash seed as well, which each process draws: a
            run on them is resumed with the same tasks only if PYTHONHASHSEED is set in its environment, to 0 say.
        order: `sequential`, `shuffled` (a permutation from seed and epoch), `easy_to_hard` (a dataset's entries by
            difficulty_field), or `by_difficulty` (those that are solved half of the time).
        difficulty_field: an entry's field with a number, for `easy_to_hard`.
        weight: share of the tasks if several tasksets are trained on (`tasksets`).
        held_out_of: of `eval_tasksets`: a source, such as addition, from which these tasks are held out. A run that
            trains on no taskset of that source leaves this evaluation out. Null: it is always kept.
        prompt_field, answer_field, messages_field: names of an entry's fields, of a field within one by a dot
            (`reward_model.ground_truth`).
        system_prompt: first message of every conversation; null for the chat template's own.
        args: further arguments of the source.
    """

    name: str = MISSING
    source: str = checked("addition", one_of, names=TASK_SOURCES)
    path: str | None = None
    split: str = "train"
    size: int | None = None
    seed: int = 0
    order: str = checked("shuffled", one_of, names=TASK_ORDERS)
    difficulty_field: str | None = None
    weight: float = 1.0
    held_out_of: str | None = checked(None, one_of, names=TASK_SOURCES, optional=True)
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    messages_field: str = "messages"
    system_prompt: str | None = None
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "reasoning_gym" or self.path is not None or self.size is not None:
            late.stored.check_taskset(self)


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
            late.servers.check_runner(self)

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
            raise ConfigError("workflow.name=evaluation trains nothing: give it as eval_workflow.")
        if self.name != MISSING:
            one_of("workflow.name", self.name, PARTS["workflow"], with_paths=True)


@dataclass
class ExpertConfig(Section, key="buffer.expert"):
    """Expert data that join the rollouts of every explore step, for `algorithm.policy_loss=mix`.

    Attributes:
        per_step: expert experiences an explore step; 0: none. They begin again at their end.
        storage: `dataset`, prompts and answers, the answer being the expert's response; or `file` or `sql`, experiences
            that another run kept or a program wrote.
        dataset: the prompts and answers, as of a taskset.
        path: the folder of `file`, which `buffer.keep` wrote; of `sql` the SQLite database.
        url: database of `sql`, instead of a path: postgresql://USER@HOST/NAME.
    """

    per_step: int = checked(0, whole_number, least=0)
    storage: str = checked("dataset", one_of, names=("dataset", "file", "sql"))
    dataset: TasksetConfig = field(default_factory=lambda: TasksetConfig(name="expert", source="dataset"))
    path: str | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_step > 0:
            late.stored.check_expert_data(self)


@dataclass
class BufferConfig(Section, key="buffer"):
    """Where experiences wait for the trainer, and what is kept of them.

    Attributes:
        storage: `memory`, filled by this run's rollouts; or `file` (the folder of steps that `keep` wrote) or `sql` (a
            database) or `dataset` (examples), which are read: then there are no rollouts, and a step is one optimizer
            step.
        path: the folder of `file`; of `sql` the SQLite database; of `dataset` a JSONL, parquet or CSV file, a folder or
            a hub name.
        url: database of `sql`, instead of a path: postgresql://USER@HOST/NAME.
        keep: write the experiences of every explore step, as they go to the trainer, to `experiences/` in the run's
            folder; or, by `sql`, to the database at `url` or `path`, else to `experiences.db` in the run's folder.
        order: in which a storage is read: `fifo` (as written); with `sql` also `priority` or `random`.
        reuse_limit: how often an experience may be read in those two; null: without end.
        batch_size: experiences an optimizer step reads (`file`, `sql`), by whole groups; or examples (`dataset`).
        repeat: begin again at the end (`file`, `dataset`, and `sql` in `fifo` order).
        decay, use_decay: `priority` takes the highest score first, which is info["priority"] (1 if there is none)
            * decay ** age in explore steps * use_decay ** times read.
        expert: expert data among the rollouts (`memory`).
        dataset: how a `dataset` is read.
    """

    storage: str = checked("memory", one_of, names=BUFFER_STORAGES)
    path: str | None = None
    url: str | None = None
    keep: bool | str = False
    order: str = checked("fifo", one_of, names=("fifo", *REPLAYS))
    reuse_limit: int | None = checked(1, whole_number, least=1, optional=True, only_with="order", among=REPLAYS)
    decay: float = checked(1.0, number, above=0, most=1, only_with="order", among=("priority",))
    use_decay: float = checked(1.0, number, above=0, most=1, only_with="order", among=("priority",))
    batch_size: int = checked(64, whole_number, least=1, only_with="storage", among=BUFFER_STORAGES[1:])
    repeat: bool = checked(True, only_with="storage", among=BUFFER_STORAGES[1:])
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = self.has_rollouts and self.keep is False and self.order == "fifo" and self.dataset == DatasetConfig()
        if not plain or self.path or self.url:
            late.stored.check_buffer(self)

    @property
    def has_rollouts(self) -> bool:
        """True if this run's rollouts fill the buffer; otherwise it is read as another run left it."""
        return self.storage == "memory"


@dataclass
class SweepConfig(Section, key="sweep"):
    """The metric by which the jobs of a sweep (`--multirun`) are compared.

    Attributes:
        metric: the metric whose last value a sweeper such as Optuna optimises, by its name in metrics.csv. Null: the
            held-out score, eval/<taskset>/mean@<k> of the first of `eval_tasksets`; without evaluations reward/mean, of
            runs without rollouts eval/loss or actor/pg_loss, for hydra.sweeper.direction=minimize.
    """

    metric: str | None = checked(None, text, optional=True)


@dataclass
class TrainConfig(Section):
    """A whole training run.

    An entry that is null is left out of every mapping of named parts: `eval_tasksets: {addition_heldout: null}` in a
    recipe that builds on another one. (These mappings: tasksets, eval_tasksets, auxiliary_models, reward,
    reward_solved, operators, add_strategy, logger, callbacks, and the streams of algorithm=streams.)

    Operators, strategies and auxiliary models are plain mappings to Hydra, which cannot add to a mapping of dataclasses
    from the command line; here each becomes an OperatorConfig, a PartConfig, an AuxiliaryConfig.

    Attributes:
        name: the experiment's name: its folder under `outputs/` and its group in W&B.
        steps: explore steps of the run; one is one Lightning epoch.
        seed: seed of everything random.
        ckpt_path: a checkpoint to resume from; `last` goes on in the newest folder of this name that has one; `auto`
            goes on from the last one in `output_dir` or, without that, of the newest run of this configuration, and
            begins if there is none.
        output_root: where run folders are made.
        output_dir: this run's folder.
        taskset: what to train on,
        tasksets: or several, by name, each with its `weight`; then `taskset` is not used.
        eval_tasksets: what to evaluate on, by name.
        workflow: how a task is tried.
        auxiliary_models: judges and teachers that workflows and operators ask, {name: {model, url, api_key_env,
            engine}}: a vLLM server of `model` that the run starts, or the endpoint `url`.
        reward: what a response is worth: a registered name, a dotted path, or {name: weight}; null: the workflow's own.
        reward_solved: which rollouts are solved, which pass@k counts and taskset.order=by_difficulty goes by:
            {component: least value}, a component being a reward function, a part that one returns, another metric, or
            `reward`, the sum; all of them have to be reached. Null: the component `math` or `accuracy`, or the only
            one, at 1; with several others there is no pass@k.
        sampling: how training rollouts are drawn.
        eval_sampling: how evaluation rollouts are drawn.
        eval_workflow: how an evaluation task is tried: a registered name or a dotted path; null: as a task to train on.
        eval_repeat_times: rollouts an evaluation task (the k of mean@k).
        operators: what tidies experiences before they are weighed, in order: {name: {args: {...}, on_error}}; a key
            `name` overrides the name.
        add_strategy: how rewards become advantages, in order: {name: {args: {...}}}; a key `name` overrides the name.
        sweep: what the jobs of a sweep are compared by.
        trainer, logger, callbacks: Lightning objects, as `_target_` nodes.
        save_model: whether the trained policy is written to `<output_dir>/model` at the end.
    """

    name: str = "run"
    steps: int = checked(30, whole_number, least=1)
    seed: int = 42
    ckpt_path: str | None = None
    output_root: str = "outputs"
    output_dir: str = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    taskset: TasksetConfig = field(default_factory=TasksetConfig)
    tasksets: dict[str, TasksetConfig] = field(default_factory=dict)
    eval_tasksets: dict[str, TasksetConfig] = field(default_factory=dict)
    workflow: WorkflowConfig = field(default_factory=WorkflowConfig)
    auxiliary_models: dict[str, Any] = field(default_factory=dict)
    reward: Any = None
    reward_solved: Any = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval_sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval_workflow: str | None = checked(None, one_of, names=PARTS["workflow"], with_paths=True, optional=True)
    eval_repeat_times: int = checked(1, whole_number, least=1)
    explorer: ExplorerConfig = field(default_factory=ExplorerConfig)
    operators: dict[str, Any] = field(default_factory=dict)
    add_strategy: dict[str, Any] = field(default_factory=dict)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    synchronizer: SynchronizerConfig = field(default_factory=SynchronizerConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    trainer: Any = None
    logger: Any = None
    callbacks: Any = None
    save_model: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)
        if self.operators:
            self.operators = late.parts.operator_configs(self.operators)
        self.add_strategy = strategies(self.add_strategy)
        check_solved(self.reward_solved)
        if self.auxiliary_models:
            self.auxiliary_models = late.auxiliary_models.auxiliary_configs(self)

    @property
    def score(self) -> str:
        """The metric that a sweep optimises, `sweep.metric` or what its null stands for."""
        if self.sweep.metric is not None:
            return self.sweep.metric
        if not self.buffer.has_rollouts:
            return "eval/loss" if self.buffer.dataset.held_out.given else "actor/pg_loss"
        evaluated = next(iter(self.eval_tasksets.values()), None)
        if evaluated is None or self.explorer.eval_interval == 0:
            return "reward/mean"
        return f"eval/{evaluated.name}/mean@{self.eval_repeat_times}"

    @property
    def items(self) -> int:
        """Optimizer steps a Lightning epoch."""
        return self.algorithm.optimizer_steps * self.algorithm.inner_epochs if self.buffer.has_rollouts else 1


def check_solved(reward_solved: Any) -> None:
    """ConfigError unless these are thresholds by component, or null."""
    if not isinstance(reward_solved, Mapping | None):
        raise ConfigError(f"reward_solved is {reward_solved!r}; give {{COMPONENT: LEAST VALUE}}, or null.")
    for component, least in (reward_solved or {}).items():
        number(f"reward_solved.{component}", least)


def check_seed(seed: int) -> None:
    """ConfigError unless every generator takes the seed."""
    whole_number("seed", seed, least=0)
    if seed >= 2**32:
        raise ConfigError(f"seed is {seed}; give a number below 2**32.")


def typed_config(config: DictConfig) -> TrainConfig:
    """The configuration without Lightning's own objects, all of whose sections have been checked.

    Raises:
        ConfigError: a section refuses a value.
        OmegaConfBaseException: a value is missing.
    """
    config = OmegaConf.merge(config, dict.fromkeys(FREE))  # type: ignore[assignment]
    settle_parts(config)
    try:
        return OmegaConf.to_object(config)  # type: ignore[return-value]
    except ConfigError:
        late.explain.check_sections_by_other_names(config)
        raise


# Mappings of named parts, in which null stands for no such part.
NAMED_PARTS = (
    *("tasksets", "eval_tasksets", "auxiliary_models", "reward", "reward_solved", "operators", "add_strategy"),
    *("logger", "callbacks", "algorithm.policy_loss.args.streams"),
)


def settle_parts(config: DictConfig) -> None:
    """Remove named parts that are null, and evaluations on what is held out of tasks that the run does not train on.

    Tasksets of several are called by their keys, unless they have a name.
    """
    for key in NAMED_PARTS:
        if key in config and key not in (*FREE, "reward", "reward_solved") and config[key] is None:
            config[key] = {}
        parts = _section(config, key)
        _remove(parts, [name for name in parts if not OmegaConf.is_missing(parts, name) and parts[name] is None])
    evaluated = _section(config, "eval_tasksets")
    for name, taskset in (*_section(config, "tasksets").items(), *evaluated.items()):
        if OmegaConf.is_missing(taskset, "name"):
            taskset.name = name
    has_rollouts = OmegaConf.select(config, "buffer.storage") == "memory"
    tasksets = list(_section(config, "tasksets").values()) or [_section(config, "taskset")]
    trained = {taskset.get("source") for taskset in tasksets if has_rollouts}
    held_out = {name: taskset.get("held_out_of") for name, taskset in evaluated.items()}
    _remove(evaluated, [name for name, source in held_out.items() if source is not None and source not in trained])


def _section(config: DictConfig, key: str) -> DictConfig:
    """The mapping at a dotted key; an empty one if something else is there, or nothing."""
    node = OmegaConf.select(config, key)
    return node if isinstance(node, DictConfig) else DictConfig({})


def _remove(parts: DictConfig, names: list[Any]) -> None:
    with open_dict(parts):
        for name in names:
            del parts[name]


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
